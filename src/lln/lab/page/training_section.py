"""The section on a short training run: what temperature, entropy and spectral gap do while a model learns."""

import dataclasses
from pathlib import Path
from typing import Any

from lln.lab.core.charts import Axis, choose_ticks
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.page import Result, Rows, Section, chart_lines, tell_section
from lln.lab.core.palette import ATTENTIONS as LOOKS
from lln.lab.core.palette import Style
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.timing import use_one_thread

ATTENTIONS = {"softmax": "softmax", "lln": "LLN", "lln_diag": "LLN+Diag"}  # by the names that recipes know
DASHES = ((1, 0), (6, 3), (2, 2), (10, 3, 2, 3))  # by layer
# What is drawn of each layer, by the titles of its charts.
PANELS = {
    "temperature": "temperature", "entropy": "entropy (bits)", "spectral_gap": "spectral gap", "alpha": "alpha",
    "beta": "beta",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    steps: int = 360
    evaluate_every: int = 60
    record_every: int = 30
    log_every: int = 10


FULL = TrainingPlan()
QUICK = TrainingPlan(steps=60, evaluate_every=20, record_every=20)


@use_one_thread()
def measure(plan: TrainingPlan, *, seed: int, device: str, runs: Path, progress: Progress = ignore) -> dict[str, Any]:
    """Trains the recipe `mlm tiny` with each attention in a folder below `runs`; a stopped run goes on. `progress`
    hears of plan.steps steps for each."""
    from lln.lab.paper.run_records import read_curves, select_layers
    from lln.lab.recipes import recipe
    from lln.lab.train.run import train

    found: dict[str, Any] = {}
    for name, title in ATTENTIONS.items():
        config = recipe("mlm", "tiny", name)
        optimisation = dataclasses.replace(config.optimisation, steps=plan.steps, warmup=min(40, plan.steps // 4))
        config = dataclasses.replace(
            config, optimisation=optimisation, seed=seed, log_every=plan.log_every, evaluate_every=plan.evaluate_every,
            save_every=plan.evaluate_every, record_every=plan.record_every,
        )  # fmt: skip
        folder = runs / name

        def step(at: int, values: dict[str, float], title: str = title) -> None:
            progress(f"train with {title}, step {at}")

        result = train(config, folder, device=device, progress=step)
        curves = read_curves(folder)
        found[title] = {
            "loss": result["metrics"]["loss"],
            "guess": result["guess"]["loss"],
            "seconds": result["seconds"],
            "validation": curves["eval_loss"],
            "training": curves["loss"],
            "layers": {quantity: select_layers(curves, quantity) for quantity in PANELS},
            "provenance": result["provenance"],
            "notes": result["notes"],
            "config": result["config"],
        }
    return {
        "what": "a small language model that guesses masked tokens, trained with three attentions",
        "settings": dataclasses.asdict(plan),
        "provenance": found["softmax"]["provenance"],
        "attentions": found,
    }


def list_by_layer(result: Result, quantity: str) -> Rows:
    return [
        {"series": f"{name}, {layer}", "step": int(step), "value": value}
        for name, x in result["attentions"].items()
        for layer, points in x["layers"][quantity].items()
        for step, value in points.items()
    ]


def style_layers(rows: Rows) -> dict[str, Style]:
    found = {}
    for series in dict.fromkeys(row["series"] for row in rows):
        name, _, layer = series.partition(", layer ")
        dash = DASHES[(int(layer) - 1) % len(DASHES)] if layer else (1, 0)
        found[series] = dataclasses.replace(LOOKS[name], dash=dash, width=2.5)
    return found


def make_section(result: Result) -> Section:
    curves = [
        {"series": name, "step": int(step), "loss": loss}
        for name, x in result["attentions"].items()
        for step, loss in x["validation"].items()
    ]
    said, *captions = write_paragraphs("training.txt", "captions")
    x, y = Axis("step", "step"), Axis("loss", "loss on held-out text")
    drawn = [chart_lines("training-loss", curves, style_layers(curves), x, y, said, points=True)]
    for (quantity, title), caption in zip(PANELS.items(), captions, strict=True):
        if rows := list_by_layer(result, quantity):
            values = [row["value"] for row in rows]
            vertical = Axis("value", title)
            if quantity == "temperature":  # it falls by orders of magnitude
                vertical = Axis("value", title, True, choose_ticks(min(values), max(values)))
            x, name = Axis("step", "step", from_zero=True), f"training-{quantity.replace('_', '-')}"
            drawn.append(chart_lines(name, rows, style_layers(rows), x, vertical, caption))
    return Section(
        **tell_section("training", result, config=result["attentions"]["softmax"]["config"]),
        sentences=write_sentences(result),
        charts=drawn,
        header=["attention", "loss", "seconds", *(f"{q.replace('_', ' ')}, first to last" for q in PANELS)],
        table=[
            [name, f"{x['loss']:.3f}", f"{x['seconds']:.0f}", *(describe_ends(x, quantity) for quantity in PANELS)]
            for name, x in result["attentions"].items()
        ],
        data=result,
    )


def describe_ends(x: dict[str, Any], quantity: str) -> str:
    """Means over the layers at the first and at the last step that was recorded."""
    layers = x["layers"][quantity].values()
    ends = [sum(points[end(points, key=int)] for points in layers) / len(layers) for end in (min, max) if layers]
    return " to ".join(f"{value:.3g}" for value in ends)


def list_losses(result: Result) -> str:
    return ", ".join(f"{x['loss']:.2f} with {name}" for name, x in result["attentions"].items())


def write_sentences(result: dict[str, Any]) -> list[str]:
    found = result["attentions"]
    guess = found["softmax"]["guess"]
    went = {
        quantity: [f"{ends} with {name}" for name, x in found.items() if (ends := describe_ends(x, quantity))]
        for quantity in ("temperature", "entropy")
    }
    # At every record, not only at the ends: in between it can be far lower.
    gaps = [x for points in found["LLN+Diag"]["layers"]["spectral_gap"].values() for x in points.values()]
    return write_paragraphs(
        "training.txt", "sentences", ended=list_losses(result), guess=guess, went=went, gaps=gaps,
        learned=[name for name, x in found.items() if x["loss"] < guess], blocked=max(gaps, default=1.0) < 0.55,
    )  # fmt: skip
