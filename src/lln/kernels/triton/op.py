"""The Triton kernels as one differentiable operation.

An eager call goes through an autograd function, which is lean. Under torch.compile the same launches are the operator
`lln::attend`, opaque to the compiler, with `lln::attend_backward` as its gradient. Both take `Call.arguments`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.kernels.call import FIELDS, SCHEMA, TENSORS, Call
from lln.kernels.triton import plan
from lln.kernels.triton.fit import DoesNotFit
from lln.kernels.triton.forward import make_like
from lln.kernels.triton.library import LIBRARY, define
from lln.kernels.triton.passes import run_backward, run_forward
from lln.kernels.triton.tape import Recording, replay, signature

FREE = 2**18  # numbers of a state that may be kept in any case
CAUSAL = FIELDS.index("is_causal")
ROWS = ("query", "key", "value")  # FIELDS begins with them
ONCE = (
    "the Triton kernels of lln_attention have no second derivative; "
    "pass backend='eager' where you need one (create_graph=True, gradient penalties)."
)
TRANSFORMED = (
    "the Triton kernels of lln_attention have no rules for torch.func; pass backend='eager' for its gradients."
)
TOO_LARGE = "the Triton kernels of lln_attention do not fit into this device"

Grads = tuple[Tensor | None, ...]


def keeps_state(is_causal: bool, query: Tensor, size: Any) -> bool:
    """Whether the final state, of so many numbers, is kept for the backward pass: where it takes no more than a number
    for each row, which is what softmax kernels keep, or next to nothing. Otherwise the keys are folded again, as causal
    ones always are. Where a compiler does not know the sizes it is kept: to compare them would tie the graph to some
    lengths."""
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    known = isinstance(rows, int) and isinstance(size, int)
    return not (is_causal or (known and size > max(rows, FREE)))


def make_key(args: Sequence[Any]) -> Hashable:
    """Calls with the same key do the same launches."""
    tf32 = args[0].dtype == torch.float32 and plan.is_tf32_allowed()
    return args[0].device, tf32, tuple(args[TENSORS:]), signature(args[:TENSORS])


def forward(args: Sequence[Any]) -> Sequence[Tensor]:
    """(out, log_sum, mean_value)"""

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        return run_forward(Call(*args), recording, forward)

    return replay(make_key(args), args[:TENSORS], launches, args[TENSORS:])


def backward(tensors: Sequence[Any], rest: Sequence[Any], grads: Any, needs: Sequence[bool]) -> Mapping[str, Tensor]:
    """Gradients by the names of FIELDS, of those that it `needs` and that have one. `tensors` are those given to the
    forward, and its final state where that is kept; `rest` its other arguments."""
    *given, log, mean = tensors
    grad, grad_log, grad_mean = grads

    def launches(recording: Recording | None) -> Mapping[str, Tensor]:
        call = Call(*given, *rest)
        zeros = call.value.new_zeros(()).expand(*call.query.shape[:-1], call.value.shape[-1])
        wanted = frozenset(name for name, need in zip(FIELDS, needs, strict=True) if need)
        final = None if log is None else (log, mean)
        return run_backward(call, final, (zeros if grad is None else grad, grad_log, grad_mean), wanted, recording)

    # The gradients of alpha and the like are sums that torch does.
    simple = grad is not None and grad_log is None and grad_mean is None and not any(needs[len(ROWS) :])
    if not simple or any(grad is t for t in tensors):
        return launches(None)

    def rows(recording: Recording | None) -> list[Tensor]:
        found = launches(recording)
        return [found[name] for name in ROWS]

    return dict(zip(ROWS, replay(backward_key(tensors, rest, grad), (*tensors, grad), rows), strict=True))


def backward_key(tensors: Sequence[Any], rest: Sequence[Any], grad: Tensor) -> Hashable:
    """Not the forward's key: what comes back through hooks for saved tensors may have other strides."""
    *given, log, mean = tensors
    return "backward", make_key((*given, *rest)), signature((log, mean, grad))


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    """What the backward pass needs: the inputs and, where `keeps_state` says so, the final state."""
    state = output[1:] if keeps_state(inputs[CAUSAL], inputs[0], output[2].numel()) else (None, None)
    ctx.save_for_backward(*inputs[:TENSORS], *state)
    ctx.rest = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


