"""Needles in text against length, from the runs that exist: what each attention finds, at what cost."""

import collections
import contextlib
import dataclasses
import re
import statistics
from collections.abc import Callable
from typing import Any

from lln.lab.core.documents import write_markdown
from lln.lab.core.tables import show_number
from lln.lab.paper.experiments import Asked, Experiment
from lln.lab.paper.jobs import configure, find_shape
from lln.lab.paper.run_records import RunRecord, list_runs, select_alike
from lln.lab.paper.run_tables import list_scores, order_names, show_cell
from lln.lab.paper.spread import RULE, Spread, find_difference, find_spread
from lln.lab.recipes.needles import lengthen, set_length

TASK = "needles"
WITH, WITHOUT = "lln_diag", "block_diagonal"  # what the linear part adds is the difference
BAND = re.compile(r"to_(\d+)_accuracy")
CHART = "accuracy-against-length"


def parse_lengths(text: str) -> tuple[int, ...]:
    """Of `--set lengths=512,2048`; of no text none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"lengths must be numbers of tokens, like 512,2048; got {text!r}.")
    return tuple(sorted({int(part) for part in parts}))


def assemble_lengths(
    experiment: Experiment, asked: Asked, runs: list[RunRecord], unavailable: dict[str, str]
) -> dict[str, Any]:
    """The result as JSON. Valid at any moment: cells whose runs are not finished are not there."""
    mine = [run for run in runs if (run.facts["task"], run.facts["preset"]) == (TASK, asked.scale)]
    groups, left = {}, []
    for length in sorted({int(run.facts["length"]) for run in mine}):
        here = [run for run in mine if run.facts["length"] == length]
        begun = collections.Counter(map(find_length_before, here)).most_common(1)[0][0]
        same = [run for run in here if find_length_before(run) == begun]
        left += [f"{run.folder} is left out: it began from another length." for run in here if run not in same]
        config, wanted = configure(TASK, asked.scale, "softmax", 0, asked.changes), None
        with contextlib.suppress(ValueError):  # runs of a length that does not go with these settings
            now = set_length(config, length) if begun is None else lengthen(config, length, "")
            wanted = find_shape(now.to_dict())
        groups[length], others = select_alike(same, wanted)
        left += others
    used = [run for group in groups.values() for run in group]
    if timeless := [run.folder for run in used if run.path is None and run.result and "step_seconds" not in run.result]:
        left.append(f"How long a step takes was not stored with {', '.join(timeless)}.")
    names = order_names(asked, used)
    made = (make_cell(name, length, group) for length, group in groups.items() for name in names)
    cells = [cell for cell in made if cell is not None]
    return {
        "figure": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "lengths": list(groups),
        "attentions": names,
        "guess": {  # accuracy in % of who looks at nothing
            str(length): next((100.0 * run.result["guess"]["accuracy"] for run in group if run.result), None)
            for length, group in groups.items()
        },
        "settings": {str(length): list_settings(group[0]) for length, group in groups.items() if group},
        "cells": cells,
        "rows": [
            {"chart": CHART, "series": c["attention"], "length": c["length"], **Spread(**c["accuracy"]).to_row()}
            for c in cells
            if c["accuracy"] is not None
        ],
        "rule": RULE,
        "differences": find_gains(groups),
        "notes": list(dict.fromkeys(note for run in used if run.result for note in run.result["notes"])),
        "remarks": left,
        "unavailable": unavailable,
        **list_runs(used),
    }


def find_length_before(run: RunRecord) -> int | None:
    """The length that the model learned before; None: it was new."""
    length: int | None = (run.facts["start"] or {}).get("length")
    return length


def list_settings(run: RunRecord) -> dict[str, Any]:
    o, sequences = run.config["optimisation"], run.config["data"]["evaluation"]
    return {"steps": o["steps"], "batch": o["batch"], "sequences": sequences, "after": find_length_before(run)}


def make_cell(attention: str, length: int, group: list[RunRecord]) -> dict[str, Any] | None:
    """What the runs of one attention, among those of one length, say over seeds."""
    runs = [run for run in group if run.attention == attention]
    failed = sorted({run.failure["sentence"] for run in runs if run.failure is not None})
    results = [run.result for run in runs if run.result is not None]
    if not results and not failed:
        return None
    alone = [run.result or {} for run in runs if not run.cost["beside"]]
    paces = [pace for result in alone if (pace := result.get("step_seconds")) is not None]
    bands = dict.fromkeys(name for r in results for name in r["metrics"] if BAND.fullmatch(name))
    accuracy, losses = list_scores(runs), [r["metrics"]["loss"] for r in results]
    return {
        "attention": attention, "length": length,
        "accuracy": dataclasses.asdict(find_spread(accuracy)) if results else None,
        "loss": dataclasses.asdict(find_spread(losses)) if results else None,
        "by_distance": {
            BAND.sub(r"\1", name): 100.0 * statistics.fmean(r["metrics"][name] for r in results if name in r["metrics"])
            for name in bands
        },
        "step_seconds": statistics.fmean(paces) if paces else None,
        "bytes": max((run.cost["bytes"] for run in runs if run.cost["bytes"] is not None), default=None),
        "failed": failed,
    }  # fmt: skip


def find_gains(groups: dict[int, list[RunRecord]]) -> list[dict[str, Any]]:
    """At each length what LLN+Diag finds beyond its blocks alone, and beyond softmax."""
    found = []
    for length, group in groups.items():
        by = {name: list_scores([run for run in group if run.attention == name]) for name in (WITH, WITHOUT, "softmax")}
        for other in (WITHOUT, "softmax"):
            if by[WITH] and by[other]:
                said = find_difference(by[WITH], by[other])
                found.append({"length": length, "a": WITH, "b": other, **dataclasses.asdict(said)})
    return found


# Markdown

# By the field of a cell: the title of its table, and how a value is shown.
SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "accuracy": ("accuracy (%)", lambda spread: show_cell(spread, 1)),
    "loss": ("loss", lambda spread: show_cell(spread, 3)),
    "step_seconds": ("ms a step", lambda seconds: show_number(1e3 * seconds)),
    "bytes": ("MiB of the GPU at most", lambda size: show_number(size / 2**20)),
}


def write_lengths(result: dict[str, Any]) -> str:
    bands = sorted({int(b) for c in result["cells"] for b in c["by_distance"]})
    distances = [
        [f"{c['length']:,}", c["attention"], *(show_percent(c["by_distance"].get(str(b))) for b in bands)]
        for c in result["cells"]
    ]
    found = {"tables": list_tables(result), "bands": [f"to {b:,}" for b in bands], "distances": distances}
    return write_markdown("lengths.md", **result, **found)


def show_percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def list_tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The rows of each table by its title, a row an attention; of costs where they are known."""
    lengths, cells, found = result["lengths"], result["cells"], {}
    for field, (title, show) in SHOWN.items():
        if field in ("accuracy", "loss") or any(c[field] is not None for c in cells):
            shown = {(c["attention"], c["length"]): "" if c[field] is None else show(c[field]) for c in cells}
            shown |= {(c["attention"], c["length"]): "failed" for c in cells if c["failed"] and c["accuracy"] is None}
            found[title] = [[name, *(shown.get((name, n), "") for n in lengths)] for name in result["attentions"]]
        if field == "accuracy":
            found[title].append(["a guess", *(show_percent(result["guess"][str(n)]) for n in lengths)])
    return found
