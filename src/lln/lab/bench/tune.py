"""Measures the launch settings of the GPU kernels anew: the table that ships as data/launch.json.

One kernel after the other, each candidate is timed under CUDA-graph replay on the shapes of its class, and the one with
the smallest product of times stays. Compiling takes longer than timing, so that processes compile beforehand.
"""

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lln.files import write_json
from lln.kernels.call import FIELDS, Call
from lln.kernels.triton import plan
from lln.kernels.triton.plan import Settings
from lln.lab.core.progress import Progress
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import time_device

Shape = tuple[int, int, int, int]
# By head dim and class: where the settings are measured.
SHAPES: dict[tuple[int, str], list[Shape]] = {
    (64, "small"): [(1, 12, 512, 64), (1, 12, 4096, 64)],
    (64, "large"): [(16, 12, 4096, 64), (1, 12, 16384, 64), (32, 12, 512, 64)],
    (128, "small"): [(1, 16, 2048, 128)],
    (128, "large"): [(4, 16, 16384, 128), (1, 16, 16384, 128)],
}
# (kernel, whether it has the blocks in it, whether it is causal), in the order of their dependence.
KERNELS = [("fold", False, False)] + [
    (kernel, blocks, kernel.startswith("causal"))
    for kernels in (("read", "read_backward", "fold_backward"), ("causal", "causal_queries", "causal_keys"))
    for blocks, kernel in itertools.product((False, True), kernels)
]
SHARED = ("causal_queries", "causal_keys")  # two kernels of one call


def list_candidates(kernel: str, dim: int) -> list[tuple[int, int, int]]:
    """(warps, stages, registers) worth trying."""
    if dim >= 128:
        return [(8, 3, 0), (8, 2, 0), (8, 1, 0), (8, 1, 128), (4, 1, 0), (4, 2, 0)]
    if kernel.startswith("causal"):
        return [(4, 1, 0), (4, 2, 0), (4, 1, 168), (4, 2, 168), (8, 1, 0), (8, 2, 0)]
    four = [(4, 3, 0), (4, 3, 168), (4, 3, 128), (4, 2, 0), (4, 2, 168), (4, 1, 0), (4, 1, 168), (4, 1, 128)]
    return [*four, (8, 1, 0), (8, 2, 0)]


def begin(device: torch.device) -> None:
    """From now on the settings are those of this device, whatever it is."""
    plan.load_stored()["capability"] = list(torch.cuda.get_device_capability(device))
    plan.find_card.cache_clear()


def use(kernel: str, blocks: bool, dim: int, size: str, settings: Settings) -> None:
    held = [settings.warps, settings.stages, settings.registers]
    plan.list_settings()[plan.name_settings(kernel, blocks, "half", dim, size)] = held
    plan.choose_settings.cache_clear()


def build_calls(shape: Shape, blocks: bool, causal: bool, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls that launch the kernels, by the name of the kernel."""
    from lln.kernels.triton import fit, passes
    from lln.kernels.triton.backward import Backward
    from lln.kernels.triton.forward import Launch

    batch, heads, length, dim = shape
    q, k, v, g = (torch.randn(batch, heads, length, dim, device=device, dtype=torch.bfloat16) for _ in range(4))
    number = functools.partial(torch.full, (1, 1, 1), device=device)
    given: dict[str, Any] = dict.fromkeys(FIELDS)
    given |= {"query": q, "key": k, "value": v, "alpha": number(2.1), "beta": number(2.1)}
    if blocks:
        given |= {"lln_weight": number(0.5), "block_weight": number(0.5), "block_size": 64}
    given |= {"is_causal": causal, "scale": dim**-0.5, "dropout_p": 0.0}
    call = Call(**given)
    fit.FITS.clear()  # what was found with other settings
    forward = passes.fit_forward(call)

    def make_forward() -> Launch:
        return Launch(call, None, forward)

    log, mean = make_forward().forward()[1:]
    backward = passes.fit_backward(call, (log, mean), (g, None, None), frozenset())

    def make_backward() -> Backward:
        return Backward(call, (log, mean), g, None, None, set(), None, backward)

    if causal:
        return {
            "causal": lambda: make_forward().attend_causally(),
            **dict.fromkeys(SHARED, lambda: make_backward().run()),
        }
    ready = make_backward()
    pulls = ready.run_queries()
    return {
        "fold": lambda: make_forward().fold_sequences(),
        "read": lambda: make_forward().read(log, mean),
        "read_backward": lambda: make_backward().run_queries(),
        "fold_backward": lambda: ready.fold_backward(*pulls),
    }


def compile_some(dims: list[int], index: int, count: int, device: str) -> None:
    """Every count-th job, on a short sequence: lengths do not change what is compiled."""
    begin(torch.device(device))
    jobs = [
        (*kernel, dim, candidate)
        for kernel, dim in itertools.product(KERNELS, dims)
        for candidate in list_candidates(kernel[0], dim)
    ]
    for kernel, blocks, causal, dim, (warps, stages, registers) in jobs[index::count]:
        use(kernel, blocks, dim, "small", Settings(warps, stages, registers))
        try:
            build_calls((1, 2, 256, dim), blocks, causal, torch.device(device))[kernel]()
        except Exception:  # what does not compile is found again, and left out, when it is timed
            continue
        finally:
            plan.list_settings().pop(plan.name_settings(kernel, blocks, "half", dim, "small"), None)
            plan.choose_settings.cache_clear()


def tune(*, device: torch.device, out: Path, progress: Progress, dim: int | None = None, seed: int = 0) -> Path:
    """Writes OUT/launch.json, which belongs into src/lln/data, and returns its path. dim: of this head dim alone."""
    dims = sorted({known for known, _ in SHAPES})
    if device.type != "cuda":
        raise ValueError(f"--tune measures GPU kernels and needs a CUDA device; this run is on {device}.")
    if dim is not None and dim not in dims:
        raise ValueError(f"--tune knows the head dims {', '.join(map(str, dims))}; got {dim}.")
    dims = dims if dim is None else [dim]
    torch.manual_seed(seed)
    begin(device)
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
        name = plan.name_settings(kernel, blocks, "half", head_dim, size)
        progress(name)
        found: dict[Settings, float] = {}
        for candidate in list_candidates(kernel, head_dim):
            settings = Settings(*candidate)
            use(kernel, blocks, head_dim, size, settings)
            try:
                calls = [build_calls(shape, blocks, causal, device)[kernel] for shape in SHAPES[head_dim, size]]
                times = [time_device(call, repeats=10, device=device)[0].median for call in calls]
                found[settings] = statistics.geometric_mean(times)
            except Exception:  # too much shared memory, or a compiler's failure
                torch.cuda.synchronize()
        if not found:
            raise RuntimeError(f"no setting of {name} could be launched on this device.")
        best = min(found, key=found.__getitem__)
        use(kernel, blocks, head_dim, size, best)
        measured[name] = {"best_ms": found[best], "worst_ms": max(found.values())}
        what = "warps, stages, registers of each kernel by dtype, head dim and size"
        made = {"what": what, "capability": plan.load_stored()["capability"], "provenance": provenance(seed, device)}
        write_json(path, made | {"settings": plan.list_settings(), "measured": measured})
    return path
