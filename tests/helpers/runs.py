"""Runs small enough for a test: their configs, how they are stopped, and what they write."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lln.lab.recipes import recipe
from lln.lab.train.config import Config, change

# The smallest language model that can be trained, as changes of a recipe.
SMALLEST = {
    "model.layers": "1", "model.width": "32", "model.heads": "2", "model.inner": "32", "data.length": "32",
    "data.vocabulary": "300", "data.evaluation": "20", "optimisation.batch": "4", "optimisation.warmup": "2",
}  # fmt: skip
OF_TEXT = ("model.", "data.length", "data.vocabulary")


def make_tiny(
    small: Mapping[str, str], attention: str = "lln_diag", task: str = "mlm", name: str | None = None, **changes: str
) -> Config:
    """A tiny recipe with the changes in `small` that its task and attention know (options are LLN+Diag's), and with
    `changes`, whose dots are written as two underscores."""
    kept = {k: v for k, v in small.items() if attention == "lln_diag" or not k.startswith("attention.options")}
    if task != "mlm":
        kept = {k: v for k, v in kept.items() if not k.startswith(OF_TEXT)} | {"data.train": "50"}
    return change(recipe(task, "tiny", attention, name), kept | {k.replace("__", "."): v for k, v in changes.items()})


def as_options(changes: Mapping[str, str]) -> list[str]:
    """Changes of a config as options of the command line."""
    return [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Stop(Exception):
    """Raised by `stop_at`, and by nothing else."""


def stop_at(number: int) -> Callable[[int, dict[str, float]], None]:
    """What a run tells its progress to, until a step at which it is stopped."""

    def progress(step: int, values: dict[str, float]) -> None:
        if step == number:
            raise Stop

    return progress
