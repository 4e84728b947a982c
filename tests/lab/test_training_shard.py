"""Two processes with FSDP train as one process does, hold half of the weights each, and go on from checkpoints."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from helpers.processes import Processes
from helpers.runs import SMALLEST, read_metrics
from lln.lab.recipes import recipe
from lln.lab.train import loop
from lln.lab.train.config import change
from lln.lab.train.run import train

SMALL = SMALLEST | {
    "model.layers": "2", "optimisation.steps": "6", "log_every": "1", "save_every": "2", "evaluate_every": "3",
    "record_every": "2", "attention.options.block_size": "8", "attention.options.statistics": "running",
}  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    made = Processes(2)
    yield made
    made.stop()


def train_here(mesh: Any, rank: int, folder: str, cache: str, changes: dict[str, str]) -> tuple[int, int]:
    """In one of the processes: how many weights its optimiser holds, of how many."""
    found = []
    make = loop.make_optimizer

    def watch(model: Any, optimisation: Any) -> Any:
        made = make(model, optimisation)
        weights: list[Any] = [p for group in made.param_groups for p in group["params"]]
        found.append((sum(p.to_local().numel() for p in weights), sum(p.numel() for p in weights)))
        return made

    with mock.patch.object(loop, "make_optimizer", watch):
        train(change(recipe("mlm", "tiny"), changes), Path(folder), cache_dir=cache)
    return found[0]


def assert_nearly(one: Any, two: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for name in one:
            assert_nearly(one[name], two[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for a, b in zip(one, two, strict=True):
            assert_nearly(a, b, where)
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=2e-3, abs=1e-4), where
    else:
        assert one == two, where


def test_sharded_processes_train_as_one_and_go_on(processes: Processes, tmp_path: Path) -> None:
    cache, one, two = tmp_path / "cache", tmp_path / "one", tmp_path / "two"
    train(change(recipe("mlm", "tiny"), SMALL), one, cache_dir=cache)
    asked = str(two), str(cache), SMALL | {"fsdp": "yes"}
    shares = processes.run(2, train_here, *asked)
    plain = [[m for m in read_metrics(folder) if "heads" not in m] for folder in (one, two)]
    assert_nearly(plain[0], plain[1])
    # The queries of a step differ between one process and two: each looks at the first of its own batch.
    norms = [[m["gradient_norms"] for m in read_metrics(folder) if "heads" in m] for folder in (one, two)]
    assert_nearly(norms[0], norms[1])
    for held, whole in shares:
        assert 0.45 * whole < held < 0.55 * whole
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[1][name].sub(value).abs().max() < 2e-4 for name, value in weights[0].items())

    before = read_metrics(two)
    (two / "result.json").unlink()
    shutil.rmtree(two / "checkpoint-6")
    processes.run(2, train_here, *asked)
    assert read_metrics(two) == before
    assert len(json.loads((two / "environment.json").read_text())) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, "fsdp needs several processes: torchrun --nproc-per-node 2"), ({"graph": "yes"}, "fsdp needs several")],
)
def test_one_process_cannot_be_sharded(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(change(recipe("mlm", "tiny"), SMALL | {"fsdp": "yes"} | changes), tmp_path / "run")
