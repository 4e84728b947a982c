"""Running what is left of the runs of a table or figure, one by one or several at once on one device.

A small model leaves most of a large GPU to others. Each run is a process's own work then, as if it were alone, so
results do not depend on how many there are. Times do, and `beside` in attempts.json says so. On an NVIDIA GPU its
Multi-Process Service should run: without it processes take turns."""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import gc
import multiprocessing
import multiprocessing.queues
import multiprocessing.synchronize
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from lln.files import read_json, write_json
from lln.hf.distillation import NotFinite
from lln.lab.core.errors import DataError, first_line
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import show_duration
from lln.lab.data.made_once import Place
from lln.lab.paper.jobs import FAILED, Job, find_state
from lln.lab.train.run import MODEL, train
from lln.lab.train.run_folder import CONFIG, FACTS, list_facts

ATTEMPTS = "attempts.json"
MOST_AT_ONCE = 4  # on one GPU: with more of them each is slower by as much as there are more
LOOK = 0.5  # seconds between two looks at how far runs are, and of a run at whether it is to stop


@dataclasses.dataclass
class Hooks:
    """Who is told what happens."""

    say: Callable[[str], None] = lambda text: None
    begin: Callable[[Job], None] = lambda job: None
    step: Callable[[Job, int, dict[str, float]], None] = lambda job, number, values: None
    end: Callable[[Job, str], None] = lambda job, state: None  # also of runs that were finished before


def run_jobs(
    jobs: list[Job], runs: Path, *, device: str, data_root: Place = None, cache_dir: Place = None,
    hooks: Hooks | None = None, retry: bool = False, keep: bool = False, at_once: int = 1,
) -> None:  # fmt: skip
    """Run what is not finished yet, so many at once; one alone in this process. A run that fails is recorded as failed,
    with the reason, and the rest goes on; KeyboardInterrupt and OSError (a full disk, a killed process) come through,
    and everything can go on from there."""
    hooks, waiting, needed = hooks or Hooks(), list(jobs), {job.after for job in jobs}
    at_once, began, trained = cap_at_once(at_once, device, hooks.say), time.monotonic(), list[Job]()
    where = {"device": device, "data_root": data_root, "cache_dir": cache_dir}
    running: dict[concurrent.futures.Future[str], Job] = {}
    with contextlib.ExitStack() as stack:
        told, pool = stack.enter_context(open_pool(at_once)) if at_once > 1 else (None, None)
        while waiting or running:
            for job in list(waiting):
                if len(running) == at_once or job.after in {j.folder for j in (*waiting, *running.values())}:
                    continue
                waiting.remove(job)
                if is_settled(job, runs, hooks, retry=retry):
                    continue
                hooks.begin(job)
                if pool is None:
                    future = concurrent.futures.Future[str]()
                    future.set_result(run_one(job, runs / job.folder, where, hooks))
                else:
                    with ignore_interrupts():
                        future = pool.submit(run_here, job, runs / job.folder, where, at_once - 1)
                running[future] = job
            done, _ = concurrent.futures.wait(running, LOOK, concurrent.futures.FIRST_COMPLETED)
            with contextlib.suppress(queue.Empty):
                while told is not None:
                    what, *rest = told.get_nowait()
                    getattr(hooks, what)(*rest)
            for future in done:
                job = running.pop(future)
                hooks.end(job, future.result())
                trained += [job] if future.result() == "finished" else []
                if not keep and find_state(runs / job.folder) == "finished":
                    tidy(runs / job.folder, model=job.folder in needed or job.config.task == "mlm")

    if trained:
        hooks.say(tell_throughput(trained, time.monotonic() - began, at_once))


def cap_at_once(at_once: int, device: str, say: Callable[[str], None]) -> int:
    """How many runs there may be side by side."""
    if at_once <= MOST_AT_ONCE or torch.device(device).type == "cpu":
        return at_once
    say(f"{MOST_AT_ONCE} runs at once and not {at_once}: more would only wait for each other on one GPU.")
    return MOST_AT_ONCE


