"""Tables 1, 3 and 5 from the runs that exist: means and spreads beside the paper's numbers, and what differs."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

from lln.lab.paper.experiments import Asked, Experiment
from lln.lab.paper.jobs import configure, find_recipe, find_shape
from lln.lab.paper.published import AVERAGE, REMARKS1
from lln.lab.paper.run_records import RunRecord, list_runs, select_alike
from lln.lab.paper.spread import RULE, Difference, find_difference, find_spread
from lln.lab.paper.what_differs import describe_data, describe_training

LOSS = "MLM loss"
CARD = "Card of "
TUNINGS = "fine-tunings of one pre-training"


def assemble_table(
    experiment: Experiment, asked: Asked, runs: list[RunRecord], unavailable: dict[str, str]
) -> dict[str, Any]:
    """The table as JSON. Valid at any moment: cells whose runs are not finished are not there."""
    # Fixed alpha = beta is for Fig. 10; here it is shown to those who ask.
    runs = [run for run in runs if ":alpha=" not in run.attention or run.attention in asked.attentions]
    groups, left = group_by_column(experiment, asked, runs)
    used = [run for group in groups.values() for run in group]
    names = order_names(asked, used)
    cells = {
        (name, column): make_cell([run for run in group if run.attention == name])
        for column, group in groups.items()
        for name in names
    }
    columns, judged = list(groups), [column for column in experiment.columns if column != AVERAGE]
    if AVERAGE in experiment.columns and set(judged) <= set(groups):
        averages = {(name, AVERAGE): average_cells([cells[name, column] for column in judged]) for name in names}
        if any(averages.values()):
            columns.append(AVERAGE)
            cells |= averages
    paper = experiment.paper or {}
    return {
        "table": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "columns": columns,
        "rows": [
            {
                "attention": name,
                "cells": {column: cells[name, column] for column in columns if cells[name, column]},
                "paper": {column: paper[name][column] for column in columns if column in paper.get(name, {})},
            }
            for name in names
        ],
        "rule": RULE,
        "differences": compare_cells(names, columns, cells),
        "marks": {column: list_marks(group) for column, group in groups.items() if group},
        "remarks": [*left, *([REMARKS1] if experiment.name == "table1" else [])],
        "unavailable": unavailable,
        **list_runs(used),
    }


def order_names(asked: Asked, runs: list[RunRecord]) -> list[str]:
    """The attentions of these runs, those that were asked for first."""
    there = {run.attention for run in runs}
    return [*(a for a in asked.attentions if a in there), *sorted(there - set(asked.attentions))]


def group_by_column(
    experiment: Experiment, asked: Asked, runs: list[RunRecord]
) -> tuple[dict[str, list[RunRecord]], list[str]]:
    """The runs of each column, and sentences about those that do not fit in."""
    runs = [run for run in runs if run.facts["preset"] == asked.scale]
    tasks = {"accuracy": "image"}
    if experiment.task != "image":
        there = {run.column for run in runs if run.facts["task"] == experiment.task} | set(asked.tasks)
        tasks = {LOSS: "mlm"} if experiment.task == "glue" else {}
        tasks |= {column: experiment.task for column in experiment.columns if column in there}
    found, left = {}, []
    for column, task in tasks.items():
        part = column if task in ("glue", "lra") else None
        mine = [run for run in runs if run.facts["task"] == task and part in (None, run.column)]
        wanted = configure(task, asked.scale, "softmax", 0, asked.changes, name=part)
        found[column], others = select_alike(mine, find_shape(wanted.to_dict()))
        left += others
    return found, left


# Cells


def make_cell(runs: list[RunRecord]) -> dict[str, Any] | None:
    """What the runs of one attention in one column say. The unit is what varies most: where several pre-trained models
    were fine-tuned, the mean of each is one value, since fine-tunings of one model are not independent."""
    finished = [run for run in runs if run.score is not None]
    failed = [run.folder for run in runs if run.failure is not None]
    if not finished:
        return {"n": 0, "failed": failed} if failed else None
    by_origin: dict[str, list[RunRecord]] = {}
    for run in finished:
        by_origin.setdefault(run.pretraining or "", []).append(run)
    if len(by_origin) > 1:
        unit = "pre-trainings"
        values = {name: statistics.fmean(list_scores(group)) for name, group in by_origin.items()}
    else:
        unit = "seeds" if "" in by_origin else TUNINGS
        values = {f"seed {run.seed}": run.score for run in finished if run.score is not None}
    costs = [run.cost for run in finished]
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


def list_scores(runs: list[RunRecord]) -> list[float]:
    return [run.score for run in runs if run.score is not None]


def average_cells(cells: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Over the columns, for the seeds that all of them have."""
    there = [cell for cell in cells if cell is not None and cell["n"]]
    if len(there) < len(cells) or len({cell["unit"] for cell in there}) > 1:
        return None
    names = [name for name in there[0]["values"] if all(name in cell["values"] for cell in there)]
    if not names:
        return None
    values = {name: statistics.fmean(cell["values"][name] for cell in there) for name in names}
    spread = dataclasses.asdict(find_spread(list(values.values())))
    return {**spread, "unit": there[0]["unit"], "values": values, "failed": []}


def compare_cells(names: list[str], columns: list[str], cells: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
    """Every two attentions in every column. Fine-tunings of one pre-trained model say nothing of others."""
    found = []
    for column, (a, b) in itertools.product(columns, itertools.combinations(names, 2)):
        first, second = cells[a, column], cells[b, column]
        if first and second and first["n"] and second["n"]:
            said = find_difference(list(first["values"].values()), list(second["values"].values()))
            if TUNINGS in (first["unit"], second["unit"]):
                said = Difference(said.difference, None, None)
            found.append({"column": column, "a": a, "b": b, **dataclasses.asdict(said)})
    return found


def list_marks(runs: list[RunRecord]) -> dict[str, Any]:
    """In what these runs differ from the paper's, as sentences: its data, its model, its budget."""
    config, task = runs[0].config, runs[0].facts["task"]
    paper = find_recipe(task, "paper", runs[0].column if task in ("glue", "lra") else None).to_dict()
    notes = list(dict.fromkeys(note for run in runs if run.result for note in run.result["notes"]))
    return {
        "data": [*describe_data(config, paper), *(note for note in notes if not note.startswith(CARD))],
        "cards": [note for note in notes if note.startswith(CARD)],
        **describe_training(config, paper),
    }
