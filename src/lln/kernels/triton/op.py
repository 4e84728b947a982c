"""The Triton kernels as one differentiable operation.

An eager call goes through an autograd function, which is lean. Under torch.compile the same launches are the operator
`lln::attend`, opaque to the compiler, with `lln::attend_backward` as its gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.kernels.triton import plan
from lln.kernels.triton.backward import Backward, Gradients, Wanted
from lln.kernels.triton.forward import Arguments, Launch, like
from lln.kernels.triton.library import LIBRARY, define
from lln.kernels.triton.tape import Recording, replayed, signature

FIELDS = [field.name for field in dataclasses.fields(Arguments)]
DIFFERENTIABLE = [field.name for field in dataclasses.fields(Gradients)]
PLACES = [FIELDS.index(name) for name in DIFFERENTIABLE]
TENSORS = FIELDS.index("block_size")  # the arguments before it are tensors
EXTRA = PLACES[3:]  # all but query, key and value
ALPHA, BETA, LLN, BLOCK = (FIELDS.index(name) for name in ("alpha", "beta", "lln_weight", "block_weight"))
CAUSAL = FIELDS.index("is_causal")
FREE = 2**18  # numbers of a state that may be kept in any case

Grads = tuple[Tensor | None, ...]


def wanted(needs: Any) -> Wanted:
    return Wanted(needs[ALPHA], needs[BETA], needs[LLN] or needs[BLOCK])


def kept(causal: bool, query: Tensor, log: Tensor, mean: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The final state as it is kept for the backward pass: where it takes no more than a number for each row, which is
    what softmax kernels keep, or next to nothing. Otherwise the keys are folded again, as causal ones always are.
    Where a compiler does not know the sizes it is kept: to compare them would tie the graph to some lengths."""
    rows, size = query.shape[0] * query.shape[1] * query.shape[2], mean.numel()
    known = isinstance(rows, int) and isinstance(size, int)
    return (None, None) if causal or (known and size > max(rows, FREE)) else (log, mean)


def gradients(
    a: Arguments, log: Tensor | None, mean: Tensor | None, grads: Any, needs: Any, recording: Recording | None = None
) -> Gradients:
    grad, grad_log, grad_mean = grads
    if grad is None:
        grad = a.value.new_zeros(()).expand(*a.query.shape[:-1], a.value.shape[-1])
    final = None if log is None or mean is None else (log, mean)
    return Backward(a, final, grad, grad_log, grad_mean, wanted(needs), recording).run()


def key_of(args: Sequence[Any]) -> Hashable:
    """Calls with the same key do the same launches."""
    tf32 = args[0].dtype == torch.float32 and plan.tf32_allowed()
    return args[0].device, tf32, tuple(args[TENSORS:]), signature(args[:TENSORS])


def forward(args: Sequence[Any]) -> Sequence[Tensor]:
    """(out, log_sum, mean_value)"""
    return replayed(key_of(args), args[:TENSORS], lambda recording: Launch(Arguments(*args), recording).forward())


def backward(tensors: Sequence[Any], rest: Sequence[Any], grads: Any, needs: Any) -> Gradients:
    """`tensors` are those given to the forward, and what is `kept`; `rest` its other arguments."""
    *given, log, mean = tensors

    def launches(recording: Recording | None) -> Gradients:
        return gradients(Arguments(*given, *rest), log, mean, grads, needs, recording)

    # The gradients of alpha and the like are sums that torch does.
    simple = grads[0] is not None and grads[1] is None and grads[2] is None and not any(map(needs.__getitem__, EXTRA))
    if not simple or any(grads[0] is t for t in tensors):
        return launches(None)
    # Not the forward's key: what comes back through hooks for saved tensors may have other strides.
    key = ("backward", key_of((*given, *rest)), signature((log, mean, grads[0])))
    return Gradients(*replayed(key, (*tensors, grads[0]), lambda recording: launches(recording).rows))


