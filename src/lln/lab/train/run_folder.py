"""A training run is a folder, and everything in it is either whole or known to be broken.

config.json        what was asked for; the same command finds the same run again
facts.json         what tables and figures ask of a run (`list_facts`); result.json holds it too
environment.json   versions, commit, device: one entry each time the run was started
metrics.jsonl      one line a measurement; lines after the checkpoint that a run goes on from are taken back
checkpoint-N/      weights, moments and random states after N steps, and manifest.json, written last: sizes and hashes
result.json        written last of all
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lln.files import PART, Unreadable, hash_file, read_json, read_json_lines, write_json, write_text
from lln.lab.train.config import Config

CONFIG, FACTS, ENVIRONMENT, METRICS, RESULT, MANIFEST = (
    "config.json", "facts.json", "environment.json", "metrics.jsonl", "result.json", "manifest.json"
)  # fmt: skip
CHECKPOINT, LOCK = "checkpoint-", ".lock"
FINAL = "final"  # begins the names of what is measured when all steps are done

Say = Callable[[str], None]


class Run:
    """The run in a folder, new or begun. ValueError where it was begun with another config, or the folder is of
    something else.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> run = Run(folder, {"seed": 0})
    >>> run.begin()
    >>> run.log({"step": 1, "loss": 2.5})
    >>> run.read_metrics()
    [{'step': 1, 'loss': 2.5}]
    >>> Run(folder, {"seed": 1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ... holds a run with other settings: seed is 0 there and 1 here. Name another folder or remove this one.
    """

    def __init__(self, path: Path, config: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        self.path, self.facts = path, facts
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; a run needs a folder.")
        held = self.read(CONFIG)
        self.is_new = held is None
        if held is None and path.exists() and not all(is_left_over(p) for p in path.iterdir()):
            raise ValueError(f"{path} has files in it but no {CONFIG}, so it is no run; name another folder.")
        self.config = json.loads(json.dumps(config))
        if held is not None and (changed := list_differences(held, self.config)):
            raise ValueError(
                f"{path} holds a run with other settings: {'; '.join(changed)}. Name another folder or remove this one."
            )

    def read(self, name: str, kind: type = dict) -> Any:
        """What a JSON file of the run holds, None where there is none."""
        return read_json(self.path / name, kind)

    def read_result(self) -> dict[str, Any] | None:
        """None: the run is not finished."""
        result: dict[str, Any] | None = self.read(RESULT)
        if result is None:
            return None
        shapes: dict[str, Any] = {
            "config": dict, "metrics": dict, "guess": dict, "notes": list, "parameters": int, "seconds": (int, float),
        }  # fmt: skip
        for name, kind in shapes.items():
            if not isinstance(result.get(name), kind):
                raise Unreadable(f"{self.path / RESULT} is not the result of a run: its {name!r} is missing or wrong.")
        return result

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def begin(self) -> None:
        """From now on the folder is this run's. What is refused before leaves no trace there."""
        for rest in self.path.glob(f"*{PART}"):  # of a process that was killed while it wrote
            rest.unlink()
        self.write(CONFIG, self.config)
        if self.facts is not None:
            self.write(FACTS, self.facts)

    def undo(self, *, with_folder: bool) -> None:
        """Of a new run that failed before anything was measured: nothing of it is left that would refuse a better
        one."""
        if self.is_new and not self.list_checkpoints() and not self.read_metrics():
            for path in self.path.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if with_folder:
                self.path.rmdir()

    def check_origin(self, data: dict[str, str], start: dict[str, str]) -> None:
        """ValueError where the run was begun with other data, or from other weights. data: fingerprints, as
        `TaskData.identity`; start: of the model that it begins with, as `pretrained.identify`. Nothing is compared with
        {}, nor with what an earlier version did not write down."""
        started = self.read(ENVIRONMENT, list) or [{}]
        held = started[-1] if isinstance(started[-1], dict) else {}
        if data and held.get("data") and (changed := list_differences(held["data"], data, "data")):
            raise ValueError(
                f"{self.path} holds a run with other data: {'; '.join(changed)}. Name the folder that they were read "
                "from (--data-root), or another folder for the run."
            )
        if start and held.get("start") and (changed := list_differences(held["start"], start, "model.start")):
            raise ValueError(
                f"{self.path} holds a run that began with other weights: {'; '.join(changed)}. Name the folder of "
                "those (--start), or another folder for the run."
            )

    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """One process at a time: two would mix their metrics. A killed process leaves no lock behind."""
        from filelock import FileLock, Timeout

        try:
            return FileLock(str(self.path / LOCK)).acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{self.path} is being trained by another process.") from None

    # Metrics

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / METRICS)

    def log(self, values: dict[str, Any]) -> None:
        """JSON has no NaN and no infinity: text says what was measured."""
        spelt_out = json.loads(json.dumps(values), parse_constant=lambda text: str(float(text)))
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(spelt_out, allow_nan=False) + "\n")

    def go_back(self, step: int) -> None:
        """Forget what was measured after the checkpoint of this step: it will be measured again. So will the model at
        the end of a run that was killed before it wrote its result."""
        kept = [row for row in self.read_metrics() if row["step"] <= step and not any(n.startswith(FINAL) for n in row)]
        write_text(self.path / METRICS, "".join(json.dumps(values) + "\n" for values in kept))

    # Checkpoints

    def list_checkpoints(self) -> list[Path]:
        """From the oldest to the newest."""
        found = [p for p in self.path.glob(CHECKPOINT + "*") if p.name.removeprefix(CHECKPOINT).isdigit()]
        return sorted(found, key=read_step)

    def find_newest(self, say: Say) -> Path | None:
        """The newest checkpoint that is whole. What is broken is removed, with a word about it."""
        for path in reversed(self.list_checkpoints()):
            reason = find_damage(path)
            if reason is None:
                return path
            say(f"{path.name} is not whole ({reason}) and is left out.")
            shutil.rmtree(path)
        return None


