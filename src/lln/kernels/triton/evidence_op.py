"""The evidence read's kernels as one differentiable operation. `support` says which calls they take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.kernels.call import FIELDS, TENSORS, Call
from lln.kernels.evidence import SIGNED
from lln.kernels.triton import plan
from lln.kernels.triton.evidence_causal_launch import CausalBackward, CausalForward, direct_signed
from lln.kernels.triton.evidence_directed_launch import DirectedBackward, DirectedForward, direct
from lln.kernels.triton.evidence_launch import HELD, EvidenceBackward, EvidenceForward, Outer
from lln.kernels.triton.fit import DoesNotFit, Fit, find
from lln.kernels.triton.forward import make_like
from lln.kernels.triton.op import ONCE, ROWS, keeps_state
from lln.kernels.triton.tape import Recording, replay, signature

NAMES = (*FIELDS[:TENSORS], "mean_key", "entropy", "directions")  # the tensors of a call
REST = FIELDS[TENSORS:]
Tensors = Sequence[Any]


def take_apart(call: Call) -> tuple[Tensors, Sequence[Any]]:
    """(the tensors of a call, the rest): directions are among the tensors, or a word at the end of the rest."""
    directed = isinstance(call.directions, Tensor)
    tensors = [getattr(call, name) for name in NAMES[:-1]]
    rest = [getattr(call, name) for name in REST]
    return [*tensors, call.directions if directed else None], (*rest, None if directed else call.directions)


def rebuild(tensors: Tensors, rest: Sequence[Any]) -> Call:
    *tensors, way = tensors
    *rest, word = rest
    given = dict(zip(NAMES[:-1], tensors, strict=True)) | dict(zip(REST, rest, strict=True))
    return Call(**given, directions=word if way is None else way, read="evidence")


def name_directions(call: Call) -> Hashable:
    """What decides about kernels."""
    way = call.directions
    return (way.shape[2], way.shape[0] > 1) if isinstance(way, Tensor) else way


def choose_passes(call: Call) -> tuple[type[EvidenceForward], type[EvidenceBackward]]:
    if call.is_causal:
        return CausalForward, CausalBackward
    if isinstance(call.directions, Tensor):
        return DirectedForward, DirectedBackward
    return EvidenceForward, EvidenceBackward


def take_whole(call: Call, part: Call) -> None:
    """The values' channels are not divided: too wide ones are for the eager back end."""
    if part.value.shape[-1] < call.value.shape[-1]:
        raise DoesNotFit(f"values of {call.value.shape[-1]} channels take more than a program has")


def fit_forward(call: Call) -> Fit:
    """Raises DoesNotFit where a kernel fits into the device with no settings; so do the other functions."""

    def rehearse(part: Call, fit: Fit) -> None:
        take_whole(call, part)
        choose_passes(part)[0](part, None, fit).attend()

    return find(call, ("evidence", name_directions(call)), rehearse)


def fit_backward(call: Call, outer: Outer, wanted: frozenset[str]) -> Fit:
    """The state may have to be folded again."""

    def rehearse(part: Call, fit: Fit) -> None:
        take_whole(call, part)
        choose_passes(part)[1](part, None, outer, wanted, None, fit).run()

    grad, *of_state = outer
    assert grad is not None
    missing = tuple(g is None for g in of_state)
    aligned = tuple(step % 16 == 0 for step in grad.stride())
    return find(call, ("evidence", name_directions(call), missing, wanted, aligned), rehearse)


def fit_training(call: Call, tensors: Tensors, fit: Fit) -> None:
    """As `fit_backward`, before there are gradients: of a call some of whose tensors may need one."""
    wanted = frozenset(name for name, t in zip(NAMES, tensors, strict=True) if t is not None and t.requires_grad)
    if wanted and wanted not in fit.trained:
        fit_backward(call, (make_like(call.query, call.value.shape[-1]), None, None, None, None), wanted)
        fit.trained.add(wanted)


def make_key(name: str, tensors: Tensors, rest: Sequence[Any]) -> Hashable:
    """Calls with the same key do the same launches."""
    tf32 = tensors[0].dtype == torch.float32 and plan.is_tf32_allowed()
    return name, tensors[0].device, tf32, tuple(rest), signature(tensors)


def forward(tensors: Tensors, rest: Sequence[Any]) -> Sequence[Tensor]:
    """(out, log_sum, mean_value, mean_key, entropy)"""

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        call = rebuild(tensors, rest)
        fit = fit_forward(call)
        fit_training(call, tensors, fit)
        return choose_passes(call)[0](call, recording, fit).attend()

    return replay(make_key("evidence", tensors, rest), tensors, launches)


def backward(
    tensors: Tensors, held: Tensors, rest: Sequence[Any], outer: Sequence[Tensor | None], needs: Sequence[bool]
) -> Mapping[str, Tensor]:
    """Gradients by the names of a call's fields, of those that it `needs` and that have one. held: the final state
    where it is kept; outer: gradients of what `forward` gave."""

    def launches(recording: Recording | None) -> Mapping[str, Tensor]:
        call = rebuild(tensors, rest)
        grad, *of_state = outer
        if grad is None:
            grad = call.value.new_zeros(()).expand(*call.query.shape[:-1], call.value.shape[-1])
        wanted = frozenset(name for name, need in zip(NAMES, needs, strict=True) if need)
        given = (grad, *of_state)
        fit = fit_backward(call, given, wanted)
        kept = None if held[0] is None else held
        return choose_passes(call)[1](call, kept, given, wanted, recording, fit).run()

    # The gradients of beta and the like are sums that torch does.
    grad = outer[0]
    simple = grad is not None and all(g is None for g in outer[1:]) and not any(needs[len(ROWS) :])
    if grad is None or not simple or any(grad is t for t in tensors):
        return launches(None)

    def rows(recording: Recording | None) -> list[Tensor]:
        found = launches(recording)
        return [found[name] for name in ROWS]

    # Not the forward's key: what comes back through hooks for saved tensors may have other strides.
    given = (*tensors, *held, grad)
    return dict(zip(ROWS, replay(make_key("evidence backward", given, rest), given, rows), strict=True))


class AttendByEvidence(Function):
    @staticmethod
    def forward(ctx: Any, rest: Sequence[Any], *tensors: Any) -> tuple[Tensor, ...]:
        out, *held = forward(tensors, rest)
        kept: Sequence[Tensor | None] = held
        if not keeps_state(False, tensors[0], sum(t.numel() for t in held)):
            kept = [None] * len(HELD)
        ctx.save_for_backward(*tensors, *kept)
        ctx.rest = rest
        ctx.set_materialize_grads(False)
        return out, *held

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: gradients without a graph would count for nothing, silently
            raise RuntimeError(ONCE)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        found = backward(saved[: len(NAMES)], saved[len(NAMES) :], ctx.rest, grads, needs)
        return None, *(found.get(name) if need else None for name, need in zip(NAMES, needs, strict=True))


def apply(call: Call) -> tuple[Tensor, ...]:
    """(out, log_sum, mean_value, mean_key, entropy), differentiable."""
    if call.is_causal and call.query.shape[2] < 2:  # a token sees its state and itself
        call = call.change(is_causal=False)
    if call.is_causal and call.directions == SIGNED:
        call = direct_signed(call)
    tensors, rest = take_apart(direct(call) if isinstance(call.directions, Tensor) else call)
    found: tuple[Tensor, ...] = AttendByEvidence.apply(rest, *tensors)
    return found
