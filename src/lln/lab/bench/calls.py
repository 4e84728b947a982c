"""One call of attention: its inputs, what is timed of it, whether it is right, why it failed; and many of them against
length, which the page shows."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.lab.bench.attentions import ATTENTIONS, Attend, Build, Case, Shape, sdpa
from lln.lab.core.errors import first_line
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Work, peak_memory, time_calls

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the gradient of the output
PARTS = "forward", "training"  # training: forward and backward
CHECK_LENGTH = 257  # odd, so that every block and chunk has an end that is not full
OURS = ("LLN", "LLN+Diag")


class CheckFailed(Exception):
    """An attention gives a wrong result, so that its time means nothing."""


def describe_plan(plan: Any) -> dict[str, Any]:
    """The fields of a plan that has a dtype and a device, ready for JSON."""
    return dataclasses.asdict(plan) | {"dtype": str(plan.dtype).removeprefix("torch."), "device": str(plan.device)}


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
    forward = torch.no_grad()(lambda: attend(*leaves))
    return {"forward": forward, "training": lambda: torch.autograd.grad(attend(*leaves), leaves, g, allow_unused=True)}


def time_in_turns(
    works: dict[str, dict[str, Work]], *, repeats: int, device: torch.device
) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each work and each part, ready for JSON: a part of all works in turns, then the next part."""
    times = {
        part: time_calls({name: parts[part] for name, parts in works.items()}, repeats=repeats, device=device)
        for part in PARTS
    }
    return {name: {part: dataclasses.asdict(times[part][name]) for part in PARTS} for name in works}


def check_attentions(names: Iterable[str], case: Case, seed: int, most: float) -> list[dict[str, Any]]:
    """Relative errors (2-norm) of output and gradients against the reference in float64, of those that have one.

    Raises:
        CheckFailed: where one is larger than `most`, or a call fails: no time is reported for a wrong result.
    """

    def run(build: Build, case: Case, inputs: Inputs) -> list[Tensor]:
        *leaves, g = inputs
        out = build(case)(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    found = []
    inputs = draw_inputs(case, seed)
    q, k, v, g = (t.detach().double().requires_grad_(t.requires_grad) for t in inputs)
    parts = "out", "gradient of q", "gradient of k", "gradient of v"
    for name in names:
        build, reference = ATTENTIONS[name].build, ATTENTIONS[name].reference
        if reference is None:
            continue
        try:
            expected = run(reference, dataclasses.replace(case, dtype=torch.float64), (q, k, v, g))
            got = run(build, case, inputs)
            errors = {part: float((a - b).norm() / b.norm()) for part, a, b in zip(parts, got, expected, strict=True)}
        except Exception as error:
            raise CheckFailed(f"{name}{case} fails: {describe_failure(error)}. Nothing was timed.") from error
        worst = max(errors, key=lambda part: errors[part] if errors[part] >= 0 else float("inf"))
        if not errors[worst] <= most:  # also where it is NaN
            raise CheckFailed(
                f"{name}{case}: {worst} is off by {errors[worst]:.1e} from float64, and {most:.0e} is allowed. "
                "Nothing was timed."
            )
        found.append({"attention": name, "causal": case.causal, "shape": list(case.shape), "errors": errors})
    return found


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


def measure_lengths(
    lengths: Sequence[int], *, repeats: int, seed: int, device: torch.device, progress: Progress = ignore
) -> dict[str, Any]:
    """Time and memory of torch's softmax attention, LLN and LLN+Diag on the same inputs, ready for JSON. `progress`
    hears of each step: two for every length."""
    heads, dim = 12, 64
    check_attentions(OURS, Case(Shape(1, heads, CHECK_LENGTH, dim), False, torch.float32, device), seed, most=1e-5)
    builds = {"softmax": sdpa} | {name: ATTENTIONS[name].build for name in OURS}
    rows: list[dict[str, Any]] = []
    for length in lengths:
        case = Case(Shape(1, heads, length, dim), False, torch.float32, device)
        inputs = draw_inputs(case, seed)
        works = {name: make_works(build(case), inputs) for name, build in builds.items()}
        progress(f"time at length {length}")
        times = time_in_turns(works, repeats=repeats, device=device)
        progress(f"memory at length {length}")
        for name, parts in works.items():
            memory = {f"{part}_bytes": peak_memory(parts[part], device) for part in PARTS}
            rows.append({"attention": name, "length": length, **times[name], **memory})
    what = "time and peak extra memory of one attention call, float32, batch 1"
    machine = {"load": read_load(), "cores": os.cpu_count()}
    return {"what": what, "heads": heads, "dim": dim, **machine, "provenance": provenance(seed, device), "rows": rows}


def read_load() -> float | None:
    """How many processes wanted a core in the last minute, on average, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
