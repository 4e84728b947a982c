"""A mechanism called on q, k, v: one check for all, packed sequences one by one, blocks where asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.checks import check_call, check_inputs
from lln.functional import CuSeqlens, Mix, autocast
from lln.kernels.call import Call
from lln.kernels.common import is_autocast_enabled
from lln.kernels.eager import attend_block_part, draw_dropout
from lln.nn.image_grid import Patches
from lln.nn.statistics import check_heads
from lln.nn.value_convolution import add_near, check_taps, check_tokens, take_near
from lln.peers.registry import REGISTRY, Mechanism, check_names, find
from lln.ranks import refuse_ranks
from lln.values import describe

Attend = Callable[[Call], Tensor]  # [B, Hq, N, E] of a call, in any dtype


def attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    block_size: int | None = None,
    mix: Mix = 0.5,
    value_convolution: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute attention by the mechanism with this name, to compare mechanisms on the same query, key and value.

    Args:
        name: one of `lln.mechanisms()` that has nothing to learn; the others are built by `lln.mechanism`.
        query, key, value, is_causal, key_mask, cu_seqlens: as in `lln.lln_attention`.
        dropout_p: probability of dropout on P, or on the queries' features where there is no P.
        scale: factor of the scores of softmax attention (also of the one imitated), default 1 / sqrt(dim).
        block_size: for kernel mechanisms: adds softmax attention inside blocks of this many tokens (ELU+Diag, ...).
        mix: out = mix * kernel + (1 - mix) * diag, or a pair of factors; needs block_size. Default 0.5.
        value_convolution: a tensor [key heads, value dim, width] with an odd width: the values convolved with it over
            the tokens (causal: over earlier ones) are added to the output, see `lln.nn.value_convolution`. The module
            `lln.mechanism(name, ..., value_convolution=5)` learns it.
        options: options of the mechanism, see `lln.mechanisms()[name].options`.

    Returns:
        [batch, heads, length, value dim] in the dtype of query. A row with nothing to attend to is zero.

    Raises:
        ValueError or TypeError: the message is one sentence, also for what the mechanism does not support.

    Examples:
        >>> import lln, torch
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> lln.attention("performer", query, key, value, features=32, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
        >>> lln.attention("skyformer", query, key, value, is_causal=True)
        Traceback (most recent call last):
        ValueError: skyformer does not support is_causal=True: landmarks are drawn from the whole sequence.
    """
    entry = find(name)
    if entry.function is None:
        raise ValueError(
            f"{name} learns {entry.learned}, so it is a module: "
            f"build it with lln.mechanism({name!r}, num_heads=..., head_dim=..., max_length=...)."
        )
    check_names(name, options, entry.options)
    return run(
        entry, functools.partial(entry.function, **options), query, key, value, is_causal=is_causal, key_mask=key_mask,
        dropout_p=dropout_p, cu_seqlens=cu_seqlens, scale=scale, block_size=block_size, mix=mix,
        taps=value_convolution,
    )  # fmt: skip


def attention_matrix(name: str, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
    """P [B, H, N, M] of the mechanism of this name, by giving it the unit vectors for values: quadratic in the length,
    for looking at. Arguments as for `lln.attention`.

    Raises:
        ValueError: for mechanisms whose output is not P v with a P that v has no part in.

    Examples:
        >>> import torch
        >>> from lln.peers import attention_matrix
        >>> p = attention_matrix("softmax", torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8))
        >>> p.shape, torch.allclose(p.sum(-1), torch.ones(1, 2, 5))
        (torch.Size([1, 2, 5, 7]), True)
    """
    if not find(name).matrix:
        raise ValueError(f"{name} has no attention matrix: its output is not a P of query and key, times value.")
    units = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
    return attention(name, query, key, units.expand(*key.shape[:2], -1, -1), **arguments)


def run(
    entry: Mechanism, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool,
    key_mask: Tensor | None, dropout_p: float, cu_seqlens: CuSeqlens | None, scale: float | None = None,
    block_size: int | None = None, mix: Mix = 0.5, heads: tuple[int, int, int] | None = None,
    taps: Tensor | None = None, patches: Patches | None = None,
) -> Tensor:  # fmt: skip
    """A checked call, sequence by sequence where packed, with blocks where asked for. heads: query heads, key heads and
    head dim, where they have to be these. taps, patches: of a value convolution."""
    refuse_ranks(entry.name, "of all mechanisms LLN attention alone is spread over ranks; use lln.LLNAttention")
    block_size = check_blocks(entry, block_size, mix)
    query, key, value = autocast(query, key, value)
    inputs = check_inputs(query, key, value, key_mask=key_mask, cu_seqlens=cu_seqlens)
    if heads is not None:
        check_heads(query, key, *heads)
    entry.check(query, key, is_causal, key_mask, cu_seqlens)
    if taps is not None:
        check_tokens(query, key, is_causal, False, cu_seqlens)
        check_taps(value, taps)
    call = check_call(inputs, block_size=block_size, mix=mix, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    device = query.device.type
    narrow = torch.autocast(device, enabled=False) if is_autocast_enabled(device) else contextlib.nullcontext()
    with narrow:
        out = attend(call) if entry.whole else run_each(attend, call, with_blocks=True)
        if taps is not None:
            near = take_near(value, taps, patches, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
            out = add_near(out, near)
        return out.to(query.dtype)


def check_blocks(entry: Mechanism, block_size: int | None, mix: Mix) -> int | None:
    """The block size to use."""
    if not entry.mixes and not (isinstance(mix, float) and mix == 0.5):
        raise ValueError(f"mix needs a kernel mechanism and block_size; got mix={describe(mix)} with {entry.name}.")
    if block_size is not None and entry.kind != "kernel":
        kernels = ", ".join(m.name for m in REGISTRY.values() if m.kind == "kernel")
        raise ValueError(f"block_size goes with kernel mechanisms ({kernels}); got {block_size!r} with {entry.name}.")
    return entry.block_size if block_size is None else block_size


def run_each(attend: Attend, call: Call, with_blocks: bool = False) -> Tensor:
    """Packed sequences each for itself; where there is no query or no key, no mechanism is asked. with_blocks: those of
    the call are mixed in."""

    def part(sequence: Call) -> Tensor:
        if not sequence.query.shape[2] or not sequence.key.shape[2]:
            nothing = sequence.query[..., :1].expand(*sequence.query.shape[:3], sequence.value.shape[3])
            return nothing.masked_fill(torch.ones_like(nothing, dtype=torch.bool), 0.0)
        out = attend(sequence)
        if not with_blocks or sequence.block_size is None or sequence.lln_weight is None:
            return out
        blocks = attend_block_part(sequence)
        return out.to(blocks.dtype) * sequence.lln_weight.unsqueeze(-2) + blocks

    outs = [part(sequence) for sequence in draw_dropout(call).sequences()]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -2)
