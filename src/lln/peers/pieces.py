"""What mechanisms share: linear attention by feature maps, masked softmax, positions; a sequence cut in blocks, its
neighbours, softmax over keys of several kinds.

Shapes are those of `lln.kernels.common`: q [B, H, G, N, D] with G query heads for each of the H key heads, k and v
[B, H, 1, M, D | E].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lln.functional import choose
from lln.kernels.blocks import gather_rows
from lln.kernels.call import Call
from lln.kernels.carry import first_valid
from lln.kernels.common import Dropout, compute_dtype, drop, softmax_or_zero
from lln.kernels.features import FeatureAttention, FeatureMap, Maps


def group_heads(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the layout and the dtype of computation."""
    dtype = compute_dtype(call.query.dtype)
    q = call.query.to(dtype).unflatten(1, (call.key.shape[1], -1))
    return q, call.key.to(dtype).unsqueeze(2), call.value.to(dtype).unsqueeze(2)


def hidden_keys(call: Call) -> Tensor | None:
    """[B, 1, 1, M, 1], True where a key is masked out."""
    return None if call.key_mask is None else ~call.key_mask[:, None, None, :, None]


def feature_attention(
    call: Call, query_map: FeatureMap, key_map: FeatureMap | None = None, *, normalise: bool = True,
    floor: float = 1e-30, log_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Linear attention with these feature maps; the gate [B, H, M] is for causal attention."""
    q = call.query.unflatten(1, (call.key.shape[1], -1))
    maps = Maps(query_map, key_map or query_map, normalise, floor)
    gate = None if log_gate is None else log_gate[:, :, None, :, None]
    out: Tensor = FeatureAttention.apply(
        q, call.key.unsqueeze(2), call.value.unsqueeze(2), hidden_keys(call), gate, maps, call.is_causal,
        compute_dtype(q.dtype), call.dropout,
    )  # fmt: skip
    return out.flatten(1, 2)


def exponential_attention(call: Call, query_logs: Tensor, key_logs: Tensor) -> Tensor:
    """Linear attention whose features are the exponentials of these logarithms: LLN's own fold, which cannot overflow.

    query_logs [B, Hq, N, F], key_logs [B, Hk, M, F]."""
    one = torch.ones(1, 1, 1, dtype=compute_dtype(call.query.dtype), device=call.query.device)
    linear = dataclasses.replace(
        call, query=query_logs, key=key_logs, value=call.value.to(query_logs.dtype), alpha=one, beta=one,
        block_size=None, lln_weight=None, block_weight=None, start=None,
    )  # fmt: skip
    return choose("auto", linear)(linear)[0]


def scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """scale q k^T, -inf where the key is hidden [..., M, 1]."""
    found = (q * scale) @ k.transpose(-1, -2)
    return found if hidden is None else found.masked_fill(hidden.transpose(-1, -2), -torch.inf)


def average(logits: Tensor, v: Tensor, dropout: Dropout | None = None, *place: int) -> Tensor:
    """softmax(logits) v; zeros for a row that is all -inf."""
    return drop(softmax_or_zero(logits), dropout, *place)[0] @ v


def positions(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries [B, N] and keys [B, M] from their sequence's first valid key, and the number of positions
    [B] from there to the last valid key (of the queries, where these are another and longer sequence)."""
    n, m, device = call.query.shape[2], call.key.shape[2], call.key.device
    first = first_valid(call.key, call.key_mask, None).unsqueeze(-1)  # [B, 1]
    key = torch.arange(m, device=device) - first
    query = key if n == m else torch.arange(n, device=device).expand(len(first), n)
    if call.key_mask is None:
        length = torch.full_like(first[:, 0], m)
    else:
        length = (key + 1).masked_fill(~call.key_mask, 0).amax(-1) if m else first[:, 0]
    return query, key, length if n == m else length.clamp_min(n)


def find_valid(call: Call) -> tuple[Tensor, Tensor]:
    """Which queries [B, N] and keys [B, M] are tokens; in self attention both are what key_mask says."""
    batch, n, m, device = call.key.shape[0], call.query.shape[2], call.key.shape[2], call.key.device
    keys = torch.ones(batch, m, dtype=torch.bool, device=device) if call.key_mask is None else call.key_mask
    return keys if n == m else torch.ones(batch, n, dtype=torch.bool, device=device), keys


def iterative_inverse(a: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse of matrices [..., m, m] by a third-order iteration (Razavi et al. 2014): products only.

    Each matrix starts from its own norms, where released codes take the largest of the whole batch."""
    norms = a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1)
    z = a.transpose(-1, -2) / norms.clamp_min(torch.finfo(a.dtype).tiny)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


def align(call: Call, attend: Callable[[Call, Tensor], Tensor]) -> Tensor:
    """attend(call, mask) with every sample moved so that its first valid token is its first row: blocks and windows
    count from there then, and left padding changes nothing. mask [B, N]: its key_mask, all True where there was none.

    For query and key of one sequence."""
    length, device = call.key.shape[2], call.key.device
    if call.key_mask is None:
        mask = torch.ones_like(call.key[:, 0, :, 0], dtype=torch.bool)
        return attend(dataclasses.replace(call, key_mask=mask), mask)
    first = first_valid(call.key, call.key_mask, None).unsqueeze(-1)
    row = torch.arange(length, device=device)
    source, target = row + first, row - first  # [B, N]

    def move(t: Tensor, index: Tensor) -> Tensor:
        return gather_rows(t.unsqueeze(2), index.clamp(0, length - 1)).squeeze(2)

    query, key, value = (move(t, source) for t in (call.query, call.key, call.value))
    mask = call.key_mask.gather(1, source.clamp_max(length - 1)) & (source < length)
    out = attend(dataclasses.replace(call, query=query, key=key, value=value, key_mask=mask), mask)
    return move(out, target).masked_fill((target < 0)[:, None, :, None], 0.0)


def find_lengths(mask: Tensor) -> Tensor:
    """[B]: rows up to the last valid one."""
    row = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (row * mask).amax(-1)


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
