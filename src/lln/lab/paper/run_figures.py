"""Figs. 1, 8, 9 and 10: what runs recorded while they trained, as rows for charts, and what the paper says of it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from lln.lab.paper import claims
from lln.lab.paper.analysis import Rows, Verdict
from lln.lab.paper.experiments import FLOAT16, Asked, Experiment, find_watched
from lln.lab.paper.jobs import DEIT, configure, find_shape
from lln.lab.paper.run_records import LOGGED, Curves, RunRecord, list_runs, select_alike, select_layers
from lln.lab.paper.run_tables import list_marks, list_scores
from lln.lab.paper.spread import Spread, find_spread

PANELS1 = ("temperature", "entropy", "spectral_gap")
PANELS9 = ("alpha", "beta")
WORDS9 = {"image": "", "mlm": ", a language model"}
OF = {"image": "Of vision transformers", "mlm": "Of language models"}


@dataclasses.dataclass
class Draft:
    """A figure in the making. `means`: the rows of the stored figure whose runs are known without their curves."""

    asked: Asked
    runs: list[RunRecord]
    means: Rows
    rows: Rows = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    used: list[RunRecord] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    bare: set[str] = dataclasses.field(default_factory=set)  # folders of runs whose curves are asked for and not known

    def select(self, task: str, *, precision: str | None = None, fixed: bool = True) -> list[RunRecord]:
        """Runs of one task in one setting, with the attentions asked for (and fixed alpha = beta of them)."""
        asked = self.asked
        preset = DEIT if precision == FLOAT16 and task == "image" and asked.scale == "paper" else asked.scale
        wanted = configure(task, preset, "softmax", 0, asked.changes, precision=precision)
        mine = [
            run
            for run in self.runs
            if (run.facts["task"], run.facts["preset"], run.config["precision"]) == (task, preset, wanted.precision)
            and drop_alpha(run.attention) in asked.attentions
        ]
        found, left = select_alike(mine, find_shape(wanted.to_dict()))
        found = [run for run in found if fixed or ":alpha=" not in run.attention]
        self.missing += left
        self.used += [run for run in found if run.folder not in {r.folder for r in self.used}]
        return found

    def select_scaled(self, task: str, used: list[RunRecord]) -> list[RunRecord]:
        """Runs under float16, which have a loss scale."""
        found = [run for run in used if run.config["precision"] == FLOAT16] or self.select(task, precision=FLOAT16)
        if not any(run.is_bare or invert_scale(run) for run in found):
            self.missing.append("The loss scale exists under float16 alone, in runs on a GPU; there are none of these.")
        return found

    def add_curves(self, chart: str, runs: list[RunRecord], find: Callable[[RunRecord], Curves]) -> Rows:
        """Means over seeds of the curves that `find` gives of a run. Runs may have looked at other steps than others: a
        curve would jump at those that few of them have, so they are left out."""
        found: dict[tuple[str, int], list[float]] = {}
        runs_of: collections.Counter[str] = collections.Counter()
        if bare := {run.folder for run in runs if run.is_bare}:
            self.bare |= bare
            for row in (row for row in self.means if row["chart"] == chart):
                found[row["series"], row["step"]] = [row["value"]] * row["seeds"]
                runs_of[row["series"]] = max(runs_of[row["series"]], row["seeds"])
        for run in runs:
            for name, points in find(run).items():
                runs_of[name] += bool(points)
                for step, value in points.items():
                    found.setdefault((name, step), []).append(value)
        rows = [
            {"chart": chart, "series": name, "step": step, "value": statistics.fmean(values), "seeds": len(values)}
            for (name, step), values in sorted(found.items(), key=lambda item: item[0][1])
            if 2 * len(values) >= runs_of[name]
        ]
        self.rows += rows
        return rows

    def add_scales(self, chart: str, runs: list[RunRecord], name: Callable[[RunRecord], str]) -> dict[str, float]:
        """Loss scales are powers of two, and as such they are drawn; returns the largest inverse of each series."""
        most: dict[str, float] = {}
        for row in self.add_curves(chart, runs, lambda run: {name(run): invert_scale(run)}):
            row["power"] = math.log2(row["value"])
            most[row["series"]] = max(most.get(row["series"], 0.0), row["value"])
        return most

    def add_layers(self, task: str, panels: tuple[str, ...], end: str = "") -> None:
        """A chart of each quantity for each attention, with a line a layer."""
        used = self.select(task, fixed=False)
        for attention, quantity in itertools.product(self.asked.attentions, panels):
            mine = [run for run in used if run.attention == attention]
            found = self.add_curves(
                f"{quantity}-{attention}{end}", mine, lambda run, quantity=quantity: select_layers(run.curves, quantity)  # type: ignore[misc]
            )  # fmt: skip
            if mine and not found:
                self.missing.append(
                    f"{attention}: no {quantity} was recorded (record_every, or the mechanism has none)."
                )


def assemble_figure(
    experiment: Experiment, asked: Asked, runs: list[RunRecord], unavailable: dict[str, str], means: Rows | None = None
) -> dict[str, Any]:
    """The figure as JSON; everything that its charts show is in `rows`."""
    draft = Draft(asked, runs, means or [])
    draw, quantities = FIGURES[experiment.name]
    draw(draft)
    if draft.bare:
        draft.missing.append(
            f"The curves of {', '.join(sorted(draft.bare))} were not stored, their means were: these count as so many "
            "seeds, and what takes each curve is said of the other runs."
        )
    return {
        "figure": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "verdicts": [dataclasses.asdict(verdict) for verdict in draft.verdicts],
        "differs": describe_runs(draft.used),
        "missing": draft.missing,
        "unavailable": unavailable,
        **list_runs(draft.used, quantities),
        "rows": draft.rows,
    }


def describe_runs(used: list[RunRecord]) -> list[str]:
    """In what they differ from the paper's."""
    tasks: dict[str, list[RunRecord]] = {}
    for run in used:
        tasks.setdefault(run.facts["task"], []).append(run)
    said, halves = [], []
    for task, runs in tasks.items():
        usual = [run for run in runs if run.config["precision"] != FLOAT16] or runs
        marks, of = list_marks(usual), f"{OF[task]}: " if len(tasks) > 1 else ""  # Fig. 9 may show two kinds of models
        said += [of + text for text in (*marks["model"], *marks["budget"], *marks["data"])]
        halves += [f"{run.attention} {run.score:.4g}" for run in runs if run not in usual and run.score is not None]
    if halves:
        said.append(f"The loss scale is that of runs of their own, in {FLOAT16}. They end at: {', '.join(halves)}.")
    return said


