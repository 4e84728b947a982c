"""How Gaussian the numbers are, log P and the elements of q and k, in distances that do not depend on how many."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lln.instruments.concentration import draw_rows
from lln.instruments.heads import Heads, span_elements
from lln.instruments.maps import AttentionMap, check_map, check_parts
from lln.kernels.common import wide_dtype
from lln.values import check_count

ROWS = 2048  # that a sample of entries is spread over
INDEPENDENT = 512  # entries, one a row and column, that a p-value is made from
NULL_DRAWS = 999


class LognormalFit(NamedTuple):
    """How far log P is from Gaussian, [batch, heads] each.

    >>> LognormalFit._fields
    ('distance', 'qq_r2', 'skewness', 'p_value')
    """

    distance: Tensor  # Kolmogorov-Smirnov, from the Gaussian with the mean and variance of log P
    qq_r2: Tensor  # squared correlation of the Q-Q plot
    skewness: Tensor
    p_value: Tensor  # of the distance (Lilliefors), on entries no two of which share a row or column


class GaussianFit(NamedTuple):
    """How far the elements of a head are from one Gaussian, [batch, heads] each.

    >>> GaussianFit._fields
    ('mean', 'std', 'distance', 'anderson_darling', 'qq_r2', 'skewness')
    """

    mean: Tensor
    std: Tensor
    distance: Tensor  # Kolmogorov-Smirnov
    anderson_darling: Tensor  # the statistic A^2, which weighs the tails; grows with the number of elements
    qq_r2: Tensor
    skewness: Tensor


class QueryKeyFit(NamedTuple):
    """The result of `gaussian_fit`: one `GaussianFit` for the queries, and one for the keys.

    >>> found = gaussian_fit(torch.randn(2, 4, 16, 8), torch.randn(2, 1, 16, 8))
    >>> found.query.std.shape, found.key.std.shape
    (torch.Size([2, 4]), torch.Size([2, 1]))
    """

    query: GaussianFit  # [batch, heads]
    key: GaussianFit  # [batch, key heads]


def normal_fit(values: Tensor, valid: Tensor) -> GaussianFit:
    """Of numbers [G, S], of which `valid` count, against the Gaussian with their own mean and standard deviation: [G]
    each. NaN for fewer than two numbers and for numbers without spread."""
    count = valid.sum(1, keepdim=True).to(values.dtype)
    values = values.masked_fill(~valid, 0.0)
    mean = values.sum(1, keepdim=True) / count
    apart = (values - mean).masked_fill_(~valid, 0.0)
    second = apart.square().sum(1, keepdim=True)
    std = (second / (count - 1)).sqrt()
    std = std.masked_fill(std <= 1e-12 * mean.abs(), torch.nan)
    skewness = (apart.pow(3).sum(1, keepdim=True) / count) / (second / count).pow(1.5)
    # What does not count goes to the end of the order and is left out of every sum.
    z = (apart / std).masked_fill_(~valid, torch.inf).sort(1).values
    rank = torch.arange(z.shape[1], device=z.device, dtype=z.dtype)
    there = rank < count
    z = z.masked_fill_(~there, 0.0)
    below, above = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
    cdf = below.exp()
    steps = torch.maximum(cdf - rank / count, (rank + 1) / count - cdf).masked_fill_(~there, -torch.inf)
    weighted = ((2 * rank + 1) * below + (2 * (count - rank) - 1) * above).masked_fill_(~there, 0.0)
    anderson_darling = -count - weighted.sum(1, keepdim=True) / count
    expected = torch.special.ndtri(((rank + 0.625) / (count + 0.25)).clamp_(0.0, 1.0)).masked_fill_(~there, 0.0)
    together, alone = (expected * z).sum(1), expected.square().sum(1) * z.square().sum(1)  # both have mean 0
    distance = steps.amax(1) if z.shape[1] else count.squeeze(1)
    broken = std.squeeze(1).isnan() | (count.squeeze(1) < 2)

    found = (std, distance, anderson_darling, together.square() / alone, skewness)
    return GaussianFit(mean.squeeze(1), *(t.reshape(len(values)).masked_fill(broken, torch.nan) for t in found))


@torch.no_grad()
def lognormal_fit(p: AttentionMap, *, entries: int = 2**20, seed: int = 0) -> LognormalFit:
    """Measure how close P is to log-normal (Prop. 3.1 and 4.1): [batch, heads] each.

    Entries of P share rows and columns, so a test of all N^2 of them would not be valid. distance, qq_r2 and skewness
    are effect sizes. Only the p-value is a test, on at most 512 entries of different rows and columns, against 999
    Gaussian samples of the same size. Entries that are exactly 0 are left out.

    Args:
        entries: the effect sizes use all entries of a head. If it has more than this number, they use a random sample
            of about this size, spread over 2,048 rows.
        seed: seed of the samples.

    Example: softmax of Gaussian scores is log-normal.
        >>> from lln.instruments import softmax_map
        >>> q, k = torch.randn(2, 1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
        >>> fit = lognormal_fit(softmax_map(q, k))
        >>> fit.distance.item() < 0.05, fit.qq_r2.item() > 0.99
        (True, True)
    """
    check_map(p)
    check_count("entries", entries, 2)
    found = []
    for group in p.groups():
        fit = normal_fit(*pick_entries(group, entries, seed))
        found.append(torch.stack([fit.distance, fit.qq_r2, fit.skewness, p_values(group, seed)], 1))
    return LognormalFit(*p.collect(found).unbind(-1))


def pick_entries(heads: Heads, entries: int, seed: int) -> tuple[Tensor, Tensor]:
    """(log P [G, S], which of them are entries)"""
    if heads.rows * heads.keys <= entries:
        return join_visible([heads.log_rows(rows).flatten(1) for rows in heads.chunks()], heads)
    rows = min(heads.rows, ROWS)
    columns = max(min(entries // rows, heads.keys), 1)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for chosen in draw_rows(heads, rows, seed):
        log_p = heads.log_rows(chosen)
        # New columns for every chunk, so that no key counts more than others.
        keys = torch.randperm(heads.keys, generator=generator)[:columns].to(heads.device)
        parts.append(log_p[..., keys[keys < log_p.shape[-1]]].flatten(1))
    return join_visible(parts, heads)


def join_visible(parts: list[Tensor], heads: Heads) -> tuple[Tensor, Tensor]:
    """(the values of all parts, which of them belong to keys that are seen), [G, count]."""
    values = torch.cat([heads.make_full(0.0, 0), *parts], 1)
    return values, values > -torch.inf


def p_values(heads: Heads, seed: int) -> Tensor:
    count = min(heads.rows, heads.keys, INDEPENDENT)
    columns = torch.randperm(heads.keys, generator=torch.Generator().manual_seed(seed + 1))[:count].to(heads.device)
    parts, first = [], 0
    for chosen in draw_rows(heads, count, seed):
        log_p = heads.log_rows(chosen)
        mine = columns[first : first + chosen.shape[1]]
        first += chosen.shape[1]
        inside = mine.clamp_max(log_p.shape[-1] - 1)  # of a causal map later keys are not there
        entry = log_p.gather(2, inside.expand(len(heads), -1).unsqueeze(-1)).squeeze(-1)
        parts.append(entry.masked_fill_(mine >= log_p.shape[-1], -torch.inf))
    values, there = join_visible(parts, heads)
    distance = normal_fit(values, there).distance
    numbers, distances = there.sum(1).tolist(), distance.tolist()
    found = [
        math.nan if math.isnan(d) else float(((null_distances(n) >= d).sum() + 1) / (NULL_DRAWS + 1))
        for n, d in zip(numbers, distances, strict=True)
    ]
    return torch.tensor(found, dtype=heads.dtype, device=heads.device)


@functools.lru_cache(maxsize=64)
def null_distances(count: int) -> Tensor:
    """The distances of Gaussian samples of so many numbers, mean and variance estimated as for the real ones: the usual
    Kolmogorov-Smirnov p-value would take both for known and hardly ever reject."""
    draws = torch.randn(NULL_DRAWS, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return normal_fit(draws, torch.ones_like(draws, dtype=torch.bool)).distance


@torch.no_grad()
def gaussian_fit(
    q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None
) -> QueryKeyFit:
    """Measure how well the paper's assumption holds that all elements of a head's queries, and all of its keys, come
    from one Gaussian of mean 0.

    It gives effect sizes for every head of q [batch, heads, length, dim] and k [batch, key heads, key length, dim].
    Padding does not count: key_mask [batch, key length] and query_mask [batch, length] are True for tokens. query_mask
    defaults to key_mask if the lengths are equal.

    Raises:
        ValueError or TypeError: the message names the argument.

    Example:
        >>> q = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        >>> found = gaussian_fit(q, q.exp())
        >>> found.query.distance.max().item() < 0.05, found.key.distance.min().item() > 0.05
        (True, True)
    """
    check_parts(q, k, ("q", "k"), key_mask, query_mask, False)
    if query_mask is None and q.shape[2] == k.shape[2]:
        query_mask = key_mask
    return QueryKeyFit(element_fit(q.detach(), query_mask), element_fit(k.detach(), key_mask))


def element_fit(t: Tensor, mask: Tensor | None) -> GaussianFit:
    shown = torch.ones_like(t[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
    together = max(span_elements(t.device) // max(t.shape[2] * t.shape[3], 1), 1)  # heads
    parts = [
        torch.stack(normal_fit(some.to(wide_dtype(t.device)).flatten(1), valid.repeat_interleave(t.shape[3], 1)), 1)
        for some, valid in zip(
            t.flatten(0, 1).split(together), shown.repeat_interleave(t.shape[1], 0).split(together), strict=True
        )
    ]
    return GaussianFit(*torch.cat(parts).unflatten(0, t.shape[:2]).unbind(-1))
