"""Hardware counters of every kernel of one call, forward and backward: how much of the memory, the matrix unit and the
exponent unit each keeps busy, and what limits how many of its programs run at a time.

    python benchmarks/counters.py --out benchmarks/results/NAME/counters.json
    python benchmarks/counters.py --shape 1x12x512x64 --calls LLN+Diag

Needs a GPU and NVIDIA's `ncu` (Nsight Compute), which starts one process for each call. Clocks are left as they are.
The times are those of kernels that are watched one by one, with caches emptied before each: `lln bench` has the others.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lln.files import write_json
from lln.lab.core.tables import markdown_table

METRICS = {
    "microseconds": "gpu__time_duration.sum",
    "memory_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "matrix_unit_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponent_unit_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared_memory_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
    "programs_by_registers": "launch__occupancy_limit_registers",
    "programs_by_shared_memory": "launch__occupancy_limit_shared_mem",
    "spilled_loads": "smsp__inst_executed_op_local_ld.sum",
}
SHOWN = list(METRICS)[:7]
CALLS: dict[str, dict[str, Any]] = {
    "LLN": {},
    "LLN+Diag": {"block_size": 64},
    "causal LLN": {"is_causal": True},
    "causal LLN+Diag": {"block_size": 64, "is_causal": True},
}
MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}


def call_once(name: str, shape: tuple[int, int, int, int]) -> None:
    """One call and its backward while `ncu` looks, after one while it does not."""
    import torch

    from lln import lln_attention

    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attend: Any = lln_attention

    def work() -> None:
        torch.autograd.grad(attend(*leaves, alpha=2.1, beta=2.1, **CALLS[name]), leaves, grad)
        torch.cuda.synchronize()

    work()
    profiler: Any = torch.cuda.profiler
    profiler.start()
    work()
    profiler.stop()


def read_table(text: str, call: str) -> list[dict[str, Any]]:
    """The rows of `ncu --csv --page raw`: a line of names, one of units, one for each kernel, after what the program
    itself printed."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise RuntimeError(f"ncu wrote no table. It said: {text.strip()[-500:]}")
    units, *rows = csv.DictReader(io.StringIO("\n".join(lines[begin:])))
    found = []
    for row in rows:
        values = {name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()}
        values["microseconds"] *= MICROSECONDS[units[METRICS["microseconds"]]]
        whole = {name: int(value) if value.is_integer() else round(value, 3) for name, value in values.items()}
        found.append({"call": call, "kernel": row["Kernel Name"].removesuffix("_kernel"), **whole})
    return found


def watch(name: str, shape: str, ncu: str) -> list[dict[str, Any]]:
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--once", name, "--shape", shape]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    return read_table(done.stdout, name)


def table(result: dict[str, Any]) -> str:
    rows = [[row["call"], row["kernel"], *(f"{row[name]:,}" for name in SHOWN)] for row in result["kernels"]]
    head = ["call", "kernel", *(name.replace("_", " ").replace("percent", "%") for name in SHOWN)]
    return "\n".join(markdown_table(head, rows, "ll" + "r" * len(SHOWN)))


def read_shape(text: str) -> tuple[int, int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 4 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"is batch x heads x tokens x dim, as in 16x12x4096x64; got {text!r}.")
    batch, heads, length, dim = map(int, sizes)
    return batch, heads, length, dim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=read_shape, default="16x12x4096x64", help="batch x heads x tokens x dim")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="CALL", help=", ".join(CALLS))
    parser.add_argument("--ncu", default="ncu", help="the program, where it is not on the path")
    parser.add_argument("--out", type=Path, help="where to store the result; it is written after each call")
    parser.add_argument("--once", choices=CALLS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.once:
        call_once(asked.once, asked.shape)
        return
    if shutil.which(asked.ncu) is None:
        parser.error(f"--ncu: there is no program {asked.ncu!r} here. It comes with NVIDIA's Nsight Compute.")
    import torch

    from lln.lab.core.provenance import provenance

    if not torch.cuda.is_available():
        parser.error("hardware counters need a GPU and a CUDA build of torch, and there is none here.")
    shape = "x".join(map(str, asked.shape))
    result: dict[str, Any] = {
        "what": f"hardware counters of every kernel of one call, forward and backward, at {shape} in bfloat16, after a "
        "warm-up",
        "tool": "ncu --clock-control none", "provenance": provenance(0, torch.device("cuda")), "metrics": METRICS,
        "kernels": [],
    }  # fmt: skip
    for name in asked.calls:
        result["kernels"] += watch(name, shape, asked.ncu)
        if asked.out:
            write_json(asked.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
