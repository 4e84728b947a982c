"""What is written down about a number: the command, the commit and the machine that made it."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def provenance(seed: int, device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge a number or to measure it again."""
    program = Path(sys.argv[0]).name
    # Where a machine keeps its files is nobody's business.
    arguments = [Path(text).name if text.startswith("/") else text for text in sys.argv[1:]]
    return {
        "command": " ".join(["lln" if program == "__main__.py" else program, *arguments]),
        "commit": find_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name_processor(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **(describe_accelerator(device) if device.type == "cuda" else {}),
    }


def drop_places(command: str) -> str:
    """A command less where it found and left its files.

    >>> drop_places("lln reproduce fig2 --out results --quick")
    'lln reproduce fig2 --quick'
    """
    return re.sub(r" --(from|out) \S+", "", command)


def describe_accelerator(device: torch.device) -> dict[str, Any]:
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


def name_processor() -> str:
    """The name of the CPU, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def find_commit() -> str | None:
    """The commit of the checkout this package is imported from, with + where it has changes; None outside of one.
    LLN_COMMIT names it on a machine that holds a copy of the files without their history."""
    if named := os.environ.get("LLN_COMMIT"):
        return named
    folder = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if "src/lln" not in git("ls-files", "--full-name", "--", "provenance.py"):
            return None  # installed into some other project's checkout
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
