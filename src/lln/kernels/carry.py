"""What an LLN+Diag state carries besides (log_sum, mean_value): where the open block stands, and its rows.

All of it is index arithmetic on the device, without a loop over sequences and without waiting for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln.kernels.blocks import slot_rows
from lln.kernels.call import Call


class Layout(NamedTuple):
    """How a sequence is cut into groups of queries, and which keys each sees: group g the window of `size` slots from
    g * rows on, in slots that count from `before` slots before the first row.

        blocks           rows = size         before = 0           the block itself
        overlap          rows = size / 2     before = size / 4    and a quarter on both sides
        overlap, causal  rows = size / 2     before = size / 2    and the group before, no later token
    """

    size: int
    rows: int
    before: int

    @classmethod
    def choose(cls, size: int, overlap: bool, is_causal: bool) -> Layout:
        if not overlap:
            return cls(size, size, 0)
        return cls(size, size // 2, size // 2 if is_causal else size // 4)


def block_start(
    key: Tensor, key_mask: Tensor | None, cu_key: Tensor | None, count: Tensor | None, block_size: int
) -> Tensor | None:
    """[B]: the slot of the first new token in the open block; negative, by so many tokens, when none is open and the
    tokens before the first valid one are skipped. None when no token moves. `count` is that of the state, if any."""
    if count is None and key_mask is None:
        return None
    first = first_valid(key, key_mask, cu_key)
    return -first if count is None else torch.where(count > 0, count % block_size, -first)


def first_valid(key: Tensor, key_mask: Tensor | None, cu_key: Tensor | None) -> Tensor:
    """[B]: position of each sequence's first valid token, or its length where there is none."""
    lengths = sequence_lengths(key, cu_key)
    if key_mask is None:
        return torch.zeros_like(lengths)
    position = torch.arange(key.shape[-2], device=key.device)
    if cu_key is None:
        position = position.expand(key_mask.shape).masked_fill(~key_mask, key.shape[-2])
        return torch.cat([position, lengths.unsqueeze(-1)], -1).amin(-1)
    sequence = owners(position, cu_key)
    position = torch.where(key_mask[0], position - cu_key[sequence], lengths[sequence])
    return lengths.scatter_reduce(0, sequence, position, "amin")


def owners(position: Tensor, offsets: Tensor) -> Tensor:
    """Which of the packed sequences each position [N] belongs to; offsets begin with 0. By all offsets, less one, and
    not by offsets[1:]: of a part, torch.compile for a GPU would read from the beginning of the whole (torch 2.11)."""
    return torch.bucketize(position, offsets.to(torch.int64), right=True) - 1


def sequence_lengths(key: Tensor, cu_key: Tensor | None) -> Tensor:
    if cu_key is not None:
        return cu_key.diff().to(torch.int64)
    return torch.full((key.shape[0],), key.shape[-2], dtype=torch.int64, device=key.device)


def open_block(call: Call) -> dict[str, Tensor]:
    """count, block_key, block_value and block_mask of the state after this call."""
    assert call.block_size is not None
    size, group, before = Layout.choose(call.block_size, call.overlap, call.is_causal)
    device, lengths = call.key.device, sequence_lengths(call.key, call.cu_key)
    start = torch.zeros_like(lengths) if call.start is None else call.start
    end = start + lengths
    count = end if call.count is None else torch.where(call.count > 0, call.count + lengths, end)
    slots = end.div(group, rounding_mode="floor").mul(group).unsqueeze(-1) + torch.arange(size, device=device)
    rows, filled = slot_rows(start + before, slots, lengths.unsqueeze(-1), size)  # of [block open before, new rows]
    kept = rows < size
    owner = torch.arange(lengths.shape[0], device=device).unsqueeze(-1)
    new = (rows - size).clamp_min(0)
    if call.cu_key is not None:
        owner, new = torch.zeros_like(owner), new + call.cu_key[:-1].unsqueeze(-1)
    new = new.clamp_max(max(call.key.shape[-2] - 1, 0))

    def pick(opened: Tensor | None, t: Tensor) -> Tensor:
        """Rows [B, H, size, D] of the state's block or of the new keys or values t."""
        if t.shape[-2]:
            fresh = t[owner, :, new].transpose(1, 2)
        else:
            fresh = t.new_zeros(lengths.shape[0], t.shape[1], size, t.shape[-1])
        if opened is None:
            return fresh
        index = rows.clamp_max(size - 1)[:, None, :, None].expand(opened.shape)
        return torch.where(kept[:, None, :, None], opened.gather(-2, index), fresh)

    mask = filled
    if call.key_mask is not None and call.key.shape[-2]:
        mask = mask & (kept | call.key_mask[owner, new])
    mask = mask & (~kept if call.open_mask is None else ~kept | call.open_mask.gather(-1, rows.clamp_max(size - 1)))
    hidden = ~mask[:, None, :, None]
    return {
        "count": count,
        "block_key": pick(call.open_key, call.key).masked_fill(hidden, 0.0),
        "block_value": pick(call.open_value, call.value).masked_fill(hidden, 0.0),
        "block_mask": mask,
    }
