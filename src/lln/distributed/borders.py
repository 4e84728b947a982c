"""Where the pieces of sequences lie that ranks hold, and which rows a rank needs of others: whole numbers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank holds of the rows 0 to `total` that all ranks hold one after another."""

    start: int
    stop: int
    total: int
    sequences: tuple[tuple[int, int], ...]  # (first, end) in all rows of the sequences that have rows here
    numbers: tuple[int, ...]  # of them

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def goes_on(self) -> bool:
        """Whether its first sequence began on an earlier rank."""
        return self.length > 0 and self.sequences[0][0] < self.start

    @property
    def stays_open(self) -> bool:
        """Whether its last sequence ends on a later rank."""
        return self.length > 0 and self.sequences[-1][1] > self.stop

    def continues(self, earlier: Piece) -> bool:
        """Whether it begins within the sequence that an earlier rank's piece ends in."""
        return self.goes_on and earlier.stays_open and earlier.numbers[-1] == self.numbers[0]

    def list_offsets(self, before: int = 0, after: int = 0) -> list[int]:
        """Those of its sequences in its own rows, and so many of its neighbours' on both sides."""
        begin, end = self.start - before, self.stop + after
        return [0, *(min(stop, end) - begin for _, stop in self.sequences)] if self.sequences else [0, 0]


def find_pieces(lengths: Sequence[int], offsets: Sequence[int] | None) -> list[Piece]:
    """The piece of every rank. offsets: of packed sequences in all rows; None: there is one, over all ranks."""
    ends = [0, *accumulate(lengths)]
    total = ends[-1]
    spans = [(0, total)] if offsets is None else list(pairwise(offsets))
    pieces = []
    for start, stop in pairwise(ends):
        inside = [at for at, (begin, end) in enumerate(spans) if max(begin, start) < min(end, stop)]
        pieces.append(Piece(start, stop, total, tuple(spans[at] for at in inside), tuple(inside)))
    return pieces


@dataclasses.dataclass(frozen=True)
class Reach:
    """How many rows before and after its own a rank needs."""

    before: int
    after: int


def find_block_reach(piece: Piece, size: int, is_causal: bool, anywhere: bool) -> Reach:
    """For blocks of that size to be whole. anywhere: where they begin is known on the device alone (a mask decides)."""
    if not piece.length:
        return Reach(0, 0)
    before, after = piece.start - piece.sequences[0][0], piece.sequences[-1][1] - piece.stop
    if anywhere:
        before, after = min(max(before, 0), size - 1), min(after, size - 1)
    else:
        last = piece.sequences[-1][0]
        before, after = max(before, 0) % size, min(after, -(piece.stop - last) % size)
    return Reach(before, 0 if is_causal else max(after, 0))


def find_window_reach(piece: Piece, before: int, after: int) -> Reach:
    """So many rows on both sides, as far as sequences go."""
    if not piece.length:
        return Reach(0, 0)
    left = min(max(piece.start - piece.sequences[0][0], 0), before)
    return Reach(left, min(max(piece.sequences[-1][1] - piece.stop, 0), after))


def overlap(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """The rows in both; empty ones begin where they end."""
    begin = max(first[0], second[0])
    return begin, max(begin, min(first[1], second[1]))


def list_wanted(piece: Piece, reach: Reach) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows before and after its own that a rank needs."""
    return (piece.start - reach.before, piece.start), (piece.stop, piece.stop + reach.after)


def list_shares(giver: Piece, taker: Piece, reach: Reach) -> list[slice]:
    """Which of the giver's own rows the taker needs, those before its own and those after; none of them is empty."""
    mine = giver.start, giver.stop
    found = [overlap(mine, wanted) for wanted in list_wanted(taker, reach)]
    return [slice(begin - giver.start, end - giver.start) for begin, end in found if begin < end]


def check_offsets(offsets: list[int] | None, lengths: Sequence[int]) -> list[int] | None:
    if offsets is not None and offsets[-1] != sum(lengths):
        raise ValueError(
            "cu_seqlens must be offsets in all rows of all ranks inside lln.distributed.context_parallel, from 0 to "
            f"{sum(lengths)}; got {offsets}."
        )
    return offsets
