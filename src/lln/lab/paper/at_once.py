"""Several runs at once on one device: a small model leaves most of a large GPU to others.

Each run is a process's own work, as if it were alone, so results do not depend on how many there are. Times do, and
`beside` in attempts.json says so. On an NVIDIA GPU its Multi-Process Service should run: without it processes take
turns."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import multiprocessing.queues
import multiprocessing.synchronize
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

from lln.lab.data.made_once import Place
from lln.lab.paper.jobs import Hooks, Job, run_one, settled, tidied

LOOK = 0.5  # seconds between two looks at how far runs are, and of a run at whether it is to stop


def drive_at_once(
    jobs: list[Job], runs: Path, at_once: int, *, device: str, data_root: Place = None, cache_dir: Place = None,
    hooks: Hooks | None = None, retry: bool = False, keep: bool = False,
) -> None:  # fmt: skip
    """What `drive` does, with so many runs at once."""
    hooks, waiting, needed = hooks or Hooks(), list(jobs), {job.after for job in jobs}
    running: dict[concurrent.futures.Future[str], Job] = {}
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    told, stop = context.Queue(), context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(at_once, mp_context=context, initializer=begin, initargs=(told, stop))
    try:
        while waiting or running:
            for job in list(waiting):
                if len(running) == at_once or job.after in {j.folder for j in (*waiting, *running.values())}:
                    continue
                waiting.remove(job)
                if not settled(job, runs, hooks, retry=retry):
                    hooks.begin(job)
                    with unheard_interrupts():
                        future = pool.submit(run_here, job, runs, device, data_root, cache_dir, at_once - 1)
                    running[future] = job
            done, _ = concurrent.futures.wait(running, LOOK, concurrent.futures.FIRST_COMPLETED)
            tell(told, hooks)
            for future in done:
                job = running.pop(future)
                hooks.end(job, future.result())
                tidied(job, runs, needed, keep=keep)
    except concurrent.futures.process.BrokenProcessPool:
        raise OSError("a process that trained was killed, perhaps for want of memory") from None
    finally:
        stop.set()  # after an error or Ctrl-C, others are still running
        pool.shutdown(wait=True, cancel_futures=True)


def tell(told: multiprocessing.queues.Queue[Any], hooks: Hooks) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            job, what, *rest = told.get_nowait()
            if what == "say":
                hooks.say(*rest)
            else:
                hooks.step(job, *rest)


@contextlib.contextmanager
def unheard_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never hear Ctrl-C: this one does, and tells them to stop."""
    if threading.current_thread() is not threading.main_thread():  # which alone can say so
        yield
        return
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


# In the processes

LINK: dict[str, Any] = {}  # told and stop of drive_at_once


def begin(told: multiprocessing.queues.Queue[Any], stop: multiprocessing.synchronize.Event) -> None:
    LINK.update(told=told, stop=stop)
    transformers.utils.logging.set_verbosity_error()  # as in the process that asked
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Nobody would wait for the run of a process whose parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_here(job: Job, runs: Path, device: str, data_root: Place, cache_dir: Place, beside: int) -> str:
    told, stop, last = LINK["told"], LINK["stop"], 0.0

    def step(job: Job, number: int, values: dict[str, float]) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > LOOK or number == job.config.optimisation.steps:
            last = now
            told.put((job, "step", number, dict(values)))
            if stop.is_set():
                raise KeyboardInterrupt

    hooks = Hooks(say=lambda text: told.put((job, "say", text)), step=step)
    return run_one(job, runs / job.folder, device, data_root, cache_dir, hooks, beside=beside)