def drop_alpha(attention: str) -> str:
    return attention.partition(":alpha=")[0]


def invert_scale(run: RunRecord) -> dict[int, float]:
    return {step: 1 / scale for step, scale in run.curves.get("loss_scale", {}).items() if scale > 0}


def count_lowered(run: RunRecord) -> int:
    """How often the loss scale was, from one look at it to the next."""
    return sum(after > before for before, after in itertools.pairwise(invert_scale(run).values()))


def find_ends(rows: Rows, chart: str) -> claims.Ends:
    """{series: (first value, last value)} of a chart."""
    found: claims.Ends = {}
    for row in sorted((r for r in rows if r["chart"] == chart), key=lambda r: r["step"]):
        found[row["series"]] = (found.get(row["series"], (row["value"],))[0], row["value"])
    return found


# The figures


def draw_fig1(draft: Draft) -> None:
    draft.add_layers("mlm", PANELS1)
    for attention in draft.asked.attentions:
        temperature, entropy, gap = (find_ends(draft.rows, f"{quantity}-{attention}") for quantity in PANELS1)
        if temperature and entropy:
            draft.verdicts.append(claims.judge_cooling(attention, temperature, entropy))
            if len(entropy) > 2:
                draft.verdicts.append(claims.judge_layers(attention, entropy))
        if gap:
            draft.verdicts.append(claims.judge_gaps(attention, gap))


