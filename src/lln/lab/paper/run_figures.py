"""Figs. 1, 8, 9 and 10: what runs recorded while they trained, as rows for charts, and what the paper says of it."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from lln.lab.paper.analysis import Rows, Verdict
from lln.lab.paper.claims import (
    judge_cooling,
    judge_fixed,
    judge_gaps,
    judge_layers,
    judge_loss,
    judge_range,
    judge_risk,
    judge_scale,
)
from lln.lab.paper.experiments import FLOAT16, Asked, Experiment, watched
from lln.lab.paper.finished_runs import Found, alike
from lln.lab.paper.jobs import DEIT, configure, shape
from lln.lab.paper.run_tables import marks, scores, told
from lln.lab.paper.spread import Spread, find_spread

PANELS1 = ("temperature", "entropy", "spectral_gap")
PANELS9 = ("alpha", "beta")
WORDS9 = {"image": "", "mlm": ", a language model"}


def assemble(experiment: Experiment, asked: Asked, runs: list[Found], unavailable: dict[str, str]) -> dict[str, Any]:
    """The figure as JSON; everything that its charts show is in `rows`."""
    make = {"fig1": fig1, "fig8": fig8, "fig9": fig9, "fig10": fig10}[experiment.name]
    rows, verdicts, used, missing = make(asked, runs)
    return {
        "figure": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "verdicts": [
            {"claim": v.claim, "holds": v.holds, "numbers": v.numbers, "sentence": v.sentence} for v in verdicts
        ],
        "differs": differs(used),
        "missing": missing,
        "unavailable": unavailable,
        "failed": [{"folder": r.folder, "sentence": r.failure["sentence"]} for r in used if r.failure is not None],
        "runs": [told(run) for run in used if run.result is not None],
        "rows": rows,
    }


OF = {"image": "Of vision transformers", "mlm": "Of language models"}
Made = tuple[Rows, list[Verdict], list[Found], list[str]]


def differs(used: list[Found]) -> list[str]:
    if not used:
        return []
    tasks: dict[str, list[Found]] = {}
    for run in used:
        tasks.setdefault(run.config["task"], []).append(run)
    usual = {task: [run for run in runs if run.config["precision"] != FLOAT16] or runs for task, runs in tasks.items()}
    found = {task: marks(runs) for task, runs in usual.items()}
    of = {task: f"{OF[task]}: " if len(tasks) > 1 else "" for task in tasks}  # Fig. 9 may show two kinds of models
    said = [of[task] + text for task, m in found.items() for text in (*m["model"], *m["budget"], *m["data"])]
    halves = [run for task, runs in tasks.items() for run in runs if run not in usual[task] and run.score is not None]
    if halves:
        ends = ", ".join(f"{run.attention} {run.score:.4g}" for run in halves)
        said.append(f"The loss scale is that of runs of their own, in {FLOAT16}. They end at: {ends}.")
    return said


def chosen(
    asked: Asked, runs: list[Found], task: str, *, precision: str | None = None
) -> tuple[list[Found], list[str]]:
    """Runs of one task in one setting, with the attentions asked for (and fixed alpha = beta of them)."""
    preset = DEIT if precision == FLOAT16 and task == "image" and asked.scale == "paper" else asked.scale
    wanted = configure(task, preset, "softmax", 0, asked.changes, precision=precision)
    names = set(asked.attentions)
    mine = [
        run
        for run in runs
        if run.config["task"] == task
        and run.config["preset"] == preset
        and run.config["precision"] == wanted.precision
        and run.attention.partition(":alpha=")[0] in names
    ]
    return alike(mine, shape(wanted.to_dict()))


# Rows


def over_seeds(runs: list[Found], series: Callable[[Found], dict[str, dict[int, float]]]) -> Rows:
    """Means over seeds. `series` gives of a run {name: {step: value}}. Runs may have looked at other steps than others:
    a curve would jump at those that few of them have, so they are left out."""
    found: dict[tuple[str, int], list[float]] = {}
    runs_of: collections.Counter[str] = collections.Counter()
    for run in runs:
        for name, points in series(run).items():
            runs_of[name] += bool(points)
            for step, value in points.items():
                found.setdefault((name, step), []).append(value)
    return [
        {"series": name, "step": step, "value": statistics.fmean(values), "seeds": len(values)}
        for (name, step), values in sorted(found.items(), key=lambda item: item[0][1])
        if 2 * len(values) >= runs_of[name]
    ]


def layers(run: Found, quantity: str) -> dict[str, dict[int, float]]:
    """{layer: {step: mean over its heads}}, layers by number from 1."""
    found: dict[str, dict[int, float]] = {}
    for line in run.metrics():
        names = list(dict.fromkeys(head["layer"] for head in line.get("heads", [])))
        for number, layer in enumerate(names, 1):
            values = [
                h[quantity] for h in line["heads"] if h["layer"] == layer and isinstance(h[quantity], (int, float))
            ]
            if values:
                found.setdefault(f"layer {number}", {})[line["step"]] = statistics.fmean(values)
    return found


def logged(run: Found, name: str) -> dict[int, float]:
    return {m["step"]: float(m[name]) for m in run.metrics() if isinstance(m.get(name), (int, float))}


def inverse_scale(run: Found) -> dict[int, float]:
    return {step: 1 / scale for step, scale in logged(run, "loss_scale").items() if scale > 0}


def begun(runs: list[Found]) -> float:
    """The inverse loss scale that these begin with."""
    return max(next(iter(found.values())) for run in runs if (found := inverse_scale(run)))


def lowered(run: Found) -> int:
    """How often the loss scale was, from one look at it to the next."""
    return sum(after > before for before, after in itertools.pairwise(inverse_scale(run).values()))


def powers(rows: Rows, chart: str) -> Rows:
    """Loss scales are powers of two, and as such they are drawn."""
    return panel([{**row, "power": math.log2(row["value"])} for row in rows], chart)


def panel(rows: Rows, chart: str) -> Rows:
    return [{"chart": chart, **row} for row in rows]


def ends(rows: Rows, chart: str) -> dict[str, tuple[float, float]]:
    """{series: (first value, last value)} of a chart."""
    found: dict[str, tuple[float, float]] = {}
    for row in sorted((r for r in rows if r["chart"] == chart), key=lambda r: r["step"]):
        found[row["series"]] = (found.get(row["series"], (row["value"],))[0], row["value"])
    return found


# The figures


def per_layer(
    asked: Asked, runs: list[Found], task: str, panels: tuple[str, ...]
) -> tuple[Rows, list[Found], list[str]]:
    used, missing = chosen(asked, runs, task)
    used = [run for run in used if ":alpha=" not in run.attention]
    rows: Rows = []
    for attention in asked.attentions:
        mine = [run for run in used if run.attention == attention]
        for quantity in panels:
            found = over_seeds(mine, lambda run, quantity=quantity: layers(run, quantity))  # type: ignore[misc]
            rows += panel(found, f"{quantity}-{attention}")
            if mine and not found:
                missing.append(f"{attention}: no {quantity} was recorded (record_every, or the mechanism has none).")
    return rows, used, missing


def fig1(asked: Asked, runs: list[Found]) -> Made:
    rows, used, missing = per_layer(asked, runs, "mlm", PANELS1)
    verdicts = []
    for attention in asked.attentions:
        found = {quantity: ends(rows, f"{quantity}-{attention}") for quantity in PANELS1}
        if found["temperature"] and found["entropy"]:
            verdicts.append(judge_cooling(attention, found["temperature"], found["entropy"]))
            if len(found["entropy"]) > 2:
                verdicts.append(judge_layers(attention, found["entropy"]))
        if found["spectral_gap"]:
            verdicts.append(judge_gaps(attention, found["spectral_gap"]))
    return rows, verdicts, used, missing


def fig8(asked: Asked, runs: list[Found]) -> Made:
    used, missing = chosen(asked, runs, "mlm")
    rows: Rows = []
    for chart, name in (("a-validation", "eval_loss"), ("a-training", "loss")):
        rows += panel(over_seeds(used, lambda run, name=name: {run.attention: logged(run, name)}), chart)  # type: ignore[misc]
    final = {a: s for a in asked.attentions if (s := scores([run for run in used if run.attention == a]))}
    verdicts = [judge_loss(a, final[a], final["softmax"]) for a in final if a != "softmax" and "softmax" in final]
    scaled, left = scaled_runs(asked, runs, "mlm", used)
    missing += left
    rows += powers(over_seeds(scaled, lambda run: {run.attention: inverse_scale(run)}), "b-loss-scale")
    most = largest(rows, "b-loss-scale")
    falls = {a: max(lowered(run) for run in scaled if run.attention == a) for a in most}
    for a in most:
        if a != "softmax" and "softmax" in most:
            verdicts.append(judge_scale(a, most[a], most["softmax"], begun(scaled), (falls[a], falls["softmax"])))
    return rows, verdicts, list({r.folder: r for r in [*used, *scaled]}.values()), missing


def scaled_runs(asked: Asked, runs: list[Found], task: str, used: list[Found]) -> tuple[list[Found], list[str]]:
    """Runs under float16, which have a loss scale."""
    found = [run for run in used if run.config["precision"] == FLOAT16]
    left: list[str] = []
    if not found:
        found, left = chosen(asked, runs, task, precision=FLOAT16)
    if not any(inverse_scale(run) for run in found):
        left.append("The loss scale exists under float16 alone, in runs on a GPU; there are none of these.")
    return found, left


def largest(rows: Rows, chart: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        if row["chart"] == chart:
            found[row["series"]] = max(found.get(row["series"], 0.0), row["value"])
    return found


def fig9(asked: Asked, runs: list[Found]) -> Made:
    rows: Rows = []
    used: list[Found] = []
    missing: list[str] = []
    verdicts = []
    for task in watched(asked):
        found, some, left = per_layer(asked, runs, task, PANELS9)
        rows, used, missing = rows + named(found, task), used + some, missing + left
    for attention, task in itertools.product(asked.attentions, watched(asked)):
        mine = [row for row in rows if row["chart"] in {f"{q}-{attention}{ending(task)}" for q in PANELS9}]
        if mine:
            verdicts.append(judge_range(f"{attention}{WORDS9[task]}", [row["value"] for row in mine]))
    return rows, verdicts, used, missing


def ending(task: str) -> str:
    """Of a chart's name."""
    return "" if task == "image" else f"-{task}"