class Attend(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = forward(args)
        keep_inputs(ctx, args, output)
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Grads:
        if torch.is_grad_enabled():  # create_graph: gradients without a graph would count for nothing, silently
            raise RuntimeError(ONCE)
        found = backward(ctx.saved_tensors, ctx.rest, grads, ctx.needs_input_grad)
        return tuple(found.get(name) if n else None for name, n in zip(FIELDS, ctx.needs_input_grad, strict=True))


@contextlib.contextmanager
def explain_lack() -> Iterator[None]:
    """A compiled graph cannot take the other back end when it runs."""
    try:
        yield
    except DoesNotFit as lack:
        raise RuntimeError(f"{TOO_LARGE} ({lack}); pass backend='eager' where it is compiled.") from lack


def attend(*args: Any) -> tuple[Tensor, ...]:
    with explain_lack():
        return tuple(forward(args))


def fake_attend(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*args)
    query, key, width = call.query, call.key, call.value.shape[3]
    batch = query.shape[0] if call.cu_query is None else call.cu_query.shape[0] - 1
    state = batch, key.shape[1], key.shape[3]
    log = query.new_empty(state, dtype=torch.float64)
    return make_like(query, width), log, query.new_empty((*state, width), dtype=torch.float32)


def attend_backward(*given: Any) -> list[Tensor]:
    """The gradients of the FIELDS that `needs` (one for each) asks for, in their order."""
    grad, grad_log, grad_mean, log, mean, *args, needs = given
    with explain_lack():
        found = backward((*args[:TENSORS], log, mean), args[TENSORS:], (grad, grad_log, grad_mean), needs)
    asked = [(name, t) for name, t, need in zip(FIELDS, args, needs, strict=True) if need]
    return [found[name] if name in found else torch.zeros_like(t).contiguous() for name, t in asked]


def fake_attend_backward(*given: Any) -> list[Tensor]:
    _grad, _grad_log, _grad_mean, _log, _mean, *args, needs = given
    asked = [(name, t) for name, t, need in zip(FIELDS, args, needs, strict=True) if need]
    return [make_like(t, t.shape[3]) if name in ROWS else t.new_empty(t.shape) for name, t in asked]


OUTER = "Tensor grad, Tensor? grad_log, Tensor? grad_mean, Tensor? kept_log, Tensor? kept_mean"
FIXED = torch.Tag.needs_fixed_stride_order  # results are laid out as arguments are
define(f"attend({SCHEMA}) -> (Tensor, Tensor, Tensor)", attend, fake_attend, FIXED)
define(f"attend_backward({OUTER}, {SCHEMA}, bool[] needs) -> Tensor[]", attend_backward, fake_attend_backward, FIXED)


def op_backward(ctx: Any, *grads: Any) -> Grads:
    *tensors, log, mean = ctx.saved_tensors
    grad, grad_log, grad_mean = grads
    if grad is None:
        query, value = tensors[0], tensors[2]
        grad = query.new_zeros(*query.shape[:-1], value.shape[-1])
    needs = list(ctx.needs_input_grad)
    found = iter(torch.ops.lln.attend_backward(grad, grad_log, grad_mean, log, mean, *tensors, *ctx.rest, needs))
    return tuple(next(found) if need else None for need in needs)


def refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(ONCE)


torch.library.register_autograd("lln::attend", op_backward, setup_context=keep_inputs, lib=LIBRARY)
# Without one, torch would warn and take it for zero.
torch.library.register_autograd("lln::attend_backward", refuse_second_derivative, lib=LIBRARY)


def apply(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, log_sum, mean_value), differentiable, of `Call.arguments`."""
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():  # a compiled jvp would be zero, silently
            raise RuntimeError(TRANSFORMED)
        compiled: tuple[Tensor, Tensor, Tensor] = torch.ops.lln.attend(*args)
        return compiled
    result: tuple[Tensor, Tensor, Tensor] = Attend.apply(*args)
    return result
