"""BigBird: blocks of tokens that see their neighbours, the first and the last block, and some random ones; the first
and the last block see all."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lln.kernels.blocks import gather_rows
from lln.kernels.call import Call
from lln.peers.pieces import average, group_heads, scores
from lln.peers.registry import register
from lln.peers.windows import align, cut_blocks, joint_attention, neighbours, visible_blocks, whole_blocks
from lln.values import check_count, describe


@register("bigbird")
def bigbird(
    call: Call, *, block: int = 64, random_blocks: int = 3, seed: int = 0, plan: Tensor | None = None
) -> Tensor:
    """block: tokens of a block. random_blocks: for each block and head, out of those it would not see anyhow. plan
    [heads, blocks, random_blocks] names them instead (rows of the first and the last block are not read)."""
    check_count("block", block)
    check_count("random_blocks", random_blocks, 0)
    count = -(-call.key.shape[2] // block)
    if plan is not None and (plan.ndim != 3 or list(plan.shape[:2]) != [call.query.shape[1], count]):
        raise ValueError(f"plan must be [heads, blocks, random blocks] = [{call.query.shape[1]}, {count}, ...]; "
                         f"got {describe(plan)}.")  # fmt: skip
    return align(call, functools.partial(block_sparse, block=block, drawn=random_blocks, seed=seed, plan=plan))


def draw(heads: int, blocks: int, last: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """For each row of blocks, `count` of the blocks that it does not see anyhow: one at random from each of `count`
    equal strata of them. [B, heads, blocks, count], and which are none because there are too few.

    A function of (seed, head, row) and the sample's own number of blocks, so that padding changes nothing."""
    device = last.device
    head, row, slot = (torch.arange(n, device=device) for n in (heads, blocks, count))
    # Candidates are 1 .. last - 1 without the window's row - 1 .. row + 1.
    low = (row - 2).clamp_min(0)  # so many come before the window
    high = (last[:, None] - 2 - row).clamp_min(0)  # [B, n] so many after it
    number = (low + high)[:, None, :, None]  # [B, 1, n, 1]
    mixed = seed + 1 + head[:, None, None] * 1000003 + row[:, None] * 8191 + slot * 131
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):  # an integer hash
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    share = (mixed ^ (mixed >> 15)) & 0xFFFF  # [heads, n, count] out of 65536
    begin, end = slot * number // max(count, 1), (slot + 1) * number // max(count, 1)
    rank = torch.where(number >= count, begin + share * (end - begin) // 65536, slot)
    chosen = torch.where(rank < low[:, None], rank + 1, rank - low[:, None] + row[:, None] + 2)
    none = (rank >= number).expand(chosen.shape)
    return chosen.clamp(0, blocks - 1), none


def block_sparse(call: Call, mask: Tensor, *, block: int, drawn: int, seed: int, plan: Tensor | None) -> Tensor:
    q, k, v = group_heads(call)
    batch, key_heads, groups, length, _ = q.shape
    size = min(block, length)
    kb, vb, seen = cut_blocks(k, size), cut_blocks(v, size), visible_blocks(mask, size)
    count = kb.shape[3]
    last = (torch.arange(length, device=q.device) * mask).amax(-1) // size  # [B] the block of the last valid token
    if plan is None:
        chosen, none = draw(key_heads * groups, count, last, drawn, seed)
    else:
        chosen = plan.to(q.device).expand(batch, *plan.shape)
        none = torch.zeros_like(chosen, dtype=torch.bool)
    chosen, none = (t.unflatten(1, (key_heads, groups)) for t in (chosen, none))  # [B, H, G, n, r]

    def take_chosen(t: Tensor) -> Tensor:
        """[B, H, G, n, r size, D]"""
        found: Tensor = whole_blocks(t, chosen.flatten(3)).unflatten(3, (count, -1))
        return found.flatten(4, 5)

    ends = last[:, None, None, None]  # [B, 1, 1, 1]
    queries = cut_blocks(q, size)
    number = torch.arange(count, device=q.device)[:, None, None]  # [n, 1, 1]
    inner = seen & (number != 0) & (number != ends[..., None, None])  # the ends have columns of their own
    window = neighbours(inner, size, size)
    parts = [(scores(queries, neighbours(kb, size, size), call.scale, ~window), neighbours(vb, size, size))]
    for end in (torch.zeros_like(ends), ends):
        shown = whole_blocks(seen, end)
        if end is ends:  # a sequence of one block has one end
            shown = shown & (ends != 0)[..., None, None]
        parts.append((scores(queries, whole_blocks(kb, end), call.scale, ~shown), whole_blocks(vb, end)))
    if chosen.shape[-1]:
        shown = take_chosen(seen) & ~none.repeat_interleave(size, -1).unsqueeze(-1)
        parts.append((scores(queries, take_chosen(kb), call.scale, ~shown), take_chosen(vb)))
    out = joint_attention(parts, call.dropout, 1).flatten(-3, -2)
    # The first and the last block see every key.
    for place, end in enumerate((torch.zeros_like(last), last)):
        index = end[:, None] * size + torch.arange(size, device=q.device)
        whole = scores(gather_rows(queries.flatten(-3, -2), index), k, call.scale, ~mask[:, None, None, :, None])
        seen_all = average(whole, v, call.dropout, 2 + place)
        out = out.scatter(-2, index[:, None, None, :, None].expand(seen_all.shape), seen_all)
    return out[..., :length, :].flatten(1, 2)
