"""What the long campaigns share: a seed, a budget of time, results that are stored while they grow and gone on from.

A campaign numbers what it tries. What a number stands for follows from the seed alone, so a stopped campaign goes on
with the next number, and a number that went wrong can be tried again by itself. What is stored says what was done and
where, the commit included. Another seed begins anew, and so do other sources or tests; a commit that changes neither,
as one that stores what was found so far, does not.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lln.files import hash_file, read_json, write_json
from lln.lab.core.provenance import provenance

ROOT = Path(__file__).parent.parent
STORED = ROOT / "results" / "hardening"
SAVED_EVERY = 20.0  # seconds


def hash_code(root: Path = ROOT) -> str:
    """What tells other sources or tests."""
    digest = hashlib.sha256()
    for path in sorted(path for part in ("src", "tests") for path in (root / part).rglob("*")):
        if path.suffix in (".py", ".json", ".c"):
            digest.update(f"{path.relative_to(root).as_posix()} {hash_file(path)}".encode())
    return digest.hexdigest()[:16]


def make_parser(about: str | None, cases: int) -> argparse.ArgumentParser:
    """The options that every campaign has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases, help=f"how many are tried in all (default: {cases})")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the time it may take (default: an hour)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="try these numbers alone, and store nothing")
    parser.add_argument("--out", type=Path, default=STORED, help="the folder of results (default: results/hardening)")
    return parser


class Campaign:
    """The numbers of one kind, tried one after another.

    faults: by number, what was wrong. counts: how often each word was returned that is no fault.
    """

    def __init__(self, name: str, options: argparse.Namespace, **facts: Any) -> None:
        self.name, self.options, self.file = name, options, options.out / f"{name}.json"
        self.request = {"seed": options.seed, **facts}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        about = provenance(options.seed, device)
        self.done, self.seconds, self.faults = 0, 0.0, dict[str, str]()
        self.counts, self.started = dict[str, int](), about
        held = read_json(self.file, dict)
        self.code = hash_code()
        if held is not None and held.get("code") == self.code and held["request"] == self.request:
            self.done, self.seconds, self.faults = held["done"], held["seconds"], held["faults"]
            self.counts, self.started = held["counts"], held["provenance"]
        self.facts: dict[str, Any] = {}

    def run(self, try_one: Callable[[int], tuple[str, str | None]], until: float) -> None:
        """try_one: of a number (a word for what it was, what was wrong or None). until: `time.monotonic` to stop at."""
        if self.options.only is not None:
            for number in self.options.only:
                print(f"{self.name} {number}: {try_one(number)[1] or 'nothing is wrong'}")
            return
        start, saved, before = time.monotonic(), time.monotonic(), self.seconds
        while self.done < self.options.cases and time.monotonic() < until:
            word, fault = try_one(self.done)
            self.counts[word] = self.counts.get(word, 0) + 1
            if fault is not None:
                self.faults[str(self.done)] = fault
                print(f"{self.name} {self.done}: {fault}", file=sys.stderr, flush=True)
            self.done += 1
            self.seconds = before + time.monotonic() - start
            if time.monotonic() - saved > SAVED_EVERY:
                saved = time.monotonic()
                self.save()
        self.save()

    def save(self) -> None:
        write_json(self.file, {
            "name": self.name, "request": self.request, "asked": self.options.cases, "done": self.done,
            "seconds": round(self.seconds, 1), "counts": self.counts, "faults": self.faults, **self.facts,
            "code": self.code, "provenance": self.started,
        })  # fmt: skip

    def tell(self) -> str:
        left = self.options.cases - self.done
        more = f"; {left} are left, the same command goes on" if left > 0 else ""
        return f"{self.name}: {self.done} in {self.seconds:.0f} s, {len(self.faults)} wrong{more}"


def finish(campaigns: list[Campaign]) -> None:
    """The end of a program: what was found, and the exit code (1: something is wrong)."""
    for one in campaigns:
        if one.options.only is None:
            print(one.tell())
    sys.exit(any(one.faults for one in campaigns if one.options.only is None))
