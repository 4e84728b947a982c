"""Figs. 1, 8, 9 and 10: what runs recorded while they trained, as rows for charts, and what the paper says of it."""

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from lln.lab.paper.analysis import Rows, Verdict, judge
from lln.lab.paper.experiments import FLOAT16, Asked, Experiment, find_watched
from lln.lab.paper.jobs import DEIT, configure, find_shape
from lln.lab.paper.run_records import LOGGED, Curves, RunRecord, group_by, list_runs, select_alike, select_layers
from lln.lab.paper.run_tables import list_marks, list_scores
from lln.lab.paper.spread import find_difference, find_spread

PANELS1 = ("temperature", "entropy", "spectral_gap")
PANELS9 = ("alpha", "beta")
NEAR = 0.05  # nats: a loss that is higher by no more than this is said to follow another
SOME = 1.0  # bits: entropy that is "approximately zero"
RANGE9 = (2.0, 2.2)  # of alpha and beta in the paper's Fig. 9
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

    def judge(self, claim: str, holds: bool | None, numbers: Mapping[str, float | None], **facts: Any) -> None:
        self.verdicts.append(judge(claim, holds, numbers, **facts))

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
    tasks = group_by(used, lambda run: str(run.facts["task"]))
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


def find_ends(rows: Rows, chart: str) -> dict[str, tuple[float, float]]:
    """{series: (first value, last value)} of a chart."""
    found: dict[str, tuple[float, float]] = {}
    for row in sorted((r for r in rows if r["chart"] == chart), key=lambda r: r["step"]):
        found[row["series"]] = (found.get(row["series"], (row["value"],))[0], row["value"])
    return found


# The figures, and what the paper says of each


def draw_fig1(draft: Draft) -> None:
    draft.add_layers("mlm", PANELS1)
    for attention in draft.asked.attentions:
        temperature, entropy, gap = (find_ends(draft.rows, f"{quantity}-{attention}") for quantity in PANELS1)
        if temperature and entropy:
            (t0, t1), (h0, h1) = (
                map(statistics.fmean, zip(*ends.values(), strict=True)) for ends in (temperature, entropy)
            )
            means = {"temperature_first": t0, "temperature_last": t1, "entropy_first": h0, "entropy_last": h1}
            draft.judge("fig1_falls", t1 < t0 and h1 < h0, means, attention=attention)
            first, *middle = (last for _, last in entropy.values())
            if (lowest := min(middle[:-1], default=None)) is not None:
                numbers = {"first_layer": first, "lowest_middle_layer": lowest}
                draft.judge("fig1_middle", lowest < SOME and first > lowest, numbers, attention=attention)
        if gap:
            fallen = sum(last < first for first, last in gap.values())
            numbers = {"layers": len(gap), "decreased": fallen}
            draft.judge("fig1_gap", fallen > len(gap) / 2, numbers, attention=attention)


def draw_fig8(draft: Draft) -> None:
    used = draft.select("mlm")
    for chart, name in (("a-validation", "eval_loss"), ("a-training", "loss")):
        draft.add_curves(chart, used, lambda run, name=name: {run.attention: run.curves.get(name, {})})  # type: ignore[misc]
    others = [a for a in draft.asked.attentions if a != "softmax"]
    softmax, *rest = (list_scores([run for run in used if run.attention == a]) for a in ("softmax", *others))
    for attention, ours in zip(others, rest, strict=True):
        if ours and softmax:
            said, (mean, theirs) = find_difference(ours, softmax), map(statistics.fmean, (ours, softmax))
            numbers = {"final": mean, "softmax": theirs, "difference": said.difference, "noise": said.noise}
            # No: more than NEAR above it, and by more than the noise. With much noise, or one seed, nobody knows.
            unclear = said.noise is None or NEAR < said.difference <= said.noise
            follows = None if unclear else said.difference <= NEAR
            draft.judge("fig8_loss", follows, numbers, attention=attention, near=NEAR)
    scaled = draft.select_scaled("mlm", used)
    most = draft.add_scales("b-loss-scale", scaled, lambda run: run.attention)
    inverse = [(run.attention, list(invert_scale(run).values())) for run in scaled if not run.is_bare]
    # The inverse scale that runs begin with, and how often each scale was lowered from one look at it to the next.
    first = max((scale[0] for _, scale in inverse if scale), default=0.0)
    lowered: dict[str, int] = {}
    for attention, scale in inverse:
        times = sum(after > before for before, after in itertools.pairwise(scale))
        lowered[attention] = max(times, lowered.get(attention, 0))
    for a in (a for a in most if a != "softmax" and {a, "softmax"} <= lowered.keys() & most.keys()):
        # Where no scale came below the first one, the largest inverse is that of the beginning, and says nothing.
        tested = max(most[a], most["softmax"]) > first
        numbers = {"largest": most[a], "softmax": most["softmax"], "first": first}
        numbers |= {"lowered": lowered[a], "softmax_lowered": lowered["softmax"]}
        holds = most[a] <= most["softmax"] if tested else None
        draft.judge("fig8_scale", holds, numbers, attention=a, tested=tested)