def named(rows: Rows, task: str) -> Rows:
    return [{**row, "chart": row["chart"] + ending(task)} for row in rows]


def fixed(run: Found) -> float | None:
    """alpha = beta of a run, None where they are matched."""
    value = run.config["attention"]["options"].get("alpha")
    return None if value is None else float(value)


def fig10(asked: Asked, runs: list[Found]) -> Made:
    used, missing = chosen(asked, runs, "image")
    rows: Rows = []
    verdicts = []
    for attention in asked.attentions:
        mine = [run for run in used if run.attention.partition(":alpha=")[0] == attention and run.score is not None]
        alphas = sorted({a for run in mine if (a := fixed(run)) is not None})
        by = {a: scores([run for run in mine if fixed(run) == a]) for a in alphas}
        matched = scores([run for run in mine if run.attention == attention])
        if not by or not matched:
            continue
        for alpha, found in by.items():
            rows.append(point(f"{attention}, alpha = beta", alpha, find_spread(found)))
            rows.append(point(f"{attention}, matched", alpha, find_spread(matched)))
        verdicts += judge_fixed(attention, by, matched)
    scaled, left = scaled_runs(asked, runs, "image", used)
    missing += left
    for attention in asked.attentions:
        mine = [run for run in scaled if run.attention.partition(":alpha=")[0] == attention]
        chart = f"b-loss-scale-{attention}"
        rows += powers(over_seeds(mine, lambda run: {matched_or_fixed(run): inverse_scale(run)}), chart)
        most = largest(rows, chart)
        if {"alpha = beta = 2", "alpha = beta = 4"} <= most.keys():
            verdicts.append(
                judge_risk(attention, most["alpha = beta = 4"], most["alpha = beta = 2"], most.get("matched"))
            )
    return rows, verdicts, list({r.folder: r for r in [*used, *scaled]}.values()), missing


def matched_or_fixed(run: Found) -> str:
    alpha = fixed(run)
    return "matched" if alpha is None else f"alpha = beta = {alpha:g}"


def point(series: str, alpha: float, found: Spread) -> dict[str, Any]:
    """With a spread where there are several seeds; a chart marks it as soon as all points have one."""
    row = {"chart": "a-accuracy", "series": series, "alpha": alpha, "value": found.mean, "seeds": found.n}
    if found.deviation is not None:
        row |= {"low": found.mean - found.deviation, "high": found.mean + found.deviation}
    return row
