"""A call of a user that is like an earlier one: recognised before anything is checked, and played.

`attend_known` is the door that `lln_attention`, `LLNAttention` and the attention functions of transformers go through.
The first call of its kind takes the long way, and `Link` follows what is played on it (statistics, starts of blocks,
attention). Where all of it came from the tensors that were given, the tapes become one, and the next call with the same
options and tensors of the same kinds plays it: nothing is checked again, since it was checked then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from lln.kernels.call import FIELDS, TENSORS
from lln.kernels.common import is_constant, is_watched, raw_stream
from lln.kernels.triton import op, plan, tape
from lln.kernels.triton.launch import Kernel
from lln.kernels.triton.tape import WATCH, Kind, Tape, addresses, count_bytes, draw_seed, remember, signature

MOST_BACKWARDS = 16  # of one call: by the layouts in which gradients come
NEVER = "never"  # what such a call does is more than its launches
KNOWN: dict[Hashable, Any] = {}
PLAIN = (Tensor, Parameter)
Given = tuple[Tensor | None, ...]
Source = tuple[int, int] | Tensor | None  # memory and how far into it; a constant; nothing


@dataclasses.dataclass
class Known:
    """inference: gives the output alone. training: also one piece of memory with all that a backward needs beside what
    was given. fields: where the tensors of the attention's call are, and its final state where that is kept; rest: its
    other arguments. seeded: dropout's seed, drawn for each call, is given last."""

    inference: Tape
    training: Tape
    fields: list[tuple[Source, Kind | None]]
    rest: Sequence[Any]
    seeded: bool
    backwards: dict[Hashable, Tape] = dataclasses.field(default_factory=dict)

    def attend(self, given: Given) -> Tensor:
        query, key, value = given[:3]
        assert query is not None
        assert key is not None
        assert value is not None
        if self.seeded:
            given = (*given, draw_seed(query.device))
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            # Not Function.apply, which first looks for what `make_key` has excluded.
            out: Tensor = super(Function, Replay).apply(query, key, value, self, given)
            return out
        with plan.use_device(query.device):
            return self.inference.play(addresses(given))[0]

    def backward(self, given: Given, memory: Tensor, grad: Tensor, before: list[int]) -> Sequence[Tensor]:
        """Of query, key and value. before: addresses of what was given and of the memory in the forward pass."""
        bases = addresses((*given, memory))
        # Other tensors may come back through hooks for saved tensors, with other strides.
        kinds: Hashable = (grad.shape, grad.stride(), grad.dtype, grad.data_ptr() & 15)
        if bases != before:
            kinds = kinds, signature(given)
        found = self.backwards.get(kinds)
        if found is not None:
            bases.append(grad.data_ptr())
            with plan.use_device(grad.device):
                return found.play(bases)
        tensors = [find_tensor(source, kind, (*given, memory)) for source, kind in self.fields]
        rows = op.backward(tensors, self.rest, (grad, None, None), [name in op.ROWS for name in FIELDS])
        made = tape.TAPES.get(op.backward_key(tensors, self.rest, grad))
        if made is not None and len(self.backwards) < MOST_BACKWARDS:
            joined = Joined(len(given) + 2)
            sources = [*(source for source, _ in self.fields), (len(given) + 1, 0)]
            joined.add(made, sources, [joined.put(kind) for kind in made.outputs])
            self.backwards[kinds] = joined.tape(made.device)
        return [rows[name] for name in op.ROWS]


def find_tensor(source: Source, kind: Kind | None, bases: Sequence[Tensor | None]) -> Tensor | None:
    """kind: of what lies inside a piece of memory."""
    if not isinstance(source, tuple):
        return source
    base, offset = source
    held = bases[base]
    if kind is None or held is None:
        return held
    size, stride, dtype = kind
    return held[offset : offset + count_bytes(kind)].view(dtype).as_strided(size, stride)


class Replay(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, known: Known, given: Given) -> Tensor:
        with plan.use_device(query.device):
            before = addresses(given)
            out, memory = known.training.play(before.copy())
        ctx.save_for_backward(*given, memory)
        before.append(memory.data_ptr())
        ctx.known, ctx.before = known, before
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        if torch.is_grad_enabled():  # create_graph: gradients without a graph would count for nothing, silently
            raise RuntimeError(op.ONCE)
        *given, memory = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dq, dk, dv = ctx.known.backward(tuple(given), memory, grad, ctx.before)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, None, None


