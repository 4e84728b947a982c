"""What conversions keep, with the spread of seeds, on long texts and on pictures, and how fast they are there.

    python benchmarks/conversion_quality.py --model DIR --text FILE --speeches FILE --device cuda --at-once 4 \\
        --parts seeds,long,speed --out benchmarks/results/conversion_quality

`--model` is a folder of MiniLM (all-MiniLM-L6-v2), `--text` a document in each line, `--speeches` a JSON object with
`party`, `name` and `text` in each line; files may be compressed by xz. Each part is a file in --out, written after each
job, so that a run that was stopped, or that came to the end of its --seconds, goes on with the same command. `--reckon`
says how long each part is expected to take on an H200, and measures nothing. The parts:

- `seeds`: Spearman's rank correlation of the similarities of passages of 512 tokens with those of the softmax model
  (see `conversion.py`), on Wikipedia and on Python's documentation, after distillation on both, with blocks of 64 and
  of 32. The better rate of a row is chosen with the first seed on passages that are not measured on.
- `long`: the party of State of the Union addresses of up to 8,192 tokens, for which MiniLM is given more positions
  (`lln.hf.extend_positions`), taught on Wikipedia and fine-tuned, cross-validated; and what a step takes.
- `speed`: the rank correlation at lengths up to 16,384 tokens after a distillation at that length, beside the time of a
  layer's attention and of the model.
- `image`: a vision transformer that `lln train image --attention softmax` trained on CIFAR-10 (`--vit RUN/model`,
  `--data-root`), with blocks of patches.

Times are measured while no other job runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from lln.files import write_json
from lln.lab.core.provenance import provenance
from quality_jobs import SOFTMAX, TEXTS, Found, open_desk, prepare, run_job

TAUGHT = ("weighed_distilled", "distilled", "blocks_distilled", "lln_distilled", "hedgehog", "mean_distilled")
BLOCKS, SEEDS = (64, 32), (0, 1, 2)
LENGTHS = (512, 2048, 8192, 1024, 4096, 16384)  # in the order of their worth
FAST = ("distilled", "weighed_distilled", "lln_distilled", "blocks_distilled", "hedgehog")
CUT = f"{SOFTMAX}, cut"
LONG = (CUT, SOFTMAX, "distilled", "blocks_distilled")
PICTURED = ("distilled", "blocks_distilled", "lln_distilled", "blocks")
# Seconds a job on an H200, of four at once: reckoned, see `--reckon`.
SECONDS = {
    "seeds": 11.0,
    "adapt": 8.0,
    "probe": 3.0,
    "fold": 7.0,
    "cost": 12.0,
    "quality": 6.0,
    "speed": 4.0,
    "image": 8.0,
}
QUIET = ("cost", "speed")  # jobs that are alone
TRIES = 3  # of a job, which may have ended because of another one
LATER = {"hedgehog": 2, "mean_distilled": 3}  # what comes after everything else, in this order


class Job(NamedTuple):
    part: str
    name: str  # of the method of a `Desk`
    given: tuple[Any, ...]

    @property
    def label(self) -> str:
        return "/".join([self.name, *("+".join(g) if isinstance(g, list) else str(g) for g in self.given)])

    @property
    def rank(self) -> int:
        """Second cross-validations come after all first ones, peers later."""
        return 1 if self.name == "fold" and self.given[1] > 0 else LATER.get(str(self.given[0]), 0)


class Store:
    """A file a part. What was measured alike, by the same commit on the same machine, is not measured again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.parts = args, dict[str, Found]()
        made = provenance(0, torch.device(args.device)) | {"transformers": transformers.__version__}
        how = {name: value for name, value in vars(args).items() if name in args.counts}
        for part in args.parts:
            held: Found = {}
            if args.out and (path := self.place(part)).exists():
                held = json.loads(path.read_text())
            alike = held.get("how") == how and all(
                held["provenance"][name] == made[name] for name in ("commit", "device", "torch")
            )
            rows = held["rows"] if alike else {}
            self.parts[part] = {"part": part, "how": how, "provenance": made, "rows": rows}

    def place(self, part: str) -> Path:
        return Path(self.args.out) / f"{part}.json"

    def find(self, job: Job) -> Found | None:
        found: Found | None = self.parts[job.part]["rows"].get(job.label)
        return found

    def keep(self, job: Job, found: Found) -> None:
        self.parts[job.part]["rows"][job.label] = found
        print(f"{time.monotonic() - self.args.began:6.1f} s  {job.part} {job.label}: {found}", flush=True)
        if self.args.out:
            write_json(self.place(job.part), json.loads(json.dumps(self.parts[job.part])))


