"""Reformer: tokens sorted by the bucket that random rotations hash them to; each attends its chunk of that order and
the chunk before. Queries are the keys (shared, normalised); several rounds of hashing are joined by their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import drop, make_finite, softmax_or_zero
from lln.peers.draws import gaussian
from lln.peers.pieces import find_valid, group_heads
from lln.peers.registry import register
from lln.peers.windows import cut_blocks, whole_blocks
from lln.values import check_count, derive_seed, describe

SELF = -1e5  # a token attends to itself only where there is nobody else


@register("reformer")
def reformer(
    call: Call, *, chunk: int = 64, rounds: int = 2, buckets: int | None = None, seed: int = 0,
    rotations: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """chunk: tokens of a chunk. rounds: of hashing. buckets: an even number, default the power of two below 2 length /
    chunk. rotations [heads, dim, rounds, buckets / 2] to hash with, else drawn from the seed. The values of `key` are
    not read."""
    for name, number in (("chunk", chunk), ("rounds", rounds)):
        check_count(name, number)
    q, _, v = group_heads(call)
    mask = find_valid(call)[1]
    heads, dim, length = call.query.shape[1], q.shape[-1], q.shape[-2]
    size = min(chunk, length)
    if buckets is not None and check_count("buckets", buckets) % 2:
        raise ValueError(f"buckets must be even, a direction and its opposite; got {buckets}.")
    if rotations is None:
        half = max(1, (buckets or 2 * max(length // chunk, 1)) // 2)
        # Each direction has a draw of its own, so that fewer are the first of more.
        seeds = [derive_seed(seed, column) for column in range(half)]
        drawn = [gaussian(heads * rounds, dim, one, device=q.device, dtype=q.dtype) for one in seeds]
        rotations = torch.stack(drawn, -1).unflatten(0, (heads, rounds)).transpose(1, 2)
    elif rotations.ndim != 4 or list(rotations.shape[:2]) != [heads, dim]:
        raise ValueError(f"rotations must be [heads, dim, rounds, buckets / 2] = [{heads}, {dim}, ...]; "
                         f"got {describe(rotations)}.")  # fmt: skip
    rotations = rotations.to(q.device, q.dtype).unflatten(0, q.shape[1:3])  # [H, G, D, R, b]
    used = None
    if buckets is None:  # by each sample's own number of tokens
        chunks = (2 * (mask.sum(-1) // chunk)).clamp_min(2)
        used = torch.exp2((chunks.double().log2() + 1e-9).floor() - 1).clamp_max(rotations.shape[-1])
    bucket = hash_buckets(q.detach(), rotations, used)  # [B, H, G, R, N]
    bucket = bucket.masked_fill(~mask[:, None, None, None], 2 * rotations.shape[-1])
    order = bucket.argsort(stable=True, dim=-1)

    def arrange(t: Tensor) -> Tensor:
        """Rows of t [B, H, G, N, D] in the order of each round, as chunks of all rounds [B, H, G, R n, size, D]."""
        t = t.expand(*q.shape[:3], *t.shape[3:]).unsqueeze(3)
        index = order.unsqueeze(-1)
        rows = t.expand(*index.shape[:4], *t.shape[4:]).gather(-2, index.expand(*index.shape[:-1], t.shape[-1]))
        return cut_blocks(rows, size).flatten(3, 4)

    row = torch.arange(length, device=q.device)[:, None].expand(*q.shape[:3], length, 1)
    queries, values = arrange(q), arrange(v)
    place, shown = arrange(row).squeeze(-1), arrange(mask[:, None, None, :, None]).squeeze(-1)
    # Where the last chunk is filled up the place is wrong, but nothing there is shown.
    keys = queries * (queries.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    before = chunk_before(mask, rotations.shape[-2], size)

    def add_before(t: Tensor) -> Tensor:
        return torch.cat([whole_blocks(t, before), t], -2)

    logits = call.scale * queries @ add_before(keys).transpose(-1, -2)
    key_place, key_shown = (add_before(t.unsqueeze(-1)).squeeze(-1) for t in (place, shown))
    logits = logits.masked_fill(place.unsqueeze(-1) == key_place.unsqueeze(-2), SELF)
    logits = logits.masked_fill(~key_shown.unsqueeze(-2), -torch.inf)
    top = make_finite(logits.detach().amax(-1, keepdim=True))
    p = (logits - top).exp()
    total = p.sum(-1, keepdim=True)
    some = total.clamp_min(0.5)  # at least 1 where a key is shown
    out = drop(p / some, call.dropout)[0] @ add_before(values)
    weight = top + some.log()
    weight = weight.masked_fill(total == 0, -torch.inf)

    def put_back(t: Tensor) -> Tensor:
        """Chunks back to rows of each round [B, H, G, R, N, D], where they came from."""
        rows: Tensor = t.unflatten(3, (order.shape[3], -1)).flatten(4, 5)[..., :length, :]
        return rows.gather(-2, order.argsort(-1).unsqueeze(-1).expand(*order.shape, t.shape[-1]))

    share = softmax_or_zero(put_back(weight).transpose(3, -1)).transpose(3, -1)
    return (share * put_back(out)).sum(3).flatten(1, 2)


def hash_buckets(q: Tensor, rotations: Tensor, used: Tensor | None) -> Tensor:
    """The nearest of the directions and their opposites, [B, H, G, R, N]; `used` [B]: how many directions count."""
    rotated = torch.einsum("bhgnd,hgdrc->bhgrnc", q, rotations)
    both = torch.cat([rotated, -rotated], -1)
    if used is not None:
        column = torch.arange(rotated.shape[-1], device=q.device).repeat(2)
        both = both.masked_fill(column >= used[:, None, None, None, None, None], -torch.inf)
    return both.argmax(-1)


def chunk_before(mask: Tensor, rounds: int, size: int) -> Tensor:
    """[B, 1, 1, R n]: the chunk before each; before the first of a round comes the last that has tokens of the round
    before, and before the first round the last."""
    count = -(-mask.shape[-1] // size)
    last = (mask.sum(-1) - 1).clamp_min(0) // size  # [B]
    chunk = torch.arange(count, device=mask.device)
    turn = torch.arange(rounds, device=mask.device)[:, None]
    first = (turn - 1) % rounds * count + last[:, None, None]  # [B, R, 1]
    found = torch.where(chunk == 0, first, turn * count + chunk - 1)
    return found.flatten(1)[:, None, None]
