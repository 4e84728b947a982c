"""The public op: LLN attention on query, key and value tensors."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from lln.backend import choose
from lln.checks import (
    BACKENDS,
    Backend,
    Coefficient,
    CuSeqlens,
    Directions,
    Inputs,
    Mix,
    Read,
    check_call,
    check_inputs,
)
from lln.kernels import eager
from lln.kernels.carry import open_block
from lln.kernels.common import is_autocast_enabled
from lln.kernels.step import is_step, step
from lln.kernels.triton import attend as triton
from lln.ranks import find_ranks
from lln.state import LLNState
from lln.values import check_choice, check_positive_values

__all__ = ["Backend", "Coefficient", "CuSeqlens", "Mix", "lln_attention"]


@overload
def lln_attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: Coefficient | None = ..., beta: Coefficient | None = ..., *,
    read: Read = ..., directions: Directions | None = ..., block_size: int | None = ..., mix: Mix = ...,
    overlap: bool = ..., evidence_offset: Coefficient = ..., is_causal: bool = ..., key_mask: Tensor | None = ...,
    dropout_p: float = ..., cu_seqlens: CuSeqlens | None = ..., state: LLNState | None = ...,
    return_state: Literal[False] = ..., scale: float | None = ..., backend: Backend = ...,
) -> Tensor: ...  # fmt: skip
@overload
def lln_attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: Coefficient | None = ..., beta: Coefficient | None = ..., *,
    read: Read = ..., directions: Directions | None = ..., block_size: int | None = ..., mix: Mix = ...,
    overlap: bool = ..., evidence_offset: Coefficient = ..., is_causal: bool = ..., key_mask: Tensor | None = ...,
    dropout_p: float = ..., cu_seqlens: CuSeqlens | None = ..., state: LLNState | None = ...,
    return_state: Literal[True], scale: float | None = ..., backend: Backend = ...,
) -> tuple[Tensor, LLNState]: ...  # fmt: skip
@overload
def lln_attention(
    query: Tensor, key: Tensor, value: Tensor, alpha: Coefficient | None = ..., beta: Coefficient | None = ..., *,
    read: Read = ..., directions: Directions | None = ..., block_size: int | None = ..., mix: Mix = ...,
    overlap: bool = ..., evidence_offset: Coefficient = ..., is_causal: bool = ..., key_mask: Tensor | None = ...,
    dropout_p: float = ..., cu_seqlens: CuSeqlens | None = ..., state: LLNState | None = ...,
    return_state: bool, scale: float | None = ..., backend: Backend = ...,
) -> Tensor | tuple[Tensor, LLNState]: ...  # fmt: skip
def lln_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Coefficient | None = None,
    beta: Coefficient | None = None,
    *,
    read: Read = "paper",
    directions: Directions | None = None,
    block_size: int | None = None,
    mix: Mix = 0.5,
    overlap: bool = False,
    evidence_offset: Coefficient = 0.0,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: CuSeqlens | None = None,
    state: LLNState | None = None,
    return_state: bool = False,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, LLNState]:
    """Compute Linear Log-Normal attention, eq. (8) of the paper, in time and memory linear in the length.

        P_ij = sum_c exp(alpha q_ic + beta k_jc) / sum_l sum_c exp(alpha q_ic + beta k_lc)         out = P v

    It is computed exactly, as two softmaxes that cannot overflow: one over the keys and one over the channels.

    Args:
        query: [batch, heads, length, dim], as in torch.nn.functional.scaled_dot_product_attention. float32, float64,
            bfloat16 or float16; everything inside is computed in float32 (float64 for float64).
        key: [batch, key heads, key length, dim]. Fewer key heads than query heads is grouped-query attention.
        value: [batch, key heads, key length, value dim].
        alpha: factor of the queries: a positive number, or a tensor [heads], [batch, heads], [heads, dim] or
            [batch, heads, dim]. Tensors may require grad. Larger means more concentrated attention.
        beta: factor of the keys, with the same shapes, of key heads.
        read: how queries read what the channels hold. "paper" (default): by alpha q, eq. (8). "evidence": by the
            centres of the keys in each channel, for weights that were trained with softmax attention. The latter is an
            addition of this package to the paper.

                K_c = sum_j B_jc k_j     H_c = entropy of B_c     out_i = sum_c softmax_c(scale q_i . K_c + H_c) S_c

            with B_jc = softmax_j(beta k_jc) and S_c = sum_j B_jc v_j. alpha is left out then.
        directions: the directions of the evidence read's channels. None (default): the keys' own coordinates. "signed":
            the coordinates and their negatives, which are twice as many channels. A tensor [key heads, channels, dim]
            or [channels, dim]: the exponents are beta times the keys' products with it, and a beta for each channel has
            `channels` in place of dim. It may require grad.
        block_size: for LLN+Diag: adds softmax attention inside consecutive blocks of this many tokens, counted from
            each sequence's first valid token. None (default): LLN alone.
        mix: how LLN and the blocks are weighed, with block_size: out = mix * lln + (1 - mix) * diag, and a pair (r, p)
            gives r * lln + p * diag. Numbers (default 0.5), or tensors as alpha (with value dim in place of dim). With
            the evidence read also "evidence": each query weighs its block against all keys outside it by softmax's
            normaliser, which is known for the block and bounded from below for the rest:

                z_i = sum_c A_ic (scale q_i . K_c + H_c)      out_i = w_i far_i + (1 - w_i) near_i
                A_i = softmax over c of what z_i averages     w_i = sigmoid(z_i + evidence_offset - ln Z_i)

            with far_i and its K, H and S from the keys outside the block, and Z_i the sum of exp(scale q_i . k_j)
            inside it.
        overlap: with mix="evidence": uses windows instead of blocks. Each group of block_size / 2 queries sees
            block_size keys: its own, and block_size / 4 more on either side (causal: block_size / 2 before them).
        evidence_offset: the offset in w_i, with mix="evidence": a number (default 0), or a tensor [heads] or
            [batch, heads].
        is_causal: a query attends to its own and earlier positions. Needs query and key of equal length.
        key_mask: [batch, key length] bool, True = attend. It hides keys; it never touches query rows. A row that has
            nothing to attend to gives zeros. What is hidden must still be finite: 0 times NaN is NaN.
        dropout_p: probability of dropout, on the softmax over channels and on the P of the blocks. It is applied
            whenever it is not 0, as in scaled_dot_product_attention: pass 0.0 in eval.
        cu_seqlens: int32 offsets [sequences + 1] of sequences packed along the length with batch 1, as in
            flash-attention; a pair (queries, keys) for cross attention. "batch" of alpha, beta, mix and state is then
            the number of sequences.
        state: an LLNState of what came before: of earlier tokens when causal, of more keys and values when not.
        return_state: also return the LLNState after these keys and values (`state` included). With a query of length 0
            the call only computes the state; with keys of length 0 it only reads it.
        scale: factor of the scores in the blocks and in the evidence read, default 1 / sqrt(dim). The paper's read has
            alpha and beta instead.
        backend: "eager" (plain PyTorch, any device), "triton" (GPU kernels), or "auto" (default): kernels where they
            can run the call.

    Returns:
        [batch, heads, length, value dim] in the dtype of query; with return_state also the state.

    Raises:
        ValueError or TypeError: the message names the argument, what came, and what is allowed.

    These tables show which keys a query sees. 1: query i attends to key j. 0: it does not. s: it also attends to
    everything that `state` holds.

        not causal, 3 queries, 5 keys      is_causal, 4 tokens      is_causal after a state of any length

                 keys                              keys                          keys
              0 1 2 3 4                          0 1 2 3                 state  0 1 2 3
        q 0   1 1 1 1 1                    q 0   1 0 0 0           q 0     s    1 0 0 0
        q 1   1 1 1 1 1                    q 1   1 1 0 0           q 1     s    1 1 0 0
        q 2   1 1 1 1 1                    q 2   1 1 1 0           q 2     s    1 1 1 0
                                           q 3   1 1 1 1           q 3     s    1 1 1 1

    Causal queries and keys are therefore the same tokens, and both count from the end of the state. A hidden key
    (key_mask) is a column of zeros. Each packed sequence has a table of its own. Blocks (block_size) count tokens from
    a sequence's first valid one, and include those in the state.

    Examples:
        >>> import torch
        >>> from lln import lln_attention
        >>> q, k, v = torch.randn(3, 2, 4, 100, 16, generator=torch.Generator().manual_seed(0))
        >>> lln_attention(q, k, v, 2.0, 2.0).shape
        torch.Size([2, 4, 100, 16])

        LLN+Diag, padding, and several sequences packed into one:

        >>> mask = torch.arange(100) < torch.tensor([[100], [70]])  # the second sequence has 70 tokens
        >>> out = lln_attention(q, k, v, 2.0, 2.0, block_size=32, key_mask=mask)
        >>> offsets = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> packed = lln_attention(q[:1], k[:1], v[:1], 2.0, 2.0, cu_seqlens=offsets)
        >>> alone = lln_attention(q[:1, :, 30:], k[:1, :, 30:], v[:1, :, 30:], 2.0, 2.0)
        >>> torch.testing.assert_close(packed[:, :, 30:], alone)

        The evidence read, for queries and keys that were trained with softmax attention:

        >>> lln_attention(q, k, v, beta=2.0, read="evidence", directions="signed").shape
        torch.Size([2, 4, 100, 16])

        A sequence in two pieces, with the state between them:

        >>> whole = lln_attention(q, k, v, 2.0, 2.0, is_causal=True)
        >>> first, second = zip(*(t.split([60, 40], 2) for t in (q, k, v)))
        >>> _, state = lln_attention(*first, 2.0, 2.0, is_causal=True, return_state=True)
        >>> rest = lln_attention(*second, 2.0, 2.0, is_causal=True, state=state)
        >>> torch.testing.assert_close(rest, whole[:, :, 60:])
    """

    def attend() -> Any:
        for name, given in (("alpha", alpha), ("beta", beta)):
            if isinstance(given, Tensor):
                check_positive_values(name, given)
        inputs = check_inputs(*autocast(query, key, value), key_mask=key_mask, cu_seqlens=cu_seqlens)
        return attend_checked(
            inputs, alpha, beta, state=state, return_state=return_state, backend=backend, block_size=block_size,
            mix=mix, overlap=overlap, evidence_offset=evidence_offset, is_causal=is_causal, dropout_p=dropout_p,
            scale=scale, read=read, directions=directions,
        )  # fmt: skip

    found: Tensor | tuple[Tensor, LLNState]
    special = state is not None or return_state is not False or cu_seqlens is not None or read != "paper"
    special = special or directions is not None or overlap is not False or isinstance(evidence_offset, Tensor)
    special = special or find_ranks() is not None
    if special or backend == "eager":
        found = attend()
    else:
        tensors = alpha if isinstance(alpha, Tensor) else None, beta if isinstance(beta, Tensor) else None
        numbers = None if tensors[0] is not None else alpha, None if tensors[1] is not None else beta
        options = (*numbers, block_size, mix, evidence_offset, is_causal, dropout_p, scale, backend)
        found = triton.attend_known(options, (query, key, value, key_mask, *tensors), backend, attend)
    return found


def attend_checked(
    inputs: Inputs, alpha: Coefficient | None, beta: Coefficient | None, *, state: LLNState | None = None,
    return_state: bool = False, backend: Backend = "auto", **options: Any,
) -> Tensor | tuple[Tensor, LLNState]:  # fmt: skip
    """`lln_attention` of tensors that `check_inputs` has seen, for modules, which look at them before the op does.
    They have the dtype of `autocast`. options: the other keywords of `check_call`."""
    call: dict[str, Any] = {"state": state, "return_state": return_state, "backend": backend, **options}
    ranks = find_ranks()
    if ranks is None:
        return attend_here(inputs, alpha, beta, **call)
    found: Tensor | tuple[Tensor, LLNState] = ranks.attend(ranks, inputs, alpha, beta, **call)
    return found


def attend_here(
    inputs: Inputs, alpha: Coefficient | None, beta: Coefficient | None, *, state: LLNState | None = None,
    return_state: bool = False, backend: Backend = "auto", **options: Any,
) -> Tensor | tuple[Tensor, LLNState]:  # fmt: skip
    """`attend_checked` of rows that are all here, whatever context there is."""
    call = check_call(inputs, alpha=alpha, beta=beta, state=state, return_state=return_state, **options)
    check_choice("backend", backend, *BACKENDS)
    run = choose(backend, call)
    block: dict[str, Any]
    if is_step(call) and (run is eager.attend or triton.can_step(call)):
        out, log_sum, mean_value, block = step(call) if run is eager.attend else triton.step(call)
    else:
        out, log_sum, mean_value, *more = run(call)
        block = open_block(call) if return_state and call.block_size is not None else {}
        block |= dict(zip(("mean_key", "entropy"), more, strict=False))
        block |= {"outside": call.joint, "overlap": call.overlap}
    if not return_state:
        return out
    if inputs.key.shape[-2] == 0:  # no new keys, so whatever beta is now has no part in the state
        used = None if state is None else state.beta
    else:
        # A copy: a learnable beta changes in place with the next optimiser step.
        used = call.beta.detach().clone() if isinstance(beta, Tensor) else float(beta)  # type: ignore[arg-type]
    return out, LLNState(log_sum, mean_value, used, **block)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast the inputs take its dtype, as they do for scaled_dot_product_attention."""
    if not isinstance(query, Tensor) or not is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(query), cast(key), cast(value)
