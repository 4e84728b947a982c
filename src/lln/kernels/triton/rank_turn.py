"""What one of several ranks does in a call whose keys lie on all of them, by the kernels of one that are here:

    fold     the state of its keys, which goes to other ranks
    read     its output, from this and what came
    ask      backward: what its queries ask of the states that came, which goes back
    answer   the gradients of its keys and values, from what came back

So each rank launches what it would launch for its rows alone, and one kernel more at each step but the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.kernels.call import MARKS, Call
from lln.kernels.evidence import SIGNED
from lln.kernels.triton import evidence_op, passes, plan
from lln.kernels.triton.backward import Backward
from lln.kernels.triton.causal_backward import suffix_kernel
from lln.kernels.triton.evidence_launch import HELD, KERNELS, EvidenceBackward, EvidenceForward
from lln.kernels.triton.fit import DoesNotFit, Fit
from lln.kernels.triton.fold import merge_kernel
from lln.kernels.triton.forward import SPLITS, Launch, make_like
from lln.kernels.triton.op import ROWS
from lln.kernels.triton.rank_states import give_states_kernel, join_states_kernel, take_states_kernel
from lln.kernels.triton.tape import Recording, replay, signature

INPUTS = (*ROWS, "alpha", "beta", "lln_weight", "block_weight", "key_mask")
REST = ("block_size", "is_causal", "scale", "read", "directions")
NOTHING: dict[str, Any] = dict.fromkeys(MARKS) | {"dropout_p": 0.0, "joint": False, "overlap": False}
WANTED = frozenset(ROWS)
CHANNELS = 4  # of a program that works on states
# What `ask` leaves for `answer`, as kernels call it.
ASKED = ("DMEAN", "PULL")
ASKED_BLOCKS = (*ASKED, "TOP", "INVERSE", "OWN", "LOG2")
ASKED_EVIDENCE = ("DMEAN", "DKEY", "DENTROPY")
ASKED_CAUSAL = ("LOG", "END", "END32", "MARK", "REACH", "REACH_D", "LOG_Z", "OWN", "REFERENCE", "LOG_END", "MEAN_END")

Tensors = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a call is beside its tensors."""

    rest: tuple[Any, ...]
    before: int  # ranks whose states this one reads
    after: int  # ranks that read its state

    @property
    def is_causal(self) -> bool:
        return bool(self.rest[REST.index("is_causal")])

    @property
    def by_evidence(self) -> bool:
        return bool(self.rest[REST.index("read")] == "evidence")

    @property
    def fields(self) -> int:
        """Tensors of a state."""
        return len(HELD) if self.by_evidence else 2

    @property
    def asked(self) -> tuple[str, ...]:
        if self.is_causal:
            return ASKED_CAUSAL
        if self.by_evidence:
            return ASKED_EVIDENCE
        return ASKED if self.rest[0] is None else ASKED_BLOCKS

    @property
    def makes_query(self) -> bool:
        """Whether `ask` makes dq; else `answer` does, with what blocks have to do with it."""
        return self.is_causal or self.by_evidence or self.rest[0] is None

    def rebuild(self, tensors: Tensors, held: Tensors = ()) -> Call:
        """held: a state that the call goes on from."""
        state = dict(zip(HELD, held, strict=False))
        return Call(
            **(NOTHING | dict(zip(INPUTS, tensors, strict=True)) | dict(zip(REST, self.rest, strict=True)) | state)
        )


def take_apart(call: Call) -> tuple[list[Any], tuple[Any, ...]]:
    return [getattr(call, name) for name in INPUTS], tuple(getattr(call, name) for name in REST)


def count_bytes(kind: Kind, tensors: Tensors) -> int:
    """Of a state as it is sent, in float64 and float32."""
    (batch, heads, _, dim), width = tensors[1].shape, tensors[2].shape[3]
    signs = 2 if kind.rest[REST.index("directions")] == SIGNED else 1
    return int(batch * heads * dim * signs * (8 + 4 * width + (8 + 4 * dim if kind.by_evidence else 0)))


