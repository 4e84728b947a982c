"""Repeated calls without their bookkeeping.

The host needs several times as long to decide what to launch as the device takes for a short sequence. Tensors of the
same shapes, strides and dtypes lead to the same launches with other addresses: those of a first call are recorded, and
later ones fill in addresses. What is not all launches and new memory (packed attention, gradients of alpha) is never
recorded. `recognise` puts the tapes of one call of a user (statistics, attention) together into one.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.kernels.common import raw_stream
from lln.kernels.triton.launch import Kernel, Play, make_play
from lln.kernels.triton.plan import use_device

ALIGNED = 16  # bytes; Triton compiles for addresses that are multiples of it
APART = 256  # bytes between pieces of memory, as the allocator has it
MOST = 1024  # calls remembered
KEPT = 2**23  # bytes of scratch memory that are kept for each stream

Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, stride, dtype of a tensor


def signature(tensors: Sequence[Tensor | None]) -> Hashable:
    """All that launches depend on besides addresses; also which of the tensors are the same one, since a recording
    tells them apart by identity."""
    kinds = [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNED == 0) for t in tensors]
    names = list(map(id, tensors))
    return (*kinds, *map(names.index, names))


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def read_kind(t: Tensor) -> Kind:
    return tuple(t.shape), t.stride(), t.dtype


def count_bytes(kind: Kind) -> int:
    """From one piece of memory to the next."""
    size, stride, dtype = kind
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
    return -(-reach * dtype.itemsize // APART) * APART


@dataclasses.dataclass(frozen=True)
class Tape:
    """The launches of a call. Addresses are counted through: of what is given, of outputs, of scratch memory, which is
    one piece."""

    device: torch.device
    given: int
    outputs: list[Kind]
    scratch: int  # bytes
    kernels: list[Kernel]
    keeps: tuple[Tensor, ...] = ()  # constants whose addresses are in the arguments

    @functools.cached_property
    def launch(self) -> Play:
        return make_play(self.kernels)

    def play(self, bases: list[int]) -> list[Tensor]:
        """The outputs; bases: addresses of what is given, 0 for None; the list is used up. The caller has
        made the device the current one."""
        made = [torch.empty_strided(size, stride, dtype=t, device=self.device) for size, stride, t in self.outputs]
        bases += [t.data_ptr() for t in made]
        stream = raw_stream(self.device) if self.device.type == "cuda" else 0
        if self.keeps and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            PINNED.update({id(t): t for t in self.keeps})
        if self.scratch:
            memory = find_scratch(self.device, stream, self.scratch)
            bases.append(memory.data_ptr())
        with LOCK:
            self.launch(bases, stream)
        return made


def find_scratch(device: torch.device, stream: int, size: int) -> Tensor:
    """Memory for launches on one stream, which come one after another: where it is little, the same for all."""
    if size > KEPT or device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph keeps its own
        return torch.empty(size, dtype=torch.uint8, device=device)
    held = SCRATCH.get((device, stream))
    if held is None:
        with torch.inference_mode(False):
            held = torch.empty(KEPT, dtype=torch.uint8, device=device)
        remember(SCRATCH, (device, stream), held)
    return held


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
        size = 0
        where = {i: (i, 0) for i in range(self.given)}
        for n, name in enumerate(kept):
            where[self.known[name]] = self.given + n, 0
        for t in self.made:
            if id(t) not in kept:
                where[self.known[id(t)]] = self.given + len(kept), size
                size += count_bytes(read_kind(t))
        kernels: list[Kernel] = [
            (compiled, grid, template, [(place, *where[source]) for place, source in places])
            for compiled, grid, template, places in self.launches
        ]
        return Tape(device, self.given, [read_kind(t) for t in results], size, kernels)


TAPES: dict[Hashable, Tape | None] = {}
SCRATCH: dict[Hashable, Tensor] = {}
PINNED: dict[int, Tensor] = {}  # constants that a captured graph reads, which lives longer than a tape may
LOCK = threading.Lock()  # scratch memory is shared by threads


def remember(store: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """The oldest goes where there are too many: nothing grows with the number of shapes that were seen."""
    while len(store) >= MOST:
        del store[next(iter(store))]
    store[key] = value


class Watch(threading.local):
    """Who is shown what is played, if anybody: see `recognise.Link`."""

    link: Any = None


WATCH = Watch()


def draw_seed(device: torch.device) -> Tensor:
    """Of dropout: on the device, so that a CUDA graph draws anew at each replay."""
    seed = torch.randint(2**62, (), device=device)
    if WATCH.link is not None:
        WATCH.link.draw(seed)
    return seed


def replay(
    key: Hashable, given: Sequence[Tensor | None], launches: Callable[[Recording | None], Sequence[Tensor]],
    rest: Sequence[Any] | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """What `launches` makes of `given`, whose first is a tensor: from its tape where there is one for this key. rest:
    of a call of attention, its other arguments."""
    assert given[0] is not None
    device = given[0].device
    tape = TAPES.get(key)
    if tape is not None:
        with use_device(device):
            result: Sequence[Tensor] = tape.play(addresses(given))
    else:
        recording = None if key in TAPES else Recording(given)
        result = launches(recording)
        if recording is not None:
            tape = recording.tape(result, device)
            remember(TAPES, key, tape)
    if WATCH.link is not None:
        WATCH.link.note(tape, given, result, rest)
    return result
