"""Tables 1, 3 and 5 from the runs that exist: means and spreads beside the paper's numbers, and what differs."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

from lln.lab.paper.experiments import Asked, Experiment
from lln.lab.paper.finished_runs import Found, alike
from lln.lab.paper.jobs import base, configure, shape
from lln.lab.paper.published import AVERAGE, REMARKS1
from lln.lab.paper.spread import RULE, Difference, find_difference, find_spread

LOSS = "MLM loss"
CARD = "Card of "
TUNINGS = "fine-tunings of one pre-training"


def assemble(experiment: Experiment, asked: Asked, runs: list[Found], unavailable: dict[str, str]) -> dict[str, Any]:
    """The table as JSON. Valid at any moment: cells whose runs are not finished are not there."""
    # Fixed alpha = beta is for Fig. 10; here it is shown to those who ask.
    runs = [run for run in runs if ":alpha=" not in run.attention or run.attention in asked.attentions]
    groups, left = columns(experiment, asked, runs)
    names = [a for a in asked.attentions if any(run.attention == a for group in groups.values() for run in group)]
    names += sorted({run.attention for group in groups.values() for run in group} - set(names))
    cells = {
        (name, column): cell([run for run in group if run.attention == name])
        for column, group in groups.items()
        for name in names
    }
    shown = list(groups)
    if experiment.columns and AVERAGE in experiment.columns and set(experiment.columns) - {AVERAGE} <= set(groups):
        wanted = [column for column in experiment.columns if column != AVERAGE]
        averages = {(name, AVERAGE): average([cells[name, column] for column in wanted]) for name in names}
        if any(averages.values()):
            shown.append(AVERAGE)
            cells |= averages
    paper = experiment.paper or {}
    used = [run for group in groups.values() for run in group]
    return {
        "table": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "columns": shown,
        "rows": [
            {
                "attention": name,
                "cells": {column: cells[name, column] for column in shown if cells[name, column]},
                "paper": {column: paper[name][column] for column in shown if column in paper.get(name, {})},
            }
            for name in names
        ],
        "rule": RULE,
        "differences": compared(names, shown, cells),
        "marks": {column: marks(group) for column, group in groups.items() if group},
        "remarks": [*left, *([REMARKS1] if experiment.name == "table1" else [])],
        "unavailable": unavailable,
        "failed": [{"folder": r.folder, "sentence": r.failure["sentence"]} for r in used if r.failure is not None],
        "unfinished": [r.folder for r in used if r.result is None and r.failure is None],
        "runs": [told(run) for run in used if run.result is not None],
    }


def columns(experiment: Experiment, asked: Asked, runs: list[Found]) -> tuple[dict[str, list[Found]], list[str]]:
    """The runs of each column, and sentences about those that do not fit in."""
    tasks = {name: ("mlm" if name == LOSS else experiment.task, name) for name in order(experiment, asked, runs)}
    found, left = {}, []
    for column, (task, name) in tasks.items():
        mine = [r for r in runs if r.config["task"] == task and r.config["preset"] == asked.scale]
        if task in ("glue", "lra"):
            mine = [r for r in mine if r.column == name]
        part = name if task in ("glue", "lra") else None
        wanted = shape(configure(task, asked.scale, "softmax", 0, asked.changes, name=part).to_dict())
        found[column], others = alike(mine, wanted)
        left += others
    return found, left


def order(experiment: Experiment, asked: Asked, runs: list[Found]) -> list[str]:
    if experiment.task == "image":
        return ["accuracy"]
    there = {r.column for r in runs if r.config["task"] == experiment.task and r.config["preset"] == asked.scale}
    known = [c for c in experiment.columns if c in there or c in asked.tasks]
    return [LOSS, *known] if experiment.task == "glue" else known


# Cells


def cell(runs: list[Found]) -> dict[str, Any] | None:
    """What the runs of one attention in one column say. The unit is what varies most: where several pre-trained models
    were fine-tuned, the mean of each is one value, since fine-tunings of one model are not independent."""
    finished = [run for run in runs if run.score is not None]
    failed = [run.folder for run in runs if run.failure is not None]
    if not finished:
        return {"n": 0, "failed": failed} if failed else None
    by_origin: dict[str, list[Found]] = {}
    for run in finished:
        by_origin.setdefault(run.pretraining or "", []).append(run)
    values: dict[str, float]
    if len(by_origin) > 1:
        unit = "pre-trainings"
        values = {name: statistics.fmean(scores(group)) for name, group in by_origin.items()}
    else:
        unit = "seeds" if "" in by_origin else TUNINGS
        values = {f"seed {run.seed}": run.score for run in finished if run.score is not None}
    costs = [run.cost() for run in finished]
    seconds = [c["seconds"] for c in costs if c["seconds"] is not None]
    return {
        **dataclasses.asdict(find_spread(list(values.values()))),
        "unit": unit,
        "values": values,
        "runs": len(finished),
        "failed": failed,
        "seconds": statistics.fmean(seconds) if seconds else None,
        "beside": max(c["beside"] for c in costs),
        "bytes": max((c["bytes"] for c in costs if c["bytes"] is not None), default=None),
    }


def scores(runs: list[Found]) -> list[float]:
    return [run.score for run in runs if run.score is not None]


def average(cells: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Over the columns, for the seeds that all of them have."""
    if any(c is None or not c["n"] for c in cells):
        return None
    held = [c for c in cells if c is not None]
    names = [name for name in held[0]["values"] if all(name in c["values"] for c in held)]
    if not names or len({c["unit"] for c in held}) > 1:
        return None
    values = {name: statistics.fmean(c["values"][name] for c in held) for name in names}
    return {
        **dataclasses.asdict(find_spread(list(values.values()))),
        "unit": held[0]["unit"],
        "values": values,
        "failed": [],
    }


