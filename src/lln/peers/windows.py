"""What mechanisms on windows and blocks share: a sequence cut in blocks, its neighbours, softmax over keys of several
kinds. Shapes are those of `lln.kernels.common`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lln.kernels.blocks import gather_rows
from lln.kernels.call import Call
from lln.kernels.carry import first_valid
from lln.kernels.common import Dropout, drop, softmax_or_zero


def align(call: Call, attend: Callable[[Call, Tensor], Tensor]) -> Tensor:
    """attend(call, mask) with every sample moved so that its first valid token is its first row: blocks and windows
    count from there then, and left padding changes nothing. mask [B, N]: its key_mask, all True where there was none.

    For query and key of one sequence."""
    length, device = call.key.shape[2], call.key.device
    if call.key_mask is None:
        mask = torch.ones_like(call.key[:, 0, :, 0], dtype=torch.bool)
        return attend(call.change(key_mask=mask), mask)
    first = first_valid(call.key, call.key_mask, None).unsqueeze(-1)
    row = torch.arange(length, device=device)
    source, target = row + first, row - first  # [B, N]

    def move(t: Tensor, index: Tensor) -> Tensor:
        return gather_rows(t.unsqueeze(2), index.clamp(0, length - 1)).squeeze(2)

    query, key, value = (move(t, source) for t in (call.query, call.key, call.value))
    mask = call.key_mask.gather(1, source.clamp_max(length - 1)) & (source < length)
    out = attend(call.change(query=query, key=key, value=value, key_mask=mask), mask)
    return move(out, target).masked_fill((target < 0)[:, None, :, None], 0.0)


def cut_blocks(t: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Rows [..., N, D] as blocks [..., n, size, D], the last one filled up with `value`."""
    missing = -t.shape[-2] % size
    filled = functional.pad(t, (0, 0, 0, missing), value=value) if missing else t
    blocks: Tensor = filled.unflatten(-2, (-1, size))
    return blocks


def visible_blocks(mask: Tensor, size: int) -> Tensor:
    """The key mask [B, N] as blocks [B, 1, 1, n, size, 1]; what fills the last one up is not visible."""
    return cut_blocks(mask[:, None, None, :, None], size)


def neighbours(t: Tensor, before: int, after: int) -> Tensor:
    """Blocks [..., n, size, D] each with so many rows before and after it: [..., n, before + size + after, D]; zeros
    beyond the ends."""
    size = t.shape[-2]
    rows = functional.pad(t.flatten(-3, -2), (0, 0, before, after))
    return rows.unfold(-2, before + size + after, size).transpose(-1, -2)


def whole_blocks(t: Tensor, index: Tensor) -> Tensor:
    """Blocks of t [B, H, G, n, size, D] by index [B, H, G, k]: [B, H, G, k, size, D]; sizes H, G of 1 are stretched."""
    shape = torch.broadcast_shapes(t.shape[:3], index.shape[:3])
    t, index = t.expand(*shape, *t.shape[3:]), index.expand(*shape, index.shape[3])
    return t.gather(3, index[..., None, None].expand(*index.shape, *t.shape[4:]))


def joint_attention(parts: list[tuple[Tensor, Tensor]], dropout: Dropout | None, *place: int) -> Tensor:
    """One softmax over keys of several kinds: parts are (scores [..., n, m_i], values [..., m_i, E])."""
    p, _ = drop(softmax_or_zero(torch.cat([s for s, _ in parts], -1)), dropout, *place)
    shares = p.split([s.shape[-1] for s, _ in parts], -1)
    out: Tensor = torch.stack([share @ v for share, (_, v) in zip(shares, parts, strict=True)]).sum(0)
    return out
