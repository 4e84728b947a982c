"""The training runs of a table or figure, each in a folder of its own: what is there, and running what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lln.files import write_json
from lln.hf.distillation import NotFinite
from lln.lab.core.errors import DataError, first_line
from lln.lab.core.provenance import provenance
from lln.lab.data.made_once import Place
from lln.lab.recipes import NAMES, PRESETS, recipe
from lln.lab.recipes.image import deit_tiny
from lln.lab.train.config import TASKS, Config, change, choose_attention, parse_json
from lln.lab.train.run import MODEL, train
from lln.lab.train.run_folder import CONFIG, RESULT, Run, list_differences

FAILED, ATTEMPTS = "failed.json", "attempts.json"
DEIT = "deit-tiny"
DIAG = "_diag"
POINTS = 30
NOT_SET = ("attention", "seed", "task", "preset")  # what jobs decide themselves
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Job:
    folder: str  # below the folder of runs
    config: Config
    after: str | None = None  # folder of the run whose model this one starts from


# Attentions by name


def parse_attention(text: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of `lln_diag` or, with options of it, `lln:matching=entropy:statistics=batch`."""
    name, *pairs = text.strip().split(":")
    options = {}
    for pair in pairs:
        option, sign, value = pair.partition("=")
        if not sign or not option or not value:
            raise ValueError(f"--attentions: options look like lln:matching=entropy; got {text!r}.")
        options[option] = parse_json(value)
    return name, options


def label(config: dict[str, Any]) -> str:
    """What parse_attention would read: options that are the preset's own are left out."""
    name, options = config["attention"]["name"], config["attention"]["options"]
    with_blocks = base(config["task"], config["preset"], None, name + DIAG).attention
    shown, usual = name, base(config["task"], config["preset"], None, name).attention.options
    if (
        not name.endswith(DIAG)
        and with_blocks.name == name
        and with_blocks.options.get("block_size") == options.get("block_size")
    ):
        shown, usual = name + DIAG, with_blocks.options  # elu with blocks is elu_diag
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in sorted(options.items()) if usual.get(k) != v}
    changed = [f"{k}={text}" for k, text in texts.items()]
    return ":".join([shown, *changed])


def base(task: str, preset: str, name: str | None, attention: str = "lln_diag") -> Config:
    if preset == DEIT:
        config = deit_tiny()
        return dataclasses.replace(config, attention=choose_attention(attention, config.attention.options))
    return recipe(task, preset if preset in PRESETS else "paper", attention, name)


# Configs and folders


def configure(
    task: str, preset: str, attention: str, seed: int, changes: dict[str, str], *, name: str | None = None,
    start: Path | None = None, precision: str | None = None,
) -> Config:  # fmt: skip
    """A recipe with an attention, a seed and the changes that are for it."""
    kind, options = parse_attention(attention)
    config = base(task, preset, name, kind)
    held = dataclasses.replace(config.attention, options=config.attention.options | options)
    config = dataclasses.replace(config, attention=held, seed=seed)
    if precision is not None:
        # A graph cannot hold a loss scale.
        config = dataclasses.replace(config, precision=precision, graph=config.graph and precision != "float16")
    config = dataclasses.replace(config, record_every=recorded(config))
    if start is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, start=str(start)))
    return change(config, meant(changes, task, name))


