"""Needles in text against length, from the runs that exist: what each attention finds, at what cost."""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
from pathlib import Path
from typing import Any

from lln.lab.core.provenance import without_places
from lln.lab.core.tables import show_number
from lln.lab.paper.experiments import Asked, Experiment
from lln.lab.paper.finished_runs import Found, alike
from lln.lab.paper.jobs import configure, shape
from lln.lab.paper.run_tables import scores, told
from lln.lab.paper.spread import RULE, find_difference, find_spread
from lln.lab.recipes.needles import lengthen, set_length

TASK = "needles"
WITH, WITHOUT = "lln_diag", "block_diagonal"  # what the linear part adds is the difference
BAND = re.compile(r"to_(\d+)_accuracy")
CHART = "accuracy-against-length"
MIB = 2**20
FARTHER = "Accuracy (%) on questions that stand so many tokens from their needle, and farther than the column before."


def parse_lengths(text: str) -> tuple[int, ...]:
    """Of `--set lengths=512,2048`; of no text none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"lengths must be numbers of tokens, like 512,2048; got {text!r}.")
    return tuple(sorted({int(part) for part in parts}))


def assemble(experiment: Experiment, asked: Asked, runs: list[Found], unavailable: dict[str, str]) -> dict[str, Any]:
    """The result as JSON. Valid at any moment: cells whose runs are not finished are not there."""
    mine = [r for r in runs if r.config["task"] == TASK and r.config["preset"] == asked.scale]
    lengths = sorted({int(r.config["data"]["length"]) for r in mine})
    groups, left = {}, []
    for length in lengths:
        here = [run for run in mine if run.config["data"]["length"] == length]
        begun = collections.Counter(began(run.config) for run in here).most_common(1)[0][0]
        same = [run for run in here if began(run.config) == begun]
        left += [f"{run.folder} is left out: it began from another length." for run in here if run not in same]
        groups[length], others = alike(same, wanted(asked, length, begun))
        left += others
    used = [run for group in groups.values() for run in group]
    names = [a for a in asked.attentions if any(run.attention == a for run in used)]
    names += sorted({run.attention for run in used} - set(names))
    cells = [
        found
        for length, group in groups.items()
        for name in names
        if (found := cell(name, length, [run for run in group if run.attention == name])) is not None
    ]
    return {
        "figure": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "lengths": lengths,
        "attentions": names,
        "guess": {str(length): guess(group) for length, group in groups.items()},
        "settings": {str(length): setting(group[0].config) for length, group in groups.items() if group},
        "cells": cells,
        "rows": [row(c) for c in cells if c["accuracy"] is not None],
        "rule": RULE,
        "differences": gains(groups),
        "notes": list(dict.fromkeys(note for run in used if run.result for note in run.result["notes"])),
        "remarks": left,
        "unavailable": unavailable,
        "failed": [{"folder": r.folder, "sentence": r.failure["sentence"]} for r in used if r.failure is not None],
        "unfinished": [r.folder for r in used if r.result is None and r.failure is None],
        "runs": [told(run) for run in used if run.result is not None],
    }  # fmt: skip


def began(config: dict[str, Any]) -> int | None:
    """The length that the model learned before; None: it was new."""
    start = config["model"]["start"]
    known = re.search(rf"^{TASK}-(\d+)-", Path(start).parent.name)
    return int(known[1]) if known else None


def wanted(asked: Asked, length: int, begun: int | None) -> dict[str, Any] | None:
    config = configure(TASK, asked.scale, "softmax", 0, asked.changes)
    try:
        config = set_length(config, length) if begun is None else lengthen(config, length, "")
    except ValueError:  # runs of a length that does not go with these settings
        return None
    return shape(config.to_dict())


def guess(runs: list[Found]) -> float | None:
    """Accuracy in % of who looks at nothing."""
    return next((100.0 * run.result["guess"]["accuracy"] for run in runs if run.result is not None), None)


def setting(config: dict[str, Any]) -> dict[str, Any]:
    o = config["optimisation"]
    return {"steps": o["steps"], "batch": o["batch"], "sequences": config["data"]["evaluation"], "after": began(config)}


def cell(attention: str, length: int, runs: list[Found]) -> dict[str, Any] | None:
    """What the runs of one attention at one length say, over seeds."""
    if not any(run.result is not None or run.failure is not None for run in runs):
        return None
    results = [run.result for run in runs if run.result is not None]
    alone = [run.result for run in runs if run.result is not None and not run.cost()["beside"]]
    paces = [r["step_seconds"] for r in alone if r.get("step_seconds") is not None]
    bands = dict.fromkeys(name for r in results for name in r["metrics"] if BAND.fullmatch(name))
    return {
        "attention": attention, "length": length,
        "accuracy": dataclasses.asdict(find_spread(scores(runs))) if results else None,
        "loss": dataclasses.asdict(find_spread([r["metrics"]["loss"] for r in results])) if results else None,
        "by_distance": {
            BAND.sub(r"\1", name): 100.0 * statistics.fmean(r["metrics"][name] for r in results if name in r["metrics"])
            for name in bands
        },
        "step_seconds": statistics.fmean(paces) if paces else None,
        "bytes": max((b for run in runs if (b := run.cost()["bytes"]) is not None), default=None),
        "failed": sorted({run.failure["sentence"] for run in runs if run.failure is not None}),
    }  # fmt: skip


def row(cell: dict[str, Any]) -> dict[str, Any]:
    """A point of the chart."""
    a = cell["accuracy"]
    found = {"chart": CHART, "series": cell["attention"], "length": cell["length"], "value": a["mean"], "seeds": a["n"]}
    if a["deviation"] is not None:
        found |= {"low": a["mean"] - a["deviation"], "high": a["mean"] + a["deviation"]}
    return found


def gains(groups: dict[int, list[Found]]) -> list[dict[str, Any]]:
    """At each length what LLN+Diag finds beyond its blocks alone, and beyond softmax."""
    found = []
    for length, group in groups.items():
        by = {name: scores([run for run in group if run.attention == name]) for name in (WITH, WITHOUT, "softmax")}
        for other in (WITHOUT, "softmax"):
            if by[WITH] and by[other]:
                said = find_difference(by[WITH], by[other])
                found.append({"length": length, "a": WITH, "b": other, **dataclasses.asdict(said)})
    return found


# Markdown


def markdown(result: dict[str, Any]) -> str:
    p = result["provenance"]
    machines = ", ".join(dict.fromkeys(run["provenance"]["device"] for run in result["runs"])) or "no machine yet"
    lines = [
        f"# {result['title']}", "",
        f"Scale {result['scale']}, {p['date'][:10]}, commit {p['commit']}, "
        f"`{without_places(p['command'])}`; runs on {machines}. "
        "Mean ± standard deviation (number of seeds).", "",
        *table(result, "accuracy (%)", lambda c: told_spread(c["accuracy"], 1)),
        *table(result, "loss", lambda c: told_spread(c["loss"], 3), guessed=False),
    ]  # fmt: skip
    if any(c["step_seconds"] is not None for c in result["cells"]):
        lines += table(result, "ms a step", lambda c: scaled(c["step_seconds"], 1e3), guessed=False)
    if any(c["bytes"] is not None for c in result["cells"]):
        lines += table(result, "MiB of the GPU at most", lambda c: scaled(c["bytes"], 1 / MIB), guessed=False)
    return "\n".join([*lines, *distances(result), *linear(result), *budget(result), *troubles(result)])


def table(result: dict[str, Any], title: str, show: Any, *, guessed: bool = True) -> list[str]:
    lengths = result["lengths"]
    lines = [f"| {title} | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" + "|---:" * len(lengths) + "|"]
    cells = {(c["attention"], c["length"]): c for c in result["cells"]}
    for name in result["attentions"]:
        texts = [shown(cells.get((name, n)), show) for n in lengths]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    if guessed:
        floors = [result["guess"][str(n)] for n in lengths]
        lines.append("| a guess | " + " | ".join("" if f is None else f"{f:.1f}" for f in floors) + " |")
    return [*lines, ""]


def shown(cell: dict[str, Any] | None, show: Any) -> str:
    if cell is None:
        return ""
    return show(cell) or ("failed" if cell["failed"] and cell["accuracy"] is None else "")


def told_spread(found: dict[str, Any] | None, digits: int) -> str:
    if found is None:
        return ""
    apart = "" if found["deviation"] is None else f" ± {found['deviation']:.{digits}f}"
    return f"{found['mean']:.{digits}f}{apart} ({found['n']})"


def scaled(value: float | None, factor: float) -> str:
    return "" if value is None else show_number(value * factor)


def distances(result: dict[str, Any]) -> list[str]:
    bands = sorted({int(b) for c in result["cells"] for b in c["by_distance"]})
    if not bands:
        return []
    lines = ["## By distance", "", FARTHER, ""]
    lines.append("| length | attention | " + " | ".join(f"to {b:,}" for b in bands) + " |")
    lines.append("|---:|---" + "|---:" * len(bands) + "|")
    for c in result["cells"]:
        found = [c["by_distance"].get(str(b)) for b in bands]
        texts = ["" if value is None else f"{value:.1f}" for value in found]
        lines.append(f"| {c['length']:,} | {c['attention']} | " + " | ".join(texts) + " |")
    return [*lines, ""]


def linear(result: dict[str, Any]) -> list[str]:
    """Whether the linear part earns its keep."""
    if not result["differences"]:
        return []
    lines = ["## What the linear part adds", "", result["rule"], ""]
    words = {True: "beyond the noise", False: "within the noise", None: "one seed, nothing to say about noise"}
    for d in result["differences"]:
        bound = "" if d["noise"] is None else f", noise {d['noise']:.1f}"
        lines.append(f"- {d['length']:,}: {d['a']} - {d['b']} = {d['difference']:+.1f} ({words[d['beyond']]}{bound})")
    return [*lines, ""]


def budget(result: dict[str, Any]) -> list[str]:
    lines = ["## What was run", ""]
    for length, s in result["settings"].items():
        made = f"{s['steps']:,} steps of {s['batch']} sequences, judged on {s['sequences']} others"
        start = "" if s["after"] is None else f", going on from the model of {s['after']:,} tokens"
        lines.append(f"- {int(length):,} tokens: {made}{start}.")
    return [*lines, *(f"- {note}" for note in result["notes"]), *(f"- {text}" for text in result["remarks"]), ""]


def troubles(result: dict[str, Any]) -> list[str]:
    lines = [f"- {name} was not run: {reason}." for name, reason in result["unavailable"].items()]
    lines += [f"- {failed['folder']} failed: {failed['sentence']}" for failed in result["failed"]]
    lines += [f"- {folder} is not finished." for folder in result["unfinished"]]
    return ["## What is missing", "", *lines, ""] if lines else []
