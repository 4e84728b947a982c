"""The command line that benchmarks share. `make pages` brings what they store into the documentation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lln.files import write_json

Result = dict[str, Any]


def command(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="where to store the result; `make pages` then updates the documentation"
    )
    return parser


def run(
    about: str | None, measure: Callable[[int, int, int], Result], table: Callable[[Result], str], *, repeats: int,
    threads: int,
) -> None:  # fmt: skip
    """The command line of a benchmark with these options."""
    parser = command(about)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = json.loads(json.dumps(measure(args.repeats, args.threads, args.seed)))
    print(table(result))
    if args.out:
        write_json(args.out, result)
