"""Two processes that share each sequence train as one does, and a run goes on with another number of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.processes import Processes
from helpers.runs import SMALLEST, read_metrics
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.run import train

SMALL = SMALLEST | {
    "model.layers": "2", "optimisation.steps": "6", "log_every": "1", "save_every": "2", "evaluate_every": "3",
    "record_every": "0", "attention.options.block_size": "8", "attention.options.statistics": "running",
}  # fmt: skip


def train_here(mesh: Any, rank: int, folder: str, cache: str, changes: dict[str, str], ranks: int) -> None:
    """In one of the processes."""
    train(change(recipe("mlm", "tiny"), changes), Path(folder), cache_dir=cache, context_parallel=ranks)


def train_together(folder: Path, cache: Path, changes: dict[str, str], processes: int, ranks: int) -> None:
    made = Processes(processes)
    made.run(processes, train_here, str(folder), str(cache), changes, ranks)
    made.stop()


def assert_nearly(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert [m.keys() for m in one] == [m.keys() for m in two]
    for mine, other in zip(one, two, strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=1e-4)


def test_processes_that_share_sequences_train_as_one_and_go_on_alone(tmp_path: Path) -> None:
    cache, one, two = tmp_path / "cache", tmp_path / "one", tmp_path / "two"
    train(change(recipe("mlm", "tiny"), SMALL), one, cache_dir=cache)
    train_together(two, cache, SMALL, processes=2, ranks=2)
    assert_nearly(read_metrics(one), read_metrics(two))
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[1][name].sub(value).abs().max() < 2e-4 for name, value in weights[0].items())

    before = read_metrics(two)
    (two / "result.json").unlink()
    shutil.rmtree(two / "checkpoint-6")
    train(change(recipe("mlm", "tiny"), SMALL), two, cache_dir=cache)  # from step 4 on in one process
    assert_nearly(read_metrics(two), before)


@pytest.mark.long
def test_a_run_of_one_process_goes_on_with_several(tmp_path: Path) -> None:
    cache, run = tmp_path / "cache", tmp_path / "run"
    train(change(recipe("mlm", "tiny"), SMALL), run, cache_dir=cache)
    before = read_metrics(run)
    for count in (3, 2):
        (run / "result.json").unlink()
        shutil.rmtree(run / "checkpoint-6")
        train_together(run, cache, SMALL, processes=count, ranks=count)
        assert_nearly(read_metrics(run), before)


@pytest.mark.long
@pytest.mark.parametrize(("processes", "changes"), [(4, {}), (2, {"fsdp": "yes"}), (3, {"data.length": "128"})])
def test_more_processes_and_sharded_weights_train_as_one(
    processes: int, changes: dict[str, str], tmp_path: Path
) -> None:
    cache, one, two = tmp_path / "cache", tmp_path / "one", tmp_path / "two"
    train(
        change(recipe("mlm", "tiny"), SMALL | {n: v for n, v in changes.items() if n != "fsdp"}), one, cache_dir=cache
    )
    ranks = 3 if processes == 3 else 2
    train_together(two, cache, SMALL | changes, processes, ranks)
    assert_nearly(read_metrics(one), read_metrics(two))


@pytest.mark.parametrize(
    ("task", "attention", "changes", "message"),
    [
        ("mlm", "lln", {}, "2 processes share a sequence, and torchrun started 1"),
        ("mlm", "softmax", {}, "spreads lln and lln_diag alone; got attention 'softmax'"),
        ("lra", "lln", {}, "goes with mlm, which judges single tokens; got lra"),
        ("mlm", "lln", {"compile": "yes", "record_every": "0"}, "needs compile=no"),
    ],
)
def test_what_cannot_be_spread_is_said_before_anything_is_written(
    task: str, attention: str, changes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lln.lab.train.run.count_processes", lambda: (1 if "started 1" in message else 2, 0))
    with pytest.raises(ValueError, match=message):
        train(change(recipe(task, "tiny", attention), changes), tmp_path / "run", context_parallel=2)
    assert not (tmp_path / "run").exists()
