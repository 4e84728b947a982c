"""Attention over the pieces of all ranks: each folds its own keys, hears the others' states, and answers its queries.

    bidirectional   every rank reads the state of all ranks
    causal          every rank goes on from the state of the ranks before it
    LLN+Diag        blocks that a border cuts get their other rows from the neighbours

All of it goes in one collective, forward, and its gradients in one, backward: D (E + 1) numbers a head for each other
rank, and fewer than 2 (block_size - 1) rows of keys and values, whatever the length.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lln.checks import BACKENDS, Coefficient, Inputs, check_call
from lln.distributed.borders import Piece, Reach, check_offsets, find_block_reach, find_pieces, list_shares, overlap
from lln.distributed.fused import attend_fused, can_fuse
from lln.distributed.near import attend_near
from lln.distributed.states import Fields, join, list_fields, make_empty, make_state, merge, take
from lln.functional import attend_here
from lln.kernels.call import Call
from lln.kernels.carry import first_valid
from lln.kernels.common import compute_dtype
from lln.ranks import Form, Ranks, send, tie
from lln.state import LLNState
from lln.values import check_choice, derive_seed

STATE, FIRST, ROWS, TAIL = "state", "first valid row", "rows", "last rows"


@dataclasses.dataclass(frozen=True)
class Item:
    """What one rank gives another: which sequences of its states, or which of its rows."""

    kind: str
    part: slice


def attend(
    ranks: Ranks, inputs: Inputs, alpha: Coefficient | None, beta: Coefficient | None, *,
    state: LLNState | None = None, return_state: bool = False, backend: Any = "auto", **options: Any,
) -> Tensor | tuple[Tensor, LLNState]:  # fmt: skip
    """`lln.functional.attend_here` of queries, keys and values that lie on all ranks; the arguments are those of this
    rank's rows, but for cu_seqlens, which are offsets in all rows."""
    refuse(inputs, state, return_state, options)
    call = check_call(inputs, alpha=alpha, beta=beta, return_state=return_state, **options)
    check_choice("backend", backend, *BACKENDS)
    with draw_apart(ranks, call.dropout_p):
        shared = Shared(ranks, call, backend, return_state, find_ratio(options))
        if shared.is_fused and (whole := attend_fused(ranks, call)) is not None:
            return whole
        out, after = shared.attend()
    if after is None:
        return out
    # A copy: a learnable beta changes in place with the next optimiser step.
    used = call.beta.detach().clone() if isinstance(beta, Tensor) else float(beta)  # type: ignore[arg-type]
    return out, dataclasses.replace(after, beta=used)


def refuse(inputs: Inputs, state: LLNState | None, return_state: bool, options: dict[str, Any]) -> None:
    """What cannot be spread, each in one sentence."""
    from torch.distributed.tensor import DTensor  # on demand: it imports sympy

    for name, t in zip(("query", "key", "value"), inputs[:3], strict=True):
        if isinstance(t, DTensor):
            raise TypeError(
                f"{name} is a DTensor; context_parallel takes this rank's own rows, {name}.to_local() of one that is "
                "sharded along the length."
            )
    if state is not None:
        raise ValueError(
            "state: inside lln.distributed.context_parallel a sequence begins with the first rank's rows, so nothing "
            "can come before them; attend with a state outside of it, on one rank."
        )
    if options.get("mix") == "evidence":
        raise ValueError(
            "mix='evidence' is not supported inside lln.distributed.context_parallel, because each block needs the "
            "keys outside it; use a number for mix."
        )
    if inputs.cu_query is not None and (inputs.cross or return_state):
        what = "a pair of cu_seqlens" if inputs.cross else "return_state with cu_seqlens"
        raise ValueError(
            f"{what}: packed sequences can be spread over ranks only in self attention without a state; leave it out."
        )


@contextlib.contextmanager
def draw_apart(ranks: Ranks, dropout_p: float) -> Iterator[None]:
    """Each rank drops out by numbers of its own, though all were seeded alike."""
    if not dropout_p:
        yield
        return
    seed = int(torch.randint(2**40, (), device="cpu"))
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(derive_seed(seed, ranks.rank))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def find_ratio(options: dict[str, Any]) -> float | None:
    mix = options.get("mix", 0.5)
    return float(mix) if isinstance(mix, (int, float)) else None


