"""Some heads of an attention map, in float64: its rows, its products with vectors, its diagonal, its factors.

No class here ever holds a rows x keys matrix, except the one that was given it. G heads, N rows, M keys, D channels.

    live     [G, N]  rows that count: valid queries that see a key
    seen     [G, M]  keys that may be attended to
    log_rows         log P of some rows, [G, R, up to M]; keys beyond the width, hidden keys and hidden rows are -inf
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lln.kernels.common import SPAN_ELEMENTS, SPAN_ELEMENTS_ELSEWHERE, make_finite

# Rows are a slice, or an index [G, R] that may differ from head to head.
Rows = slice | Tensor
# Below this, a sum of products in float64 has lost digits to underflow and is computed anew in logarithms.
TINY = 1e-280


def span_elements(device: torch.device) -> int:
    return SPAN_ELEMENTS.get(device.type, SPAN_ELEMENTS_ELSEWHERE)


def cut(rows: int, step: int) -> Iterator[slice]:
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def take(t: Tensor, rows: Rows) -> Tensor:
    """Rows of t [G, N] or [G, N, D]."""
    if isinstance(rows, slice):
        return t[:, rows]
    return t.gather(1, rows) if t.ndim == 2 else t.gather(1, rows.unsqueeze(-1).expand(-1, -1, t.shape[-1]))


class Heads:
    """What all maps share. A subclass gives `log_rows` and whatever it can do better than by streaming rows."""

    index: Tensor  # [G] the places of these heads in their map

    def __init__(self, q: Tensor, k: Tensor, live: Tensor, seen: Tensor, is_causal: bool) -> None:
        """q [G, N, D] and k [G, M, D]: what the rows and the keys of P are made of."""
        self.q, self.k, self.live, self.seen, self.is_causal = q, k, live, seen, is_causal
        self.padded = not bool(live.all() & seen.all())  # else no mask need be applied
        self.rows, self.keys, self.device, self.dtype = live.shape[1], seen.shape[1], live.device, q.dtype

    def log_rows(self, rows: Rows) -> Tensor:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.live)

    def counts(self) -> Tensor:
        """How many keys each row sees, [G, N]."""
        if self.is_causal:
            return self.seen.cumsum(1)
        return self.seen.sum(1, keepdim=True).expand(-1, self.rows)

    def chunks(self, at_least: int = 16) -> Iterator[slice]:
        """Slices of rows, each of about span_elements entries of P."""
        return cut(self.rows, max(span_elements(self.device) // max(len(self) * self.keys, 1), at_least))

    def width(self, rows: Rows) -> int:
        """How many of the first keys these rows may see; the others are not even looked at."""
        if not self.is_causal:
            return self.keys
        return rows.stop if isinstance(rows, slice) else int(rows.max()) + 1 if rows.numel() else 0

    def find_later(self, rows: Rows, width: int) -> Tensor:
        """Which of the first keys lie behind each row, [1 or G, R, width]."""
        at = rows if isinstance(rows, Tensor) else torch.arange(rows.start, rows.stop, device=self.device)[None]
        return torch.arange(width, device=self.device) > at.unsqueeze(-1)

    def make_full(self, value: float, *shape: int) -> Tensor:
        """[G, *shape]"""
        return torch.full((len(self), *shape), value, dtype=self.dtype, device=self.device)

    def entropies(self, rows: Rows) -> Tensor:
        """Of some rows, in bits: [G, R]; 0 for hidden rows."""
        log_p = self.log_rows(rows)
        p = log_p.exp()
        return -p.mul_(log_p.clamp_min_(-1e300)).sum(-1) / math.log(2)  # 0 log 0 = 0

    def product_rows(self, rows: slice) -> Tensor:
        """P of some rows, as products take it."""
        return self.log_rows(rows).exp_()

    def multiply(self, x: Tensor) -> Tensor:
        """P x for x [G, M, V]; zero in hidden rows."""
        parts = []
        for rows in self.chunks():
            p = self.product_rows(rows)
            parts.append(p @ x[:, : p.shape[-1]])
        return torch.cat(parts, 1)

    def multiply_transposed(self, y: Tensor) -> Tensor:
        """P^T y for y [G, N, V]."""
        out = y.new_zeros(len(self), self.keys, y.shape[-1])
        for rows in self.chunks():
            p = self.product_rows(rows)
            out[:, : p.shape[-1]] += p.transpose(1, 2) @ y[:, rows]
        return out

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """(A [G, N, F], B [G, M, F]) with P = A B^T, where P has such a form."""
        return None

    def diagonal(self) -> Tensor:
        """The diagonal of a causal map, which holds its eigenvalues: [G, N]."""
        raise NotImplementedError

    def start(self) -> Tensor | None:
        """[G, N, V]: vectors whose images under P soon hold its leading eigenvectors. None: nothing is known."""
        return None

    def make_dense(self) -> Tensor:
        """P itself, [G, N, M]."""
        out = self.make_full(0.0, self.rows, self.keys)
        for rows in self.chunks():
            p = self.log_rows(rows).exp_()
            out[:, rows, : p.shape[-1]] = p
        return out


class SoftmaxHeads(Heads):
    """P_ij = softmax_j(q_i . k_j), the scale already in q."""

    def scores(self, rows: Rows) -> Tensor:
        width = self.width(rows)
        scores = take(self.q, rows) @ self.k[:, :width].transpose(1, 2)
        if self.padded:
            scores.masked_fill_(~self.seen[:, None, :width], -torch.inf)
        return scores.masked_fill_(self.find_later(rows, width), -torch.inf) if self.is_causal else scores

    def log_rows(self, rows: Rows) -> Tensor:
        scores = self.scores(rows)
        if scores.shape[-1]:
            scores.sub_(make_finite(scores.logsumexp(-1, keepdim=True)))
        return scores.masked_fill_(~take(self.live, rows).unsqueeze(-1), -torch.inf) if self.padded else scores

    @functools.cached_property
    def log_norm(self) -> Tensor:
        """[G, N, 1]; +inf for hidden rows, whose weights it makes 0."""
        parts = [self.scores(rows).logsumexp(-1, keepdim=True) for rows in self.chunks()]
        return torch.cat(parts, 1).masked_fill_(~self.live.unsqueeze(-1), torch.inf)

    def product_rows(self, rows: slice) -> Tensor:
        # Products come in rounds: the normaliser is kept, so that each round takes one exponential and no maximum.
        return self.scores(rows).sub_(self.log_norm[:, rows]).exp_()

    def diagonal(self) -> Tensor:
        scores = (self.q * self.k).sum(-1).masked_fill(~self.seen, -torch.inf)
        return (scores - self.log_norm.squeeze(-1)).exp()

    def start(self) -> Tensor:
        # To first order in the scores an eigenvector is linear in the queries.
        return self.q * self.live.unsqueeze(-1)


class LLNHeads(Heads):
    """P_ij = sum_c exp(a_ic + x_jc) / sum_l sum_c exp(a_ic + x_lc) with a = alpha q and x = beta k: eq. (9)."""

    def __init__(self, a: Tensor, x: Tensor, live: Tensor, seen: Tensor, is_causal: bool) -> None:
        super().__init__(a, x, live, seen, is_causal)
        self.a, self.x = a, x.masked_fill(~seen.unsqueeze(-1), -torch.inf) if self.padded else x

    @functools.cached_property
    def log_sum(self) -> Tensor:
        """L: [G, 1, D], or of each prefix [G, N, D]. Of no key at all it is the lowest finite number."""
        if self.is_causal:
            return make_finite(self.x.logcumsumexp(1))
        if not self.keys:
            return make_finite(self.make_full(-torch.inf, 1, self.x.shape[-1]))
        return make_finite(self.x.logsumexp(1, keepdim=True))

    @functools.cached_property
    def log_norm(self) -> Tensor:
        return (self.a + self.log_sum).logsumexp(-1)

    def log_rows(self, rows: Rows) -> Tensor:
        end = self.width(rows)
        x = self.x[:, :end]
        if not end:
            return self.a.new_empty(*take(self.live, rows).shape, 0)
        # With L of all keys up to the last row as the reference no exponent is positive, whatever comes later.
        reference = self.log_sum[:, end - 1 : end] if self.is_causal else self.log_sum
        a, norm = take(self.a, rows), take(self.log_norm, rows).unsqueeze(-1)
        top = (a + reference).amax(-1, keepdim=True)
        n = (a + reference - top).exp_() @ (x - reference).exp_().transpose(1, 2)
        lost = n < TINY
        log_p = n.log_().add_(top - norm)
        if self.padded or self.is_causal:
            hidden = ~(self.seen[:, None, :end] & take(self.live, rows).unsqueeze(-1))
            if self.is_causal:
                hidden |= self.find_later(rows, end)
            log_p.masked_fill_(hidden, -torch.inf)
            lost &= ~hidden
        # The entries that underflowed take one logsumexp each.
        for head, row, key in zip(*(part.split(2**16) for part in lost.nonzero(as_tuple=True)), strict=True):
            log_p[head, row, key] = (a[head, row] + x[head, key]).logsumexp(-1) - norm[head, row, 0]
        return log_p

    def factors(self) -> tuple[Tensor, Tensor] | None:
        return None if self.is_causal else self.two_softmaxes

    @functools.cached_property
    def two_softmaxes(self) -> tuple[Tensor, Tensor]:
        """A = softmax_c(a + L) and B = softmax_j(x)."""
        a, b = (self.a + self.log_sum).softmax(-1), (self.x - self.log_sum).exp_()
        return (a.mul_(self.live.unsqueeze(-1)) if self.padded else a), b

    def diagonal(self) -> Tensor:
        return ((self.a + self.x).logsumexp(-1) - self.log_norm).exp()


class KernelHeads(Heads):
    """P_ij = f_i . g_j / sum_l f_i . g_l for features f of the queries and g of the keys."""

    def __init__(self, fq: Tensor, fk: Tensor, live: Tensor, seen: Tensor, is_causal: bool) -> None:
        super().__init__(fq, fk * seen.unsqueeze(-1), live, seen, is_causal)
        sums = self.k.cumsum(1) if is_causal else self.k.sum(1, keepdim=True)
        norm = (fq * sums).sum(-1, keepdim=True)
        if not bool((norm.squeeze(-1) > 0)[live].all()):
            raise ValueError(
                "fq and fk must give every row a positive sum of weights fq_i . fk_j; got "
                f"{norm.squeeze(-1)[live].min().item():.3g}. A row whose features are all 0 attends to nothing: "
                "add a small number to the features."
            )
        self.q = torch.where(live.unsqueeze(-1), fq / norm, 0.0)

    def product_rows(self, rows: Rows) -> Tensor:
        width = self.width(rows)
        p = take(self.q, rows) @ self.k[:, :width].transpose(1, 2)
        return p.masked_fill_(self.find_later(rows, width), 0.0) if self.is_causal else p

    def log_rows(self, rows: Rows) -> Tensor:
        p = self.product_rows(rows)
        if bool((p < 0).any()):
            raise ValueError(
                "fq and fk must give no negative weight fq_i . fk_j where logarithms are taken; "
                f"got {p.min().item():.3g}."
            )
        return p.log_()

    def factors(self) -> tuple[Tensor, Tensor] | None:
        return None if self.is_causal else (self.q, self.k)

    def diagonal(self) -> Tensor:
        return (self.q * self.k).sum(-1)


class DenseHeads(Heads):
    """A matrix as it was given, for q; hidden rows and keys are zero in it."""

    def product_rows(self, rows: Rows) -> Tensor:
        return take(self.q, rows)

    def log_rows(self, rows: Rows) -> Tensor:
        return take(self.q, rows).log()

    def diagonal(self) -> Tensor:
        return self.q.diagonal(dim1=1, dim2=2)


class DiagHeads(Heads):
    """LLN+Diag: r P_LLN + p P_blocks, softmax attention inside blocks; r and p [G, 1, 1].

    place [G, N]: of a token; a row attends to the `size` places from its `start` [G, N] on, which are less than `size`
    away from its own."""

    def __init__(
        self, lln: LLNHeads, q: Tensor, k: Tensor, place: Tensor, start: Tensor, size: int, r: Tensor, p: Tensor
    ) -> None:
        super().__init__(q, k, lln.live, lln.seen, lln.is_causal)
        self.lln, self.place, self.start_at, self.size, self.r, self.p = lln, place, start, size, r, p

    def reach(self, rows: Rows) -> slice:
        """Keys among which all are that share a block with one of these rows."""
        if isinstance(rows, slice):
            return slice(max(rows.start - self.size + 1, 0), min(rows.stop + self.size - 1, self.keys))
        return slice(0, self.keys)

    def find_apart(self, rows: Rows, near: slice) -> Tensor:
        """Which of these keys share no block with which of these rows, [G, R, keys]."""
        inside = self.place[:, None, near] - take(self.start_at, rows).unsqueeze(-1)
        return (inside < 0) | (inside >= self.size)

    def block_rows(self, rows: Rows) -> tuple[Tensor, slice]:
        """P_blocks of some rows at the keys that can share a block with one of them, and which keys these are."""
        near = self.reach(rows)
        scores = take(self.q, rows) @ self.k[:, near].transpose(1, 2)
        hidden = self.find_apart(rows, near) | ~self.seen[:, None, near]
        if self.is_causal:
            hidden |= self.find_later(rows, near.stop)[..., near.start :]
        scores.masked_fill_(hidden, -torch.inf)
        weights = scores.sub_(make_finite(scores.amax(-1, keepdim=True))).exp_()
        p = weights / weights.sum(-1, keepdim=True).clamp_min_(1.0)  # the largest weight of a row that has any is 1
        return p.mul_(take(self.live, rows).unsqueeze(-1)), near

    def log_rows(self, rows: Rows) -> Tensor:
        log_p = self.lln.log_rows(rows) + self.r.log()
        p, near = self.block_rows(rows)
        width = min(near.stop, log_p.shape[-1])  # of a causal map the later keys are not there
        inside = slice(near.start, width)
        log_p[..., inside] = torch.logaddexp(log_p[..., inside], (p[..., : width - near.start] * self.p).log_())
        return log_p

    def blocks(self) -> Iterator[tuple[slice, Tensor, slice]]:
        """Rows, P_blocks of them, and at which keys."""
        for rows in cut(self.rows, max(4 * self.size, 64)):
            yield rows, *self.block_rows(rows)

    def multiply(self, x: Tensor) -> Tensor:
        if (factors := self.lln.factors()) is None:
            return super().multiply(x)
        a, b = factors
        out = a @ (b.transpose(1, 2) @ x) * self.r
        for rows, p, near in self.blocks():
            out[:, rows] += p @ x[:, near] * self.p
        return out

    def multiply_transposed(self, y: Tensor) -> Tensor:
        if (factors := self.lln.factors()) is None:
            return super().multiply_transposed(y)
        a, b = factors
        out = b @ (a.transpose(1, 2) @ y) * self.r
        for rows, p, near in self.blocks():
            out[:, near] += p.transpose(1, 2) @ y[:, rows] * self.p
        return out

    def diagonal(self) -> Tensor:
        blocks = [p[:, :, rows.start - near.start :].diagonal(dim1=1, dim2=2) for rows, p, near in self.blocks()]
        return self.lln.diagonal() * self.r.squeeze(-1) + torch.cat(blocks, 1) * self.p.squeeze(-1)

    def start(self) -> Tensor | None:
        # Powers of P applied to A stay in the span of A and of its averages over blocks, which is soon exhausted.
        factors = self.lln.factors()
        return None if factors is None else factors[0]


class TileHeads(DiagHeads):
    """The same with blocks of any tokens: `place` [G, N] is the block of a token, negative where it shares all. Its
    tokens may lie anywhere, so that what streams rows takes time that grows with the square of the length."""

    def reach(self, rows: Rows) -> slice:
        return slice(0, self.keys)

    def find_apart(self, rows: Rows, near: slice) -> Tensor:
        mine, theirs = take(self.place, rows).unsqueeze(-1), self.place[:, None, near]
        return (mine != theirs) & (mine >= 0) & (theirs >= 0)
