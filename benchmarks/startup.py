"""What it costs to begin: CPU time of `import lln` beyond `import torch`, and of `lln --help` and `lln --version`.

    python benchmarks/startup.py --out benchmarks/results/startup.json

Every command runs in a process of its own, in turns, so that a slow moment of the machine hits all alike. What comes
after `import torch` is timed inside its process: the difference of two processes that take seconds would be noise.
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
    "lln --help": ["-m", "lln", "--help"],
    "lln --version": ["-m", "lln", "--version"],
}
AFTER_TORCH = {
    "import lln": "import lln",
    "from lln import lln_attention": "from lln import lln_attention",
    "all names of lln": "import lln; [getattr(lln, name) for name in lln.__all__]",
}
TIMED = "import time, torch; start = time.process_time(); {}; print(1e3 * (time.process_time() - start))"
MOST = {"import lln": 50.0, "lln --help": 500.0, "lln --version": 500.0}  # ms


def measure(name: str) -> float:
    """Milliseconds of CPU time, of the user and of the system."""
    if name in AFTER_TORCH:
        command = [sys.executable, "-c", TIMED.format(AFTER_TORCH[name])]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    before = os.times()
    subprocess.run([sys.executable, *COMMANDS[name]], check=True, capture_output=True)
    after = os.times()
    children = after.children_user - before.children_user + after.children_system - before.children_system
    return 1e3 * children


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in (*COMMANDS, *AFTER_TORCH)}
    for name in found:
        measure(name)  # files come into memory, modules are compiled
    for _ in range(options.repeats):
        for name, times in found.items():
            times.append(measure(name))
    rows = {}
    for name, times in found.items():
        timing = summarize(times)
        rows[name] = dataclasses.asdict(timing) | {"met": timing.median <= MOST[name] if name in MOST else None}
        beyond = " after import torch" if name in AFTER_TORCH else ""
        print(f"{name}: {timing.median:.0f} ms of CPU time{beyond} ({timing.low:.0f} to {timing.high:.0f})")
    if options.out:
        write_json(options.out, {"cpu_ms": rows, "most": MOST, "provenance": provenance(0, torch.device("cpu"))})


if __name__ == "__main__":
    main()