def plan(args: argparse.Namespace, store: Store) -> list[Job]:
    """The jobs that can be begun now, the most worthy first. Some ask for what others have found."""
    found = [job for part in args.parts for job in PLANS[part](args, store)]
    passed = time.monotonic() - args.began
    late = {part for part, most in args.turns.items() if passed > most}
    return sorted(found, key=lambda job: (job.part in late, job.rank))


def plan_seeds(args: argparse.Namespace, store: Store) -> Iterator[Job]:
    first, *others = args.seeds
    # Rows in turns, so that processes compile different kernels at once.
    sizes = [(row, size) for size in args.blocks for row in args.rows]
    cells = [(row, size) for row, size in sizes if row != "lln_distilled" or size == args.blocks[0]]
    for rate, (row, size) in itertools.product(args.rates, cells):
        yield Job("seeds", "seeds", (row, size, first, rate))
    for seed, (row, size) in itertools.product(others, cells):
        if (rate := best_rate(store.parts["seeds"]["rows"], row, size, first, args.rates)) is not None:
            yield Job("seeds", "seeds", (row, size, seed, rate))


def plan_long(args: argparse.Namespace, store: Store) -> Iterator[Job]:
    made = [kind for kind in LONG if not kind.startswith(SOFTMAX)]
    yield from (Job("long", "adapt", (kind,)) for kind in made)
    ready = [kind for kind in LONG if kind not in made or store.find(Job("long", "adapt", (kind,)))]
    for seed, at, kind in itertools.product(range(args.repeated), range(args.folds), ready):
        yield Job("long", "fold", (kind, seed, at))
        if seed == at == 0:
            yield Job("long", "probe", (kind,))
    if len(ready) == len(LONG):
        yield Job("long", "cost", (list(LONG),))


def plan_speed(args: argparse.Namespace, store: Store) -> Iterator[Job]:
    for length in args.lengths:
        yield from (Job("speed", "quality", (row, length)) for row in FAST)
        yield Job("speed", "speed", (length, list(FAST)))
    yield from (Job("speed", "quality", (SOFTMAX, length)) for length in args.lengths)


def plan_image(args: argparse.Namespace, store: Store) -> Iterator[Job]:
    yield from (Job("image", "image", (row, 0)) for row in (SOFTMAX, "blocks"))
    yield from (Job("image", "image", (row, seed)) for seed in args.seeds for row in PICTURED if row != "blocks")


PLANS = {"seeds": plan_seeds, "long": plan_long, "speed": plan_speed, "image": plan_image}


def best_rate(rows: dict[str, Found], row: str, size: int, seed: int, rates: list[float]) -> float | None:
    """By the passages that are there to choose on; None while not all rates are measured."""
    found = [rows.get(Job("seeds", "seeds", (row, size, seed, rate)).label) for rate in rates]
    if any(one is None for one in found):
        return None
    worth = [chosen(one) for one in found if one is not None]
    return rates[worth.index(max(worth))]


def chosen(found: Found) -> float:
    return float(statistics.mean(value for name, value in found.items() if name.startswith("chosen")))


class Pool:
    """Processes that jobs run in; others take their place where one ended itself."""

    def __init__(self, args: argparse.Namespace, *given: Any) -> None:
        self.args, self.given = args, given
        self.pool = self.open()

    def open(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.args.at_once, get_context("spawn"), initializer=open_desk, initargs=self.given)

    def begin(self, job: Job) -> Future[Found]:
        try:
            return self.pool.submit(run_job, job.name, job.given)
        except BrokenProcessPool:
            self.pool.shutdown(wait=True)
            self.pool = self.open()
            return self.pool.submit(run_job, job.name, job.given)

    def close(self, wait_for: bool) -> None:
        """What jobs do is waited for, or not."""
        for process in [] if wait_for else list((self.pool._processes or {}).values()):
            process.terminate()
        self.pool.shutdown(wait=True, cancel_futures=True)


