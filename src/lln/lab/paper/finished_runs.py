"""Runs that exist, whoever made them: read back from their folders for tables and figures."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lln.files import read_json_lines
from lln.lab.paper.jobs import ATTEMPTS, FAILED, label, shape
from lln.lab.train.run import MODEL
from lln.lab.train.run_folder import CHECKPOINT, CONFIG, ENVIRONMENT, METRICS, RESULT, list_differences

# The embedded tasks stand in for these.
STANDS_FOR = {"topics": "sst2", "pairs": "qqp"}


@dataclasses.dataclass(frozen=True)
class Found:
    folder: str  # its path below where it was looked for
    path: Path
    config: dict[str, Any]
    attention: str  # as in --attentions
    column: str  # the task, and of GLUE and LRA which one
    pretraining: str | None  # of fine-tuning: which pre-trained model it starts from
    result: dict[str, Any] | None
    failure: dict[str, Any] | None

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def score(self) -> float | None:
        """Accuracy in %, of MNLI the matched one; of MLM the loss on held-out text. None: not finished."""
        if self.result is None:
            return None
        metrics = self.result["metrics"]
        if self.config["task"] == "mlm":
            return float(metrics["loss"])
        name = next(key for key in metrics if key.endswith("accuracy"))
        return 100.0 * float(metrics[name])

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are whole."""
        return read_json_lines(self.path / METRICS)

    def cost(self) -> dict[str, Any]:
        """Seconds over all times it was started, beside how many other runs at most, and bytes of the GPU; what a
        killed process took is not known."""
        times = read(self.path / ATTEMPTS) or []
        starts = len(read(self.path / ENVIRONMENT) or [])
        seconds = sum(t["seconds"] for t in times) if times else (self.result or {}).get("seconds")
        most = [t["bytes"] for t in times if t["bytes"] is not None]
        whole = starts <= max(len(times), 1)
        return {
            "seconds": seconds, "beside": max((t.get("beside", 0) for t in times), default=0),
            "bytes": max(most, default=None), "starts": starts, "all_times_known": whole,
        }  # fmt: skip


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def find(folder: Path) -> list[Found]:
    """Every run in this folder or below it, in the order of their names."""
    found = []
    for path in sorted(configs(folder)):
        config = read(path)
        if isinstance(config, dict) and {"task", "preset", "attention", "optimisation", "seed"} <= config.keys():
            found.append(described(path.parent, folder, config))
    return found


def configs(folder: Path) -> Iterator[Path]:
    """Not those of checkpoints and models, which another process may be writing or removing."""
    for place, inside, files in os.walk(folder, followlinks=True):
        inside[:] = [name for name in inside if name != MODEL and not name.startswith(CHECKPOINT)]
        if CONFIG in files:
            yield Path(place) / CONFIG


def described(path: Path, below: Path, config: dict[str, Any]) -> Found:
    subset = config["data"]["subset"]
    column = STANDS_FOR.get(subset, subset) if config["task"] in ("glue", "lra") else config["task"]
    if config["task"] == "lra":
        column = subset  # LRA's own names
    return Found(
        folder=path.relative_to(below).as_posix(), path=path, config=config, attention=label(config), column=column,
        pretraining=origin(config["model"]["start"]), result=read(path / RESULT), failure=read(path / FAILED),
    )  # fmt: skip


def origin(start: str) -> str | None:
    """Which pre-trained model a folder is: its seed where the name tells it."""
    if not start:
        return None
    named = re.search(r"seed(\d+)$", Path(start).parent.name)
    return f"seed {named[1]}" if named else Path(start).parent.name


def alike(runs: list[Found], wanted: dict[str, Any] | None) -> tuple[list[Found], list[str]]:
    """Of runs of one column those that can stand in one table: with the settings asked for, where there are any, else
    with those that most of them have. Also a sentence about the others."""
    if not runs:
        return [], []
    shapes = [shape(run.config) for run in runs]
    chosen = wanted if wanted in shapes else None
    if chosen is None:
        texts = collections.Counter(json.dumps(s, sort_keys=True) for s in shapes)
        chosen = json.loads(texts.most_common(1)[0][0])
    kept = [run for run, s in zip(runs, shapes, strict=True) if s == chosen]
    left = [
        f"{run.folder} is left out: {'; '.join(list_differences(s, chosen))} for the others."
        for run, s in zip(runs, shapes, strict=True)
        if s != chosen
    ]
    return kept, left
