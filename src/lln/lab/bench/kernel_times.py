"""`lln bench`: a check, then time and memory of every attention at every shape, one row each, and what follows from
them: floors, speed-ups, and how time grows with length."""

import contextlib
import dataclasses
import itertools
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lln.lab.bench import calls
from lln.lab.bench.attentions import ALPHA, ATTENTIONS, BETA, BLOCK_SIZE, Attention, Case, Shape
from lln.lab.bench.calls import PARTS
from lln.lab.bench.kernel_plan import BenchPlan
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import Work, measure_bandwidth, peak_memory, time_device, time_host

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
CHECK_BATCH = 2
LONGEST_CALL_MS = 20_000.0
Rows = list[dict[str, Any]]
Store = Callable[[dict[str, Any]], None]


def measure(plan: BenchPlan, *, store: Store = ignore, progress: Progress = ignore) -> dict[str, Any]:
    """The result, ready for JSON. `store` gets it after each shape: what a killed run had measured is not lost."""
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else contextlib.nullcontext():
        progress("check")
        checks = check_plan(plan)
        progress("copy bandwidth")
        result: dict[str, Any] = {
            "what": "time and peak extra memory of one attention call: forward, and forward + backward (training)",
            "how": write_paragraphs("bench.txt", plan.device.type)[0],
            "settings": calls.describe_plan(plan) | {"alpha": ALPHA, "beta": BETA, "block_size": BLOCK_SIZE},
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


def check_plan(plan: BenchPlan) -> Rows:
    """Every LLN variant that will be timed, in the dtype of the run. The relative errors; raises CheckFailed where one
    is too large."""
    found = []
    for heads, dim in sorted({(shape.heads, shape.dim) for shape in plan.shapes}):
        for causal in plan.causal:
            case = Case(Shape(CHECK_BATCH, heads, calls.CHECK_LENGTH, dim), causal, plan.dtype, plan.device)
            found += calls.check_attentions(plan.choose(causal), case, plan.seed, TOLERANCE[plan.dtype])
    return found


def measure_shape(plan: BenchPlan, shape: Shape, causal: bool, earlier: Rows, progress: Progress) -> Rows:
    """A row for each attention. Where it could not be measured, `error` says why and the times are None; host_ms (of
    training) and graph (whether device_ms comes from CUDA graphs) are of CUDA alone."""
    rows: Rows = []
    turns: dict[str, dict[str, Work]] = {}
    for name in plan.choose(causal):
        progress(f"{name}{', causal' if causal else ''}: {shape}")
        attention = ATTENTIONS[name]
        row = {"attention": name, "causal": causal, **shape._asdict()}
        row |= dict.fromkeys(("device_ms", "host_ms", "training_bytes", "graph"))
        row["error"] = explain_skip(name, attention, Case(shape, causal, plan.dtype, plan.device), earlier)
        rows.append(row)
        if row["error"]:
            continue
        try:
            # torch tells in warnings why a back end does not take the inputs; the row says that it does not.
            with warnings.catch_warnings(), attention.context():
                warnings.simplefilter("ignore", UserWarning)
                works = build_works(plan, attention, shape, causal)
                row["training_bytes"] = peak_memory(works["training"], plan.device)
                if plan.device.type == "cuda":
                    time_on_cuda(row, works, plan)
                else:
                    turns[name] = {part: put_in_context(attention, work) for part, work in works.items()}
        except Exception as error:  # out of memory, no such back end: a result, and no reason to stop
            row["error"] = calls.describe_failure(error)
    if plan.device.type == "cpu":
        progress(f"{shape}: all in turns")
        times = calls.time_in_turns(turns, repeats=plan.repeats, device=plan.device)
        for row in rows:
            row["device_ms"] = times.get(row["attention"])
    return rows


def build_works(plan: BenchPlan, attention: Attention, shape: Shape, causal: bool) -> dict[str, Work]:
    case = Case(shape, causal, plan.dtype, plan.device, plan.dropout)
    inputs = calls.draw_inputs(case, plan.seed, heads_first=attention.heads_first)
    return calls.make_works(attention.build(case), inputs)


def put_in_context(attention: Attention, work: Work) -> Work:
    def call() -> Any:
        with attention.context():
            return work()

    return call


def time_on_cuda(row: dict[str, Any], works: dict[str, Work], plan: BenchPlan) -> None:
    host = time_host(works["training"], plan.device)
    row["host_ms"] = None if host is None else dataclasses.asdict(host)
    found = {part: time_device(work, repeats=plan.repeats, device=plan.device) for part, work in works.items()}
    row["device_ms"] = {part: dataclasses.asdict(timing) for part, (timing, _) in found.items()}
    row["graph"] = all(graph for _, graph in found.values())


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


def derive(result: dict[str, Any]) -> None:
    """Adds floor_ms, percent_of_floor and speedup to the rows, and `scaling` to the result. Floor: the time that a copy
    takes for the bytes which bidirectional LLN must read and write at the least. Speed-up: over the fastest softmax
    attention at the same shape, for forward and training each."""
    itemsize = getattr(torch, result["settings"]["dtype"]).itemsize
    measured = [row for row in result["rows"] if row["device_ms"] is not None]
    softmax = [row for row in measured if ATTENTIONS[row["attention"]].softmax]
    for row in result["rows"]:
        row["floor_ms"] = row["percent_of_floor"] = row["speedup"] = None
        elements = ATTENTIONS[row["attention"]].floor
        if elements is not None and not row["causal"]:
            size, speed = math.prod(row[key] for key in Shape._fields) * itemsize, result["copy_bytes_per_second"]
            row["floor_ms"] = {part: 1e3 * count * size / speed for part, count in zip(PARTS, elements, strict=True)}
        if row["device_ms"] is None:
            continue
        if row["floor_ms"] is not None:
            row["percent_of_floor"] = {part: 100 * row["floor_ms"][part] / read_median(row, part) for part in PARTS}
        if rivals := [other for other in softmax if locate(other) == locate(row)]:
            fastest = {part: min(read_median(rival, part) for rival in rivals) for part in PARTS}
            row["speedup"] = {part: fastest[part] / read_median(row, part) for part in PARTS}
    result["scaling"] = measure_growth(measured)


def read_median(row: dict[str, Any], part: str) -> float:
    return float(row["device_ms"][part]["median"])


def locate(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in (*Shape._fields, "causal"))


def measure_growth(measured: Rows) -> Rows:
    """The exponent of length in time, between the two greatest lengths at one batch size: 1 linear, 2 quadratic."""
    keys = "attention", "causal", "batch", "heads", "dim"
    measured = sorted(measured, key=lambda row: (*(row[key] for key in keys), row["length"]))
    found = []
    for values, group in itertools.groupby(measured, lambda row: tuple(row[key] for key in keys)):
        last = list({row["length"]: row for row in group}.values())[-2:]
        if len(last) == 2:
            growth = math.log(last[1]["length"] / last[0]["length"])
            times = {part: [read_median(row, part) for row in last] for part in PARTS}
            exponents = {part: math.log(ms[1] / ms[0]) / growth for part, ms in times.items()}
            lengths = [row["length"] for row in last]
            found.append(dict(zip(keys, values, strict=True)) | {"lengths": lengths} | exponents)
    order = {name: position for position, name in enumerate(ATTENTIONS)}
    return sorted(found, key=lambda entry: (entry["causal"], order[entry["attention"]]))