class Shared:
    """One call, and what this rank and the others hold of it."""

    def __init__(self, ranks: Ranks, call: Call, backend: Any, return_state: bool, ratio: float | None = None) -> None:
        """ratio: the share of the linear part, where it is one number and the blocks have the rest."""
        self.ranks, self.call, self.backend, self.return_state, self.ratio = ranks, call, backend, return_state, ratio
        self.packed, self.masked = call.cu_query is not None, call.key_mask is not None
        cut = call.block_size is not None or self.packed  # only then does it matter where borders are
        self.pieces = self.find_pieces() if cut else None
        self.mine = None if self.pieces is None else self.pieces[ranks.rank]
        self.reaches = [Reach(0, 0)] * ranks.size
        if self.pieces is not None and call.block_size is not None:
            known = call.block_size, call.is_causal, self.masked
            self.reaches = [find_block_reach(piece, *known) for piece in self.pieces]

    def find_pieces(self) -> list[Piece]:
        lengths, self.masked = measure(self.ranks, self.call.key.shape[2], self.masked)
        offsets = None if self.call.cu_query is None else self.call.cu_query.tolist()
        return find_pieces(lengths, check_offsets(offsets, lengths))

    def offsets(self, before: int = 0, after: int = 0) -> Tensor | None:
        """Of the packed sequences that have rows here."""
        if not self.packed or self.mine is None:
            return None
        return torch.tensor(self.mine.list_offsets(before, after), dtype=torch.int32, device=self.call.key.device)

    def pick(self, t: Tensor | None) -> Tensor | None:
        """Of what has a row for each packed sequence, those of the sequences here."""
        if t is None or not self.packed or t.shape[0] == 1 or self.mine is None:
            return t
        return t[list(self.mine.numbers)] if self.mine.numbers else t[:1]

    def attend(self) -> tuple[Tensor, LLNState | None]:
        call, rank = self.call, self.ranks.rank
        own = self.fold()
        parcels = [self.give(to, own) for to in self.all]
        expected = [[f for item in self.list_items(by, rank) for f in self.describe(item, own)] for by in self.all]
        given = call.query, call.key, call.value, call.alpha, call.beta, call.lln_weight, call.block_weight
        anchors = *given, call.directions
        sending = send(self.ranks, parcels, expected, anchors, call.key.device)
        near = self.attend_blocks([{}] * self.ranks.size) if self.is_apart else None  # while states are under way
        came, token = sending.finish()
        out, after = self.answer(own, came, near)
        return tie(out, token), after

    def give(self, to: int, own: Fields) -> list[Tensor]:
        """What goes to a rank; own: the state of the keys here."""
        return [t for item in self.list_items(self.ranks.rank, to) for t in self.take(item, own)]

    def answer(
        self, own: Fields, came: list[list[Tensor]], near: Tensor | None = None
    ) -> tuple[Tensor, LLNState | None]:
        """The output here, and where it was asked for the state after all rows. came: from every rank what it gave.
        near: what blocks give, where that is known."""
        call = self.call
        heard = [self.sort(by, parts, own) for by, parts in enumerate(came)]
        if self.is_whole:
            out = self.read(own, heard, block_size=call.block_size, mix=(call.lln_weight, call.block_weight))
        else:
            out = self.read(own, heard)
            if call.block_size is not None:
                out = self.mix(out, self.attend_blocks(heard) if near is None else near)
        after = self.finish(own, heard) if self.return_state else None
        return out.to(call.query.dtype), after

    @property
    def is_fused(self) -> bool:
        """Whether kernels do all of it: no border cuts a block."""
        cut = self.call.block_size is not None and (self.masked or any(r != Reach(0, 0) for r in self.reaches))
        return not cut and can_fuse(self.call, self.backend, self.return_state)

    @property
    def is_whole(self) -> bool:
        """Whether blocks here go on from the state alone, with the linear part in one call."""
        plain = self.call.block_size is not None and self.call.is_causal and not self.masked and not self.packed
        return plain and not self.reaches[self.ranks.rank].before

    @property
    def is_apart(self) -> bool:
        """Whether blocks here are computed by themselves and need nothing of other ranks."""
        alone = self.call.block_size is not None and self.reaches[self.ranks.rank] == Reach(0, 0)
        return alone and not self.masked and not self.is_whole

    @property
    def all(self) -> range:
        return range(self.ranks.size)

    def run(self, inputs: Inputs, **more: Any) -> Any:
        """The linear part of some rows here, by the call's own coefficients."""
        call = self.call
        alpha, beta = self.pick(call.alpha), self.pick(call.beta)
        options: dict[str, Any] = {"read": call.read, "directions": call.directions, "scale": call.scale}
        alpha = None if call.read == "evidence" else alpha
        return attend_here(inputs, alpha, beta, **options, **more, backend=self.backend)

    def fold(self) -> Fields:
        """The state of the keys here, of each sequence."""
        call, offsets = self.call, self.offsets()
        none = None if offsets is None else torch.zeros_like(offsets)
        inputs = Inputs(call.query[:, :, :0], call.key, call.value, call.key_mask, none, offsets, offsets is not None)
        return list_fields(self.run(inputs, return_state=True)[1])

    # What is sent: both sides list the same items, from whole numbers that both know.

    def list_items(self, by: int, to: int) -> list[Item]:
        """What rank `by` gives rank `to`."""
        if by == to:
            return []
        found, every = [], slice(None)
        if self.packed:
            assert self.pieces is not None
            giver, taker = self.pieces[by], self.pieces[to]
            part = None
            if by < to and taker.continues(giver):
                part = slice(-1, None)
            elif by > to and not self.call.is_causal and giver.continues(taker):
                part = slice(0, 1)
            earlier = part if by < to else None
        else:
            part = every if by < to or not self.call.is_causal or self.return_state else None
            earlier = every if by < to or self.return_state else None
        if part is not None:
            found.append(Item(STATE, part))
        if self.pieces is None or self.call.block_size is None:
            return found
        if self.masked and earlier is not None:
            found.append(Item(FIRST, earlier))
        found += [Item(ROWS, rows) for rows in list_shares(self.pieces[by], self.pieces[to], self.reaches[to])]
        rows = self.tail(by)
        return [*found, Item(TAIL, rows)] if self.return_state and rows.start < rows.stop else found

    def tail(self, rank: int) -> slice:
        """Which of a rank's rows the block that stays open may hold."""
        assert self.pieces is not None
        assert self.call.block_size is not None
        piece = self.pieces[rank]
        begin, end = overlap((piece.start, piece.stop), (max(piece.total - self.call.block_size, 0), piece.total))
        return slice(begin - piece.start, end - piece.start)

    def take(self, item: Item, own: Fields) -> list[Tensor]:
        if item.kind == STATE:
            return [t[item.part] for t in own]
        if item.kind == FIRST:
            return [self.find_first()[item.part]]
        rows = [t[:, :, item.part] for t in (self.call.key, self.call.value)]
        return [*rows, self.key_mask()[:, item.part]] if self.masked else rows

    def describe(self, item: Item, own: Fields) -> list[Form]:
        """The forms of what `take` gives on another rank."""
        count = 1 if self.packed else len(own[0])
        if item.kind == STATE:
            return [((count, *t.shape[1:]), t.dtype) for t in own]
        if item.kind == FIRST:
            return [((count,), torch.int64)]
        rows = item.part.stop - item.part.start
        forms: list[Form] = [((*t.shape[:2], rows, t.shape[3]), t.dtype) for t in (self.call.key, self.call.value)]
        return [*forms, ((len(self.call.key), rows), torch.bool)] if self.masked else forms

    def sort(self, by: int, parts: list[Tensor], own: Fields) -> dict[str, list[Tensor]]:
        """What came from a rank, by its kind."""
        rest, found = iter(parts), {}
        for item in self.list_items(by, self.ranks.rank):
            found[item.kind] = [next(rest) for _ in self.describe(item, own)]
        return found

    def key_mask(self) -> Tensor:
        """Of the rows here, where some rank has a mask."""
        key = self.call.key
        made = torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device)
        return made if self.call.key_mask is None else self.call.key_mask

    def find_first(self) -> Tensor:
        """In all rows, the first valid one of each sequence's rows here; the number of all rows where there is none."""
        assert self.mine is not None
        offsets = self.offsets()
        found = first_valid(self.call.key, self.key_mask(), offsets)
        lengths = self.call.key.shape[2] if offsets is None else offsets.diff()
        begins = self.mine.start if offsets is None else self.mine.start + offsets[:-1]
        return torch.where(found < lengths, found + begins, self.mine.total)

    # The linear part.

    def list_neighbours(self, heard: list[dict[str, list[Tensor]]]) -> tuple[list[Fields], list[Fields]]:
        """The states of earlier ranks and of later ones that this rank's first and last sequence have part in."""
        states = [tuple(parts[STATE]) if STATE in parts else None for parts in heard]
        first, last = states[: self.ranks.rank], states[self.ranks.rank + 1 :]
        return [s for s in first if s is not None], [s for s in last if s is not None]

    def read(self, own: Fields, heard: list[dict[str, list[Tensor]]], **blocks: Any) -> Tensor:
        """blocks: of causal rows that begin with one, what the op is told of them."""
        call, offsets = self.call, self.offsets()
        before, after = self.list_neighbours(heard)
        if call.is_causal:
            inputs = Inputs(call.query, call.key, call.value, call.key_mask, offsets, offsets, False)
            held = None
            if before:
                rest = [make_empty(own, slice(1, None))] if len(own[0]) > len(before[0][0]) else []
                held = make_state(join([merge(before), *rest]))
                held = self.open_block(held) if blocks else held
            out: Tensor = self.run(inputs, is_causal=True, state=held, dropout_p=call.dropout_p, **blocks)
            return out
        if self.packed and len(own[0]) > 1:
            ends = [*before, take(own, slice(0, 1))], [take(own, slice(-1, None)), *after]
            every = join([merge(ends[0]), take(own, slice(1, -1)), merge(ends[1])])
        else:
            every = merge([*before, own, *after])
        none = None if offsets is None else torch.zeros_like(offsets)
        inputs = Inputs(call.query, call.key[:, :, :0], call.value[:, :, :0], None, offsets, none, offsets is not None)
        out = self.run(inputs, state=make_state(every), dropout_p=call.dropout_p)
        return out

    # The blocks.

    def open_block(self, state: LLNState) -> LLNState:
        """A state of earlier rows, after which a block begins."""
        call, size = self.call, self.call.block_size
        assert size is not None
        batch, heads, _, dim = call.key.shape
        return dataclasses.replace(
            state,
            count=torch.zeros(batch, dtype=torch.int64, device=call.key.device),
            block_key=call.key.new_zeros(batch, heads, size, dim),
            block_value=call.key.new_zeros(batch, heads, size, call.value.shape[3]),
            block_mask=torch.zeros(batch, size, dtype=torch.bool, device=call.key.device),
        )

    def extend(self, heard: list[dict[str, list[Tensor]]]) -> list[Tensor]:
        """Keys and values, and a mask where there is one, of the rows here and those around them."""
        own = [self.call.key, self.call.value, *([self.key_mask()] if self.masked else [])]
        around = [parts.get(ROWS) for parts in heard]
        around[self.ranks.rank] = own
        given = [parts for parts in around if parts is not None]
        return [torch.cat(parts, min(2, parts[0].ndim - 1)) for parts in zip(*given, strict=True)]

    def attend_blocks(self, heard: list[dict[str, list[Tensor]]]) -> Tensor:
        """Softmax attention in blocks alone, [B, Hq, N, E] in the dtype of queries or a wider one."""
        call, reach = self.call, self.reaches[self.ranks.rank]
        assert call.block_size is not None
        if not call.query.shape[2]:
            return call.query.new_zeros(
                *call.query.shape[:3], call.value.shape[3], dtype=compute_dtype(call.query.dtype)
            )
        key, value, *masks = self.extend(heard)
        query = functional.pad(call.query, (0, 0, reach.before, reach.after))
        offsets = self.offsets(reach.before, reach.after)
        inputs = Inputs(query, key, value, masks[0] if masks else None, offsets, offsets, False)
        near = check_call(
            inputs, block_size=call.block_size, is_causal=call.is_causal, scale=call.scale, dropout_p=call.dropout_p
        ).change(lln_weight=None, block_weight=None, start=None)
        if masks:
            near = near.change(**self.place(near, reach, heard))
        out = attend_near(near)
        return out[:, :, reach.before : reach.before + call.query.shape[2]]

    def place(self, near: Call, reach: Reach, heard: list[dict[str, list[Tensor]]]) -> dict[str, Tensor]:
        """Where the first row stands in its block, and an open block without rows before it, for there may be a rest.
        Only earlier ranks can hold an earlier valid row."""
        assert self.mine is not None
        assert near.block_size is not None
        offsets, total = near.cu_key, self.mine.total
        size, length = near.block_size, near.key.shape[2]
        begins = torch.zeros(1, dtype=torch.int64, device=near.key.device) if offsets is None else offsets[:-1].long()
        lengths: Any = length if offsets is None else offsets.diff()
        first = first_valid(near.key, near.key_mask, offsets)
        begins = begins + self.mine.start - reach.before  # in all rows
        firsts = torch.where(first < lengths, first + begins, total)
        earlier = [parts[FIRST][0] for parts in heard[: self.ranks.rank] if FIRST in parts]
        if earlier:
            known = torch.stack(earlier).amin(0)
            known = known if len(known) == len(firsts) else functional.pad(known, (0, len(firsts) - 1), value=total)
            firsts = torch.minimum(firsts, known)
        past = begins - firsts
        start = torch.where(past > 0, past % size, torch.maximum(past, -torch.as_tensor(lengths, device=past.device)))
        batch = len(start)
        return {
            "start": start,
            "open_key": near.key.new_zeros(batch, near.key.shape[1], size, near.key.shape[3]),
            "open_value": near.value.new_zeros(batch, near.value.shape[1], size, near.value.shape[3]),
            "open_mask": torch.zeros(batch, size, dtype=torch.bool, device=near.key.device),
        }

    def mix(self, linear: Tensor, near: Tensor) -> Tensor:
        call = self.call
        if self.ratio is not None and linear.dtype == near.dtype:  # rounded once, in one pass over both
            return torch.lerp(near, linear, self.ratio)
        near = near.to(compute_dtype(call.query.dtype))
        weights = []
        for weight in (self.pick(call.lln_weight), self.pick(call.block_weight)):
            assert weight is not None
            if self.packed and weight.shape[0] > 1:
                assert self.mine is not None
                counts = torch.tensor(self.mine.list_offsets(), device=weight.device).diff()
                rows = weight.repeat_interleave(counts, 0, output_size=linear.shape[2])  # [N, Hq, E]
                weights.append(rows.transpose(0, 1).unsqueeze(0))
            else:
                weights.append(weight.unsqueeze(-2))
        return linear.to(near.dtype) * weights[0] + near * weights[1]

    # The state after all rows, for those who go on from it.

    def finish(self, own: Fields, heard: list[dict[str, list[Tensor]]]) -> LLNState:
        before, after = self.list_neighbours(heard)
        every = make_state(merge([*before, own, *after]))
        if self.call.block_size is None:
            return every
        assert self.mine is not None
        call, size, rank = self.call, self.call.block_size, self.ranks.rank
        rows = self.tail(rank)
        parts = [p.get(TAIL) for p in heard]
        parts[rank] = self.take(Item(TAIL, rows), own)
        key, value, *masks = (
            torch.cat(ts, min(2, ts[0].ndim - 1)) for ts in zip(*(p for p in parts if p is not None), strict=True)
        )
        firsts = torch.zeros(len(key), dtype=torch.int64, device=key.device)
        if masks:
            found = [p[FIRST][0] for p in heard if FIRST in p]
            firsts = torch.stack([*found, self.find_first()]).amin(0)
        count = (self.mine.total - key.shape[2] - firsts).clamp_min(0)
        empty = self.open_block(make_state(make_empty(own, slice(None))))
        query = key.new_zeros(len(key), call.query.shape[1], *key.shape[2:])
        inputs = Inputs(query, key, value, masks[0] if masks else None, None, None, False)
        opened = self.run(
            inputs, is_causal=True, block_size=size, state=dataclasses.replace(empty, count=count), return_state=True
        )[1]
        block = {name: getattr(opened, name) for name in ("count", "block_key", "block_value", "block_mask")}
        return dataclasses.replace(every, **block)


def measure(ranks: Ranks, length: int, masked: bool) -> tuple[tuple[int, ...], bool]:
    """(how many rows each rank has, whether any of them has a mask)"""
    if ranks.lengths is not None:  # known, so that nobody need be asked
        return ranks.measure(length), masked
    told = ranks.tell(length, masked)
    return tuple(count for count, _ in told), any(mask for _, mask in told)
