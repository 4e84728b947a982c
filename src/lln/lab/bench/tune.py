"""Measures the launch settings of the GPU kernels anew: the table that ships as data/launch.json.

One kernel after the other, each candidate is timed under CUDA-graph replay on the shapes of its class, and the one with
the smallest product of times stays. Compiling takes longer than timing, so that processes compile beforehand.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln.files import write_json
from lln.kernels.triton import plan
from lln.kernels.triton.plan import Settings
from lln.lab.core.provenance import provenance

Shape = tuple[int, int, int, int]
# By head dim and class: where the settings are measured.
SHAPES: dict[tuple[int, str], list[Shape]] = {
    (64, "small"): [(1, 12, 512, 64), (1, 12, 4096, 64)],
    (64, "large"): [(16, 12, 4096, 64), (1, 12, 16384, 64)],
    (128, "small"): [(1, 16, 2048, 128)],
    (128, "large"): [(4, 16, 16384, 128), (1, 16, 16384, 128)],
}
# (kernel, whether it has the blocks in it, whether it is causal), in the order of their dependence.
KERNELS = [
    ("fold", False, False),
    ("read", False, False),
    ("read_backward", False, False),
    ("fold_backward", False, False),
    ("read", True, False),
    ("read_backward", True, False),
    ("fold_backward", True, False),
    ("causal", False, True),
    ("causal_queries", False, True),
    ("causal_keys", False, True),
    ("causal", True, True),
    ("causal_queries", True, True),
    ("causal_keys", True, True),
]
PROGRAMS = (2, 3, 4, 6)


def candidates(kernel: str, dim: int) -> list[tuple[int, int, int]]:
    """(warps, stages, registers) worth trying."""
    if dim >= 128:
        return [(8, 3, 0), (8, 2, 0), (8, 1, 0), (8, 1, 128), (4, 1, 0), (4, 2, 0)]
    if kernel.startswith("causal"):
        return [(4, 1, 0), (4, 2, 0), (4, 1, 168), (4, 2, 168), (8, 1, 0), (8, 2, 0)]
    four = [(4, 3, 0), (4, 3, 168), (4, 3, 128), (4, 2, 0), (4, 2, 168), (4, 1, 0), (4, 1, 168), (4, 1, 128)]
    return [*four, (8, 1, 0), (8, 2, 0)]


def use(kernel: str, blocks: bool, dim: int, size: str, settings: Settings) -> None:
    values = [settings.warps, settings.stages, settings.programs, settings.registers]
    plan.table()[plan.key(kernel, blocks, "half", dim, size)] = values
    plan.settings.cache_clear()


def training(shape: Shape, blocks: bool, causal: bool, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls that launch the kernels, by the part of the work they belong to."""
    from lln.kernels.triton.backward import Backward, Wanted
    from lln.kernels.triton.forward import Arguments, Launch

    batch, heads, length, dim = shape
    q, k, v, g = (torch.randn(batch, heads, length, dim, device=device, dtype=torch.bfloat16) for _ in range(4))

    def number(x: float) -> Tensor:
        return torch.full((1, 1, 1), x, device=device)

    weights = (number(0.5), number(0.5)) if blocks else (None, None)
    none: list[Any] = [None] * 10
    rest: list[Any] = [*weights, *none, 64 if blocks else None, causal, dim**-0.5, 0.0]
    a = Arguments(q, k, v, number(2.1), number(2.1), *rest)
    out, log, mean = Launch(a).forward()
    del out

    def back() -> Backward:
        return Backward(a, (log, mean), g, None, None, Wanted(False, False, False))

    if causal:
        return {"causal": lambda: Launch(a).causal(), "causal_backward": lambda: back().run()}
    ready = back()
    pulls = ready.queries()
    return {
        "fold": lambda: Launch(a).folded(),
        "read": lambda: Launch(a).read(log, mean),
        "read_backward": lambda: back().queries(),
        "fold_backward": lambda: ready.fold_backward(*pulls),
    }


