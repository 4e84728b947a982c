"""LLN+Diag whose blocks overlap: softmax attention in windows of block_size keys around half as many queries.

    bidirectional: queries of a block of b / 2 tokens see it and b / 4 tokens on both sides of it
    causal:        they see it and the b / 2 tokens before it, as far as these are not later

So no query sits at the edge of what it sees, with as many products as disjoint blocks of b. Windows count from a
sequence's first valid token. Rows are laid into *slots*, of which each sequence has a whole number of blocks; all of it
is index arithmetic on the device. Memory is linear in the length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lln.checks import Inputs, check_block_size, mix_weights
from lln.functional import Backend, Coefficient, Mix, attend_checked
from lln.kernels.blocks import gather_rows
from lln.kernels.carry import first_valid, owners
from lln.kernels.common import compute_dtype
from lln.ranks import refuse_ranks
from lln.state import LLNState


def window(block_size: int, is_causal: bool) -> tuple[int, int]:
    """(queries of a block, keys that its window begins before it); a window has block_size keys."""
    return block_size // 2, block_size // 2 if is_causal else block_size // 4


def overlapping_attention(
    inputs: Inputs,
    alpha: Coefficient | None,
    beta: Coefficient,
    *,
    block_size: int,
    mix: Mix,
    scale: float | None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    state: LLNState | None = None,
    return_state: bool = False,
    backend: Backend = "auto",
    **read: Any,
) -> Tensor:
    """`lln.functional.attend_checked` with overlapping blocks, and without states. [B, H, N, E] in the dtype of
    query. read: how channels are read, as there."""
    if state is not None or return_state:
        raise ValueError(
            "overlap: a state keeps one open block, and overlapping windows reach further back; leave out state and "
            "return_state (in generate: cache_implementation='dynamic')."
        )
    refuse_ranks("overlap", "windows that overlap are not spread over ranks; use blocks, overlap=False")
    query, key = inputs.query, inputs.key
    check_block_size(block_size, is_causal, inputs.cross or query.shape[2] != key.shape[2], with_state=False)
    linear = attend_checked(
        inputs, alpha, beta, is_causal=is_causal, dropout_p=dropout_p, backend=backend, scale=scale, **read
    )
    assert isinstance(linear, Tensor)
    near = attend_windows(inputs, block_size, scale, is_causal, dropout_p)
    return mix_parts(inputs, linear, near, mix, block_size)


def mix_parts(inputs: Inputs, linear: Tensor, near: Tensor, mix: Mix, block_size: int) -> Tensor:
    """LLN attention and softmax attention among neighbours, both [B, H, N, E], as one, in the dtype of query."""
    query, offsets = inputs.query, inputs.cu_query
    shape = query.shape[0] if offsets is None else offsets.numel() - 1, query.shape[1], inputs.value.shape[3]
    r, p = mix_weights(mix, block_size, shape, compute_dtype(query.dtype), query.device)
    assert r is not None
    assert p is not None
    return (linear * r.unsqueeze(-2) + near * p.unsqueeze(-2)).to(query.dtype)


def attend_windows(inputs: Inputs, size: int, scale: float | None, is_causal: bool, dropout_p: float) -> Tensor:
    """Softmax attention in the windows alone. A row whose window has no visible key is zero."""
    query, key, value, key_mask, offsets, _, _ = inputs
    batch, heads, length, _ = query.shape
    if length == 0:
        return query.new_zeros(batch, heads, 0, value.shape[3])
    rows, before = window(size, is_causal)
    edges = before, size - rows - before
    slots = None
    if key_mask is None and offsets is None:
        missing = -length % rows
        query, key, value = (functional.pad(t, (0, 0, 0, missing)) for t in (query, key, value))
        visible = (torch.arange(length + missing, device=query.device) < length).unsqueeze(0)
    else:
        slots = Slots.make(key, key_mask, offsets, rows)
        query, key, value = (slots.fill(t) for t in (query, key, value))
        visible = slots.visible
    seen = functional.pad(visible, edges).unfold(1, size, rows)  # [B or 1, n, size]
    if slots is not None and slots.sequence is not None:
        owners = functional.pad(slots.sequence, edges, value=-1).unfold(1, size, rows)
        seen = seen & (owners == slots.sequence[:, ::rows, None])
    seen = seen.unsqueeze(2)
    if is_causal:
        column, row = torch.arange(size, device=query.device), torch.arange(rows, device=query.device)
        causal = column <= row[:, None] + before
        seen = seen & causal.repeat(heads // key.shape[1], 1)  # [B or 1, n, group rows, size]
    padded = (functional.pad(t, (0, 0, *edges)) for t in (key, value))
    k, v = (t.unfold(2, size, rows).transpose(-1, -2) for t in padded)
    out = attend_apart(query.unflatten(2, (-1, rows)), k, v, seen, slots is not None, scale, dropout_p).flatten(2, 3)
    return out[:, :, :length] if slots is None else slots.take(out)


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, some_blind: bool, scale: float | None,
    dropout_p: float,
) -> Tensor:  # fmt: skip
    """Softmax attention of n groups of queries [B, H, n, R, D], each to keys [B, key heads, n, S, D] of its own.

    seen: [B or 1, n, 1 or rows of the heads that share a key head, S], or None: all. some_blind: there may be rows that
    see nothing, which get zeros. [B, H, n, R, E]."""
    (batch, heads, count, rows, _), key_heads = query.shape, key.shape[1]
    group = heads // key_heads
    alive = None
    if seen is not None and some_blind:
        alive = seen.any(-1, keepdim=True)
        seen = seen | ~alive  # a row without any key would be NaN in some kernels; it is zeroed below
        seen, alive = (t.repeat_interleave(key_heads, 0) for t in (seen, alive))
    # [B key heads, n, queries of the group, D]: one group is one head to torch, and nothing is repeated.
    q = query.unflatten(1, (key_heads, group)).transpose(2, 3).flatten(3, 4).flatten(0, 1)
    # A copy: not every attention kernel takes windows that share their memory.
    k, v = (t.flatten(0, 1).contiguous() for t in (key, value))
    out = functional.scaled_dot_product_attention(q, k, v, seen, dropout_p, scale=scale)
    if alive is not None:
        out = out.masked_fill(~alive, 0.0)
    return out.view(batch, key_heads, count, group, rows, out.shape[-1]).transpose(2, 3).flatten(1, 2)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where the rows of padded or packed sequences go."""

    rows: Tensor  # [B, S]  the row that fills a slot, 0 where none
    visible: Tensor  # [B, S]  slots whose key may be attended to
    slots: Tensor  # [B, N]  the inverse of `rows`; negative: before its sequence's first valid token
    sequence: Tensor | None  # [1, S]  packed: the sequence of a slot, -1 where none

    @classmethod
    def make(cls, key: Tensor, key_mask: Tensor | None, offsets: Tensor | None, size: int) -> Slots:
        length, device = key.shape[2], key.device
        at = torch.arange(length, device=device)
        first = first_valid(key, key_mask, offsets)
        owner = None
        if offsets is None:
            slots = at - first.unsqueeze(-1)
            count = -(-length // size) * size
        else:
            owner = owners(at, offsets)
            blocks = (offsets.diff().to(torch.int64) - first + size - 1).div(size, rounding_mode="floor")
            local = at - offsets[owner] - first[owner]
            slots = torch.where(local < 0, -1, (blocks.cumsum(0) - blocks)[owner] * size + local).unsqueeze(0)
            count = (length // size + len(first)) * size  # at most; how many there are only the device knows
        target = torch.where(slots < 0, count, slots)

        def fill_slots(values: Tensor, empty: int) -> Tensor:
            """Numbers of rows [N] as numbers of slots [B, S]."""
            made = torch.full((slots.shape[0], count + 1), empty, dtype=torch.int64, device=device)
            return made.scatter_(1, target, values.expand(slots.shape))[:, :count]

        rows = fill_slots(at, length)
        filled, rows = rows < length, rows.clamp_max(length - 1)
        visible = filled if key_mask is None else filled & key_mask.gather(1, rows)
        return cls(rows, visible, slots, None if owner is None else fill_slots(owner, -1))

    def fill(self, t: Tensor) -> Tensor:
        """Rows t [B, H, N, D] in their slots; what stands in empty ones is arbitrary."""
        return gather_rows(t.unsqueeze(2), self.rows).squeeze(2)

    def take(self, t: Tensor) -> Tensor:
        """The inverse; rows without a slot get zeros."""
        found = gather_rows(t.unsqueeze(2), self.slots.clamp_min(0)).squeeze(2)
        return found.masked_fill((self.slots < 0)[:, None, :, None], 0.0)
