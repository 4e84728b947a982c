"""What the long campaigns share: a seed, a budget of time, results that are stored while they grow and gone on from.

A campaign numbers what it tries. What a number stands for follows from the seed alone, so a stopped campaign goes on
with the next number, and a number that went wrong can be tried again by itself. What is stored says what was done and
where, the commit included. Another seed begins anew, and so do other sources or tests; a commit that changes neither,
as one that stores what was found so far, does not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lln.files import hash_file, read_json, write_json
from lln.lab.core.provenance import provenance

ROOT = Path(__file__).parent.parent
STORED = ROOT / "results" / "hardening"
SAVED_EVERY = 20.0  # seconds
HANDED = 32  # numbers that each of several processes is given at a time


class Tried(NamedTuple):
    """What came of one number."""

    word: str  # for what it was, to be counted
    fault: str | None = None
    seen: tuple[str, ...] = ()  # names of what is to be counted once, however often it is seen


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
        self.counts, self.started, self.seen = dict[str, int](), about, set[str]()
        held = read_json(self.file, dict)
        self.code = hash_code()
        if held is not None and held.get("code") == self.code and held["request"] == self.request:
            self.done, self.seconds, self.faults = held["done"], held["seconds"], held["faults"]
            self.counts, self.started = held["counts"], held["provenance"]
            self.seen = set(held.get("seen", ()))
        self.facts: dict[str, Any] = {}

    def run(
        self, try_one: Callable[[int], Tried], until: float, *, at_once: int = 1,
        prepare: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """until: `time.monotonic` to stop at. at_once: processes, each of which calls `prepare` first; both functions
        must then be known by name."""
        if self.options.only is not None:
            for number in self.options.only:
                print(f"{self.name} {number}: {try_one(number).fault or 'nothing is wrong'}")
            return
        if at_once == 1:
            self.collect(map(try_one, itertools.count(self.done)), until)
            return
        with multiprocessing.get_context("spawn").Pool(at_once, prepare) as pool:
            while self.done < self.options.cases and time.monotonic() < until:
                end = min(self.done + HANDED * at_once, self.options.cases)
                self.collect(pool.imap(try_one, range(self.done, end)), math.inf)

    def collect(self, tries: Iterator[Tried], until: float) -> None:
        """Count what came of the next numbers."""
        start, saved, before = time.monotonic(), time.monotonic(), self.seconds
        while self.done < self.options.cases and time.monotonic() < until:
            tried = next(tries, None)
            if tried is None:
                break
            self.counts[tried.word] = self.counts.get(tried.word, 0) + 1
            self.seen.update(hashlib.sha256(name.encode()).hexdigest()[:12] for name in tried.seen)
            if tried.fault is not None:
                self.faults[str(self.done)] = tried.fault
                print(f"{self.name} {self.done}: {tried.fault}", file=sys.stderr, flush=True)
            self.done += 1
            self.seconds = before + time.monotonic() - start
            if time.monotonic() - saved > SAVED_EVERY:
                saved = time.monotonic()
                self.save()
        self.save()

    def save(self) -> None:
        write_json(self.file, {
            "name": self.name, "request": self.request, "asked": self.options.cases, "done": self.done,
            "seconds": round(self.seconds, 1), "counts": self.counts, "faults": self.faults,
            **self.facts, **({"variants": len(self.seen), "seen": sorted(self.seen)} if self.seen else {}),
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
