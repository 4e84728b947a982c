"""What `lln reproduce` was asked for, of tables and figures made of training runs: understood, or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from lln.lab.core.errors import DataError, Refused
from lln.lab.data.labelled import list_tasks
from lln.lab.data.sources import list_splits
from lln.lab.paper.experiments import EXPERIMENTS, Asked, Experiment, find_refusal
from lln.lab.paper.jobs import Job, configure
from lln.lab.paper.needle_lengths import parse_lengths
from lln.lab.recipes import PRESETS
from lln.lab.train.config import Config


@dataclasses.dataclass(frozen=True)
class Request:
    """The command line, as it was given."""

    name: str
    scale: str
    attentions: str | None
    tasks: str | None
    seeds: int
    first: int
    tunings: int | None
    changes: dict[str, str]
    data_root: Path | None
    device: str | None
    out: Path
    source: Path | None
    charts: bool
    dry_run: bool
    retry: bool
    keep: bool
    at_once: int
    as_json: bool


def understand(request: Request) -> tuple[Asked, dict[str, str]]:
    """The request with its defaults, and of the default attentions those that cannot be run, and why. Refused, in one
    sentence, for what cannot be."""
    experiment, scale = EXPERIMENTS[request.name], request.scale
    task = "mlm" if experiment.task == "glue" else experiment.task
    unavailable: dict[str, str] = {}
    names: list[str] = []
    asked = None if request.attentions is None else split_names(request.attentions)
    for name in experiment.attentions(scale) if asked is None else asked:
        if (why := find_refusal(task, scale, name)) is None:
            names.append(configure(task, scale, name, 0, {}).attention.label)  # whatever the order of options
        elif asked is None:
            unavailable[name] = why
        else:
            raise Refused(f"--attentions: {why}.")
    if not names:
        raise Refused(f"--attentions: there is none to run; got {request.attentions!r}.")
    changes = dict(request.changes)
    lengths = parse_lengths(changes.pop("lengths", "") if request.name == "lengths" else "")
    found = Asked(
        scale=scale, attentions=tuple(dict.fromkeys(names)), tasks=choose_tasks(experiment, request),
        seeds=request.seeds, tunings=request.tunings or (1 if scale == "tiny" else 3), changes=changes,
        runs=request.out / "runs", device=request.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        first=request.first, lengths=lengths,
    )  # fmt: skip
    return found, unavailable


def split_names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def choose_tasks(experiment: Experiment, request: Request) -> tuple[str, ...]:
    allowed = experiment.tasks(request.scale)
    if request.tasks is None:
        return allowed if experiment.columns else ()
    if not allowed:
        able = ", ".join(e.name for e in EXPERIMENTS.values() if e.tasks(request.scale))
        raise Refused(f"--tasks goes with {able}, not with {experiment.name}.")
    given = split_names(request.tasks)
    unknown = [name for name in given if name not in allowed]
    if unknown or not given:
        elsewhere = unknown and any(unknown[0] in experiment.tasks(scale) for scale in PRESETS)
        more = f" (at scale {request.scale})" if elsewhere else ""
        got = unknown[0] if unknown else request.tasks
        raise Refused(f"--tasks must be among {', '.join(allowed)}{more}; got {got!r}.")
    return tuple(given)


def check_data(jobs: list[Job], data_root: Path | None) -> None:
    """DataError where a set is not there: before hours have gone by."""
    places: dict[tuple[str, str | None], str] = {}
    for job in jobs:
        if (place := find_data(job.config)) is not None:
            places.setdefault(place, job.config.task)
    for (name, part), task in places.items():
        known = list_splits(name, config=part, data_root=data_root)
        if known and "train" not in known:
            raise DataError(
                f"{' '.join(filter(None, (name, part)))} has no split 'train' here (it has {', '.join(known)}); "
                f"another set is named with --set {task}.data.name=..."
            )


def find_data(config: Config) -> tuple[str, str | None] | None:
    """(name, configuration) of the set that a run reads, None where it is generated."""
    data = config.data
    if data.name == "generated":
        return None
    if config.task == "glue":
        task = list_tasks()[data.subset]
        return task.name, task.config
    return data.name, (data.subset or None) if config.task in ("mlm", "image", "needles") else None