class Joined:
    """Tapes, one after another, as one: what one gives another need not leave it."""

    def __init__(self, given: int) -> None:
        self.given, self.scratch = given, 0
        self.outputs: list[Kind] = []
        self.kernels: list[Kernel] = []
        self.keeps: list[Tensor] = []

    def put(self, kind: Kind) -> tuple[int, int]:
        """Where a new output is."""
        self.outputs.append(kind)
        return self.given + len(self.outputs) - 1, 0

    def spare(self, size: int) -> tuple[int, int]:
        """Where so many bytes of scratch memory are."""
        self.scratch += size
        return -1, self.scratch - size

    def add(self, tape: Tape, sources: Sequence[Source], outputs: Sequence[tuple[int, int]]) -> None:
        """sources: of what the tape is given; outputs: where its outputs are."""
        scratch = self.spare(tape.scratch)
        where = [*sources, *outputs, scratch]
        for compiled, grid, template, places in tape.kernels:
            args, moved = template.copy(), []
            for place, base, offset in places:
                source = where[base]
                if isinstance(source, tuple):
                    moved.append((place, source[0], source[1] + offset))
                else:
                    args[place] = 0 if source is None else source.data_ptr() + offset
            self.kernels.append((compiled, grid, args, moved))
        self.keeps += [source for source in sources if isinstance(source, Tensor)]
        self.keeps += tape.keeps

    def tape(self, device: torch.device) -> Tape:
        last = self.given + len(self.outputs)  # scratch memory comes after the outputs, which are all known now
        kernels: list[Kernel] = [
            (compiled, grid, args, [(place, last if base == -1 else base, offset) for place, base, offset in places])
            for compiled, grid, args, places in self.kernels
        ]
        return Tape(device, self.given, self.outputs, self.scratch, kernels, tuple(self.keeps))


@dataclasses.dataclass
class Step:
    """A tape that was played: where what it was given came from (given to the call: (place, 0); a constant; an earlier
    step: Made), and of attention its other arguments."""

    tape: Tape
    sources: list[Source | Made]
    rest: Sequence[Any] | None


class Made(NamedTuple):
    step: int
    output: int