def compared(names: list[str], shown: list[str], cells: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
    """Every two attentions in every column. Fine-tunings of one pre-trained model say nothing of others."""
    found = []
    for column, (a, b) in itertools.product(shown, itertools.combinations(names, 2)):
        first, second = cells[a, column], cells[b, column]
        if first and second and first["n"] and second["n"]:
            said = find_difference(list(first["values"].values()), list(second["values"].values()))
            if TUNINGS in (first["unit"], second["unit"]):
                said = Difference(said.difference, None, None)
            found.append({"column": column, "a": a, "b": b, **dataclasses.asdict(said)})
    return found


def told(run: Found) -> dict[str, Any]:
    assert run.result is not None
    return {
        "folder": run.folder, "attention": run.attention, "column": run.column, "seed": run.seed,
        "pretraining": run.pretraining, "score": run.score, "metrics": run.result["metrics"],
        "guess": run.result["guess"], "parameters": run.result["parameters"], "notes": run.result["notes"],
        "how": {name: run.config[name] for name in ("precision", "graph", "compile")},
        **run.cost(), "provenance": run.result["provenance"],
    }  # fmt: skip


# What differs from the paper


def marks(runs: list[Found]) -> dict[str, Any]:
    """In what these runs differ from the paper's, as sentences: its data, its model, its budget."""
    config = runs[0].config
    name = runs[0].column if config["task"] in ("glue", "lra") else None
    paper = base(config["task"], "paper", name).to_dict()
    notes = list(dict.fromkeys(note for run in runs if run.result for note in run.result["notes"]))
    return {
        "data": [*other_data(config, paper), *(note for note in notes if not note.startswith(CARD))],
        "cards": [note for note in notes if note.startswith(CARD)],
        "model": other_model(config["model"], paper["model"]),
        "budget": other_budget(config, paper),
    }


def other_data(config: dict[str, Any], paper: dict[str, Any]) -> list[str]:
    def title(data: dict[str, Any]) -> str:
        return " ".join(part for part in (data["name"], data["subset"]) if part)

    ours, theirs = title(config["data"]), title(paper["data"])
    if config["data"]["subset"] == "retrieval":  # the recipe's is no more the paper's than any other
        return [
            f"Data: {config['data']['name']} stands in for the published pairs of papers, which are not on the Hub."
        ]
    return [] if ours == theirs else [f"Data: {ours}, where the paper's recipe has {theirs}."]


def other_model(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    def title(model: dict[str, Any]) -> str:
        norm = ", pre-norm" if model["pre_norm"] else ""
        places = f", {model['positions']} positions" if "positions" in model else ""
        return f"{model['layers']} layers, {model['width']} wide, {model['heads']} heads{norm}{places}"

    if title(ours) == title(theirs):
        return []
    return [f"Model: {title(ours)}; in the paper's recipe {title(theirs)}."]


def other_budget(config: dict[str, Any], paper: dict[str, Any]) -> list[str]:
    def title(c: dict[str, Any]) -> str:
        o, what = c["optimisation"], "pixels a side" if c["task"] == "image" else "tokens"
        return f"{o['steps']:,} steps of {o['batch']} examples of {c['data']['length']} {what} in {c['precision']}"

    return (
        [] if title(config) == title(paper) else [f"Training: {title(config)}; in the paper's recipe {title(paper)}."]
    )
