"""`lln bench`: a check, then time and memory of every attention at every shape, one row each."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lln.lab.bench.attentions import ALPHA, ATTENTIONS, BETA, BLOCK_SIZE, Attention
from lln.lab.bench.calls import (
    Case,
    Shape,
    check_call,
    describe_failure,
    describe_plan,
    draw_inputs,
    make_works,
    time_in_turns,
)
from lln.lab.bench.kernel_plan import Plan
from lln.lab.bench.ratios import derive
from lln.lab.bench.replay import HOW, measure_bandwidth, time_device, time_host
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Timing, Work, peak_memory

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CHECK_BATCH, CHECK_LENGTH = 2, 257  # odd, so that every block and chunk has an end that is not full
LONGEST_CALL_MS = 20_000.0
Store = Callable[[dict[str, Any]], None]


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


def measure(plan: Plan, *, store: Store = ignore, progress: Progress = ignore) -> dict[str, Any]:
    """The result, ready for JSON. `store` gets it after each shape: what a killed run had measured is not lost."""
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else contextlib.nullcontext():
        progress("check")
        checks = check_plan(plan)
        progress("copy bandwidth")
        result: dict[str, Any] = {
            "what": "time and peak extra memory of one attention call: forward, and forward + backward (training)",
            "how": HOW[plan.device.type],
            "settings": describe_plan(plan) | {"alpha": ALPHA, "beta": BETA, "block_size": BLOCK_SIZE},
            "provenance": provenance(plan.seed, plan.device),
            "copy_bytes_per_second": measure_bandwidth(plan.device),
            "checks": checks,
            "finished": False,
            "rows": [],
        }
        for shape in plan.shapes:
            for causal in plan.causal:
                if plan.choose(causal):
                    result["rows"] += measure_shape(plan, shape, causal, result["rows"], progress)
            derive(result)
            store(result)
    result["finished"] = True
    store(result)
    return result


def check_plan(plan: Plan) -> list[dict[str, Any]]:
    """Outputs and gradients of every LLN variant that will be timed, in the dtype of the run. The relative errors;
    raises CheckFailed where one is too large."""
    found = []
    for heads, dim in sorted({(shape.heads, shape.dim) for shape in plan.shapes}):
        shape = Shape(CHECK_BATCH, heads, CHECK_LENGTH, dim)
        for causal in plan.causal:
            case = Case(shape, causal, plan.dtype, plan.device)
            inputs = draw_inputs(case, plan.seed)
            for name in plan.choose(causal):
                one = ATTENTIONS[name]
                if one.reference is not None:
                    errors = check_call(name, one.build, one.reference, case, inputs, TOLERANCE[plan.dtype])
                    found.append({"attention": name, "causal": causal, "shape": list(shape), "errors": errors})
    return found


def measure_shape(
    plan: Plan, shape: Shape, causal: bool, earlier: list[dict[str, Any]], progress: Progress
) -> list[dict[str, Any]]:
    rows: list[Row] = []
    turns: dict[str, dict[str, Work]] = {}
    for name in plan.choose(causal):
        progress(f"{name}{', causal' if causal else ''}: {shape}")
        row, attention = Row(name, causal, *shape), ATTENTIONS[name]
        rows.append(row)
        row.error = explain_skip(name, attention, Case(shape, causal, plan.dtype, plan.device), earlier)
        if row.error:
            continue
        try:
            # torch tells in warnings why a back end does not take the inputs; the row says that it does not.
            with warnings.catch_warnings(), attention.context():
                warnings.simplefilter("ignore", UserWarning)
                works = build_works(plan, attention, shape, causal)
                row.training_bytes = peak_memory(works["training"], plan.device)
                if plan.device.type == "cuda":
                    measure_on_cuda(row, works, plan)
                else:
                    turns[name] = {part: within_context(name, work) for part, work in works.items()}
        except Exception as error:  # out of memory, no such back end: a result, and no reason to stop
            row.error = describe_failure(error)
    if plan.device.type == "cpu":
        progress(f"{shape}: all in turns")
        times = time_in_turns(turns, repeats=plan.repeats, device=plan.device)
        for row in rows:
            row.device_ms = times.get(row.attention)
    return [dataclasses.asdict(row) for row in rows]


def build_works(plan: Plan, attention: Attention, shape: Shape, causal: bool) -> dict[str, Work]:
    case = Case(shape, causal, plan.dtype, plan.device, plan.dropout)
    inputs = draw_inputs(case, plan.seed, heads_first=attention.heads_first)
    return make_works(attention.build(case), inputs)


def measure_on_cuda(row: Row, works: dict[str, Work], plan: Plan) -> None:
    row.host_ms = time_host(works["training"], plan.device)
    found = {part: time_device(work, repeats=plan.repeats, device=plan.device) for part, work in works.items()}
    row.device_ms = {part: timing for part, (timing, _) in found.items()}
    row.graph = all(graph for _, graph in found.values())


def within_context(name: str, work: Work) -> Work:
    def call() -> Any:
        with ATTENTIONS[name].context():
            return work()

    return call


def explain_skip(name: str, attention: Attention, case: Case, earlier: list[dict[str, Any]]) -> str | None:
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
