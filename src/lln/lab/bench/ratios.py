"""What follows from measured rows: floors, speed-ups, and how time grows with length."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from lln.lab.bench.attentions import ATTENTIONS
from lln.lab.bench.calls import PARTS, Shape

Rows = list[dict[str, Any]]


def derive(result: dict[str, Any]) -> None:
    """Adds floor_ms, percent_of_floor and speedup to the rows, and `scaling` to the result."""
    itemsize = getattr(torch, result["settings"]["dtype"]).itemsize
    for row in result["rows"]:
        row["floor_ms"] = estimate_floor(row, itemsize, result["copy_bytes_per_second"])
        row["percent_of_floor"] = row["speedup"] = None
        if row["device_ms"] is None:
            continue
        if row["floor_ms"] is not None:
            row["percent_of_floor"] = {part: 100 * row["floor_ms"][part] / read_median(row, part) for part in PARTS}
        row["speedup"] = compare_with_softmax(row, result["rows"])
    result["scaling"] = measure_growth(result["rows"])


def read_median(row: dict[str, Any], part: str) -> float:
    return float(row["device_ms"][part]["median"])


def estimate_floor(row: dict[str, Any], itemsize: int, bandwidth: float) -> dict[str, float] | None:
    """The time that a copy takes for the bytes which bidirectional LLN must read and write at the least."""
    elements = ATTENTIONS[row["attention"]].floor
    if elements is None or row["causal"]:
        return None
    size = row["batch"] * row["heads"] * row["length"] * row["dim"] * itemsize
    return {part: 1e3 * count * size / bandwidth for part, count in zip(PARTS, elements, strict=True)}


def locate(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in (*Shape._fields, "causal"))


def compare_with_softmax(row: dict[str, Any], rows: Rows) -> dict[str, float] | None:
    """Over the fastest softmax attention at the same shape, for forward and training each."""
    rivals = [
        other
        for other in rows
        if ATTENTIONS[other["attention"]].softmax and other["device_ms"] is not None and locate(other) == locate(row)
    ]
    if not rivals:
        return None
    return {part: min(read_median(rival, part) for rival in rivals) / read_median(row, part) for part in PARTS}


def measure_growth(rows: Rows) -> Rows:
    """The exponent of length in time, between the two greatest lengths at one batch size: 1 linear, 2 quadratic."""
    keys = "attention", "causal", "batch", "heads", "dim"
    measured = [row for row in rows if row["device_ms"] is not None]
    measured.sort(key=lambda row: (*(row[key] for key in keys), row["length"]))
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