def draw_fig9(draft: Draft) -> None:
    ends = {task: "" if task == "image" else f"-{task}" for task in find_watched(draft.asked)}
    for task, end in ends.items():
        draft.add_layers(task, PANELS9, end)
    for attention, (task, end) in itertools.product(draft.asked.attentions, ends.items()):
        charts = {f"{quantity}-{attention}{end}" for quantity in PANELS9}
        if values := [row["value"] for row in draft.rows if row["chart"] in charts]:
            low, high, inside = min(values), max(values), statistics.fmean(RANGE9[0] <= x <= RANGE9[1] for x in values)
            numbers = {"lowest": low, "highest": high, "inside": inside}
            draft.judge("fig9", inside == 1, numbers, attention=attention, task=task)


def draw_fig10(draft: Draft) -> None:
    def find_alpha(run: RunRecord) -> float | None:
        """alpha = beta of a run, None where they are matched."""
        value = run.config["attention"]["options"].get("alpha")
        return None if value is None else float(value)

    used = draft.select("image")
    for attention in draft.asked.attentions:
        mine = [run for run in used if drop_alpha(run.attention) == attention and run.score is not None]
        alphas = sorted({a for run in mine if (a := find_alpha(run)) is not None})
        by = {a: list_scores([run for run in mine if find_alpha(run) == a]) for a in alphas}
        matched = list_scores([run for run in mine if run.attention == attention])
        if by and matched:
            for alpha, scores in by.items():
                for series, shown in (("alpha = beta", scores), ("matched", matched)):
                    point = {"chart": "a-accuracy", "series": f"{attention}, {series}", "alpha": alpha}
                    draft.rows.append(point | find_spread(shown).to_row())
            judge_fixed(draft, attention, by, matched)
    scaled = draft.select_scaled("image", used)
    for attention in draft.asked.attentions:
        mine = [run for run in scaled if drop_alpha(run.attention) == attention]
        most = draft.add_scales(
            f"b-loss-scale-{attention}", mine,
            lambda run: "matched" if (alpha := find_alpha(run)) is None else f"alpha = beta = {alpha:g}",
        )  # fmt: skip
        two, four, free = (most.get(name) for name in ("alpha = beta = 2", "alpha = beta = 4", "matched"))
        if two is not None and four is not None:
            numbers = {"four": four, "two": two, "matched": free}
            draft.judge("fig10_scale", four > two, numbers, attention=attention)


def judge_fixed(draft: Draft, attention: str, by: dict[float, list[float]], matched: list[float]) -> None:
    """Fixed values below 2 lose accuracy, those from 2 on do not. by: accuracies of each alpha = beta."""
    apart = {alpha: find_difference(values, matched) for alpha, values in by.items()}
    once, mean = any(d.noise is None for d in apart.values()), statistics.fmean(matched)
    for low in (True, False):
        if asked := {a: d for a, d in apart.items() if (a < 2.0) == low}:
            worse = [d.noise is not None and d.difference < -d.noise for d in asked.values()]
            holds = None if once else all(one == low for one in worse)
            texts = [f"{round(d.difference, 1) + 0.0:+.1f} at {a:g}" for a, d in asked.items()]  # no -0.0
            numbers = {f"difference_{a:g}": d.difference for a, d in asked.items()} | {"matched": mean}
            draft.judge("fig10_fixed", holds, numbers, attention=attention, low=low, texts=texts, once=once)


# How each is made, and which curves of its runs are stored with it.
FIGURES: dict[str, tuple[Callable[[Draft], None], tuple[str, ...]]] = {
    "fig1": (draw_fig1, PANELS1),
    "fig8": (draw_fig8, LOGGED),
    "fig9": (draw_fig9, PANELS9),
    "fig10": (draw_fig10, ("loss_scale",)),
}
