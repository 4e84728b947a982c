"""What it costs to begin: CPU time of `import lln` beyond `import torch`, and of `lln --help` and `lln --version`.

    python benchmarks/startup.py --out benchmarks/results/startup.json

Every command runs in a process of its own, in turns, so that a slow moment of the machine hits all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import torch

from lln.files import write_json
from lln.lab.core.provenance import provenance
from lln.lab.core.timing import summarize

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "import torch, lln": ["-c", "import torch, lln"],
    "all names of lln": ["-c", "import torch, lln; [getattr(lln, name) for name in lln.__all__]"],
    "lln --help": ["-m", "lln", "--help"],
    "lln --version": ["-m", "lln", "--version"],
}
MOST = {"import torch, lln": 50.0, "lln --help": 500.0, "lln --version": 500.0}  # ms; the first beyond import torch


def measure_cpu(command: list[str]) -> float:
    """Milliseconds of CPU time, of the user and of the system."""
    before = os.times()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    after = os.times()
    children = after.children_user - before.children_user + after.children_system - before.children_system
    return 1e3 * children


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for name in COMMANDS:
        measure_cpu(COMMANDS[name])  # files come into memory, modules are compiled
    for _ in range(options.repeats):
        for name, command in COMMANDS.items():
            found[name].append(measure_cpu(command))
    timings = {name: summarize(values) for name, values in found.items()}
    base = timings["import torch"].median
    rows = {}
    for name, timing in timings.items():
        cost = timing.median - base if name == "import torch, lln" else timing.median
        rows[name] = dataclasses.asdict(timing) | {"met": cost <= MOST[name] if name in MOST else None}
        beyond = f", {timing.median - base:.0f} beyond import torch" if "torch" in COMMANDS[name][-1] else ""
        print(f"{name}: {timing.median:.0f} ms of CPU time ({timing.low:.0f} to {timing.high:.0f}){beyond}")
    if options.out:
        write_json(options.out, {"cpu_ms": rows, "most": MOST, "provenance": provenance(0, torch.device("cpu"))})


if __name__ == "__main__":
    main()
