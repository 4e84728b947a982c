"""Pre-training from scratch, each attention at the best of a few learning rates: every rate with the first seed, and
then the other seeds with the one that ended best. The grid is reported beside what came of it."""

import dataclasses
import statistics
from typing import Any

from lln.lab.core.errors import Refused
from lln.lab.paper.experiments import RATES, Asked, Experiment
from lln.lab.paper.jobs import configure, find_shape
from lln.lab.paper.run_records import RunRecord, list_runs
from lln.lab.paper.run_tables import LOSS, compare_cells, list_marks, make_cell, order_names
from lln.lab.paper.spread import RULE

BEST = f"{LOSS}, best rate"


def parse_rates(text: str) -> tuple[float, ...]:
    """Of `--set rates=.5,1,2`, which are factors of the recipe's rate; of no text the usual ones.

    >>> parse_rates("2, .5"), parse_rates("")
    ((0.5, 2.0), (0.5, 1.0, 2.0))
    """
    try:
        found = tuple(sorted({float(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        found = (0.0,)
    if any(not 0 < factor < float("inf") for factor in found):
        raise Refused(f"--set rates: they are factors of the recipe's learning rate, like .5,1,2; got {text!r}.")
    return found or RATES


def assemble_rates(
    experiment: Experiment, asked: Asked, runs: list[RunRecord], unavailable: dict[str, str]
) -> dict[str, Any]:
    """The result as JSON, in the form of a table's. Valid at any moment: what is not finished is not there."""
    usual = configure("mlm", asked.scale, "softmax", 0, asked.changes)
    shape = drop_rate(find_shape(usual.to_dict()))
    mine = [run for run in runs if run.facts["task"] == "mlm" and run.facts["preset"] == asked.scale]
    alike = [run for run in mine if drop_rate(find_shape(run.config)) == shape]
    left = [f"{run.folder} is left out: it has other settings." for run in mine if run not in alike]
    names = order_names(asked, alike)
    rates = sorted({find_rate(run) for run in alike})
    groups = {f"{LOSS}, rate {rate:g}": [run for run in alike if find_rate(run) == rate] for rate in rates}
    best = {name: choose_rate([run for run in alike if run.attention == name]) for name in names}
    groups[BEST] = [run for run in alike if find_rate(run) == best[run.attention]]
    cells = {
        (name, column): make_cell([run for run in group if run.attention == name])
        for column, group in groups.items()
        for name in names
    }
    return {
        "table": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "columns": list(groups),
        "rows": [
            {
                "attention": name,
                "rate": best[name],
                "cells": {column: cells[name, column] for column in groups if cells[name, column]},
                "paper": {},
            }
            for name in names
        ],
        "rule": RULE,
        "differences": compare_cells(names, [BEST], cells),
        "marks": {BEST: list_marks(groups[BEST])} if groups[BEST] else {},
        "remarks": [*left, *tell_rates(best, rates)],
        "unavailable": unavailable,
        **list_runs(alike),
    }


def drop_rate(shape: dict[str, Any]) -> dict[str, Any]:
    return shape | {"optimisation": {k: v for k, v in shape["optimisation"].items() if k != "rate"}}


def find_rate(run: RunRecord) -> float:
    return float(run.config["optimisation"]["rate"])


def choose_rate(runs: list[RunRecord]) -> float | None:
    """The rate at which the runs of one attention ended best, by their mean with the first seed that is there: further
    seeds are run with one rate only."""
    finished = [run for run in runs if run.score is not None]
    if not finished:
        return None
    first = min(run.seed for run in finished)
    scores: dict[float, list[float]] = {}
    for run in finished:
        if run.seed == first and run.score is not None:
            scores.setdefault(find_rate(run), []).append(run.score)
    return min(scores, key=lambda rate: statistics.fmean(scores[rate]))


def tell_rates(best: dict[str, float | None], rates: list[float]) -> list[str]:
    """Sentences about which rates were chosen, and whether the grid was wide enough."""
    known = {name: rate for name, rate in best.items() if rate is not None}
    if not known:
        return []
    told = ", ".join(f"{name} {rate:g}" for name, rate in known.items())
    found = [f"Learning rates, chosen with the first seed among {', '.join(f'{r:g}' for r in rates)}: {told}."]
    edge = [name for name, rate in known.items() if len(rates) > 1 and rate in (rates[0], rates[-1])]
    if edge:
        found.append(f"At an edge of the grid, so that others may be better still: {', '.join(edge)}.")
    return found


def list_known_rates(asked: Asked, runs: list[RunRecord]) -> dict[str, float]:
    """The best rate of each attention whose whole grid is finished with the first seed."""
    wanted = dataclasses.replace(asked, seeds=1)
    found = {}
    for attention in asked.attentions:
        base = configure("mlm", asked.scale, attention, asked.first, asked.changes)
        grid = {factor * base.optimisation.rate for factor in wanted.rates}
        shape = drop_rate(find_shape(base.to_dict()))
        mine = [
            run for run in runs
            if run.attention == base.attention.label and run.seed == asked.first and run.score is not None
            and run.facts["task"] == "mlm" and drop_rate(find_shape(run.config)) == shape and find_rate(run) in grid
        ]  # fmt: skip
        if {find_rate(run) for run in mine} == grid and (rate := choose_rate(mine)) is not None:
            found[attention] = rate
    return found
