"""`lln bench`: a check, then time and memory of every attention at every shape, one row each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.lab.bench.attentions import ATTENTIONS, BLOCK_SIZE, Attention, Build, Case, Shape
from lln.lab.bench.length_times import ALPHA, BETA
from lln.lab.bench.ratios import derive
from lln.lab.bench.replay import HOW, copy_bandwidth, device_time, host_time
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Timing, Work, peak_memory, time_calls

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CHECK_BATCH, CHECK_LENGTH = 2, 257  # odd, so that every block and chunk has an end that is not full
LONGEST_CALL_MS = 20_000.0
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the gradient of the output


class CheckFailed(Exception):
    """An attention gives a wrong result, so that its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Plan:
    shapes: list[Shape]
    names: list[str]  # of ATTENTIONS
    causality: list[bool]
    dtype: torch.dtype
    device: torch.device
    repeats: int
    seed: int
    tokens: int | None = None  # a batch, where the batch follows from the length
    dropout: float = 0.0  # in what is timed; what is checked has none

    def chosen(self, causal: bool) -> list[str]:
        return [name for name in self.names if causal in ATTENTIONS[name].causality]

    def steps(self) -> int:
        """How often `measure` reports progress."""
        turns = 1 if self.device.type == "cpu" else 0
        return 2 + len(self.shapes) * sum(
            len(self.chosen(causal)) + turns for causal in self.causality if self.chosen(causal)
        )


@dataclasses.dataclass
class Row:
    """An attention at a shape. Where it could not be measured, `error` says why and the times are None."""

    attention: str
    causal: bool
    batch: int
    heads: int
    length: int
    dim: int
    device_ms: dict[str, Timing] | None = None  # forward, training (forward and backward)
    host_ms: Timing | None = None  # of training, on CUDA
    training_bytes: int | None = None
    graph: bool | None = None  # on CUDA: whether device_ms comes from CUDA graphs
    error: str | None = None


