"""Several runs at once on one device: a small model leaves most of a large GPU to others.

Each run is a process's own work, as if it were alone, so results do not depend on how many there are. Times do, and
`beside` in attempts.json says so. On an NVIDIA GPU its Multi-Process Service should run: without it processes take
turns."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import queue
from pathlib import Path
from typing import Any

import transformers

from lln.reproduce.jobs import Hooks, Job, run_one, settled, tidied
from lln.training.tasks import Place

LOOK = 0.5  # seconds between two looks at how far runs are


def drive_at_once(
    jobs: list[Job], runs: Path, at_once: int, *, device: str, data_root: Place = None, cache_dir: Place = None,
    hooks: Hooks | None = None, retry: bool = False, keep: bool = False,
) -> None:  # fmt: skip
    """What `drive` does, with so many runs at once."""
    hooks, waiting, needed = hooks or Hooks(), list(jobs), {job.after for job in jobs}
    running: dict[concurrent.futures.Future[str], Job] = {}
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with context.Manager() as manager:
        told: queue.Queue[Any] = manager.Queue()
        pool = concurrent.futures.ProcessPoolExecutor(at_once, mp_context=context)
        try:
            while waiting or running:
                for job in list(waiting):
                    if len(running) == at_once or job.after in {j.folder for j in (*waiting, *running.values())}:
                        continue
                    waiting.remove(job)
                    if not settled(job, runs, hooks, retry=retry):
                        hooks.begin(job)
                        future = pool.submit(run_here, job, runs, device, data_root, cache_dir, at_once - 1, told)
                        running[future] = job
                done, _ = concurrent.futures.wait(running, LOOK, concurrent.futures.FIRST_COMPLETED)
                while not told.empty():
                    job, what, *rest = told.get()
                    if what == "say":
                        hooks.say(*rest)
                    else:
                        hooks.step(job, *rest)
                for future in done:
                    job = running.pop(future)
                    hooks.end(job, future.result())
                    tidied(job, runs, needed, keep=keep)
        except concurrent.futures.process.BrokenProcessPool:
            raise OSError("a process that trained was killed, perhaps for want of memory") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def run_here(
    job: Job, runs: Path, device: str, data_root: Place, cache_dir: Place, beside: int, told: queue.Queue[Any]
) -> str:
    """In a process of its own; what happens is told in a queue."""
    transformers.utils.logging.set_verbosity_error()  # as in the process that asked
    every = max(job.config.optimisation.steps // 100, 1)

    def step(job: Job, number: int, values: dict[str, float]) -> None:
        if number % every == 0:
            told.put((job, "step", number, dict(values)))

    hooks = Hooks(say=lambda text: told.put((job, "say", text)), step=step)
    return run_one(job, runs / job.folder, device, data_root, cache_dir, hooks, beside=beside)
