"""Softmax attention inside consecutive blocks (the "Diag" of LLN+Diag), and where each token sits in its block.

Blocks count from a sequence's first valid token, and go on where the state of an earlier call left off. When
neither a mask nor a state moves a token, the blocks are views of q, k, v. Otherwise the rows of
[open block of the state, new rows] are gathered into *slots*; slot s belongs to block s // block_size.
Shapes are those of `common`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.kernels.common import (
    Dropout,
    compute_dtype,
    count_parts,
    cut_rows,
    drop,
    keep_full_precision,
    softmax_or_zero,
    spans,
    zeros_like,
)


def slot_rows(start: Tensor, slots: Tensor, length: int | Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Which row of [open block, new rows] fills each slot [B or 1, S] (0 where none), and whether one does: two [B, S].

    start [B] is the slot of the first new row, in [-length, block_size): the slots below it hold the open block's
    own rows, and where it is negative the rows before the first valid token have no slot.
    """
    row = slots - start.unsqueeze(-1)
    filled = row < length
    rows = torch.where(row < 0, slots, block_size + row)
    return torch.where(filled, rows, 0), filled


def gather_rows(t: Tensor, index: Tensor) -> Tensor:
    """Rows of t [B, H, G, N, D] by index [B, S]."""
    index = index[:, None, None, :, None]
    return t.gather(-2, index.expand(*t.shape[:3], index.shape[3], t.shape[-1]))


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the rows of one call go."""

    rows: Tensor  # [B, S]  the row of [open block, new rows] that fills a slot
    visible: Tensor  # [B, S]  slots whose key may be attended to
    fresh: Tensor  # [B, S]  slots that hold one of the new rows
    slots: Tensor  # [B, block_size + N]  the inverse of `rows`
    placed: Tensor  # [B, block_size + N]  rows that have a slot
    block_size: int
    count: int  # S / block_size

    @classmethod
    def make(cls, start: Tensor, key_mask: Tensor, block_size: int, continued: bool) -> Placement:
        """key_mask [B, block_size + N] covers [open block, new rows]. `continued`: the open block may have rows."""
        length = key_mask.shape[-1] - block_size
        blocks = count_parts(length + (block_size - 1 if continued else 0), block_size)
        count = blocks * block_size
        rows, filled = slot_rows(start, torch.arange(count, device=start.device).unsqueeze(0), length, block_size)
        row = torch.arange(block_size + length, device=start.device).unsqueeze(0)
        first = start.unsqueeze(-1)
        opened = row < block_size
        slots = torch.where(opened, row, row - block_size + first)
        placed = (opened & (row < first)) | (~opened & (slots >= 0))  # ONNX Runtime has no `where` of bools
        visible, fresh = filled & key_mask.gather(1, rows), filled & (rows >= block_size)
        return cls(rows, visible, fresh, slots.clamp(0, count - 1), placed, block_size, blocks)

    def place_queries(self, t: Tensor) -> Tensor:
        """The new rows t [B, H, G, N, D] in their slots; zeros in the slots that hold none."""
        return gather_rows(t, (self.rows - self.block_size).clamp_min(0)) * self.fresh[:, None, None, :, None]

    def place_keys(self, t: Tensor, opened: Tensor | None) -> Tensor:
        """[open block, new rows] in their slots; what stands in slots that are not `visible` is arbitrary."""
        if opened is None:
            opened = t.new_zeros(()).expand(*t.shape[:-2], self.block_size, t.shape[-1])
        return gather_rows(torch.cat([opened, t], -2), self.rows)

    def take_new_rows(self, t: Tensor) -> Tensor:
        """The inverse of `place_queries`; rows without a slot get zeros."""
        return self.take_all_rows(t)[..., self.block_size :, :]

    def take_all_rows(self, t: Tensor) -> Tensor:
        """The inverse of `place_keys`: [open block, new rows]."""
        return gather_rows(t, self.slots) * self.placed[:, None, None, :, None]


def weights(q: Tensor, k: Tensor, visible: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """P of blocks [..., n, block_size, D]; visible [..., n, block_size] says which keys may be attended to."""
    scores = (q * scale) @ k.transpose(-1, -2)
    if is_causal:
        size = scores.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if visible is None:
        return scores.softmax(-1)
    return softmax_or_zero(scores.masked_fill(~visible.unsqueeze(-2), -torch.inf))


class Blocks(Function):
    """(q, k, v, weight, open_key, open_value, start, key_mask,
    block_size, is_causal, scale, dtype, dropout) -> out

    Without `start` the blocks lie as they are, and the length must be a multiple of block_size. With it, start and
    key_mask are those of `Placement.make`, and open_key, open_value [B, H, 1, block_size, D | E] hold the rows of the
    block that an earlier call left open (None: there was no earlier call).
    """

    @staticmethod
    @keep_full_precision
    def forward(
        q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, open_key: Tensor | None, open_value: Tensor | None,
        start: Tensor | None, key_mask: Tensor | None, block_size: int, is_causal: bool, scale: float,
        dtype: torch.dtype, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        computed = compute_dtype(q.dtype)
        placement = place(start, key_mask, block_size, open_key)
        qs, ks, vs, visible = cut_into_blocks(q, k, v, open_key, open_value, placement, block_size)
        out = q.new_empty((*qs.shape[:-1], v.shape[-1]), dtype=dtype)
        for part in spans(qs, dim=-3, at_least=1):
            q_part, k_part, v_part = (t[..., part, :, :].to(computed) for t in (qs, ks, vs))
            p = weights(q_part, k_part, None if visible is None else visible[..., part, :], is_causal, scale)
            o = drop(p, dropout, part.start)[0] @ v_part
            out[..., part, :, :] = o if weight is None else o * weight.unsqueeze(-2)
        out = out.flatten(-3, -2)
        return out if placement is None else placement.take_new_rows(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:8])
        ctx.settings = inputs[8:]

    @staticmethod
    @keep_full_precision
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, open_key, open_value, start, key_mask = ctx.saved_tensors
        block_size, is_causal, scale, _, dropout = ctx.settings
        dtype = compute_dtype(q.dtype)
        placement = place(start, key_mask, block_size, open_key)
        qs, ks, vs, visible = cut_into_blocks(q, k, v, open_key, open_value, placement, block_size)
        gs = (g_out if placement is None else placement.place_queries(g_out)).unflatten(-2, (qs.shape[-3], block_size))
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (qs, ks, vs))
        dweight = zeros_like(weight)
        for part in spans(qs, dim=-3, at_least=1):
            q_part, k_part, v_part, g = (t[..., part, :, :].to(dtype) for t in (qs, ks, vs, gs))
            p = weights(q_part, k_part, None if visible is None else visible[..., part, :], is_causal, scale)
            dropped, mask = drop(p, dropout, part.start)
            if weight is not None:
                if ctx.needs_input_grad[3]:
                    o = dropped @ v_part
                    dweight = dweight + (g * o).flatten(-3, -2).sum_to_size(weight.shape)
                g = g * weight.unsqueeze(-2)
            dp = g @ v_part.transpose(-1, -2)
            dp = dp if mask is None else dp * mask
            dscores = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[..., part, :, :] = (dscores @ k_part).to(q.dtype)
            dk[..., part, :, :] = (dscores.transpose(-1, -2) @ q_part).sum(2, keepdim=True).to(k.dtype)
            dv[..., part, :, :] = (dropped.transpose(-1, -2) @ g).sum(2, keepdim=True).to(v.dtype)
        dq, dk, dv = (t.flatten(-3, -2) for t in (dq, dk, dv))
        if placement is None:
            return dq, dk, dv, dweight, *[None] * 9
        dk, dv = placement.take_all_rows(dk), placement.take_all_rows(dv)
        grads = placement.take_new_rows(dq), dk[..., block_size:, :], dv[..., block_size:, :], dweight
        if open_key is None:
            return *grads, *[None] * 9
        return *grads, dk[..., :block_size, :], dv[..., :block_size, :], *[None] * 7


def place(start: Tensor | None, key_mask: Tensor | None, block_size: int, open_key: Tensor | None) -> Placement | None:
    if start is None or key_mask is None:
        return None
    return Placement.make(start, key_mask, block_size, continued=open_key is not None)


def cut_into_blocks(
    q: Tensor, k: Tensor, v: Tensor, open_key: Tensor | None, open_value: Tensor | None,
    placement: Placement | None, block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """q, k, v as blocks [B, H, G, n, block_size, D], and which keys of each block may be attended to."""
    visible, count = None, q.shape[-2] // block_size
    if placement is not None:
        q, k, v = placement.place_queries(q), placement.place_keys(k, open_key), placement.place_keys(v, open_value)
        count = placement.count
        visible = cut_rows(placement.visible[:, None, None], count, block_size, -1)
    q, k, v = (cut_rows(t, count, block_size) for t in (q, k, v))
    return q, k, v, visible