def measure(
    plan: Plan,
    *,
    store: Callable[[dict[str, Any]], None] = lambda result: None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The result, ready for JSON. `store` gets it after each shape: what a killed run had measured is not lost."""
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else contextlib.nullcontext():
        progress("check")
        checks = check(plan)
        progress("copy bandwidth")
        result: dict[str, Any] = {
            "what": "time and peak extra memory of one attention call: forward, and forward + backward (training)",
            "how": HOW[plan.device.type],
            "settings": settings(plan),
            "provenance": provenance(plan.seed, plan.device),
            "copy_bytes_per_second": copy_bandwidth(plan.device),
            "checks": checks,
            "finished": False,
            "rows": [],
        }
        for shape in plan.shapes:
            for causal in plan.causality:
                if plan.chosen(causal):
                    result["rows"] += measure_shape(plan, shape, causal, result["rows"], progress)
            derive(result)
            store(result)
    result["finished"] = True
    store(result)
    return result


def settings(plan: Plan) -> dict[str, Any]:
    return {
        "device": str(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "attentions": plan.names,
        "shapes": [list(shape) for shape in plan.shapes],
        "tokens": plan.tokens,
        "causal": plan.causality,
        "dropout": plan.dropout,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "alpha": ALPHA,
        "beta": BETA,
        "block_size": BLOCK_SIZE,
    }


def inputs(plan: Plan, shape: Shape, heads_first: bool = True) -> Inputs:
    batch, heads, length, dim = shape
    sizes = (batch, heads, length, dim) if heads_first else (batch, length, heads, dim)
    torch.manual_seed(plan.seed)
    q, k, v, g = (torch.randn(sizes, dtype=plan.dtype, device=plan.device) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), g


def check(plan: Plan) -> list[dict[str, Any]]:
    """Outputs and gradients of every LLN variant that will be timed, in the dtype of the run, against the eager back
    end in float64. The relative errors; raises CheckFailed where one is too large."""
    found = []
    for heads, dim in sorted({(shape.heads, shape.dim) for shape in plan.shapes}):
        shape = Shape(CHECK_BATCH, heads, CHECK_LENGTH, dim)
        given = inputs(plan, shape)
        for causal in plan.causality:
            for name in plan.chosen(causal):
                attention = ATTENTIONS[name]
                if attention.reference is None:
                    continue
                case = Case(shape, causal, plan.dtype, plan.device)
                where = f"{name}{', causal,' if causal else ''} at {shape} in {str(plan.dtype).removeprefix('torch.')}"
                try:
                    errors = compare(attention.build, attention.reference, case, given)
                except Exception as error:
                    raise CheckFailed(f"{where} fails: {sentence(error)}. Nothing was timed.") from error
                worst = max(errors, key=lambda part: errors[part] if errors[part] >= 0 else float("inf"))
                if not errors[worst] <= TOLERANCE[plan.dtype]:  # also where it is NaN
                    raise CheckFailed(
                        f"{where}: {worst} is off by {errors[worst]:.1e} from float64, and {TOLERANCE[plan.dtype]:.0e} "
                        "is allowed. Nothing was timed."
                    )
                found.append({"attention": name, "causal": causal, "shape": list(shape), "errors": errors})
    return found


def compare(build: Build, reference: Build, case: Case, given: Inputs) -> dict[str, float]:
    def results(attend: Build, case: Case, given: list[Tensor]) -> list[Tensor]:
        q, k, v, g = given
        out = attend(case)(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), g)]

    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    expected = results(reference, dataclasses.replace(case, dtype=torch.float64), wide)
    got = results(build, case, list(given))
    parts = "out", "gradient of q", "gradient of k", "gradient of v"
    return {part: float((a - b).norm() / b.norm()) for part, a, b in zip(parts, got, expected, strict=True)}


def measure_shape(
    plan: Plan, shape: Shape, causal: bool, earlier: list[dict[str, Any]], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    rows: list[Row] = []
    turns: dict[str, dict[str, Work]] = {}
    for name in plan.chosen(causal):
        progress(f"{name}{', causal' if causal else ''}: {shape}")
        row, attention = Row(name, causal, *shape), ATTENTIONS[name]
        rows.append(row)
        row.error = too_much(name, attention, Case(shape, causal, plan.dtype, plan.device), earlier)
        if row.error:
            continue
        try:
            # torch tells in warnings why a back end does not take the inputs; the row says that it does not.
            with warnings.catch_warnings(), attention.context():
                warnings.simplefilter("ignore", UserWarning)
                calls = works(plan, attention, shape, causal)
                row.training_bytes = peak_memory(calls["training"], plan.device)
                if plan.device.type == "cuda":
                    measure_on_cuda(row, calls, plan)
                else:
                    turns[name] = calls
        except Exception as error:  # out of memory, no such back end: a result, and no reason to stop
            row.error = sentence(error)
    if plan.device.type == "cpu":
        progress(f"{shape}: all in turns")
        measure_in_turns([row for row in rows if row.attention in turns], turns, plan)
    return [dataclasses.asdict(row) for row in rows]


def works(plan: Plan, attention: Attention, shape: Shape, causal: bool) -> dict[str, Work]:
    q, k, v, g = inputs(plan, shape, attention.heads_first)
    attend = attention.build(Case(shape, causal, plan.dtype, plan.device, plan.dropout))

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    return {"forward": forward, "training": lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), g)}


def measure_on_cuda(row: Row, calls: dict[str, Work], plan: Plan) -> None:
    row.host_ms = host_time(calls["training"], plan.device)
    found = {part: device_time(work, repeats=plan.repeats, device=plan.device) for part, work in calls.items()}
    row.device_ms = {part: timing for part, (timing, _) in found.items()}
    row.graph = all(graph for _, graph in found.values())


def measure_in_turns(rows: list[Row], turns: dict[str, dict[str, Work]], plan: Plan) -> None:
    def within(name: str, work: Work) -> Work:
        def call() -> Any:
            with ATTENTIONS[name].context():
                return work()

        return call

    times = {
        part: time_calls(
            {name: within(name, calls[part]) for name, calls in turns.items()}, repeats=plan.repeats, device=plan.device
        )
        for part in ("forward", "training")
    }
    for row in rows:
        row.device_ms = {part: found[row.attention] for part, found in times.items()}


def too_much(name: str, attention: Attention, case: Case, earlier: list[dict[str, Any]]) -> str | None:
    """Why a quadratic attention is not worth trying at this shape."""
    if not attention.softmax:
        return None
    batch, heads, length, dim = case.shape
    if attention.matrix and case.device.type == "cpu":
        # P, its logarithm and their gradients. Linux ends a process that asks for more than there is.
        needed = 4 * batch * heads * length**2 * case.dtype.itemsize
        if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2:
            return f"skipped: would need about {needed / 2**30:,.0f} GiB"
    known = [row for row in earlier if (row["attention"], row["causal"]) == (name, case.causal) and row["device_ms"]]
    if not known:
        return None
    last = known[-1]
    before = last["batch"] * last["heads"] * last["length"] ** 2 * last["dim"]
    estimate = last["device_ms"]["training"]["median"] * batch * heads * length**2 * dim / before
    if estimate > LONGEST_CALL_MS:
        return f"skipped: about {estimate / 1e3:,.0f} s a call, judged by length {last['length']:,}"
    return None


def sentence(error: Exception) -> str:
    """An exception in few words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in lines[0]:
        asked = [part for part in lines[0].split(". ") if part.startswith("Tried to allocate")]
        return ": ".join(["out of memory", *(part[0].lower() + part[1:] for part in asked)])
    if "No available kernel" in lines[0] or "No viable backend" in lines[0]:
        return "torch has no such back end for these inputs"
    return lines[0][:160].rstrip(" .")