def tell_throughput(trained: list[Job], seconds: float, at_once: int) -> str:
    """What all of them came to, by which another number at once can be compared.

    >>> from lln.lab.paper.jobs import configure
    >>> tell_throughput([Job("a", configure("mlm", "tiny", "lln", 0, {}))] * 3, 60.0, 2)
    '3 runs in 60 s, 2 at once: 180 an hour, 40 steps a second.'
    """
    steps = sum(job.config.optimisation.steps for job in trained)
    runs = f"{len(trained)} run{'s' if len(trained) > 1 else ''}"
    side = f", {at_once} at once" if at_once > 1 else ""
    hour, second = 3600 * len(trained) / seconds, steps / seconds
    return f"{runs} in {show_duration(seconds)}{side}: {hour:.0f} an hour, {second:.3g} steps a second."


def is_settled(job: Job, runs: Path, hooks: Hooks, *, retry: bool) -> bool:
    """Whether there is nothing to run, because it was run before or what it starts from was not."""
    path = runs / job.folder
    now = find_state(path)
    if now == "failed" and retry:
        (path / FAILED).unlink()
        now = "begun"
    if now not in ("finished", "failed") and job.after is not None and find_state(runs / job.after) != "finished":
        hooks.say(f"{job.folder}: left out, since {job.after} has not finished.")
        now = "left out"
    if now in ("finished", "failed", "left out"):
        hooks.end(job, now)
        return True
    return False


def run_one(job: Job, path: Path, where: dict[str, Any], hooks: Hooks, *, beside: int = 0) -> str:
    device = torch.device(where["device"])
    try:
        with attempt(path, device, beside):
            train(
                job.config, path, **where, say=lambda text: hooks.say(f"{job.folder}: {text}"),
                progress=functools.partial(hooks.step, job),
            )  # fmt: skip
        return "finished"
    except (ValueError, TypeError, DataError, NotFinite, RuntimeError) as error:  # RuntimeError: also out of memory
        sentence = "out of memory" if isinstance(error, torch.OutOfMemoryError) else first_line(error, strip="")
        found = {"error": type(error).__name__, "sentence": sentence, "provenance": provenance(job.config.seed, device)}
        if not (path / CONFIG).exists():  # refused before the run began
            write_json(path / CONFIG, job.config.to_dict())
            write_json(path / FACTS, list_facts(job.config))
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
            before = read_json(path / ATTEMPTS, list) or []
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            most = torch.cuda.max_memory_allocated(device) - held if cuda else None
            write_json(path / ATTEMPTS, [*before, {"ended": date, "seconds": seconds, "beside": beside, "bytes": most}])


def tidy(path: Path, *, model: bool) -> None:
    """Of a finished run, remove what nothing needs any more: a model with its optimiser is large."""
    for checkpoint in path.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    if not model:
        shutil.rmtree(path / MODEL, ignore_errors=True)


# Several at once

Told: TypeAlias = "multiprocessing.queues.Queue[Any]"  # a generic class in annotations alone


def make_context() -> Any:
    """How processes begin: anew, since CUDA does not survive a fork."""
    return multiprocessing.get_context("spawn")


@contextlib.contextmanager
def open_pool(at_once: int) -> Iterator[tuple[Told, concurrent.futures.Executor]]:
    """Processes that run jobs, and the queue in which they tell of them; they stop where this one does."""
    context = make_context()
    told, stop = context.Queue(), context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(at_once, mp_context=context, initializer=begin, initargs=(told, stop))
    try:
        yield told, pool
    except concurrent.futures.BrokenExecutor:
        raise OSError("a process that trained was killed, perhaps for want of memory") from None
    finally:
        stop.set()  # after an error or Ctrl-C, others are still running
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
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

LINK: dict[str, Any] = {}  # told and stop of open_pool


def begin(told: Told, stop: multiprocessing.synchronize.Event) -> None:
    LINK.update(told=told, stop=stop)
    transformers.utils.logging.set_verbosity_error()  # as in the process that asked
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Nobody would wait for the run of a process whose parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_here(job: Job, path: Path, where: dict[str, Any], beside: int) -> str:
    told, stop, last = LINK["told"], LINK["stop"], 0.0

    def step(job: Job, number: int, values: dict[str, float]) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > LOOK or number == job.config.optimisation.steps:
            last = now
            told.put(("step", job, number, dict(values)))
            if stop.is_set():
                raise KeyboardInterrupt

    hooks = Hooks(say=lambda text: told.put(("say", text)), step=step)
    return run_one(job, path, where, hooks, beside=beside)