class Attend(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        out, log, mean = forward(args)
        ctx.save_for_backward(*args[:TENSORS], *kept(args[CAUSAL], args[0], log, mean))
        ctx.rest = args[TENSORS:]
        ctx.set_materialize_grads(False)
        return out, log, mean

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Grads:
        if torch.is_grad_enabled():  # create_graph: gradients without a graph would count for nothing, silently
            raise RuntimeError(ONCE)
        result = backward(ctx.saved_tensors, ctx.rest, grads, ctx.needs_input_grad)
        places: list[Tensor | None] = [None] * len(FIELDS)
        for place, name in zip(PLACES, DIFFERENTIABLE, strict=True):
            if ctx.needs_input_grad[place]:
                places[place] = getattr(result, name)
        return tuple(places)


ONCE = (
    "the Triton kernels of lln_attention have no second derivative; "
    "pass backend='eager' where you need one (create_graph=True, gradient penalties)."
)


TRANSFORMED = (
    "the Triton kernels of lln_attention have no rules for torch.func; pass backend='eager' for its gradients."
)

GIVEN = ", ".join([f"Tensor {n}" for n in FIELDS[:LLN]] + [f"Tensor? {n}" for n in FIELDS[LLN:TENSORS]])
GIVEN += ", SymInt? block_size, bool is_causal, float scale, float dropout"
OUTER = "Tensor grad, Tensor? grad_log, Tensor? grad_mean, Tensor? kept_log, Tensor? kept_mean"


def attend(*args: Any) -> tuple[Tensor, ...]:
    return tuple(forward(args))


def fake_attend(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    cu_query = args[5]
    batch = query.shape[0] if cu_query is None else cu_query.shape[0] - 1
    state = batch, key.shape[1], key.shape[3]
    log = query.new_empty(state, dtype=torch.float64)
    return like(query, value.shape[3]), log, query.new_empty((*state, value.shape[3]), dtype=torch.float32)


def attend_backward(grad: Tensor, grad_log: Any, grad_mean: Any, log: Any, mean: Any, *rest: Any) -> list[Tensor]:
    """The gradients of DIFFERENTIABLE that `needs` (one for each argument) asks for, in that order."""
    *args, needs = rest
    tensors = (*args[:TENSORS], log, mean)
    result = backward(tensors, args[TENSORS:], (grad, grad_log, grad_mean), needs)
    found = []
    for place, name in zip(PLACES, DIFFERENTIABLE, strict=True):
        if needs[place]:
            gradient = getattr(result, name)
            found.append(torch.zeros_like(args[place]).contiguous() if gradient is None else gradient)
    return found


def fake_attend_backward(grad: Tensor, grad_log: Any, grad_mean: Any, log: Any, mean: Any, *rest: Any) -> list[Tensor]:
    *args, needs = rest
    fakes: list[Tensor] = []
    for place, name in zip(PLACES, DIFFERENTIABLE, strict=True):
        if needs[place]:
            t = args[place]
            fakes.append(like(t, t.shape[3]) if name in ("query", "key", "value") else t.new_empty(t.shape))
    return fakes


FIXED = torch.Tag.needs_fixed_stride_order  # results are laid out as arguments are
define(f"attend({GIVEN}) -> (Tensor, Tensor, Tensor)", attend, fake_attend, FIXED)
define(f"attend_backward({OUTER}, {GIVEN}, bool[] needs) -> Tensor[]", attend_backward, fake_attend_backward, FIXED)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *kept(inputs[CAUSAL], inputs[0], *output[1:]))
    ctx.rest = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def op_backward(ctx: Any, *grads: Any) -> Grads:
    *tensors, log, mean = ctx.saved_tensors
    grad, grad_log, grad_mean = grads
    if grad is None:
        query, value = tensors[0], tensors[2]
        grad = query.new_zeros(*query.shape[:-1], value.shape[-1])
    needs = list(ctx.needs_input_grad)
    found = iter(torch.ops.lln.attend_backward(grad, grad_log, grad_mean, log, mean, *tensors, *ctx.rest, needs))
    places: list[Tensor | None] = [None] * len(FIELDS)
    for place in PLACES:
        if needs[place]:
            places[place] = next(found)
    return tuple(places)


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(ONCE)


torch.library.register_autograd("lln::attend", op_backward, setup_context=setup_context, lib=LIBRARY)
# Without one, torch would warn and take it for zero.
torch.library.register_autograd("lln::attend_backward", no_second_derivative, lib=LIBRARY)


def apply(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, log_sum, mean_value), differentiable; the fields of Arguments."""
    if torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():  # a compiled jvp would be zero, silently
            raise RuntimeError(TRANSFORMED)
        compiled: tuple[Tensor, Tensor, Tensor] = torch.ops.lln.attend(*args)
        return compiled
    result: tuple[Tensor, Tensor, Tensor] = Attend.apply(*args)
    return result


def sample_calls(device: str) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Small calls of the operators, for torch.library.opcheck."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    def factor(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).add(1.0).to(device).requires_grad_()

    nothing = [None] * (TENSORS - 7)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for causal in (False, True):
        rows = draw(1, 2, 20, 16), draw(1, 1, 20, 16), draw(1, 1, 20, 16)
        plain = factor(1, 2, 1), factor(1, 1, 16), None, None
        mixed = factor(1, 1, 1), factor(1, 1, 1), factor(1, 2, 1), factor(1, 1, 1)
        for factors, size in ((plain, None), (mixed, 8)):
            args = (*rows, *factors, *nothing, size, causal, 0.25, 0.0)
            calls.append((torch.ops.lln.attend.default, args, {}))
    return calls
