"""Runs every example as its first lines say, and stores how long each takes: results/examples.json.

python tools/time_examples.py [--only long_documents]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lln.files import write_json
from lln.lab.core.provenance import provenance

ROOT = Path(__file__).parents[1]
STORED = ROOT / "results" / "examples.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="some of them, with commas between")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"what": "seconds of each example, from start to end", "rows": {}}
    if STORED.exists():
        result = json.loads(STORED.read_text())
    for path in sorted((ROOT / "examples").glob("*.py")):
        if arguments.only and path.stem not in arguments.only.split(","):
            continue
        began = time.monotonic()
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
        if done.returncode:
            print(f"{path.stem}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        seconds = round(time.monotonic() - began, 1)
        result["rows"][path.stem] = {"seconds": seconds, "provenance": provenance(0, torch.device("cpu"))}
        print(f"{path.stem}: {seconds} s")
        write_json(STORED, result)


if __name__ == "__main__":
    main()
