"""What distillation and fine-tuning share: batches in an order that the seed decides, and Adam with a state that can be
put away after any step and taken up again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WARMUP = 10  # steps over which the rate rises; then it falls in a straight line to 0
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class NotFinite(ArithmeticError):
    """A loss is NaN or infinite."""


class Learner:
    """Adam on named parameters, each with a rate of its own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Mapping[str, float], steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a positive int; got {steps!r}.")
        self.parameters, self.rates, self.steps, self.done = dict(parameters), rates, steps, 0
        groups = [{"params": [parameter], "lr": rates[name]} for name, parameter in self.parameters.items()]
        self.adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
        self.adam.zero_grad()

    def step(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NotFinite(f"The loss is {loss} at step {self.done + 1}; a lower rate may help.")
        factor = min(1.0, (self.done + 1) / WARMUP) * (1.0 - self.done / self.steps)
        for group, name in zip(self.adam.param_groups, self.parameters, strict=True):
            group["lr"] = factor * self.rates[name]
        self.adam.step()
        self.adam.zero_grad()
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        """The parameters and what Adam knows about them, by names."""
        found = {}
        for name, parameter in self.parameters.items():
            found[name] = parameter.detach()
            for moment, value in self.adam.state[parameter].items():
                found[f"{name}/{moment}"] = value
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], done: int) -> None:
        """Go on from a state after so many steps."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])
            held = {moment: state[f"{name}/{moment}"] for moment in MOMENTS if f"{name}/{moment}" in state}
            self.adam.state[parameter] = {
                moment: value.clone() if moment == "step" else value.to(parameter, copy=True)
                for moment, value in held.items()
            }
        self.done = done


def choose(batches: Sequence[Any], step: int, seed: int) -> Any:
    """The batch of a step: all of them once, in an order of its own, before any comes again."""
    epoch, at = divmod(step, len(batches))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return batches[int(torch.randperm(len(batches), generator=generator)[at])]


def relative(student: Tensor, teacher: Tensor, rows: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    """Squared error over the squared size of what is wanted, both summed over `dims`; a mean over the rest. Rows that
    are padding, False in `rows` [B, N], do not count. Both [B, N, ...]."""
    error, size = (student - teacher).square(), teacher.square()
    if rows is not None:
        shape = [*rows.shape, *[1] * (teacher.ndim - 2)]
        error, size = (torch.where(rows.view(shape), t, 0.0) for t in (error, size))
    return (error.sum(dims) / size.sum(dims).clamp_min(torch.finfo(size.dtype).tiny)).mean()


def check_batches(batches: Sequence[Any]) -> None:
    if not isinstance(batches, Sequence):
        raise TypeError(f"batches must be a list, since they are gone through again; got {type(batches).__name__}.")
    if not batches:
        raise ValueError("batches must hold at least one batch; it is empty.")