def play(name: str, kind: Kind, given: Tensors, launches: Callable[[Recording | None], Sequence[Tensor]]) -> list[Any]:
    query = given[0]
    tf32 = query.dtype == torch.float32 and plan.is_tf32_allowed()
    key: Hashable = "ranks", name, query.device, tf32, kind, signature(given)
    return list(replay(key, given, launches))


def fit_forward(call: Call) -> Fit:
    """Raises DoesNotFit, and where the values are too wide for one program."""
    fit = evidence_op.fit_forward(call) if call.read == "evidence" else passes.fit_forward(call)
    if fit.part < call.value.shape[-1]:
        raise DoesNotFit(f"values of {call.value.shape[-1]} channels take more than a program has")
    return fit


def fit_backward(call: Call) -> Fit:
    grad = make_like(call.query, call.value.shape[-1])
    if call.read == "evidence":
        fit = evidence_op.fit_backward(call, (grad, None, None, None, None), WANTED)
    else:
        fit = passes.fit_backward(call, None, (grad, None, None), WANTED)
    if fit.part < call.value.shape[-1]:
        raise DoesNotFit(f"values of {call.value.shape[-1]} channels take more than a program has")
    return fit


def launch_states(launch: Launch, kernel: Any, others: int, programs: int, **given: Any) -> None:
    """A kernel of `rank_states`; programs: for each few channels."""
    evidence = launch.call.read == "evidence"
    n = (
        launch.batch
        * launch.heads
        * (launch.channels if isinstance(launch, (EvidenceForward, EvidenceBackward)) else launch.dim)
    )
    numbers = 2 + launch.width + (2 + launch.dim if evidence else 0)  # of float32, a channel
    usual = dict.fromkeys(("KEY", "ENTROPY", "DKEY", "DENTROPY", "G_KEY", "G_ENTROPY", "KEY_OUT", "ENTROPY_OUT"))
    launch.launch(
        kernel, programs * -(-n // CHANNELS), "merge", **(usual | given), n=n, others=others, step=n * numbers // 2,
        BC=CHANNELS, BP=SPLITS[others > SPLITS[0]], EVIDENCE=evidence,
    )  # fmt: skip


def view_state(came: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What came as float64 and as float32."""
    return (None, None) if came is None else (came.view(torch.float64), came.view(torch.float32))


def allocate_held(launch: Any) -> list[Tensor]:
    """A new state."""
    if launch.call.read == "evidence":
        return list(launch.allocate_held(launch.batch, launch.heads).values())
    return list(launch.allocate_states(launch.batch, launch.heads))


def join(launch: Any, own: Tensors, theirs: Tensors, others: int) -> list[Tensor]:
    held = allocate_held(launch)
    made = {f"{name}_OUT": t for name, t in zip(KERNELS, held, strict=False)}
    mine = dict(zip(KERNELS, own, strict=False)) if own else dict.fromkeys(KERNELS)
    launch_states(
        launch, join_states_kernel, others, 1, **mine, **made, THEIRS=theirs[0], THEIRS32=theirs[1], HAS_OWN=bool(own)
    )
    return held


def fold(kind: Kind, tensors: Tensors) -> list[Tensor]:
    """The state of the keys here; where it is causal also the states of all works."""

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        call = kind.rebuild(tensors)
        fit = fit_forward(call)
        if any(t.requires_grad for t in tensors[: len(ROWS)]):
            fit_backward(kind.rebuild(tensors, make_held(kind, call)) if kind.by_evidence else call)
        with plan.use_device(call.query.device):
            if kind.by_evidence:
                return list(EvidenceForward(call, recording, fit).hold().values())
            launch = Launch(call, recording, fit)
            if not kind.is_causal:
                return launch.fold_sequences()
            w = launch.cut("causal", launch.query_heads, True, False)
            log, mean = launch.fold(w, False)
            return [*launch.merge(merge_kernel, w, LOG=log, MEAN=mean), log, mean]

    return play("fold", kind, tensors, launches)


def make_held(kind: Kind, call: Call) -> list[Tensor]:
    """Of the form of a state, to ask what fits."""
    launch = EvidenceForward(call)
    return list(launch.allocate_held(launch.batch, launch.heads).values())


def read(kind: Kind, tensors: Tensors, folded: Tensors, came: Tensor | None) -> list[Tensor]:
    """(output, the state that was read: where it is causal that of the rows before, if there are any)"""
    theirs = view_state(came)

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        call = kind.rebuild(tensors)
        fit = fit_forward(call)
        with plan.use_device(call.query.device):
            if kind.is_causal:
                launch = Launch(call, recording, fit)
                held = join(launch, (), theirs, kind.before) if kind.before else []
                if held:
                    launch.call = kind.rebuild(tensors, held)
                w = launch.cut("causal", launch.query_heads, True, False)
                launch.carry_prefixes(w, *folded[2:])
                return [launch.read_causally(w), *held]
            if not kind.by_evidence:
                launch = Launch(call, recording, fit)
                held = join(launch, folded, theirs, kind.before)
                return [launch.read(held[0], held[1]), *held]
            by_evidence = EvidenceForward(call, recording, fit)
            held = join(by_evidence, folded, theirs, kind.before)
            return [by_evidence.read_held(dict(zip(KERNELS, held, strict=True))), *held]

    return play("read", kind, (*tensors, *folded, *theirs), launches)


def ask(
    kind: Kind, tensors: Tensors, held: Tensors, came: Tensor | None, grad: Tensor
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """(dq where it is known by now, what `answer` needs, gradients of the states that came)"""
    theirs = view_state(came)

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        call = kind.rebuild(tensors, held if kind.is_causal or kind.by_evidence else ())
        fit = fit_backward(call if kind.by_evidence else kind.rebuild(tensors))
        made = frozenset(("query",)) if kind.makes_query else frozenset()
        with plan.use_device(call.query.device):
            if kind.by_evidence:
                asking: Any = EvidenceBackward(
                    call, held, (grad, None, None, None, None), frozenset(), recording, fit, made
                )
                asking.values |= dict(zip(KERNELS, held, strict=True))
                asking.ask_queries()
                asked = asking.asked
            elif kind.is_causal:
                asking = Backward(call, None, grad, None, None, frozenset(), recording, fit, made)
                asked = ask_causally(kind, asking)
            else:
                asking = Backward(call, (held[0], held[1]), grad, None, None, frozenset(), recording, fit, made)
                dmean, pull = asking.run_queries()
                asked = asking.values | {"DMEAN": dmean, "PULL": pull}
            back = give(kind, asking, held, theirs, asked) if kind.before else []
        first = [asking.gradients["query"]] if kind.makes_query else []
        return [*first, *(asked[name] for name in kind.asked), *back]

    found = play("ask", kind, (*tensors, *held, *theirs, grad), launches)
    dq = found.pop(0) if kind.makes_query else None
    return dq, found[: len(kind.asked)], found[len(kind.asked) :]


def ask_causally(kind: Kind, asking: Backward) -> dict[str, Any]:
    w = asking.ask_causally(*asking.fold_prefixes("causal_queries"))
    asked = asking.values | {"LOG_END": asking.log, "MEAN_END": asking.mean}
    if kind.before:  # of the states after this rank's rows nothing is asked yet
        asked["DMEAN"], asked["PULL"] = carry_back(asking, w, asking.log, asking.mean, None)[1]
    return asked


def carry_back(
    asking: Backward, w: plan.Works, log: Tensor, mean: Tensor, grads: tuple[Tensor, Tensor] | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What is asked of the states after every work, and of the incoming one; grads: of the last one's L and S."""
    suffix, first = asking.allocate_sums(asking.heads * w.works), asking.allocate_sums(asking.batch, asking.heads)
    asking.merge_with(
        suffix_kernel, w, LOG_END=log, MEAN_END=mean, G_LOG=grads and grads[0], G_MEAN=grads and grads[1],
        SUFFIX=suffix[0], SUFFIX_D=suffix[1], REACH_0=first[0], REACH_D0=first[1], HAS_GRAD=grads is not None,
    )  # fmt: skip
    return suffix, first


def give(kind: Kind, asking: Any, held: Tensors, theirs: Tensors, asked: dict[str, Any]) -> list[Tensor]:
    """The gradients of the states that came, a row for each of their ranks."""
    back = [asking.allocate(kind.before, *t.shape, dtype=t.dtype) for t in held]
    made = {f"G_{name}": t for name, t in zip(KERNELS, back, strict=False)}
    given = {name: asked.get(name) for name in ("DMEAN", "PULL", "DKEY", "DENTROPY")}
    launch_states(
        asking, give_states_kernel, kind.before, kind.before, **dict(zip(KERNELS, held, strict=False)),
        THEIRS=theirs[0], THEIRS32=theirs[1], **given, **made,
    )  # fmt: skip
    return back


def answer(
    kind: Kind, tensors: Tensors, own: Tensors, held: Tensors, grad: Tensor, asked: Tensors, came: Tensor | None
) -> list[Tensor]:
    """(dk, dv, and dq where `ask` has not made it); came: gradients of this rank's state."""
    theirs = view_state(came)
    named = dict(zip(kind.asked, asked, strict=True))

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        call = kind.rebuild(tensors, held if kind.is_causal or kind.by_evidence else ())
        fit = fit_backward(call if kind.by_evidence else kind.rebuild(tensors))
        made = frozenset(("key", "value")) if kind.makes_query else WANTED
        take = functools.partial(take_back, kind, own=own, theirs=theirs)
        with plan.use_device(call.query.device):
            if kind.by_evidence:
                answering: Any = answer_by_evidence(call, held, grad, named, take, recording, fit, made)
            elif kind.is_causal:
                answering = Backward(call, None, grad, None, None, frozenset(), recording, fit, made)
                answer_causally(kind, answering, named, take)
            else:
                answering = Backward(call, (held[0], held[1]), grad, None, None, frozenset(), recording, fit, made)
                answering.values |= named
                total = answering.allocate_sums(answering.batch, answering.heads)
                take(answering, held, asked=named, G_MEAN=total[0], PULL_OUT=total[1])
                answering.fold_backward(*total)
        return [answering.gradients[name] for name in ("key", "value", "query") if name in made]

    return play("answer", kind, (*tensors, *own, *held, *theirs, grad, *asked), launches)


def take_back(
    kind: Kind, launch: Any, held: Tensors, asked: dict[str, Any], *, own: Tensors, theirs: Tensors, **made: Any
) -> None:
    usual = dict.fromkeys(("G_LOG", "G_MEAN", "PULL_OUT", "DMEAN", "PULL"))
    launch_states(
        launch, take_states_kernel, kind.after, 1, LOG=held[0], MEAN=held[1], LOG_OWN=own[0], MEAN_OWN=own[1],
        THEIRS=theirs[0], THEIRS32=theirs[1], HAS_OWN=not kind.is_causal, **(usual | asked | made),
    )  # fmt: skip


def answer_causally(kind: Kind, answering: Backward, named: dict[str, Any], take: Any) -> None:
    w = answering.cut("causal_queries", answering.query_heads, True, False)
    end = named["LOG_END"], named["MEAN_END"]
    grads = None
    if kind.after:
        grads = answering.allocate_states(answering.batch, answering.heads)[0], answering.allocate(*end[1].shape)
        take(answering, end, asked={}, G_LOG=grads[0], G_MEAN=grads[1])
    answering.values |= named
    answering.parts = {}
    carry_back(answering, w, *end, grads)
    answering.answer_causally(w)


def answer_by_evidence(
    call: Call, held: Tensors, grad: Tensor, named: dict[str, Any], take: Any, recording: Any, fit: Fit, made: Any
) -> EvidenceBackward:
    answering = EvidenceBackward(call, held, (grad, None, None, None, None), frozenset(), recording, fit, made)
    total = answering.allocate_held(answering.batch, answering.heads)
    take(answering, held, asked=named, **{f"G_{name}": t for name, t in total.items()})
    answering.values |= dict(zip(KERNELS, held, strict=True))
    answering.cut("read_backward", answering.query_heads, False, False)
    answering.values |= {"works": 0, "splits": 0}  # what the queries here ask is in the total
    answering.grads = list(total.values())
    answering.sum_asked(plan.Works(answering.used, answering.tile, 1, 0, 0), named)
    answering.ask_keys()
    return answering
