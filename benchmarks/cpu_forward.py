"""LLN's forward pass on a CPU beside torch's softmax attention and beside the bare products q @ (k^T v).

    python benchmarks/cpu_forward.py --out benchmarks/results/cpu_forward.json

The bare products are the arithmetic that any linear attention must do, so their time is what bounds LLN. All works
take turns within one run, and the times are ratios of medians.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lln import lln_attention
from lln.lab.bench.attentions import ALPHA, BETA, Case, Shape
from lln.lab.bench.calls import CHECK_LENGTH, OURS, check_attentions
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table, show_timing
from lln.lab.core.timing import Work, peak_memory, time_calls
from storing import run

SHAPE = {"batch": 1, "heads": 12, "length": 8192, "dim": 64}
MEMORY_LENGTHS = (4096, 8192, 16384, 32768)


def works(length: int) -> dict[str, Work]:
    q, k, v = (torch.randn(SHAPE["batch"], SHAPE["heads"], length, SHAPE["dim"]) for _ in range(3))
    return {
        "softmax": lambda: scaled_dot_product_attention(q, k, v),
        "q @ (k^T v)": lambda: q @ (k.transpose(-1, -2) @ v),
        "LLN": lambda: lln_attention(q, k, v, ALPHA, BETA),
        "LLN+Diag": lambda: lln_attention(q, k, v, ALPHA, BETA, block_size=64),
        "softmax, causal": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "LLN, causal": lambda: lln_attention(q, k, v, ALPHA, BETA, is_causal=True),
    }


@torch.no_grad()
def measure(repeats: int, threads: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    check = Case(Shape(1, SHAPE["heads"], CHECK_LENGTH, SHAPE["dim"]), False, torch.float32, cpu)
    with torch.enable_grad():
        check_attentions(OURS, check, seed=0, most=1e-5)
    times = time_calls(works(SHAPE["length"]), repeats=repeats, device=cpu, warmup=2)
    memory: dict[str, list[int]] = {}
    for length in MEMORY_LENGTHS:
        for name, work in works(length).items():
            if "softmax" not in name:  # minutes at the longer lengths
                memory.setdefault(name, []).append(peak_memory(work, cpu))
    return {
        "what": "forward pass in float32, ms (median and quartiles), and peak extra bytes against length",
        "shape": SHAPE,
        "provenance": provenance(seed, cpu),
        "ms": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "memory_lengths": MEMORY_LENGTHS,
        "peak_bytes": memory,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    ms, shape, made = result["ms"], result["shape"], result["provenance"]
    rows = []
    for name, t in ms.items():
        # Of the same kind: causal softmax computes half as much.
        softmax = ms["softmax, causal" if "causal" in name else "softmax"]
        against_softmax = softmax["median"] / t["median"]
        against_products = t["median"] / ms["q @ (k^T v)"]["median"]
        label = f"`{name}`" if "@" in name else name
        rows.append((label, show_timing(t), f"{against_softmax:.3g}", f"{against_products:.3g}"))
    lines = [
        *markdown_table(["forward, float32", "ms (quartiles)", "softmax / it", "it / bare products"], rows, "l"),
        "",
        f"Batch {shape['batch']}, {shape['heads']} heads of {shape['dim']}, {shape['length']:,} tokens; "
        f"{made['device']}, {made['threads']} threads, torch {made['torch']}, {made['date'][:10]}, "
        f"commit {made['commit']}. Peak extra memory of LLN: {memory(result, 'LLN')}.",
    ]
    return "\n".join(lines) + "\n"


def memory(result: dict[str, Any], name: str) -> str:
    pairs = zip(result["memory_lengths"], result["peak_bytes"][name], strict=True)
    return ", ".join(f"{peak / 2**20:.0f} MiB at {length:,}" for length, peak in pairs)


if __name__ == "__main__":
    run(__doc__, measure, table, repeats=15, threads=2)
