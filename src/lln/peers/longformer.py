"""Longformer: a sliding window, and global tokens that see and are seen by all."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.checks import check_key_mask
from lln.kernels.blocks import gather_rows
from lln.kernels.call import Call
from lln.peers.pieces import average, find_valid, group_heads, scores
from lln.peers.registry import register
from lln.peers.windows import cut_blocks, joint_attention, neighbours, visible_blocks
from lln.values import check_count


@register("longformer")
def longformer(call: Call, *, window: int = 256, global_tokens: int = 1, global_mask: Tensor | None = None) -> Tensor:
    """window: tokens seen to each side. global_tokens: so many at the start of each sequence; or global_mask [B, N]
    names them (finding how many there are waits for the device)."""
    check_count("window", window)
    check_count("global_tokens", global_tokens, 0)
    _, mask = find_valid(call)
    count, chosen = global_tokens, mask & (mask.cumsum(-1) <= global_tokens)  # [B, N], at most `count` a sample
    if global_mask is not None:
        check_key_mask(global_mask, call.key, "global_mask", "key")
        chosen = global_mask & mask
        count = int(chosen.sum(-1).max())
    q, k, v = group_heads(call)
    length = call.key.shape[2]
    row = torch.arange(length, device=q.device)
    index = (~chosen).to(torch.uint8).argsort(stable=True, dim=-1)[:, :count]  # [B, g]
    present = chosen.gather(1, index)[:, None, None, :, None]  # [B, 1, 1, g, 1]
    size = min(window, length)
    visible = neighbours(visible_blocks(mask & ~chosen, size), size, size)  # [B, 1, 1, n, 3 w, 1]
    query, key = torch.arange(size, device=q.device)[:, None], torch.arange(-size, 2 * size, device=q.device)
    band = (key - query).abs() <= window  # [w, 3 w]
    if call.is_causal:
        band = band & (key <= query)
    near = scores(cut_blocks(q, size), neighbours(cut_blocks(k, size), size, size), call.scale, ~visible)
    near = near.masked_fill(~band, -torch.inf)
    global_k, global_v = gather_rows(k, index), gather_rows(v, index)
    far = scores(q, global_k, call.scale, ~present)  # [B, H, G, N, g]
    later = row[:, None] < index[:, None, None, None, :]  # [B, 1, 1, N, g]: the global token comes after the query
    if call.is_causal:
        far = far.masked_fill(later, -torch.inf)
    far = cut_blocks(far, size, -torch.inf)
    parts = [(far, global_v.unsqueeze(3)), (near, neighbours(cut_blocks(v, size), size, size))]
    out = joint_attention(parts, call.dropout, 1).flatten(-3, -2)[..., :length, :]
    # Global queries see every key.
    whole = scores(gather_rows(q, index), k, call.scale, ~mask[:, None, None, :, None])
    if call.is_causal:
        whole = whole.masked_fill(row > index[:, None, None, :, None], -torch.inf)
    seen = average(whole, v, call.dropout, 2)  # [B, H, G, g, E]
    place = index[:, None, None, :, None].expand(seen.shape)
    seen = torch.where(present, seen, out.gather(-2, place))
    return out.scatter(-2, place, seen).flatten(1, 2)
