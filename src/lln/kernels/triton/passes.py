"""A pass of a call as a device has room for it: at once, or by parts of the values' channels, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.kernels.call import FIELDS, TENSORS, VALUE, Call, list_marked
from lln.kernels.triton.backward import Backward
from lln.kernels.triton.fit import Fit, find
from lln.kernels.triton.forward import Launch, make_like
from lln.kernels.triton.tape import Recording

Gradients = Mapping[str, Tensor]
Outer = tuple[Tensor, Tensor | None, Tensor | None]  # gradients of the output, of log_sum, of mean_value


def fit_forward(call: Call) -> Fit:
    """Raises DoesNotFit where a kernel fits into the device with no settings; so do the other functions."""
    return find(call, "forward", lambda part, fit: Launch(part, None, fit).forward())


def fit_backward(call: Call, final: tuple[Tensor, Tensor] | None, outer: Outer, wanted: frozenset[str]) -> Fit:
    grad, grad_log, grad_mean = outer

    def rehearse(part: Call, fit: Fit) -> None:
        of = slice(part.value.shape[-1])
        state = None if final is None else (final[0], final[1][..., of].contiguous())
        mean = None if grad_mean is None else grad_mean[..., of]
        Backward(part, state, grad[..., of], grad_log, mean, wanted, None, fit).run()

    asked = final is None, grad_log is None, grad_mean is None, wanted, *(step % 16 == 0 for step in grad.stride())
    return find(call, asked, rehearse)


def fit_training(call: Call, fit: Fit) -> None:
    """As `fit_backward`, before there are gradients: of a call some of whose tensors may need one."""
    tensors = zip(FIELDS[:TENSORS], call.arguments(), strict=False)
    wanted = frozenset(name for name, t in tensors if t is not None and t.requires_grad)
    if wanted and wanted not in fit.trained:
        grad = make_like(call.query, call.value.shape[-1])
        fit_backward(call, None, (grad, None, None), wanted)
        fit.trained.add(wanted)


def list_slices(width: int, part: int) -> list[slice]:
    return [slice(i, i + part) for i in range(0, width, part)]


def run_forward(
    call: Call, recording: Recording | None, forward: Callable[[Sequence[Any]], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """(out, log_sum, mean_value); forward: the same of the arguments of a part."""
    fit, width = fit_forward(call), call.value.shape[-1]
    fit_training(call, fit)
    if width <= fit.part:
        return Launch(call, recording, fit).forward()
    # Attention is linear in the values.
    parts = [forward(call.narrow(channels).arguments()) for channels in list_slices(width, fit.part)]
    outs, log_sums, means = zip(*parts, strict=True)
    out = make_like(call.query, width)
    torch.cat(outs, -1, out=out)
    return out, log_sums[0], torch.cat(means, -1)


def run_backward(
    call: Call, final: tuple[Tensor, Tensor] | None, outer: Outer, wanted: frozenset[str], recording: Recording | None
) -> Gradients:
    """By the names of a call's fields. final: the state, where it was kept."""
    fit, width = fit_backward(call, final, outer, wanted), call.value.shape[-1]
    if width <= fit.part:
        return Backward(call, final, *outer, wanted, recording, fit).run()
    grad, grad_log, grad_mean = outer
    parts = []
    for channels in list_slices(width, fit.part):
        state = None if final is None else (final[0], final[1][..., channels].contiguous())
        mean = None if grad_mean is None else grad_mean[..., channels]
        part = call.narrow(channels), state, (grad[..., channels], grad_log, mean), wanted, None
        parts.append(run_backward(*part))
        grad_log = None  # each part has the whole of log_sum
    return {name: merge(call, name, [part[name] for part in parts]) for name in parts[0]}


def merge(call: Call, name: str, parts: Sequence[Tensor]) -> Tensor:
    """The gradient of a field from those of the parts: side by side where it has the values' channels, or a sum."""
    t: Tensor = getattr(call, name)
    if name not in list_marked(VALUE) or t.shape[-1] == 1:
        return sum(parts[1:], parts[0])
    if name != "value":
        return torch.cat(list(parts), -1)
    whole = make_like(t, t.shape[-1])
    torch.cat(list(parts), -1, out=whole)
    return whole
