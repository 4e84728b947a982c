"""Runs small enough for a test: their configs, how they are stopped, and what they write."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lln.hf.distillation import Learner
from lln.lab.recipes import recipe
from lln.lab.train.config import Config, change
from lln.lab.train.run import train

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


def write_options(changes: Mapping[str, str]) -> list[str]:
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


def assert_goes_on(config: Config, folder: Path, cache: Path, *, stop: int) -> None:
    """A run in folder/parts that is stopped at that step, one after the last that is saved, ends as one in folder/whole
    that is not; and no two of the steps that it tells of have the same loss."""
    whole = train(config, folder / "whole", cache_dir=cache)
    with pytest.raises(Stop):
        train(config, folder / "parts", cache_dir=cache, progress=stop_at(stop))
    said: list[str] = []
    parts = train(config, folder / "parts", cache_dir=cache, say=said.append)
    assert f"Going on from step {stop - 1}." in said
    assert parts["metrics"] == whole["metrics"]
    lines = [(folder / run / "metrics.jsonl").read_text() for run in ("whole", "parts")]
    assert lines[0] == lines[1]
    losses = [row["loss"] for row in read_metrics(folder / "whole") if "loss" in row]
    assert len(set(losses)) == config.optimisation.steps // config.log_every


@contextlib.contextmanager
def interrupt_learning(after: int) -> Iterator[None]:
    """Somebody presses Ctrl-C after so many steps of distillation and fine-tuning."""
    plain, steps = Learner.step, itertools.count()

    def stop(self: Learner, loss: float) -> None:
        if next(steps) == after:
            raise KeyboardInterrupt
        plain(self, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", stop)
        yield
