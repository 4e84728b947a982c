"""Random rows and random entries of a map, and the entropy estimated from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lln.instruments.heads import Heads, span_elements, take
from lln.instruments.maps import AttentionMap

PILOT_PAIRS, PILOT_ROWS = 4096, 64  # draws that tell how many draws a width takes
LEAST = 1e-12  # of a uniform number: at 0 it would choose a channel or key of weight 0


class Estimate(NamedTuple):
    """An estimate and the ends of its confidence interval, [batch, heads] each.

    Example:
        >>> from lln.instruments import entropy, lln_map
        >>> q, k = torch.randn(2, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
        >>> found = entropy(lln_map(q, k, 1.0, 1.0), width=0.1)
        >>> bool((found.high - found.low <= 0.1).all())
        True
    """

    value: Tensor
    low: Tensor
    high: Tensor


def draw_uniform(seed: int, *shape: int, like: Tensor) -> Tensor:
    """Numbers in (0, 1), drawn on the CPU so that every device sees the same."""
    numbers = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.clamp_(LEAST, 1 - LEAST).to(like.device, like.dtype)


def live_first(heads: Heads) -> Tensor:
    """Row indices [G, N], those of live rows first and in their order."""
    return torch.argsort((~heads.live).to(torch.uint8), dim=1, stable=True)


def draw_rows(heads: Heads, count: int, seed: int) -> Iterator[Tensor]:
    """Indices [G, R] of `count` random live rows without repetition, in chunks that stream like `Heads.chunks`.

    Where a head has fewer live rows, hidden ones fill up, which count for nothing. All heads draw from one shuffle."""
    count = min(count, heads.rows)
    order = torch.rand(heads.rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(heads.device)
    chosen = (order + (~heads.live).to(order.dtype)).argsort(1)[:, :count].sort(1).values
    step = max(span_elements(heads.device) // max(len(heads) * heads.keys, 1), 16)
    yield from (part for part in chosen.split(step, 1) if part.shape[1])


def estimate_entropy(
    p: AttentionMap, samples: int | None, width: float | None, confidence: float, seed: int
) -> Estimate:
    """See `entropy`. Each group of heads is drawn until the widest of its intervals is narrow enough."""
    deviations = math.sqrt(2) * torch.erfinv(torch.tensor(confidence, dtype=torch.float64)).item()
    found = []
    for group in p.groups():
        draw, pilot = choose_draw(group)
        found.append(draw(samples, seed) if samples else draw_until_narrow(draw, pilot, width or 0.0, deviations, seed))
    value, error = (p.collect([pair[side] for pair in found]) for side in (0, 1))
    return Estimate(value, value - deviations * error, value + deviations * error)


Draw = Callable[[int, int], tuple[Tensor, Tensor]]  # number, seed -> mean and standard error, [G] each


def choose_draw(heads: Heads) -> tuple[Draw, int]:
    """Pairs where P = A B^T is a mixture that can be drawn from, else rows; and a first number of them."""
    factors = heads.factors()
    if factors is not None and all(bool((side >= 0).all()) for side in factors):
        return PairDraw(heads, *factors), PILOT_PAIRS
    return lambda count, seed: row_draw(heads, count, seed), PILOT_ROWS


def draw_until_narrow(draw: Draw, count: int, width: float, deviations: float, seed: int) -> tuple[Tensor, Tensor]:
    """Fresh draws in growing number until every interval is at most `width` wide."""
    while True:
        mean, error = draw(count, seed)
        wide = 2 * deviations * error.nan_to_num(0.0).max().item()
        if wide <= width:
            return mean, error
        count, seed = math.ceil(count * max(1.1 * (wide / width) ** 2, 1.5)), seed + 1


def row_draw(heads: Heads, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Row entropies in bits of `count` rows. Rows are drawn without repetition, so that all of them leave no error."""
    chosen = list(draw_rows(heads, count, seed))
    if not chosen:
        nothing = torch.full((len(heads),), torch.nan, dtype=heads.dtype, device=heads.device)
        return nothing, nothing
    bits = torch.cat([heads.entropies(rows) for rows in chosen], 1)
    valid = torch.cat([take(heads.live, rows) for rows in chosen], 1)
    drawn, all_rows = valid.sum(1), heads.live.sum(1)
    mean = bits.sum(1) / drawn  # hidden rows have 0
    spread = ((bits - mean.unsqueeze(1)) * valid).square().sum(1) / (drawn - 1).clamp_min(1)
    error = (spread / drawn * (1 - drawn / all_rows)).sqrt()
    return mean, torch.where((drawn < 2) & (drawn < all_rows), torch.nan, error)


class PairDraw:
    """-log2 P_ij for i uniform, c ~ A_i, j ~ B_c: unbiased for the mean row entropy, since j is drawn from P_i."""

    def __init__(self, heads: Heads, a: Tensor, b: Tensor) -> None:
        total = b.sum(1, keepdim=True)  # of LLN it is 1; for other features it moves from B to A
        self.a, self.b = a, b
        self.order, self.rows = live_first(heads), heads.live.sum(1)
        self.channels = accumulate(a * total)  # [G, N, F]
        keys = accumulate(b.transpose(1, 2))  # [G, F, M]
        # One rising sequence for all channels, channel c in (c, c + 1], so that one search serves every draw.
        self.width, self.keys = keys.shape[2], (keys + torch.arange(keys.shape[1]).to(b).view(-1, 1)).flatten(1)

    def __call__(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        heads, features = len(self.a), self.a.shape[2]
        if not self.width or not self.a.shape[1]:
            nothing = self.a.new_full((heads,), torch.nan)
            return nothing, nothing
        total = squares = self.a.new_zeros(heads)
        step = max(span_elements(self.a.device) // max(heads * features, 1), 1024)
        for first in range(0, count, step):
            bits = self.bits(draw_uniform(seed * 1_000_003 + first, 3, min(step, count - first), like=self.a))
            total, squares = total + bits.sum(1), squares + bits.square().sum(1)
        mean = total / count
        spread = (squares / count - mean.square()).clamp_min(0.0) * (count / (count - 1))
        return mean, (spread / count).sqrt()

    def bits(self, u: Tensor) -> Tensor:
        """[G, S] from uniform numbers [3, S]."""
        rank = (u[0] * self.rows.unsqueeze(1)).long()  # [G, S]
        row = self.order.gather(1, rank.minimum((self.rows - 1).clamp_min(0).unsqueeze(1)))
        channel = torch.searchsorted(take(self.channels, row), u[1, :, None].expand(*row.shape, 1).contiguous())
        channel = channel.squeeze(-1).clamp_max(self.a.shape[2] - 1)
        key = torch.searchsorted(self.keys, channel + u[2]) - channel * self.width
        key = key.clamp(0, self.width - 1)
        return -(take(self.a, row) * take(self.b, key)).sum(-1).log2()


def accumulate(weights: Tensor) -> Tensor:
    """Distribution functions over the last dimension, ending at exactly 1 (where there is any weight)."""
    sums = weights.cumsum(-1)
    return sums / sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