def list_facts(config: Config) -> dict[str, Any]:
    """What tables and figures ask of a run. `name`: which GLUE or LRA task; `label`: the attention as tables show it;
    `length`: tokens of a sequence, of images pixels along the side; `start`: the run whose model this one begins from,
    with `seed`, `task` and `length` None where it is not a run of ours; None for new models."""
    start = None
    if config.model.start:
        folder = Path(config.model.start).absolute().parent
        held = read_json(folder / CONFIG, dict) or {}
        length = held.get("data", {}).get("length")
        start = {"folder": folder.name, "task": held.get("task"), "seed": held.get("seed"), "length": length}
    return {
        "task": config.task, "name": config.data.subset, "preset": config.preset, "attention": config.attention.name,
        "label": config.attention.label, "seed": config.seed, "length": config.data.length, "start": start,
    }  # fmt: skip


def is_left_over(path: Path) -> bool:
    """Whether a file says nothing of what its folder is for: a process was killed before it wrote what does."""
    return path.name == LOCK or path.name.endswith(PART)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    found = read_json_lines(path)
    for number, row in enumerate(found, 1):
        if not isinstance(row.get("step"), int):
            raise Unreadable(f"{path} cannot be read: measurement {number} has no step.")
    return found


def read_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def seal(checkpoint: Path) -> None:
    """Write down what the files of a checkpoint are. Until then it counts as half-written."""
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # the manifest must not reach the disk before what it vouches for
        files[path.relative_to(checkpoint).as_posix()] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    write_json(checkpoint / MANIFEST, files)


def find_damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    try:
        files = read_json(checkpoint / MANIFEST, dict)
        expected = {name: (facts["bytes"], facts["sha256"]) for name, facts in (files or {}).items()}
    except (KeyError, TypeError, ValueError):
        return f"{MANIFEST} cannot be read"
    if not expected:
        return "it was not written to its end"
    for name, (size, digest) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or hash_file(path) != digest:
            return f"{name} has changed"
    return None


def list_differences(held: Any, asked: Any, name: str = "") -> list[str]:
    """Where two configs differ, as `name: this, asked for that`."""
    if not (isinstance(held, dict) and isinstance(asked, dict)):
        return [] if held == asked else [f"{name} is {held!r} there and {asked!r} here"]
    parts = ((held.get(k), asked.get(k), f"{name}.{k}" if name else k) for k in sorted({*held, *asked}))
    return [difference for part in parts for difference in list_differences(*part)]