class Link:
    """Follows what a call plays. Tensors are known by their addresses: all of them live as long as this does."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.sources: dict[int, Source | Made] = {
            t.data_ptr(): (i, 0) for i, t in enumerate(given) if t is not None
        }  # fmt: skip
        self.steps: list[Step] = []
        self.alive: list[Any] = []
        self.complete = all(t is None or t.numel() > 0 for t in given)
        self.seeded = False

    def draw(self, seed: Tensor) -> None:
        """This seed is drawn for each call and given last."""
        self.complete &= not self.seeded
        self.seeded = True
        self.sources[seed.data_ptr()] = len(self.given), 0
        self.given = (*self.given, seed)

    def note(
        self, tape: Tape | None, given: Sequence[Tensor | None], result: Sequence[Tensor], rest: Sequence[Any] | None
    ) -> None:
        """What was played for `given`; nothing (None) could be."""
        self.alive += [given, result]
        if tape is None or any(t.numel() == 0 for t in result):
            self.complete = False
            return
        sources: list[Source | Made] = []
        for t in given:
            source = None if t is None else self.sources.get(t.data_ptr())
            if t is not None and source is None:
                self.complete &= is_constant(t)
                source = t
            sources.append(source)
        for i, t in enumerate(result):
            self.sources[t.data_ptr()] = Made(len(self.steps), i)
        self.steps.append(Step(tape, sources, rest))
        self.out = result[0]

    def make_known(self, out: Tensor) -> Known | None:
        """None where the call was more than what it played, or attended in several parts."""
        attended = [step for step in self.steps if step.rest is not None]
        if not self.complete or len(attended) != 1 or attended[0] is not self.steps[-1]:
            return None
        outputs, sources, rest = self.steps[-1].tape.outputs, self.steps[-1].sources, attended[0].rest
        query = self.given[0]
        assert query is not None
        assert rest is not None
        if out.data_ptr() != self.out.data_ptr() or (tuple(out.shape), out.stride()) != outputs[0][:2]:
            return None
        (_, log, mean), is_causal = outputs, rest[op.CAUSAL - TENSORS]
        state = op.keeps_state(is_causal, query, math.prod(mean[0]))
        inference, _ = self.join(with_state=False, keep=False)
        training, places = self.join(with_state=state, keep=True)
        memory = len(self.given)
        fields: list[tuple[Source, Kind | None]] = [
            ((memory, places[source][1]), self.steps[source.step].tape.outputs[source.output])
            if isinstance(source, Made)
            else (source, None)
            for source in sources
        ]
        last = len(self.steps) - 1
        for i, kind in ((1, log), (2, mean)):
            fields.append(((memory, places[Made(last, i)][1]), kind) if state else (None, None))
        return Known(inference, training, fields, rest, self.seeded)

    def join(self, *, with_state: bool, keep: bool) -> tuple[Tape, dict[Made, tuple[int, int]]]:
        """All steps as one tape, and where what they make is. Its outputs are the attention's, and with `keep` a piece
        of memory that holds what the steps before made and, with_state, its final state."""
        joined, last, size = Joined(len(self.given)), len(self.steps) - 1, 0
        out, memory = len(self.given), len(self.given) + 1
        places: dict[Made, tuple[int, int]] = {}
        for n, step in enumerate(self.steps):
            for i, kind in enumerate(step.tape.outputs):
                if n == last and i == 0:
                    places[Made(n, i)] = out, 0
                elif keep and (n < last or with_state):
                    places[Made(n, i)] = memory, size
                    size += count_bytes(kind)
                else:
                    places[Made(n, i)] = joined.spare(count_bytes(kind))
            sources = [places[source] if isinstance(source, Made) else source for source in step.sources]
            joined.add(step.tape, sources, [places[Made(n, i)] for i in range(len(step.tape.outputs))])
        joined.put(self.steps[-1].tape.outputs[0])
        if keep:
            joined.put(((size,), (1,), torch.uint8))
        assert self.given[0] is not None
        return joined.tape(self.given[0].device), places


def attend_known(options: tuple[Any, ...], given: Given, attend: Callable[[], Tensor]) -> Tensor:
    """What `attend` gives: attention of the first three of `given`, with what else its result depends on. options: all
    that it depends on beside these tensors' values."""
    key = make_key(options, given)
    if key is None:
        return attend()
    try:
        known = KNOWN.get(key)
    except TypeError:  # some option cannot be a key; the long way says what is wrong with it
        return attend()
    if known is NEVER:
        return attend()
    if known is not None:
        found: Tensor = known.attend(given)
        return found
    link = WATCH.link = Link(given)
    try:
        out = attend()
    finally:
        WATCH.link = None
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        remember(KNOWN, key, link.make_known(out) or NEVER)
    return out


def make_key(options: tuple[Any, ...], given: Given) -> Hashable:
    """What calls that do the same launches have in common. None where somebody looks on who has to see each step: a
    compiler, torch.func, forward-mode derivatives, another call that is being followed."""
    if WATCH.link is not None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    if is_watched():
        return None
    query, key, value = given[:3]
    # The types of options, since True == 1 == 1.0.
    kinds: list[Any] = [options, *map(type, options), query is key, query is value, key is value]
    grads = torch.is_grad_enabled()
    try:
        for i, t in enumerate(given):
            if t is None:
                kinds.append(None)
                continue
            if type(t) not in PLAIN or (i > 2 and grads and t.requires_grad):
                return None
            kinds += (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15)
    except RuntimeError:  # it has no memory or no strides; the long way says so
        return None
    assert query is not None
    if query.is_cuda:
        if torch.is_autocast_enabled("cuda") and query.dtype is not torch.get_autocast_dtype("cuda"):
            return None
        kinds.append(raw_stream(query.device))
    if query.dtype is torch.float32:
        kinds.append(plan.is_tf32_allowed())
    return tuple(kinds)
