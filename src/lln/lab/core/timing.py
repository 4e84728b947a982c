"""How a call is timed, and how its memory is counted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Work = Callable[[], Any]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For small matrices: threads that wait for a busy core cost far more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median of the repeats and their quartiles."""

    median: float
    low: float
    high: float
    repeats: int


def time_calls(works: dict[str, Work], *, repeats: int, device: torch.device, warmup: int = 1) -> dict[str, Timing]:
    """Times the works in turns, one call of each a round, so that a slow moment of the machine hits all alike.

    >>> times = time_calls({"sum": lambda: torch.ones(8).sum()}, repeats=3, device=torch.device("cpu"))
    >>> times["sum"].low <= times["sum"].median <= times["sum"].high
    True
    """
    for work in works.values():
        for _ in range(warmup):
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: summarize([1e3 * s for s in values]) for name, values in seconds.items()}


def summarize(values: list[float]) -> Timing:
    """Median and quartiles.

    >>> summarize([1.0, 2.0, 3.0, 4.0, 5.0])
    Timing(median=3.0, low=2.0, high=4.0, repeats=5)
    """
    if len(values) < 2:
        return Timing(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, len(values))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(work: Work, device: torch.device) -> int:
    """Bytes that the call holds at its worst moment on top of what was there before, its result included.

    >>> peak_memory(lambda: torch.ones(1024), torch.device("cpu"))  # 4 bytes each
    4096
    """
    work()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some builds of the profiler write a line a run to stderr
    warnings.filterwarnings("ignore", ".*Profiler clears events", UserWarning)  # of no concern to a single run
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    del result
    held = peak = 0
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    # Every allocation and release of torch's CPU allocator, in order, also those inside an operator.
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
