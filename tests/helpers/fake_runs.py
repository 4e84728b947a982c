"""Folders of runs that nobody trained, with known numbers in them."""

import json
from pathlib import Path
from typing import Any

from lln.lab.paper.experiments import EXPERIMENTS, Asked
from lln.lab.paper.jobs import Job
from lln.lab.train.config import Config

PROVENANCE = {"command": "lln", "commit": "abc", "date": "2026-01-01T00:00:00+00:00", "seed": 0, "device": "a machine"}


def make_asked(runs: Path, **changed: Any) -> Asked:
    settings: dict[str, Any] = {
        "scale": "tiny", "attentions": ("softmax", "lln"), "tasks": (), "seeds": 1, "tunings": 1, "changes": {},
        "device": "cpu",
    }  # fmt: skip
    return Asked(**(settings | changed), runs=runs)


def list_jobs(name: str, what: Asked) -> list[Job]:
    return EXPERIMENTS[name].jobs(what)


def make_result(config: Config, score: float, notes: list[str] | None = None, seconds: float = 2.0) -> dict[str, Any]:
    """score: accuracy (0 to 1), or the loss of mlm"""
    metrics = {"loss": score} if config.task == "mlm" else {"loss": 0.5, "accuracy": score}
    return {
        "config": config.to_dict(), "metrics": metrics, "guess": {}, "parameters": 7, "notes": notes or [], "data": {},
        "seconds": seconds, "provenance": PROVENANCE,
    }  # fmt: skip


def finish(
    path: Path,
    config: Config,
    score: float,
    *,
    notes: list[str] | None = None,
    lines: list[dict[str, Any]] | None = None,
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines or []))
    (path / "result.json").write_text(json.dumps(make_result(config, score, notes)))


def fail(path: Path, config: Config, sentence: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "failed.json").write_text(json.dumps({"error": "NotFinite", "sentence": sentence}))
