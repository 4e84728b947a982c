"""Repeated calls without their bookkeeping.

The host needs several times as long to decide what to launch as the device takes for a short sequence. Tensors of the
same shapes, strides and dtypes lead to the same launches with other addresses: those of a first call are recorded, and
later ones fill in addresses. What is not all launches and new memory (packed attention, gradients of alpha) is never
recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.kernels.common import raw_stream
from lln.kernels.triton.plan import on_device

ALIGNED = 16  # bytes; Triton compiles for addresses that are multiples of it
APART = 256  # bytes between pieces of scratch memory, as the allocator has it
MOST = 512  # calls remembered


def signature(tensors: Sequence[Tensor | None]) -> Hashable:
    """All that launches depend on besides addresses; also which of the tensors are the same one, since a recording
    tells them apart by identity."""
    kinds = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNED == 0) for t in tensors]
    names = list(map(id, tensors))
    return (*kinds, *map(names.index, names))


@dataclasses.dataclass(frozen=True)
class Tape:
    """The launches of a call; addresses are those of given tensors, then of outputs, then of scratch memory."""

    device: torch.device
    outputs: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    scratch: list[int]  # offsets
    size: int  # of the scratch memory
    launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int]]]]

    def play(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        made = [torch.empty_strided(size, stride, dtype=t, device=self.device) for size, stride, t in self.outputs]
        memory = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        base = memory.data_ptr()
        addresses = [0 if t is None else t.data_ptr() for t in given]
        addresses += [t.data_ptr() for t in made]
        addresses += [base + offset for offset in self.scratch]
        stream = raw_stream(self.device)
        for launch, template, places in self.launches:
            args = template.copy()
            for place, source in places:
                args[place] = addresses[source]
            launch(*args, stream=stream)
        return made


class Recording:
    """Follows one call. A launch that is given a tensor from elsewhere ends it: something else had a hand in it."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        self.given = len(given)
        self.known = {id(t): i for i, t in enumerate(given) if t is not None}
        self.made: list[Tensor] = []  # also keeps them alive, so that no two have the same id
        self.launches: list[tuple[Any, tuple[int, ...], list[Any], list[tuple[int, int]]]] = []
        self.complete = True

    def make(self, t: Tensor) -> Tensor:
        self.known[id(t)] = self.given + len(self.made)
        self.made.append(t)
        return t

    def launch(self, compiled: Any, grid: tuple[int], args: Sequence[Any]) -> None:
        """args: all of the kernel's, in its order."""
        tensors = [(i, id(t)) for i, t in enumerate(args) if isinstance(t, Tensor)]
        if compiled is None or any(name not in self.known for _, name in tensors):  # None: the interpreter
            self.complete = False
            return
        template = [None if isinstance(v, Tensor) else v for v in args]
        self.launches.append((compiled, (*grid, 1, 1), template, [(i, self.known[name]) for i, name in tensors]))

    def tape(self, results: Sequence[Tensor], device: torch.device) -> Tape | None:
        """None where a call like this cannot be repeated from its launches alone."""
        kept = [id(t) for t in results]
        if not self.complete or len(set(kept)) < len(kept) or not {id(t) for t in self.made}.issuperset(kept):
            return None
        scratch: list[int] = []
        size = 0
        order = {i: n for n, i in enumerate(range(self.given))}
        for n, name in enumerate(kept):
            order[self.known[name]] = self.given + n
        for t in self.made:
            if id(t) not in kept:
                order[self.known[id(t)]] = self.given + len(kept) + len(scratch)
                scratch.append(size)
                size += -(-t.numel() * t.element_size() // APART) * APART
        launches = [
            (compiled[grid], template, [(place, order[source]) for place, source in places])
            for compiled, grid, template, places in self.launches
        ]
        outputs = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
        return Tape(device, outputs, scratch, size, launches)


TAPES: dict[Hashable, Tape | None] = {}


def remember(key: Hashable, tape: Tape | None) -> None:
    if len(TAPES) >= MOST:
        TAPES.clear()
    TAPES[key] = tape


def replayed(
    key: Hashable, given: Sequence[Tensor | None], launches: Callable[[Recording | None], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """What `launches` makes of `given`, whose first is a tensor: from its tape where there is one for this key."""
    assert given[0] is not None
    device = given[0].device
    tape = TAPES.get(key)
    if tape is not None:
        with on_device(device):
            return tape.play(given)
    recording = None if key in TAPES else Recording(given)
    result = launches(recording)
    if recording is not None:
        remember(key, recording.tape(result, device))
    return result
