"""What the instruments take on long inputs: time and peak memory on a CPU.

    python benchmarks/instruments.py --out benchmarks/results/instruments.json

Each is checked against the dense matrix at 512 tokens first.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln import match_moments
from lln.files import write_json
from lln.instruments import AttentionMap, entropy, lln_map, principal_std, softmax_map, spectral_gap
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import show_number
from lln.lab.core.timing import summarize

CPU = torch.device("cpu")
ALPHA, BETA = (float(x) for x in match_moments(1.0, 1.0, 64))
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
    length: int
    heads: int
    make: Callable[[Tensor, Tensor], AttentionMap]
    measure: Callable[[AttentionMap], Any]
    most_seconds: float
    most_bytes: int | None = None


CASES = {
    "LLN: gap and principal_std": Case(
        65536, 12, lambda q, k: lln_map(q, k, ALPHA, BETA), lambda p: (spectral_gap(p), principal_std(p)), 10
    ),
    "softmax: gap": Case(8192, 1, softmax_map, spectral_gap, 60, GIB),
    "softmax: principal_std": Case(8192, 1, softmax_map, principal_std, 60, GIB),
    "LLN+Diag: gap": Case(8192, 1, lambda q, k: lln_map(q, k, ALPHA, BETA, 64), spectral_gap, 60, GIB),
    "LLN: entropy within .1 bit": Case(
        65536, 12, lambda q, k: lln_map(q, k, ALPHA, BETA), lambda p: entropy(p, width=0.1), 10
    ),
    "softmax: exact entropy": Case(8192, 1, softmax_map, entropy, 60, GIB),
}


def inputs(heads: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, heads, length, 64), torch.randn(1, heads, length, 64)


def check() -> dict[str, float]:
    """The largest deviations from the dense matrix at 512 tokens; an error where they are too large."""
    q, k = inputs(1, 512)
    found = {"gap": 0.0, "principal_std": 0.0, "entropy": 0.0}
    for p in (softmax_map(q, k), lln_map(q, k, ALPHA, BETA), lln_map(q, k, ALPHA, BETA, 64)):
        dense = p.dense()[0, 0]
        gap = 1 - torch.linalg.eigvals(dense).abs().sort(descending=True).values[1]
        spread = torch.linalg.svdvals(dense - dense.mean(0))[0]
        bits = -torch.xlogy(dense, dense).sum(1).mean() / torch.tensor(2.0, dtype=torch.float64).log()
        wanted = {"gap": gap, "principal_std": spread, "entropy": bits}
        got = {"gap": spectral_gap(p), "principal_std": principal_std(p), "entropy": entropy(p)}
        for name in found:
            found[name] = max(found[name], (got[name] - wanted[name]).abs().max().item())
    if found["gap"] > 1e-6 or found["principal_std"] > 1e-6 or found["entropy"] > 1e-9:
        raise SystemExit(f"The instruments are wrong, so their speed says nothing: {found}")
    return found


def run(name: str, repeats: int, threads: int, seed: int) -> dict[str, Any]:
    """In a process of its own, so that its peak of memory is its own."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    case = CASES[name]
    q, k = inputs(case.heads, case.length)
    milliseconds, start_cpu = [], time.process_time()
    for _ in range(repeats):
        start = time.perf_counter()
        case.measure(case.make(q, k))  # a new map each time: one that was measured may remember
        milliseconds.append(1e3 * (time.perf_counter() - start))
    cpu_seconds = (
        time.process_time() - start_cpu
    ) / repeats  # of all threads: it tells a busy machine from a slow call
    row = {"length": case.length, "heads": case.heads, "ms": dataclasses.asdict(summarize(milliseconds))}
    row |= {"cpu_seconds": cpu_seconds, "most_seconds": case.most_seconds, "most_bytes": case.most_bytes}
    return row | {"resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to store the result")
    parser.add_argument("--only", choices=list(CASES), help="one case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    deviations = check()
    rows = {}
    for name in [args.only] if args.only else CASES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            row = rows[name] = pool.submit(run, name, args.repeats, args.threads, args.seed).result()
        seconds = row["ms"]["median"] / 1e3
        row["met"] = seconds < row["most_seconds"] and row["resident_bytes"] < (row["most_bytes"] or float("inf"))
        verdict = "met" if row["met"] else "MISSED"
        print(
            f"{name}, {row['heads']} heads, {row['length']:,} tokens: {show_number(seconds)} s, "
            f"{show_number(row['cpu_seconds'])} of CPU time "
            f"(at most {row['most_seconds']}: {verdict}); "
            f"the process held {row['resident_bytes'] / GIB:.2f} GiB at its peak, torch itself included",
            flush=True,
        )
    result = {"deviation_at_512": deviations, "cases": rows, "provenance": provenance(args.seed, CPU)}
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