def part(kernel: str) -> str:
    return "causal_backward" if kernel in ("causal_queries", "causal_keys") else kernel


def replay_ms(call: Callable[[], Any], repeats: int = 10, inside: int = 4) -> float:
    """The median time of a call in a CUDA graph of a few."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inside):
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / inside)
    return sorted(times)[len(times) // 2]


def jobs(dims: list[int]) -> Iterator[tuple[str, bool, bool, int, tuple[int, int, int]]]:
    """Everything there is to compile."""
    for (kernel, blocks, causal), dim in itertools.product(KERNELS, dims):
        for candidate in candidates(kernel, dim):
            yield kernel, blocks, causal, dim, candidate


def compile_some(dims: list[int], index: int, count: int, device: str) -> None:
    """Every count-th job, on a short sequence: lengths do not change what is compiled."""
    for kernel, blocks, causal, dim, (warps, stages, registers) in itertools.islice(jobs(dims), index, None, count):
        use(kernel, blocks, dim, "small", Settings(warps, stages, 2, registers))
        try:
            training((1, 2, 256, dim), blocks, causal, torch.device(device))[part(kernel)]()
        except Exception:  # what does not compile is found again, and left out, when it is timed
            continue
        finally:
            plan.table().pop(plan.key(kernel, blocks, "half", dim, "small"), None)
            plan.settings.cache_clear()


def tune(
    *, device: torch.device, out: Path, progress: Callable[[str], None], dim: int | None = None, seed: int = 0
) -> Path:
    """Writes OUT/launch.json, which belongs into src/lln/data, and returns its path. dim: of this head dim alone."""
    dims = sorted({known for known, _ in SHAPES})
    if device.type != "cuda":
        raise ValueError(f"--tune measures GPU kernels and needs a CUDA device; this run is on {device}.")
    if dim is not None and dim not in dims:
        raise ValueError(f"--tune knows the head dims {', '.join(map(str, dims))}; got {dim}.")
    dims = dims if dim is None else [dim]
    torch.manual_seed(seed)
    progress("compile")
    workers = max((os.cpu_count() or 2) - 2, 1)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in [pool.submit(compile_some, dims, i, workers, str(device)) for i in range(workers)]:
            done.result()
    measured: dict[str, dict[str, float]] = {}
    path = out / "launch.json"
    classes = [(known, size) for known, size in SHAPES if known in dims]
    for (head_dim, size), (kernel, blocks, causal) in itertools.product(classes, KERNELS):
        name = plan.key(kernel, blocks, "half", head_dim, size)
        progress(name)
        found: dict[Settings, float] = {}
        calls = [training(shape, blocks, causal, device)[part(kernel)] for shape in SHAPES[head_dim, size]]
        programs = (
            PROGRAMS if kernel not in ("causal_queries", "causal_keys") else PROGRAMS[:1]
        )  # that of `causal` rules
        for (warps, stages, registers), number in itertools.product(candidates(kernel, head_dim), programs):
            settings = Settings(warps, stages, number, registers)
            use(kernel, blocks, head_dim, size, settings)
            try:
                found[settings] = math.exp(sum(math.log(replay_ms(call)) for call in calls) / len(calls))
            except Exception:  # too much shared memory, or a compiler's failure
                torch.cuda.synchronize()
        if not found:
            raise RuntimeError(f"no setting of {name} could be launched on this device.")
        best = min(found, key=found.__getitem__)
        use(kernel, blocks, head_dim, size, best)
        measured[name] = {"best_ms": found[best], "worst_ms": max(found.values())}
        result = {
            "what": "warps, stages, programs a multiprocessor, registers of each kernel by dtype, head dim and size",
            "provenance": provenance(seed, device),
            "settings": plan.table(),
            "measured": measured,
        }
        write_json(path, result)
    return path
