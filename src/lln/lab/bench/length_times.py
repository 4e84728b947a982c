"""Time and memory against length: torch's softmax attention, LLN and LLN+Diag on the same inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lln.lab.bench.attentions import ATTENTIONS, sdpa
from lln.lab.bench.calls import PARTS, Case, Shape, check_call, draw_inputs, make_works, time_in_turns
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import peak_memory

OURS = ("LLN", "LLN+Diag")
BUILDS = {"softmax": sdpa} | {name: ATTENTIONS[name].build for name in OURS}


def check_ours(heads: int, dim: int, device: torch.device, seed: int = 0) -> None:
    """CheckFailed where LLN or LLN+Diag is not eq. (8): no time is reported for a wrong result."""
    case = Case(Shape(1, heads, 257, dim), False, torch.float32, device)
    for name in OURS:
        reference = ATTENTIONS[name].reference
        assert reference is not None
        check_call(name, BUILDS[name], reference, case, draw_inputs(case, seed), most=1e-5)


def measure(
    lengths: Sequence[int],
    *,
    heads: int = 12,
    dim: int = 64,
    repeats: int = 5,
    seed: int = 0,
    device: torch.device | None = None,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """The rows and how they were made, ready for JSON. `progress` hears of each step: two for every length."""
    device = device or torch.device("cpu")
    check_ours(heads, dim, device, seed)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        case = Case(Shape(1, heads, length, dim), False, torch.float32, device)
        inputs = draw_inputs(case, seed)
        works = {name: make_works(build(case), inputs) for name, build in BUILDS.items()}
        progress(f"time at length {length}")
        times = time_in_turns(works, repeats=repeats, device=device)
        progress(f"memory at length {length}")
        for name, parts in works.items():
            row: dict[str, Any] = {"attention": name, "length": length}
            row |= {part: dataclasses.asdict(times[name][part]) for part in PARTS}
            rows.append(row | {f"{part}_bytes": peak_memory(parts[part], device) for part in PARTS})
    return {
        "what": "time and peak extra memory of one attention call, float32, batch 1",
        "heads": heads,
        "dim": dim,
        "provenance": provenance(seed, device),
        "rows": rows,
    }