def work_off(args: argparse.Namespace, store: Store, pool: Pool) -> bool:
    """Run what is planned, `at_once` at a time; quiet jobs alone, and in time. Whether nothing is under way."""
    running: dict[Future[Found], Job] = {}
    tries: dict[str, int] = {}

    def left() -> float:
        return float(args.seconds - (time.monotonic() - args.began))

    while True:
        busy = {job.label for job in running.values()} | {label for label, count in tries.items() if count == TRIES}
        open_jobs = [job for job in plan(args, store) if store.find(job) is None and job.label not in busy]
        quiet = [job for job in open_jobs if job.name in QUIET]
        loud = [job for job in open_jobs if job.name not in QUIET]
        asked = sum(SECONDS[job.name] for job in quiet)
        hurry = bool(quiet) and left() < asked + 1.5 * max(SECONDS.values())
        candidates = [] if hurry else loud
        if not running and (hurry or not loud) and quiet:
            candidates = quiet[:1]
        for job in candidates:
            if len(running) >= (1 if job.name in QUIET else args.at_once) or left() < SECONDS[job.name]:
                break
            running[pool.begin(job)] = job
        if not running:
            print("Nothing is left." if not open_jobs else "The time is over; the same command goes on.", flush=True)
            return True
        done, _ = wait(running, timeout=max(left(), 0.0), return_when=FIRST_COMPLETED)
        if not done:
            print("The time is over; the same command goes on.", flush=True)
            return False
        for one in done:
            job = running.pop(one)
            if (error := one.exception()) is None:
                store.keep(job, one.result())
            else:  # the others are worth having all the same
                tries[job.label] = tries.get(job.label, 0) + 1
                print(f"{job.part} {job.label} FAILED: {type(error).__name__}: {error}", flush=True)


def reckon(args: argparse.Namespace, store: Store) -> None:
    """How long each part is expected to take on an H200."""
    whole: dict[str, float] = dict.fromkeys(args.parts, 0.0)
    for job in list_all(args, store):
        whole[job.part] += SECONDS[job.name] / (1 if job.name in QUIET else args.at_once)
    for part, seconds in whole.items():
        print(f"{part}: about {seconds:.0f} s")


def list_all(args: argparse.Namespace, store: Store) -> list[Job]:
    """Also those that wait for others: as if these had been measured."""
    pretended = argparse.Namespace(parts={part: {"rows": {}} for part in args.parts})
    pretended.find = lambda job: pretended.parts[job.part]["rows"].get(job.label)
    while True:
        jobs = plan(args, pretended)  # type: ignore[arg-type]
        if all(pretended.find(job) for job in jobs):
            return [job for job in jobs if store.find(job) is None]
        for job in jobs:
            pretended.parts[job.part]["rows"][job.label] = {"chosen": 0.0}


def read_list(kind: Any, text: str) -> list[Any]:
    return [kind(one) for one in text.split(",")]


def read_turns(text: str) -> dict[str, float]:
    return {part: float(seconds) for part, seconds in (one.split("=") for one in text.split(","))}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["seeds", "long", "speed"])
    parser.add_argument("--out", type=Path, help="a folder for the results")
    for name, metavar in (
        ("model", "DIR"),
        ("text", "FILE"),
        ("speeches", "FILE"),
        ("vit", "DIR"),
        ("data-root", "DIR"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar=metavar)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing that would not be done by then")
    parser.add_argument(
        "--turns", type=read_turns, default={}, metavar="PART=SECONDS,...", help="from then on a part comes last"
    )
    parser.add_argument("--at-once", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reckon", action="store_true")
    counts: dict[str, Any] = {
        "documents": 1100, "most": 700, "length": 512, "distill": 800,
        "tokens": 16384, "long_learned": 64, "long_judged": 64, "long_distill": 150, "long_rate": 0.01,
        "speech_length": 8192, "speech_count": 233, "speech_tokens": 32768, "speech_rate": 5e-5,
        "folds": 5, "repeated": 2, "epochs": 4, "speed_tokens": 65536, "repeats": 10,
        "tile": 4, "picture_judged": 10000, "picture_learned": 64, "picture_distill": 360,
    }  # fmt: skip
    for name, usual in counts.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(usual), default=usual)
    lists: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rows": (str, TAUGHT), "blocks": (int, BLOCKS), "seeds": (int, SEEDS), "lengths": (int, LENGTHS),
        "rates": (float, (0.01, 0.03)),
    }  # fmt: skip
    for name, (kind, usual) in lists.items():
        parser.add_argument(f"--{name}", type=functools.partial(read_list, kind), default=list(usual))
    args = parser.parse_args()
    args.counts, args.began = (*counts, "rates"), time.monotonic()
    return args


def main() -> None:
    args = parse()
    transformers.utils.logging.disable_progress_bar()
    store = Store(args)
    reckon(args, store)
    if args.reckon:
        return
    with tempfile.TemporaryDirectory() as folder:
        told = argparse.Namespace(**{name: value for name, value in vars(args).items() if name != "counts"})
        pool, over = Pool(args, told, Path(folder)), False
        try:
            warm = [pool.begin(Job("", "warm", ())) for _ in range(args.at_once)]
            torch.save(prepare(args), Path(folder) / TEXTS)
            print(f"{time.monotonic() - args.began:6.1f} s  texts are ready", flush=True)
            wait(warm)
            print(f"{time.monotonic() - args.began:6.1f} s  so are {len(warm)} processes", flush=True)
            over = work_off(args, store, pool)
        finally:
            pool.close(over)


if __name__ == "__main__":
    main()
