"""How a call is timed, on a CUDA device by the device and by the host, and how its memory is counted."""

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Work = Callable[[], Any]
BATCH_MS = 1.0
LONGEST_MS = 10_000.0  # of all batches together; fewer repeats where they would take longer
HOST_CALLS, HOST_ROUNDS, HOST_LIMIT_MS = 20, 5, 5.0
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
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


def time_device(work: Work, *, repeats: int, device: torch.device) -> tuple[Timing, bool]:
    """Milliseconds a call on a CUDA device, and whether a CUDA graph was replayed."""
    graph = capture(work, device)
    call = work if graph is None else graph.replay
    estimate = time_batches(call, 1, 3, device)[0]
    inner = max(1, min(100, math.ceil(BATCH_MS / max(estimate, 1e-3))))
    repeats = max(3, min(repeats, int(LONGEST_MS / (inner * estimate))))
    return summarize(time_batches(call, repeats, inner, device)), graph is not None


def time_batches(call: Work, count: int, inner: int, device: torch.device) -> list[float]:
    """Milliseconds a call in each of `count` batches of `inner` calls, after one batch that does not count."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in (None, *events[:-1]):
        if event is not None:
            event.record()
        for _ in range(inner):
            call()
    events[-1].record()
    synchronize(device)
    return [first.elapsed_time(second) / inner for first, second in itertools.pairwise(events)]


def capture(work: Work, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """The call as a CUDA graph, or None where it cannot be captured."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        # The outer context brings the stream back also where the capture ends in an error.
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
            with torch.cuda.graph(graph, stream=side):
                work()
    except Exception:  # whatever a back end does that a graph does not allow; the plain call tells if it is more
        synchronize(device)
        return None
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


def time_host(work: Work, device: torch.device) -> Timing | None:
    """Milliseconds of host time a call. None where a call takes so long that the host is of no concern."""
    start = time.perf_counter()
    work()
    synchronize(device)
    if 1e3 * (time.perf_counter() - start) > HOST_LIMIT_MS:
        return None
    values = []
    for _ in range(HOST_ROUNDS):
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            work()
        values.append(1e3 * (time.perf_counter() - start) / HOST_CALLS)
        synchronize(device)
    return summarize(values)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of one large copy: what memory gives on this machine today."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)

    if device.type == "cuda":
        timing = summarize(time_batches(copy, 20, 2, device))  # as a plain call: in a graph it is a slower copy engine
    else:
        timing = time_calls({"copy": copy}, repeats=5, device=device)["copy"]
    return 2 * size / (1e-3 * timing.median)