def recorded(config: Config) -> int:
    """What layers do is drawn for pre-training and images alone, there with some thirty points."""
    if config.task not in ("mlm", "image"):
        return 0
    return min(config.record_every, max(config.optimisation.steps // POINTS, 1))


def meant(changes: dict[str, str], task: str, name: str | None) -> dict[str, str]:
    """Those for this task. `optimisation.steps` is for all, `glue.optimisation.steps` for one task,
    `glue.sst2.optimisation.steps` for one part of it; the narrower wins."""
    found: dict[int, dict[str, str]] = {0: {}, 1: {}, 2: {}}
    for key, value in changes.items():
        parts = key.split(".")
        narrow = 0
        if parts[0] in TASKS:
            if parts[0] != task:
                continue
            parts, narrow = parts[1:], 1
            if parts and parts[0] in NAMES.get(task, []):
                if parts[0] != name:
                    continue
                parts, narrow = parts[1:], 2
        if not parts or parts[0] in NOT_SET or parts == ["model", "start"]:
            raise ValueError(
                f"--set {key}: {'.'.join(parts) or 'that'} cannot be set here; attentions are named with --attentions, "
                "like lln:statistics=batch, and seeds counted with --seeds."
            )
        found[narrow][".".join(parts)] = value
    return found[0] | found[1] | found[2]


def folder_name(config: Config, name: str | None, pretraining: int | None = None) -> str:
    usual = base(config.task, config.preset, name).precision
    parts = [
        config.task, name, config.preset, None if config.precision == usual else config.precision,
        re.sub(r"[^\w.+-]+", "-", label(config.to_dict())), None if pretraining is None else f"pre{pretraining}",
        f"seed{config.seed}",
    ]  # fmt: skip
    return "-".join(part for part in parts if part)


# The state of a run


def state(path: Path) -> str:
    """finished, failed, begun or new"""
    for file, word in ((RESULT, "finished"), (FAILED, "failed"), (CONFIG, "begun")):
        if (path / file).exists():
            return word
    return "new"


def check(jobs: list[Job], runs: Path) -> None:
    """ValueError where a folder holds a run with other settings, or one that another process is busy with."""
    for job in jobs:
        path, now = runs / job.folder, state(runs / job.folder)
        if now in ("finished", "failed"):
            # Only what a result depends on: logging may have been set otherwise.
            held, asked = (shape(c) for c in (json.loads((path / CONFIG).read_text()), job.config.to_dict()))
            if changed := list_differences(held, asked):
                raise ValueError(
                    f"{path} holds a run with other settings: {'; '.join(changed)}. Name another --out or remove it."
                )
        elif now == "begun":
            with Run(path, job.config.to_dict()).lock():
                pass


def shape(config: dict[str, Any]) -> dict[str, Any]:
    """What runs of one table share, whatever their attention and seed: all that decides a result but these."""
    kept = {name: config[name] for name in ("task", "preset", "model", "data", "optimisation", "precision")}
    return kept | {"model": {k: v for k, v in kept["model"].items() if k != "start"}}


# Running


@dataclasses.dataclass
class Hooks:
    """Who is told what happens."""

    say: Say = lambda text: None
    begin: Callable[[Job], None] = lambda job: None
    step: Callable[[Job, int, dict[str, float]], None] = lambda job, number, values: None
    end: Callable[[Job, str], None] = lambda job, state: None  # also of runs that were finished before


def drive(
    jobs: list[Job], runs: Path, *, device: str, data_root: Place = None, cache_dir: Place = None,
    hooks: Hooks | None = None, retry: bool = False, keep: bool = False,
) -> None:  # fmt: skip
    """Run what is not finished yet. A run that fails is recorded as failed, with the reason, and the rest goes on;
    KeyboardInterrupt and OSError (a full disk) come through, and everything can go on from there."""
    hooks, needed = hooks or Hooks(), {job.after for job in jobs}
    for job in jobs:
        if not settled(job, runs, hooks, retry=retry):
            hooks.begin(job)
            hooks.end(job, run_one(job, runs / job.folder, device, data_root, cache_dir, hooks))
            tidied(job, runs, needed, keep=keep)


def settled(job: Job, runs: Path, hooks: Hooks, *, retry: bool) -> bool:
    """Whether there is nothing to run, because it was run before or what it starts from was not."""
    path = runs / job.folder
    now = state(path)
    if now == "failed" and retry:
        (path / FAILED).unlink()
        now = "begun"
    if now not in ("finished", "failed") and job.after is not None and state(runs / job.after) != "finished":
        hooks.say(f"{job.folder}: left out, since {job.after} has not finished.")
        now = "left out"
    if now in ("finished", "failed", "left out"):
        hooks.end(job, now)
        return True
    return False


def tidied(job: Job, runs: Path, needed: set[str | None], *, keep: bool) -> None:
    path = runs / job.folder
    if not keep and state(path) == "finished":
        tidy(path, model=job.folder in needed or job.config.task == "mlm")


def run_one(
    job: Job, path: Path, device: str, data_root: Place, cache_dir: Place, hooks: Hooks, *, beside: int = 0
) -> str:
    where = torch.device(device)
    try:
        with attempt(path, where, beside):
            train(
                job.config, path, device=device, data_root=data_root, cache_dir=cache_dir,
                say=lambda text: hooks.say(f"{job.folder}: {text}"), progress=functools.partial(hooks.step, job),
            )  # fmt: skip
        return "finished"
    except (ValueError, TypeError, DataError, NotFinite, RuntimeError) as error:  # RuntimeError: also out of memory
        sentence = "out of memory" if isinstance(error, torch.OutOfMemoryError) else first_line(error, strip="")
        found = {"error": type(error).__name__, "sentence": sentence, "provenance": provenance(job.config.seed, where)}
        if not (path / CONFIG).exists():  # refused before the run began
            write_json(path / CONFIG, job.config.to_dict())
        write_json(path / FAILED, found)
        hooks.say(f"{job.folder} failed: {sentence}")
        return "failed"


@contextlib.contextmanager
def attempt(path: Path, device: torch.device, beside: int = 0) -> Iterator[None]:
    """Adds to attempts.json how long this took, beside how many other runs at most, and the memory it needed at its
    worst moment on a GPU, without what runs before it have left in this process (workspaces of libraries)."""
    cuda, held = device.type == "cuda", 0
    if cuda:
        gc.collect()  # of the run before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    start = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - start
        if (path / CONFIG).exists():
            before = json.loads((path / ATTEMPTS).read_text()) if (path / ATTEMPTS).exists() else []
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            most = torch.cuda.max_memory_allocated(device) - held if cuda else None
            write_json(path / ATTEMPTS, [*before, {"ended": date, "seconds": seconds, "beside": beside, "bytes": most}])


def tidy(path: Path, *, model: bool) -> None:
    """Of a finished run, remove what nothing needs any more: a model with its optimiser is large."""
    for checkpoint in path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    if not model:
        shutil.rmtree(path / MODEL, ignore_errors=True)
