"""How concentrated a map is: the entropy of its rows, their variance, the moments of log P, its temperature."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from lln.instruments.heads import Heads, Rows, SoftmaxHeads, span_elements, take
from lln.instruments.maps import AttentionMap, LLNMap, SoftmaxMap, check_map, lln_map, softmax_map
from lln.kernels.common import PAPER_A, PAPER_B
from lln.values import check_count, check_number, check_positive, derive_seed

PILOT_PAIRS, PILOT_ROWS = 4096, 64  # draws that tell how many draws a width takes
LEAST = 1e-12  # of a uniform number: at 0 it would choose a channel or key of weight 0


class Estimate(NamedTuple):
    """An estimate and the ends of its confidence interval, [batch, heads] each.

    Example:
        >>> q, k = torch.randn(2, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
        >>> found = entropy(lln_map(q, k, 1.0, 1.0), width=0.1)
        >>> bool((found.high - found.low <= 0.1).all())
        True
    """

    value: Tensor
    low: Tensor
    high: Tensor


@overload
def entropy(p: AttentionMap) -> Tensor: ...
@overload
def entropy(p: AttentionMap, *, samples: int, confidence: float = ..., seed: int = ...) -> Estimate: ...
@overload
def entropy(p: AttentionMap, *, width: float, confidence: float = ..., seed: int = ...) -> Estimate: ...
@torch.no_grad()
def entropy(
    p: AttentionMap,
    *,
    samples: int | None = None,
    width: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Tensor | Estimate:
    """Measure the mean entropy of the rows of P in bits, eq. (7): [batch, heads].

    By default it is exact: a few rows at a time are computed, so that memory grows with the length and time with its
    square. For long inputs it can be estimated without bias instead:

        samples   the number of draws; a draw is a pair (i, j) for LLN and kernel maps, whose cost does not depend on
                  the length, and a whole row for other maps
        width     draw until the confidence interval is at most this wide, in bits

    Returns:
        A tensor; with samples or width an Estimate (value, low, high), where the interval from low to high holds the
        exact entropy with probability `confidence` (normal approximation).

    Raises:
        ValueError: for both samples and width, or for one that is not positive.

    Example: where all of 8 keys weigh alike there are 3 bits.
        >>> even = softmax_map(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4))
        >>> entropy(even).round(decimals=6).tolist(), entropy(even, samples=5).value.round(decimals=6).tolist()
        ([[3.0, 3.0]], [[3.0, 3.0]])
    """
    check_map(p)
    if samples is None and width is None:
        return p.collect([mean_of_rows(heads, map(heads.entropies, heads.chunks())) for heads in p.groups()])
    if samples is not None and width is not None:
        raise ValueError(f"give samples or width, and not both; got samples={samples} and width={width}.")
    if samples is not None:
        check_count("samples", samples, 2)
    else:
        check_positive("width", width, ", in bits")
    if not 0 < check_number("confidence", confidence) < 1:
        raise ValueError(f"confidence must lie between 0 and 1; got {confidence}.")
    deviations = math.sqrt(2) * torch.erfinv(torch.tensor(confidence, dtype=torch.float64)).item()
    found = []
    for group in p.groups():
        # Pairs where P = A B^T is a mixture that can be drawn from, else rows; and a first number of them.
        draw: Callable[[int, int], Tensor] = functools.partial(draw_row_entropies, group)
        count, factors, now = PILOT_ROWS, group.factors(), seed
        if factors is not None and all(bool((side >= 0).all()) for side in factors):
            draw, count = PairDraw(group, *factors), PILOT_PAIRS
        drawn = draw(samples or count, now)
        # Fresh draws in growing number until the widest interval of the group is narrow enough.
        while width and (wide := 2 * deviations * drawn[:, 1].nan_to_num(0.0).max().item()) > width:
            count, now = math.ceil(count * max(1.1 * (wide / width) ** 2, 1.5)), now + 1
            drawn = draw(count, now)
        found.append(drawn)
    value, error = p.collect(found).unbind(-1)
    return Estimate(value, value - deviations * error, value + deviations * error)


def draw_rows(heads: Heads, count: int, seed: int) -> Iterator[Tensor]:
    """Indices [G, R] of `count` random live rows without repetition, in chunks that stream like `Heads.chunks`.

    Where a head has fewer live rows, hidden ones fill up, which count for nothing. All heads draw from one shuffle."""
    count = min(count, heads.rows)
    order = torch.rand(heads.rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(heads.device)
    chosen = (order + (~heads.live).to(order.dtype)).argsort(1)[:, :count].sort(1).values
    step = max(span_elements(heads.device) // max(len(heads) * heads.keys, 1), 16)
    yield from (part for part in chosen.split(step, 1) if part.shape[1])


def draw_row_entropies(heads: Heads, count: int, seed: int) -> Tensor:
    """The mean of the entropies in bits of `count` rows and its standard error, [G, 2]. Rows are drawn without
    repetition, so that all of them leave no error."""
    chosen = list(draw_rows(heads, count, seed))
    if not chosen:
        return heads.make_full(torch.nan, 2)
    bits = torch.cat([heads.entropies(rows) for rows in chosen], 1)
    valid = torch.cat([take(heads.live, rows) for rows in chosen], 1)
    drawn, all_rows = valid.sum(1), heads.live.sum(1)
    mean = bits.sum(1) / drawn  # hidden rows have 0
    spread = ((bits - mean.unsqueeze(1)) * valid).square().sum(1) / (drawn - 1).clamp_min(1)
    error = (spread / drawn * (1 - drawn / all_rows)).sqrt()
    return torch.stack([mean, torch.where((drawn < 2) & (drawn < all_rows), torch.nan, error)], 1)


class PairDraw:
    """-log2 P_ij for i uniform, c ~ A_i, j ~ B_c: unbiased for the mean row entropy, since j is drawn from P_i. Called
    with a number and a seed it gives the mean of so many and its standard error, [G, 2]."""

    def __init__(self, heads: Heads, a: Tensor, b: Tensor) -> None:
        total = b.sum(1, keepdim=True)  # of LLN it is 1; for other features it moves from B to A
        self.a, self.b = a, b
        self.rows = heads.live.sum(1)
        self.order = heads.live.to(torch.uint8).argsort(dim=1, descending=True, stable=True)  # [G, N] live rows first
        self.channels = accumulate(a * total)  # [G, N, F]
        keys = accumulate(b.transpose(1, 2))  # [G, F, M]
        # One rising sequence for all channels, channel c in (c, c + 1], so that one search serves every draw.
        self.width, self.keys = keys.shape[2], (keys + torch.arange(keys.shape[1]).to(b).view(-1, 1)).flatten(1)

    def __call__(self, count: int, seed: int) -> Tensor:
        heads, features = len(self.a), self.a.shape[2]
        if not self.width or not self.a.shape[1]:
            return self.a.new_full((heads, 2), torch.nan)
        total = squares = self.a.new_zeros(heads)
        step = max(span_elements(self.a.device) // max(heads * features, 1), 1024)
        for first in range(0, count, step):
            # On the CPU, so that every device sees the same numbers in (0, 1).
            generator = torch.Generator().manual_seed(derive_seed(seed, first))
            u = torch.rand(3, min(step, count - first), generator=generator, dtype=torch.float64)
            bits = self.bits(u.clamp_(LEAST, 1 - LEAST).to(self.a))
            total, squares = total + bits.sum(1), squares + bits.square().sum(1)
        mean = total / count
        spread = (squares / count - mean.square()).clamp_min(0.0) * (count / (count - 1))
        return torch.stack([mean, (spread / count).sqrt()], 1)

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


def mean_of_rows(heads: Heads, parts: Iterable[Tensor]) -> Tensor:
    """[G, R] of all chunks -> [G] over live rows."""
    return torch.where(heads.live, torch.cat([heads.make_full(0.0, 0), *parts], 1), 0.0).sum(1) / heads.live.sum(1)


@torch.no_grad()
def variance(p: AttentionMap) -> Tensor:
    """Measure the variance of the entries of a row of P, averaged over rows: [batch, heads], eq. (21).

    A row counts the keys that it may see. For LLN and kernel maps this is exact, in time linear in the length.

    Example:
        >>> from lln.instruments import dense_map
        >>> variance(dense_map(torch.eye(4)))  # a row: one 1 and three 0, around 1/4
        tensor([[0.1875]], dtype=torch.float64)
    """
    check_map(p)
    return p.collect([mean_of_rows(group, row_variances(group)) for group in p.groups()])


def row_variances(heads: Heads) -> list[Tensor]:
    """[G, R] of each chunk."""
    counts = heads.counts().clamp_min(1).to(heads.dtype)
    factors = heads.factors()
    if factors is not None:
        a, b = factors
        # P_ij minus the mean of its row is A_i . (B_j - mean of B), with no difference of two large sums.
        centred = (b - b.sum(1, keepdim=True) / counts[:, :1, None]) * heads.seen.unsqueeze(-1)
        gram = centred.transpose(1, 2) @ centred
        return [((a @ gram) * a).sum(-1) / counts]
    rows = []
    for part in heads.chunks():
        log_p = heads.log_rows(part)
        visible = heads.seen[:, None, : log_p.shape[-1]]
        if heads.is_causal:
            visible = visible & ~heads.find_later(part, log_p.shape[-1])
        weights, count = log_p.exp_(), counts[:, part].unsqueeze(-1)
        apart = (weights - weights.sum(-1, keepdim=True) / count).mul_(visible)
        rows.append(apart.square_().sum(-1) / count.squeeze(-1))
    return rows


class LogMoments(NamedTuple):
    """Moments of log P (natural logarithm) over all entries of the rows that count, each [batch, heads].

    Example: what the paper predicts for softmax.
        >>> q, k = torch.randn(2, 1, 1, 64, 32, generator=torch.Generator().manual_seed(0))
        >>> found = log_moments(softmax_map(q, k))
        >>> torch.allclose(found.variance, found.predicted_variance, rtol=0.1)
        True
    """

    mean: Tensor
    variance: Tensor  # over all entries
    within: Tensor  # the mean over rows of the variance within a row
    predicted_mean: Tensor | None  # Prop. 3.1: -ln(keys) - var(scores) / 2; None where the paper predicts nothing
    predicted_variance: Tensor | None  # Prop. 3.1: var(scores); Prop. 4.1: a s2 + b with the authors' constants


@torch.no_grad()
def log_moments(p: AttentionMap, *, rows: int | None = None, seed: int = 0) -> LogMoments:
    """Measure the mean and variance of log P, beside the paper's predictions for softmax (Prop. 3.1) and LLN (Prop.
    4.1).

    Entries that are exactly 0 have no logarithm and are left out. Variances are unbiased (n - 1).

    Args:
        rows: measure a random sample of this many rows. Default: all rows, in time that grows with the square of the
            length.
        seed: seed of the sample.

    Example:
        >>> found = log_moments(softmax_map(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)))
        >>> found.mean.exp(), found.variance
        (tensor([[0.1250]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))
    """
    check_map(p)
    if rows is not None:
        check_count("rows", rows)
    found = []
    for group in p.groups():
        parts = group.chunks() if rows is None else draw_rows(group, rows, seed)
        sums = (log_sums(group, part) for part in parts)
        found.append(functools.reduce(merge, sums, next(sums, group.make_full(0.0, 6))))
    count, mean, squares, row_count, row_variance, log_count = p.collect(found).unbind(-1)
    predicted_mean = predicted_variance = None
    if isinstance(p, SoftmaxMap):
        predicted_variance = score_variance(p)
        # The mean over entries of ln(keys that the row sees), and half the variance of the scores.
        predicted_mean = -log_count / count.clamp_min(1) - predicted_variance / 2
    elif isinstance(p, LLNMap) and p.block_size is None:
        # s2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2, the variance of alpha q plus that of beta k.
        spreads = [element_variance(g.q, g.live) + element_variance(g.k, g.seen) for g in p.groups()]
        predicted_variance = PAPER_A * p.collect(spreads) + PAPER_B
    mean = torch.where(count > 0, mean, torch.nan)
    return LogMoments(mean, squares / (count - 1), row_variance / row_count, predicted_mean, predicted_variance)


def log_sums(heads: Heads, rows: Rows) -> Tensor:
    """(entries, their mean, their squares around it, rows of two entries or more, the sum of their variances,
    the sum over entries of log(keys that the row sees)), [G, 6]."""
    log_p = heads.log_rows(rows)
    there = log_p > -torch.inf
    log_p.masked_fill_(~there, 0.0)
    in_row = there.sum(-1).to(log_p.dtype)
    row_mean = log_p.sum(-1) / in_row.clamp_min(1)
    row_squares = (log_p - row_mean.unsqueeze(-1)).mul_(there).square_().sum(-1)
    count = in_row.sum(1)
    mean = (in_row * row_mean).sum(1) / count.clamp_min(1)
    squares = row_squares.sum(1) + (in_row * (row_mean - mean.unsqueeze(1)).square()).sum(1)
    several = in_row > 1
    row_variance = torch.where(several, row_squares / (in_row - 1), 0.0)
    log_count = in_row * take(heads.counts(), rows).clamp_min(1).to(in_row.dtype).log()
    return torch.stack([count, mean, squares, several.sum(1), row_variance.sum(1), log_count.sum(1)], 1)


def merge(one: Tensor, other: Tensor) -> Tensor:
    """The sums of two sets of entries; the spread between their means goes into the squares."""
    both = one + other
    apart = other[:, 1] - one[:, 1]
    share = other[:, 0] / both[:, 0].clamp_min(1)
    both[:, 1] = one[:, 1] + share * apart
    both[:, 2] += one[:, 0] * share * apart.square()
    return both


def score_variance(p: AttentionMap) -> Tensor:
    """Of the scores a_ij = scale q_i . k_j over all pairs of a row that counts and a key it sees, [batch, heads],
    without forming the pairs. Bidirectional: E a^2 = tr(M_q M_k) with the second moments M of q and k, E a = qbar .
    kbar. Causal: over prefixes, by streaming."""
    return p.collect([(causal_variance if p.is_causal else pair_variance)(group) for group in p.groups()])


def pair_variance(heads: Heads) -> Tensor:
    q, k = heads.q, heads.k  # scaled; zero where hidden
    rows, keys = (mask.sum(1).to(q.dtype)[:, None, None] for mask in (heads.live, heads.seen))
    q_mean, k_mean = q.sum(1, keepdim=True) / rows, k.sum(1, keepdim=True) / keys
    # var = tr(M_q M_k) - (qbar . kbar)^2, written in covariances so that large means do not cancel:
    # tr(C_q C_k) + qbar' C_k qbar + kbar' C_q kbar.
    q_apart, k_apart = (q - q_mean) * heads.live.unsqueeze(-1), (k - k_mean) * heads.seen.unsqueeze(-1)
    c_q, c_k = q_apart.transpose(1, 2) @ q_apart / rows, k_apart.transpose(1, 2) @ k_apart / keys
    return (c_q * c_k).sum((1, 2)) + ((q_mean @ c_k) * q_mean).sum((1, 2)) + ((k_mean @ c_q) * k_mean).sum((1, 2))


def causal_variance(heads: Heads) -> Tensor:
    assert isinstance(heads, SoftmaxHeads)
    count = total = squares = heads.make_full(0.0)
    centre = None
    for rows in heads.chunks():
        scores = heads.scores(rows)
        there = (scores > -torch.inf) & heads.live[:, rows].unsqueeze(-1)
        scores.masked_fill_(~there, 0.0)
        found = there.sum((1, 2)).to(scores.dtype)
        if centre is None:  # near the mean, so that squares around it keep their digits
            centre = scores.sum((1, 2)) / found.clamp_min(1)
        apart = (scores - centre[:, None, None]).mul_(there)
        count, total, squares = count + found, total + apart.sum((1, 2)), squares + apart.square_().sum((1, 2))
    return squares / count - (total / count).square()


def element_variance(t: Tensor, valid: Tensor) -> Tensor:
    """The unbiased variance of all elements of the valid tokens of t [G, N, D], zero elsewhere: [G]."""
    count = (valid.sum(1) * t.shape[-1]).to(t.dtype)
    mean = t.sum((1, 2)) / count
    apart = (t - mean[:, None, None]) * valid.unsqueeze(-1)
    return apart.square_().sum((1, 2)) / (count - 1)


@overload
def temperature(q: AttentionMap, /, *, rows: int | None = ..., seed: int = ...) -> Tensor: ...
@overload
def temperature(
    q: Tensor, k: Tensor, alpha: float | Tensor | None = ..., beta: float | Tensor | None = ..., *,
    rows: int | None = ..., seed: int = ..., **options: Any,
) -> Tensor: ...  # fmt: skip
@torch.no_grad()
def temperature(
    q: Tensor | AttentionMap,
    k: Tensor | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    *,
    rows: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """Measure how widely attention spreads, [batch, heads]: high if all keys weigh alike, low if few keys take all.

        temperature(q, k)                of softmax attention, eq. (5): 1 / sqrt(var(a_ij)), a_ij = scale q_i . k_j,
                                         exactly and in time linear in the length (streamed when causal)
        temperature(q, k, alpha, beta)   of LLN attention: 1 / sqrt(var(log P_ij)), as measured. Eq. (11) puts the line
                                         a s2 + b for the variance, which is negative for s2 < 2.389
        temperature(p)                   of a map: eq. (5) for softmax, the measured variance of log P for others

    Args:
        rows, seed: measure log P on a random sample of this many rows, see log_moments.
        options: options of softmax_map or lln_map: key_mask, query_mask, is_causal, scale, block_size, mix.

    Raises:
        ValueError or TypeError: the message names the argument.

    Example: larger queries make scores that lie further apart, so that attention is colder.
        >>> q, k = torch.randn(2, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(temperature(2 * q, k), temperature(q, k) / 2)
        True
    """
    if isinstance(q, AttentionMap):
        if k is not None or alpha is not None or beta is not None or options:
            raise TypeError("temperature of a map takes no k, alpha, beta or options: they are in the map already.")
        p = q
    elif k is None:
        raise TypeError("temperature takes a map, or q and k; got q alone.")
    elif (alpha is None) != (beta is None):
        raise TypeError(f"alpha and beta go together; got alpha={alpha} and beta={beta}.")
    else:
        p = softmax_map(q, k, **options) if alpha is None or beta is None else lln_map(q, k, alpha, beta, **options)
    if isinstance(p, SoftmaxMap):
        return score_variance(p).rsqrt()
    return log_moments(p, rows=rows, seed=seed).variance.rsqrt()
