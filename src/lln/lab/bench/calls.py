"""One call of attention: its inputs, what is timed of it, whether it is right, and why it failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.lab.core.errors import first_line
from lln.lab.core.timing import Timing, Work, time_calls

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the gradient of the output
PARTS = "forward", "training"  # training: forward and backward


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    dim: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} x {self.length:,} x {self.dim}"


@dataclasses.dataclass(frozen=True)
class Case:
    """What an attention is built for."""

    shape: Shape
    causal: bool
    dtype: torch.dtype
    device: torch.device
    dropout: float = 0.0


Build = Callable[[Case], Attend]


def describe_plan(plan: Any) -> dict[str, Any]:
    """The fields of a plan that has a dtype and a device, ready for JSON."""
    return dataclasses.asdict(plan) | {"dtype": str(plan.dtype).removeprefix("torch."), "device": str(plan.device)}


class CheckFailed(Exception):
    """An attention gives a wrong result, so that its time means nothing."""


def draw_inputs(case: Case, seed: int, *, heads_first: bool = True) -> Inputs:
    """Standard normal, drawn on the device: [B, H, N, D], else [B, N, H, D]; q, k and v want gradients."""
    batch, heads, length, dim = case.shape
    sizes = (batch, heads, length, dim) if heads_first else (batch, length, heads, dim)
    torch.manual_seed(seed)
    q, k, v, g = (torch.randn(sizes, dtype=case.dtype, device=case.device) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g


def make_works(attend: Attend, inputs: Inputs) -> dict[str, Work]:
    """What is timed, by PARTS. A gradient is None where a mechanism does not use that input."""
    *leaves, g = inputs

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    return {"forward": forward, "training": lambda: torch.autograd.grad(attend(*leaves), leaves, g, allow_unused=True)}


def time_in_turns(
    works: dict[str, dict[str, Work]], *, repeats: int, device: torch.device
) -> dict[str, dict[str, Timing]]:
    """Of each work and each part: a part of all works in turns, then the next part."""
    times = {
        part: time_calls({name: parts[part] for name, parts in works.items()}, repeats=repeats, device=device)
        for part in PARTS
    }
    return {name: {part: times[part][name] for part in PARTS} for name in works}


def check_call(name: str, build: Build, reference: Build, case: Case, inputs: Inputs, most: float) -> dict[str, float]:
    """Relative errors (2-norm) of output and gradients against the reference in float64.

    Raises:
        CheckFailed: where one is larger than `most`, or the call fails.
    """

    def run(build: Build, case: Case, inputs: Inputs) -> list[Tensor]:
        *leaves, g = inputs
        out = build(case)(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    where = f"{name}{', causal,' if case.causal else ''} at {case.shape} in {str(case.dtype).removeprefix('torch.')}"
    q, k, v, g = (t.detach().double().requires_grad_(t.requires_grad) for t in inputs)
    parts = "out", "gradient of q", "gradient of k", "gradient of v"
    try:
        expected = run(reference, dataclasses.replace(case, dtype=torch.float64), (q, k, v, g))
        got = run(build, case, inputs)
        errors = {part: float((a - b).norm() / b.norm()) for part, a, b in zip(parts, got, expected, strict=True)}
    except Exception as error:
        raise CheckFailed(f"{where} fails: {describe_failure(error)}. Nothing was timed.") from error
    worst = max(errors, key=lambda part: errors[part] if errors[part] >= 0 else float("inf"))
    if not errors[worst] <= most:  # also where it is NaN
        raise CheckFailed(
            f"{where}: {worst} is off by {errors[worst]:.1e} from float64, and {most:.0e} is allowed. "
            "Nothing was timed."
        )
    return errors


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's allocator has an exception of its own; a CPU's says it in words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def describe_failure(error: Exception) -> str:
    """An exception in few words."""
    line = first_line(error, strip="")
    if is_out_of_memory(error):
        asked = [part for part in line.split(". ") if part.startswith("Tried to allocate")]
        return ": ".join(["out of memory", *(part[0].lower() + part[1:] for part in asked)])
    if "No available kernel" in line or "No viable backend" in line:
        return "torch has no such back end for these inputs"
    return line[:160].rstrip(" .")