def draw_fig8(draft: Draft) -> None:
    used = draft.select("mlm")
    for chart, name in (("a-validation", "eval_loss"), ("a-training", "loss")):
        draft.add_curves(chart, used, lambda run, name=name: {run.attention: run.curves.get(name, {})})  # type: ignore[misc]
    final = {a: list_scores([run for run in used if run.attention == a]) for a in draft.asked.attentions}
    others = [a for a in final if a != "softmax" and final[a]]
    draft.verdicts += [claims.judge_loss(a, final[a], final["softmax"]) for a in others if final.get("softmax")]
    scaled = draft.select_scaled("mlm", used)
    most = draft.add_scales("b-loss-scale", scaled, lambda run: run.attention)
    first = [next(iter(scale.values())) for run in scaled if (scale := invert_scale(run))]
    falls = {a: [count_lowered(run) for run in scaled if run.attention == a and not run.is_bare] for a in most}
    for a in (a for a in most if a != "softmax" and falls[a] and falls.get("softmax")):
        lowered = max(falls[a]), max(falls["softmax"])
        draft.verdicts.append(claims.judge_scale(a, most[a], most["softmax"], max(first), lowered))


def draw_fig9(draft: Draft) -> None:
    ends = {task: "" if task == "image" else f"-{task}" for task in find_watched(draft.asked)}
    for task, end in ends.items():
        draft.add_layers(task, PANELS9, end)
    for attention, (task, end) in itertools.product(draft.asked.attentions, ends.items()):
        charts = {f"{quantity}-{attention}{end}" for quantity in PANELS9}
        if values := [row["value"] for row in draft.rows if row["chart"] in charts]:
            draft.verdicts.append(claims.judge_range(f"{attention}{WORDS9[task]}", values))


def draw_fig10(draft: Draft) -> None:
    def find_alpha(run: RunRecord) -> float | None:
        """alpha = beta of a run, None where they are matched."""
        value = run.config["attention"]["options"].get("alpha")
        return None if value is None else float(value)

    def name_alpha(run: RunRecord) -> str:
        alpha = find_alpha(run)
        return "matched" if alpha is None else f"alpha = beta = {alpha:g}"

    used = draft.select("image")
    for attention in draft.asked.attentions:
        mine = [run for run in used if drop_alpha(run.attention) == attention and run.score is not None]
        alphas = sorted({a for run in mine if (a := find_alpha(run)) is not None})
        by = {a: list_scores([run for run in mine if find_alpha(run) == a]) for a in alphas}
        matched = list_scores([run for run in mine if run.attention == attention])
        if by and matched:
            for alpha, found in by.items():
                draft.rows.append(make_point(f"{attention}, alpha = beta", alpha, found))
                draft.rows.append(make_point(f"{attention}, matched", alpha, matched))
            draft.verdicts += claims.judge_fixed(attention, by, matched)
    scaled = draft.select_scaled("image", used)
    for attention in draft.asked.attentions:
        mine = [run for run in scaled if drop_alpha(run.attention) == attention]
        most = draft.add_scales(f"b-loss-scale-{attention}", mine, name_alpha)
        two, four = (most.get(f"alpha = beta = {alpha}") for alpha in (2, 4))
        if two is not None and four is not None:
            draft.verdicts.append(claims.judge_risk(attention, four, two, most.get("matched")))


def make_point(series: str, alpha: float, scores: list[float]) -> dict[str, Any]:
    """With a spread where there are several seeds; a chart marks it as soon as all points have one."""
    return {"chart": "a-accuracy", "series": series, "alpha": alpha, **add_spread(find_spread(scores))}


def add_spread(found: Spread) -> dict[str, Any]:
    row: dict[str, Any] = {"value": found.mean, "seeds": found.n}
    if found.deviation is not None:
        row |= {"low": found.mean - found.deviation, "high": found.mean + found.deviation}
    return row


# How each is made, and which curves of its runs are stored with it.
FIGURES: dict[str, tuple[Callable[[Draft], None], tuple[str, ...]]] = {
    "fig1": (draw_fig1, PANELS1),
    "fig8": (draw_fig8, LOGGED),
    "fig9": (draw_fig9, PANELS9),
    "fig10": (draw_fig10, ("loss_scale",)),
}
