"""Heads of LLN+Diag: a product of two thin matrices plus blocks along the diagonal."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lln.instruments.heads import Heads, LLNHeads, Rows, take
from lln.kernels.common import finite


class DiagHeads(Heads):
    """LLN+Diag: r P_LLN + p P_blocks, softmax attention inside blocks; r and p [G, 1, 1].

    place [G, N]: of a token; a row attends to the `size` places from its `start` [G, N] on, which are less than `size`
    away from its own."""

    def __init__(
        self, lln: LLNHeads, q: Tensor, k: Tensor, place: Tensor, start: Tensor, size: int, r: Tensor, p: Tensor
    ) -> None:
        super().__init__(lln.live, lln.seen, lln.is_causal)
        self.lln, self.q, self.k, self.place, self.start_at, self.size = lln, q, k, place, start, size
        self.r, self.p, self.dtype = r, p, q.dtype

    def block_rows(self, rows: Rows) -> tuple[Tensor, slice]:
        """P_blocks of some rows at the keys that can share a block with one of them, and which keys these are."""
        near = slice(0, self.keys)
        if isinstance(rows, slice):
            near = slice(max(rows.start - self.size + 1, 0), min(rows.stop + self.size - 1, self.keys))
        scores = take(self.q, rows) @ self.k[:, near].transpose(1, 2)
        inside = self.place[:, None, near] - take(self.start_at, rows).unsqueeze(-1)
        hidden = (inside < 0) | (inside >= self.size) | ~self.seen[:, None, near]
        if self.is_causal:
            hidden |= self.later(rows, near.stop)[..., near.start :]
        scores.masked_fill_(hidden, -torch.inf)
        weights = scores.sub_(finite(scores.amax(-1, keepdim=True))).exp_()
        p = weights / weights.sum(-1, keepdim=True).clamp_min_(1.0)  # the largest weight of a row that has any is 1
        return p.mul_(take(self.live, rows).unsqueeze(-1)), near

    def log_rows(self, rows: Rows) -> Tensor:
        log_p = self.lln.log_rows(rows) + self.r.log()
        p, near = self.block_rows(rows)
        width = min(near.stop, log_p.shape[-1])  # of a causal map the later keys are not there
        inside = slice(near.start, width)
        both = torch.logaddexp(log_p[..., inside], (p[..., : width - near.start] * self.p).log_())
        log_p[..., inside] = both
        return log_p

    def block_chunks(self) -> Iterator[slice]:
        step = max(4 * self.size, 64)
        for first in range(0, self.rows, step):
            yield slice(first, min(first + step, self.rows))

    def product(self, x: Tensor) -> Tensor:
        factors = self.lln.factors()
        if factors is None:
            return super().product(x)
        a, b = factors
        out = a @ (b.transpose(1, 2) @ x) * self.r
        for rows in self.block_chunks():
            p, near = self.block_rows(rows)
            out[:, rows] += p @ x[:, near] * self.p
        return out

    def transposed(self, y: Tensor) -> Tensor:
        factors = self.lln.factors()
        if factors is None:
            return super().transposed(y)
        a, b = factors
        out = b @ (a.transpose(1, 2) @ y) * self.r
        for rows in self.block_chunks():
            p, near = self.block_rows(rows)
            out[:, near] += p.transpose(1, 2) @ y[:, rows] * self.p
        return out

    def diagonal(self) -> Tensor:
        blocks = []
        for rows in self.block_chunks():
            p, near = self.block_rows(rows)
            blocks.append(p[:, :, rows.start - near.start :].diagonal(dim1=1, dim2=2))
        return self.lln.diagonal() * self.r.squeeze(-1) + torch.cat(blocks, 1) * self.p.squeeze(-1)

    def start(self) -> Tensor | None:
        # Powers of P applied to A stay in the span of A and of its averages over blocks, which is soon exhausted.
        factors = self.lln.factors()
        return None if factors is None else factors[0]
