"""What all figures share: inputs, the shape of a result, how it is written down."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.checks import MATCHINGS
from lln.files import write_json, write_text
from lln.lab.core.provenance import provenance
from lln.lab.core.seeds import normal
from lln.matching.moments import match_moments

CPU = torch.device("cpu")
Progress = Callable[[str], None]
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured: Gaussian queries and keys with sigma_q = sigma_k, in float64."""

    length: int = 1024
    dim: int = 64
    seeds: int = 4
    samples: int = 200_000  # sums of log-normal variables (Fig. 6)


QUICK = Plan(length=256, seeds=2, samples=20_000)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One claim of the paper, whether it holds, and the numbers that say so. None: they do not decide it."""

    claim: str
    holds: bool | None
    numbers: Mapping[str, float | None]
    sentence: str


WORDS: dict[bool | None, str] = {True: "holds", False: "DOES NOT HOLD", None: "not decided"}


@dataclasses.dataclass(frozen=True)
class Figure:
    name: str
    title: str
    steps: Callable[[Plan], int]
    measure: Callable[[Plan, int, Progress], Rows]
    judge: Callable[[Plan, Rows], list[Verdict]]
    charts: Callable[[Plan, Rows], dict[str, str]]  # SVG texts by the end of the file's name


def run(figure: Figure, plan: Plan, seed: int, progress: Progress) -> dict[str, Any]:
    """The result, ready for JSON. `progress` hears of figure.steps(plan) steps."""
    rows = figure.measure(plan, seed, progress)
    return {
        "figure": figure.name,
        "title": figure.title,
        "verdicts": [dataclasses.asdict(verdict) for verdict in figure.judge(plan, rows)],
        "settings": dataclasses.asdict(plan),
        "provenance": provenance(seed, CPU),
        "rows": rows,
    }


def write(figure: Figure, plan: Plan, result: dict[str, Any], out: Path) -> list[Path]:
    """NAME.json and an SVG file for each chart; returns where they are."""
    paths = [out / f"{figure.name}.json"]
    write_json(paths[0], result)
    for end, text in figure.charts(plan, result["rows"]).items():
        paths.append(out / f"{figure.name}{end}.svg")
        write_text(paths[-1], text)
    return paths


def inputs(plan: Plan, seed: int, run: int) -> tuple[Tensor, Tensor]:
    """Standard normal q and k, [1, 1, length, dim]. Every sigma and every attention uses the same draws: their
    differences are steadier than they are."""
    z_q, z_k = (normal((seed, plan.dim, plan.length, run, side), plan.length, plan.dim, device=CPU) for side in (0, 1))
    return z_q[None, None], z_k[None, None]


LLN = ("unmatched", *MATCHINGS)


def alpha_of(kind: str, sigma: float, plan: Plan) -> float:
    """alpha = beta of LLN for sigma_q = sigma_k = sigma."""
    if kind == "unmatched":
        return 1.0
    return float(match_moments(sigma, sigma, plan.dim, kind, length=plan.length)[0])  # type: ignore[arg-type]


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean over the seeds and, where there are several, its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {name: statistics.fmean(values), f"{name}_error": error}


def value(rows: Rows, series: str, at: dict[str, float], name: str) -> float:
    """A number of the one row of this series where the columns `at` have these values."""
    found = next(row for row in rows if row["series"] == series and all(row[key] == at[key] for key in at))
    return float(found[name])


def column(rows: Rows, name: str) -> list[float]:
    return sorted({row[name] for row in rows})
