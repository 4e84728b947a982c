"""How a call is timed, how its memory is counted, and what is written down about the machine."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
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
    """Times the works in turns, one call of each a round, so that a slow moment of the machine hits all alike."""
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


def show(timing: dict[str, Any]) -> str:
    """A stored Timing as text: median (low to high)."""
    return f"{number(timing['median'])} ({number(timing['low'])} to {number(timing['high'])})"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def summarize(values: list[float]) -> Timing:
    if len(values) < 2:
        return Timing(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, len(values))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(work: Work, device: torch.device) -> int:
    """Bytes that the call holds at its worst moment on top of what was there before, its result included."""
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


def provenance(seed: int, device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge a number or to measure it again."""
    program = Path(sys.argv[0]).name
    # Where a machine keeps its files is nobody's business.
    arguments = [Path(text).name if text.startswith("/") else text for text in sys.argv[1:]]
    return {
        "command": " ".join(["lln" if program == "__main__.py" else program, *arguments]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(accelerator(device) if device.type == "cuda" else {}),
    }


def without_places(command: str) -> str:
    """A command less where it found and left its files."""
    return re.sub(r" --(from|out) \S+", "", command)


def accelerator(device: torch.device) -> dict[str, Any]:
    """What decides the speed of a CUDA device beside its name."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "triton": triton,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver,
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
    }


def processor() -> str:
    """The name of the CPU, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout this package is imported from, with + where it has changes; None outside of one.
    LLN_COMMIT names it on a machine that holds a copy of the files without their history."""
    if named := os.environ.get("LLN_COMMIT"):
        return named
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if "src/lln" not in git("ls-files", "--full-name", "--", "measure.py"):
            return None  # installed into some other project's checkout
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
