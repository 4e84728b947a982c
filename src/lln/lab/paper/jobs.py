"""The training runs that a table or figure needs, each in a folder of its own: their configs, and what is there."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from lln.files import read_json
from lln.lab.recipes import NAMES, PRESETS, recipe
from lln.lab.recipes.image import deit_tiny
from lln.lab.train.config import TASKS, Config, change, choose_attention, parse_json
from lln.lab.train.run_folder import CONFIG, RESULT, Run, list_differences

FAILED = "failed.json"
DEIT = "deit-tiny"
POINTS = 30
NOT_SET = ("attention", "seed", "task", "preset")  # what jobs decide themselves


@dataclasses.dataclass(frozen=True)
class Job:
    folder: str  # below the folder of runs
    config: Config
    after: str | None = None  # folder of the run whose model this one starts from


# Configs and folders


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of what `--attentions` names.

    >>> parse_attention("lln_diag")
    ('lln_diag', {})
    >>> parse_attention("lln:matching=entropy:alpha=2")
    ('lln', {'matching': 'entropy', 'alpha': 2})
    """
    name, *pairs = text.strip().split(":")
    options = {}
    for pair in pairs:
        option, sign, value = pair.partition("=")
        if not sign or not option or not value:
            raise ValueError(f"--attentions: options look like lln:matching=entropy; got {text!r}.")
        options[option] = parse_json(value)
    return name, options


def find_recipe(task: str, preset: str, name: str | None, attention: str = "lln_diag") -> Config:
    """Of a preset, or of the vision transformer of Fig. 10b."""
    if preset == DEIT:
        config = deit_tiny()
        return dataclasses.replace(config, attention=choose_attention(attention, config.attention.options))
    return recipe(task, preset if preset in PRESETS else "paper", attention, name)


def configure(
    task: str, preset: str, attention: str, seed: int, changes: dict[str, str], *, name: str | None = None,
    start: Path | None = None, precision: str | None = None,
) -> Config:  # fmt: skip
    """A recipe with an attention, a seed and the changes that are for it."""
    kind, options = parse_attention(attention)
    config = find_recipe(task, preset, name, kind)
    own: dict[str, Any] = {
        "attention": dataclasses.replace(config.attention, options=config.attention.options | options), "seed": seed,
        "record_every": 0,  # what layers do is drawn for pre-training and images alone, there with some thirty points
    }  # fmt: skip
    if task in ("mlm", "image"):
        own["record_every"] = min(config.record_every, max(config.optimisation.steps // POINTS, 1))
    if precision is not None:  # a graph cannot hold a loss scale
        own |= {"precision": precision, "graph": config.graph and precision != "float16"}
    if start is not None:
        own["model"] = dataclasses.replace(config.model, start=str(start))
    return change(dataclasses.replace(config, **own), select_changes(changes, task, name))


def select_changes(changes: dict[str, str], task: str, name: str | None) -> dict[str, str]:
    """Those for this task. `optimisation.steps` is for all, `glue.optimisation.steps` for one task,
    `glue.sst2.optimisation.steps` for one part of it; the narrower wins."""
    found: dict[int, dict[str, str]] = {0: {}, 1: {}, 2: {}}
    for key, value in changes.items():
        parts, narrow = key.split("."), 0
        if parts[0] in TASKS:
            narrow = 2 if len(parts) > 1 and parts[1] in NAMES.get(parts[0], []) else 1
        if parts[:narrow] != [task, name][:narrow]:
            continue
        parts = parts[narrow:]
        if not parts or parts[0] in NOT_SET or parts == ["model", "start"]:
            raise ValueError(
                f"--set {key}: {'.'.join(parts) or 'that'} cannot be set here; attentions are named with --attentions, "
                "like lln:statistics=batch, and seeds counted with --seeds."
            )
        found[narrow][".".join(parts)] = value
    return found[0] | found[1] | found[2]


def name_folder(config: Config, name: str | None, pretraining: int | None = None) -> str:
    usual = find_recipe(config.task, config.preset, name).precision
    parts = [
        config.task, name, config.preset, None if config.precision == usual else config.precision,
        re.sub(r"[^\w.+-]+", "-", config.attention.label),
        None if pretraining is None else f"{'new' if config.model.untrained else 'pre'}{pretraining}",
        f"seed{config.seed}",
    ]  # fmt: skip
    return "-".join(part for part in parts if part)


# What is there


def find_state(path: Path) -> str:
    """finished, failed, begun or new"""
    for file, word in ((RESULT, "finished"), (FAILED, "failed"), (CONFIG, "begun")):
        if (path / file).exists():
            return word
    return "new"


def check_jobs(jobs: list[Job], runs: Path) -> None:
    """ValueError where a folder holds a run with other settings, or one that another process is busy with."""
    for job in jobs:
        path, now = runs / job.folder, find_state(runs / job.folder)
        if now in ("finished", "failed"):
            # Only what a result depends on: logging may have been set otherwise.
            there = read_json(path / CONFIG, dict)
            if changed := list_differences(find_shape(there), find_shape(job.config.to_dict())):
                raise ValueError(
                    f"{path} holds a run with other settings: {'; '.join(changed)}. Name another --out or remove it."
                )
        elif now == "begun":
            with Run(path, job.config.to_dict()).lock():
                pass


def find_shape(config: dict[str, Any]) -> dict[str, Any]:
    """What runs of one table share, whatever their attention and seed: all that decides a result but these."""
    kept = {name: config[name] for name in ("task", "preset", "model", "data", "optimisation", "precision")}
    return kept | {"model": {k: v for k, v in kept["model"].items() if k != "start"}}
