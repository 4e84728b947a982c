"""How long runs will roughly take: known from runs like them, else from counted operations."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import torch

from lln.lab.paper.jobs import Job, find_shape, find_state
from lln.lab.paper.run_records import find_runs
from lln.lab.train.config import Config

# Fitted to the tiny and mini recipes; an estimate is meant to tell minutes from hours.
REACHED = 0.3  # of the speed of a large matrix product
LAYER_SECONDS = 0.004  # of a step and layer, however small
MORE = 1.25  # evaluation, checkpoints, recording


def estimate_jobs(jobs: list[Job], runs: Path, device: str, *, retry: bool = False) -> dict[str, float]:
    """Seconds of each job that is not finished, by its folder."""
    known = find_runs(runs) if runs.is_dir() else []
    found = {}
    for job in jobs:
        if find_state(runs / job.folder) in (("finished",) if retry else ("finished", "failed")):
            continue
        shape = find_shape(job.config.to_dict())
        same = [run for run in known if run.result is not None and find_shape(run.config) == shape]
        mine = [run for run in same if run.facts["attention"] == job.config.attention.name]
        times = [seconds for run in (mine or same) if (seconds := run.cost["seconds"]) is not None]
        found[job.folder] = sum(times) / len(times) if times else count_seconds(job.config, device)
    return found


def count_seconds(config: Config, device: str) -> float:
    model, o = config.model, config.optimisation
    length = config.data.length
    if config.task == "image":
        length = (length // model.patch) ** 2 + 1
    elif config.task == "glue":
        length //= 2  # batches are as long as their longest example
    tokens = o.batch * length * (2 if config.data.subset == "retrieval" else 1)
    weights = model.layers * (4 * model.width**2 + 2 * model.width * model.inner)
    if config.task == "mlm":
        weights += model.width * config.data.vocabulary
    seen = length if config.attention.name == "softmax" else model.width // model.heads
    operations = 6 * tokens * (weights + 2 * model.layers * model.width * seen)
    least = model.layers * o.accumulation * LAYER_SECONDS
    return MORE * o.steps * (least + operations / (REACHED * measure_speed(device, config.precision)))


@functools.cache
def measure_speed(device: str, precision: str) -> float:
    """Operations a second of a matrix product."""
    where = torch.device(device)
    size = 4096 if where.type == "cuda" else 512
    a = torch.randn(size, size, device=where, dtype=getattr(torch, precision) if where.type == "cuda" else None)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def show_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
