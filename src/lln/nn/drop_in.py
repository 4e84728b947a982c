"""LLN attention under the signature of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks import Inputs, Matching, check_inputs
from lln.functional import Backend, Coefficient, Mix, attend_checked, autocast
from lln.kernels.triton.attend import attend_known
from lln.matching.moments import LENGTH, match_moments, match_samples
from lln.nn.torch_masks import can_read, read_added
from lln.ranks import find_ranks
from lln.values import check_flag, describe


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    block_size: int | None = None,
    mix: Mix = 0.5,
    matching: Matching = "paper",
    alpha: Coefficient | None = None,
    beta: Coefficient | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Replace torch.nn.functional.scaled_dot_product_attention by LLN attention, with the same arguments up to
    `enable_gqa`.

    alpha and beta follow from the spread of the queries and keys of each sample and head, as in `lln.LLNAttention` with
    statistics="sample", so that LLN attention is as concentrated as the softmax attention that it replaces.

    Args:
        query: [batch, heads, length, dim], or [batch, length, dim] like key and value. More dimensions before the heads
            (windows, frames) are a batch of so many, as for torch.
        key: [batch, key heads, key length, dim].
        value: [batch, key heads, key length, value dim].
        attn_mask: padding, [batch, 1, 1, key length] or what torch would expand to that: bool with True = attend, or
            a float mask that is added to scores: 0 = attend, and -inf or any number of -1,000 or less (-1e9, finfo.min)
            = hidden. Masks of other shapes are refused. On a CPU other float values are refused too. On other devices
            the values are not checked, because that would wait for the device: negative values hide. If query and key
            have the same length, positions that are hidden among the keys do not count as queries either.
        dropout_p: probability of dropout, applied whenever it is not 0, as torch does: pass 0.0 in eval.
        is_causal: a query attends to its own and earlier positions; it can be combined with attn_mask. The spread of
            later tokens must not be used then, so it is taken to be 1 unless alpha and beta are given.
            `lln.LLNAttention` with statistics="running" measures it.
        scale: factor of the scores of the softmax that is imitated, and of the one in the blocks; default 1 /
            sqrt(dim).
        enable_gqa: allow fewer key heads than query heads.
        block_size: for LLN+Diag, the number of tokens in a block. None (default): LLN alone.
        mix: how LLN and the blocks are weighed, see `lln.lln_attention`.
        matching: "paper" (default), "entropy" (recommended for new models) or "variance", see `lln.match_moments`.
        alpha: factor of the queries; give it and beta to use them instead of matching, see `lln.lln_attention`.
        beta: factor of the keys.
        backend: "eager" (plain PyTorch), "triton" (GPU kernels) or "auto" (default: kernels where they can run).

    Returns:
        [batch, heads, length, value dim] in the dtype of query, with as many dimensions before these, or as few, as
        query has. A row that has nothing to attend to gives zeros.

    Raises:
        ValueError or TypeError: the message names the argument, what came, and what is allowed.

    Examples:
        >>> import lln, torch
        >>> query, key, value = torch.randn(3, 2, 4, 50, 16, generator=torch.Generator().manual_seed(0))
        >>> lln.scaled_dot_product_attention(query, key, value).shape
        torch.Size([2, 4, 50, 16])
        >>> padding = (torch.arange(50) < torch.tensor([[50], [30]]))[:, None, None]  # the second has 30 tokens
        >>> out = lln.scaled_dot_product_attention(query, key, value, attn_mask=padding, block_size=8)
        >>> short = (t[1:, :, :30] for t in (query, key, value))
        >>> alone = lln.scaled_dot_product_attention(*short, block_size=8)
        >>> torch.testing.assert_close(out[1:, :, :30], alone)

        In a model that calls torch's function by the name `F.scaled_dot_product_attention`:

        >>> torch.nn.functional.scaled_dot_product_attention = lln.scaled_dot_product_attention  # doctest: +SKIP
    """
    leading = query.shape[:-2] if isinstance(query, Tensor) else None
    query, key, value, attn_mask = lay_out(query, key, value, attn_mask)
    if (alpha is None) != (beta is None):
        raise ValueError("alpha and beta go together: give both, or neither and let matching find them.")
    check_flag("enable_gqa", enable_gqa)
    key_mask = None if attn_mask is None else read_padding(attn_mask, key)

    def attend() -> Tensor:
        inputs = check_inputs(*autocast(query, key, value), key_mask=key_mask, cu_seqlens=None)
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"key has {key.shape[1]} heads and query {query.shape[1]}; pass enable_gqa=True for grouped queries."
            )
        factors = (alpha, beta) if alpha is not None else find_coefficients(inputs, is_causal, matching, scale, backend)
        found = attend_checked(
            inputs, *factors, block_size=block_size, mix=mix, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
            backend=backend,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found

    tensors = tuple(t if isinstance(t, Tensor) else None for t in (alpha, beta))
    numbers = tuple(None if isinstance(t, Tensor) else t for t in (alpha, beta))
    options = ("dot_product", numbers, block_size, mix, is_causal, dropout_p, scale, enable_gqa, matching, backend)
    apart = find_ranks() is not None
    out = attend() if apart else attend_known(options, (query, key, value, key_mask, *tensors), backend, attend)
    return out if leading is None or len(leading) == 2 else out.reshape(*leading, *out.shape[-2:])


def lay_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    """[batch, heads, length, dim] of what torch takes with any number of dimensions. What does not go together stays as
    it is, and is refused as that."""
    tensors: tuple[Tensor, ...] = (query, key, value)
    if not all(isinstance(t, Tensor) and t.ndim == query.ndim for t in tensors) or query.ndim in (0, 1, 4):
        return *tensors, mask
    if query.ndim < 4:
        at = query.ndim - 2  # of the heads
        mask = mask.unsqueeze(at) if isinstance(mask, Tensor) and mask.ndim == query.ndim else mask
        tensors = tuple(t.unsqueeze(at) for t in tensors)
        return *((t if t.ndim == 4 else t.unsqueeze(0)) for t in tensors), mask
    leading = query.shape[:-3]
    if any(t.shape[:-3] != leading for t in tensors):
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise ValueError(f"query, key and value must have the same dimensions before the heads; got shapes {shapes}.")
    if isinstance(mask, Tensor) and 4 <= mask.ndim <= query.ndim:
        held = mask.shape[:-3]
        if all(one in (1, all_) for one, all_ in zip(held[::-1], leading[::-1], strict=False)):
            mask = mask.expand(*leading, *mask.shape[-3:]).flatten(0, -4)
    return *(t.flatten(0, -4) for t in tensors), mask


def find_coefficients(
    inputs: Inputs, is_causal: bool, matching: Matching, scale: float | None, backend: Backend
) -> tuple[Coefficient, Coefficient]:
    """Of each sample for itself; causal ones must not look at later tokens."""
    query, key, _, key_mask, *_ = inputs
    if is_causal:
        return match_moments(1.0, 1.0, query.shape[3], matching, scale, length=LENGTH)
    query_mask = key_mask if query.shape[2] == key.shape[2] else None
    data = query.detach(), key.detach(), key.shape[1], query_mask, key_mask, None, None
    return match_samples(data, matching, scale, backend)


def read_padding(mask: Tensor, key: Tensor) -> Tensor:
    """[batch, key length] bool, True = attend, of an attn_mask that hides keys from all queries and heads."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        remedy = " Use attn_mask.bool()." if isinstance(mask, Tensor) else ""
        raise TypeError(
            f"attn_mask must be a tensor, bool (True = attend) or float (0 or -inf), or None; got {describe(mask)}."
            f"{remedy}"
        )
    batch, length = key.shape[0], key.shape[2]
    shape = [1] * (4 - mask.ndim) + list(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1:] != [1, 1, length]:
        remedy = ""
        if list(mask.shape) == [batch, length]:
            remedy = " Use attn_mask[:, None, None]."
        elif shape[2] > 1 and shape[3] == length:
            remedy = (
                " In place of a causal mask pass is_causal=True; of padding that is repeated for every query use "
                "attn_mask[..., :1, :]."
            )
        raise ValueError(
            f"attn_mask must be padding, of shape [batch, 1, 1, key length] = [{batch}, 1, 1, {length}], because "
            "linear attention forms no query-key pairs that could be masked one by one (causality is is_causal=True); "
            f"got {describe(mask)}.{remedy}"
        )
    rows = mask.reshape(shape[0], length).expand(batch, length)
    if mask.dtype == torch.bool:
        return rows
    return ~read_added("attn_mask", rows, can_read(mask), " Where 1 means attend, use attn_mask.bool().")
