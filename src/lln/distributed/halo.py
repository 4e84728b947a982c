"""Rows of the neighbours, for what looks a few tokens back or ahead: a convolution over the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln.distributed.borders import Reach, check_offsets, find_pieces, find_window_reach, list_shares, overlap
from lln.ranks import Form, Ranks, exchange, tie


class Extended(NamedTuple):
    """Rows of this rank among those of its neighbours."""

    rows: Tensor  # [B, H, before + N + after, D]
    reach: Reach
    cu_seqlens: Tensor | None  # offsets of the packed sequences in them
    token: Tensor  # for `lln.ranks.tie`, which what is made of the rows has to go through

    def take(self, t: Tensor) -> Tensor:
        """The rows of this rank alone."""
        own = self.rows.shape[2] - self.reach.before - self.reach.after
        return t[:, :, self.reach.before : self.reach.before + own]


def fetch_neighbours(ranks: Ranks, t: Tensor, before: int, after: int, cu_seqlens: Tensor | None = None) -> Extended:
    """t [B, H, N, D] with so many rows more on both sides, as far as its sequence goes, and differentiable: gradients
    go back to the ranks that the rows are of. cu_seqlens: offsets of packed sequences in the rows of all ranks, which
    do not reach into one another."""
    lengths = ranks.measure(t.shape[2])
    offsets = None if cu_seqlens is None else check_offsets(cu_seqlens.tolist(), lengths)
    pieces = find_pieces(lengths, offsets)
    mine, rank = pieces[ranks.rank], ranks.rank
    reaches = [find_window_reach(piece, before, after) for piece in pieces]

    def shares(by: int, to: int) -> list[slice]:
        return [] if by == to else list_shares(pieces[by], pieces[to], reaches[to])

    def form(rows: slice) -> Form:
        return (*t.shape[:2], rows.stop - rows.start, t.shape[3]), t.dtype

    parcels = [[t[:, :, rows] for rows in shares(rank, to)] for to in range(ranks.size)]
    expected = [[form(rows) for rows in shares(by, rank)] for by in range(ranks.size)]
    came, token = exchange(ranks, parcels, expected, [t], t.device)
    came[rank] = [t]
    local = None
    if cu_seqlens is not None:
        own = mine.list_offsets(reaches[rank].before, reaches[rank].after)
        local = torch.tensor(own, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return Extended(torch.cat([one for parts in came for one in parts], 2), reaches[rank], local, token)


def fetch_last(ranks: Ranks, t: Tensor, count: int) -> Tensor:
    """[B, H, count or fewer, D]: the last rows of all ranks' t [B, H, N, D], on every rank."""
    pieces = find_pieces(ranks.measure(t.shape[2]), None)
    shares = []
    for piece in pieces:
        begin, end = overlap((piece.start, piece.stop), (max(piece.total - count, 0), piece.total))
        shares.append(slice(begin - piece.start, end - piece.start))
    mine = t[:, :, shares[ranks.rank]]
    others = [other != ranks.rank for other in range(ranks.size)]
    forms: list[list[Form]] = [
        [((*t.shape[:2], share.stop - share.start, t.shape[3]), t.dtype)] if other else []
        for share, other in zip(shares, others, strict=True)
    ]
    came, token = exchange(ranks, [[mine] if other else [] for other in others], forms, [t], t.device)
    came[ranks.rank] = [mine]
    return tie(torch.cat([rows for parts in came for rows in parts], 2), token)
