"""Training runs: stopped at any moment they end where an uninterrupted one ends, on one process or two."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forking import run_apart, train_apart
from helpers.processes import Processes
from helpers.runs import SMALLEST, make_tiny, read_metrics, write_options
from lln.hf.distillation import NotFinite
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.run import train

SMALL = SMALLEST | {
    "optimisation.steps": "12", "log_every": "2", "save_every": "4", "evaluate_every": "4", "record_every": "0",
    "attention.options.block_size": "8",
}  # fmt: skip
tiny = functools.partial(make_tiny, SMALL)
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.run import train
changes, folder, cache = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
attention = changes.pop("attention", "lln_diag")
train(change(recipe("mlm", "tiny", attention), changes), folder, cache_dir=cache)
"""


def command(folder: Path, cache: Path, **changes: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(SMALL | changes), str(folder), str(cache)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """An uninterrupted run in a process of its own."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_apart(train_apart, SMALL, folder, cache) == 0
    return folder


def test_a_batch_without_a_masked_token_ends_no_run(tmp_path: Path, cache: Path) -> None:
    """As short texts may be: one token in ten has none to guess, most of the time."""
    config = tiny(data__length="2", data__options__probability="0.01", optimisation__steps="4", save_every="4")
    train(config, tmp_path / "run", cache_dir=cache)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert losses == [0.0, 0.0]


def test_a_run_is_a_folder_with_everything_in_it(whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert result["config"]["optimisation"]["steps"] == 12
    assert result["metrics"]["loss"] == read_metrics(whole)[-1]["final_loss"]
    assert result["guess"]["loss"] > 0
    assert result["notes"]
    assert result["provenance"]["torch"] == torch.__version__
    assert result["facts"] == json.loads((whole / "facts.json").read_text())
    assert (result["facts"]["label"], result["facts"]["length"]) == ("lln_diag:block_size=8", 32)
    environment = json.loads((whole / "environment.json").read_text())
    assert len(environment) == 1
    assert {"transformers", "commit", "device", "data"} <= environment[0].keys()
    losses = [m for m in read_metrics(whole) if "loss" in m]
    assert [m["step"] for m in losses] == [2, 4, 6, 8, 10, 12]
    assert [m["step"] for m in read_metrics(whole) if "eval_loss" in m] == [4, 8, 12]
    assert {p.name for p in (whole / "model").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not list(whole.rglob("*.bin"))


def test_the_loss_falls(whole: Path) -> None:
    found = [m["eval_loss"] for m in read_metrics(whole) if "eval_loss" in m]
    assert found[-1] < found[0]


@pytest.mark.parametrize("moment", ["logged 6", "saving checkpoint-8", "logged 2"])
def test_a_killed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, cache: Path, whole: Path, moment: str
) -> None:
    folder = tmp_path / "run"
    assert run_apart(train_apart, SMALL, folder, cache, moment) == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    assert run_apart(train_apart, SMALL, folder, cache) == 0
    assert read_metrics(folder) == read_metrics(whole)  # to the last bit
    assert len(json.loads((folder / "environment.json").read_text())) == 2


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, cache: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", str(whole), str(folder)], check=True)
    (folder / "result.json").unlink()
    weights = folder / "checkpoint-12" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    said: list[str] = []
    threads = torch.get_num_threads()
    train(tiny(), folder, cache_dir=cache, say=said.append)
    assert torch.get_num_threads() == threads
    assert said[0].startswith("checkpoint-12 is not whole (model.safetensors has changed)")
    assert said[1] == "Going on from step 8."
    assert read_metrics(folder) == read_metrics(whole)


def test_the_checkpoints_of_the_last_steps_are_kept_whatever_the_clock_says(tmp_path: Path, cache: Path) -> None:
    def set_back(step: int, values: dict[str, float]) -> None:
        for folder in tmp_path.glob("run/checkpoint-*"):  # older ones seem to be newer
            os.utime(folder, (2**32 - step, 2**32 - step))

    train(tiny(), tmp_path / "run", cache_dir=cache, progress=set_back)
    assert {p.name for p in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-12"}


def test_a_finished_run_is_not_run_again(whole: Path, cache: Path) -> None:
    before = sorted((p, p.stat().st_mtime_ns) for p in whole.rglob("*") if p.name != "config.json")
    said: list[str] = []
    result = train(tiny(), whole, cache_dir=cache, say=said.append)
    assert result == json.loads((whole / "result.json").read_text())
    assert "is finished" in said[0]
    assert before == sorted((p, p.stat().st_mtime_ns) for p in whole.rglob("*") if p.name != "config.json")


def test_attention_and_seed_matter(tmp_path: Path, cache: Path, whole: Path) -> None:
    other = train(tiny(seed="1"), tmp_path / "seed", cache_dir=cache)
    softmax = train(tiny("softmax"), tmp_path / "softmax", cache_dir=cache)
    losses = {r["metrics"]["loss"] for r in (other, softmax, json.loads((whole / "result.json").read_text()))}
    assert len(losses) == 3


def train_here(mesh: Any, rank: int, folder: str, cache: str, changes: dict[str, str]) -> None:
    """In one of two processes."""
    train(tiny(**changes), Path(folder), cache_dir=cache)


def test_two_processes_train_as_one(tmp_path: Path, cache: Path) -> None:
    """Also with running statistics, which are pooled over the processes."""
    changes = {"attention__options__statistics": "running", "optimisation__steps": "6", "log_every": "1"}
    train(tiny(**changes), tmp_path / "one", cache_dir=cache)
    processes = Processes(2)
    processes.run(2, train_here, str(tmp_path / "two"), str(cache), changes)
    processes.stop()
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [m["step"] for m in one] == [m["step"] for m in two]
    for a, b in zip(one, two, strict=True):
        for name in {"loss", "eval_loss", "final_loss", "grad_norm"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=2e-4), (a, b)


@pytest.mark.long
def test_torchrun_starts_processes_that_train_as_one(tmp_path: Path, cache: Path) -> None:
    """As people start them, with sequences that both share."""
    train(tiny(), tmp_path / "one", cache_dir=cache)
    together = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["-m", "lln", "train", "mlm", "--scale", "tiny", "--attention", "lln_diag", "--context-parallel", "2"]
    asked += ["--out", str(tmp_path / "two"), *write_options(SMALL)]
    subprocess.run([*together, *asked], check=True, capture_output=True)
    for a, b in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        for name in {"loss", "eval_loss", "final_loss"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=2e-4), (a, b)


def test_a_loss_that_is_not_finite_stops_with_the_layer(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(NotFinite, match=r"not finite at step \d+: the weights \S+ are not|first part of the model"):
        train(tiny(optimisation__rate="1e30", optimisation__clip="0"), tmp_path / "run", cache_dir=cache)


@pytest.mark.parametrize(
    ("task", "name"),
    [("glue", "sst2"), ("glue", "qqp"), ("image", None), ("lra", "listops"), ("lra", "text"), ("lra", "retrieval"),
     ("lra", "pathfinder"), ("lra", "image")],
)  # fmt: skip
def test_every_task_runs(task: str, name: str | None, tmp_path: Path, cache: Path) -> None:
    small = {k: v for k, v in SMALL.items() if k.startswith(("optim", "log", "save", "eval", "record"))}
    small |= {"optimisation.steps": "4", "data.evaluation": "12", "data.train": "24"}
    result = train(change(recipe(task, "tiny", "lln_diag", name), small), tmp_path / "run", cache_dir=cache)
    assert 0.0 <= result["metrics"]["accuracy"] <= 1.0
    assert 0.0 < result["guess"]["accuracy"] <= 1.0


def test_fine_tuning_starts_from_a_trained_model(tmp_path: Path, cache: Path, whole: Path) -> None:
    small = {k: v for k, v in SMALL.items() if k not in ("data.length", "data.vocabulary")}
    small |= {"data.length": "32", "model.start": str(whole / "model"), "optimisation.steps": "4", "data.train": "24"}
    train(change(recipe("glue", "tiny", "lln_diag", "sst2"), small), tmp_path / "run", cache_dir=cache)
    assert (tmp_path / "run" / "model" / "tokenizer.json").read_text() == (
        whole / "model" / "tokenizer.json"
    ).read_text()
    with pytest.raises(ValueError, match="holds no saved model"):
        train(
            change(recipe("glue", "tiny"), small | {"model.start": str(tmp_path)}), tmp_path / "other", cache_dir=cache
        )


def test_mixed_precision_accumulation_and_checkpointing_are_settings(tmp_path: Path, cache: Path) -> None:
    plain = train(tiny(), tmp_path / "plain", cache_dir=cache)["metrics"]["loss"]
    again = train(tiny(checkpointing="yes"), tmp_path / "checkpointing", cache_dir=cache)["metrics"]["loss"]
    assert again == pytest.approx(plain, rel=1e-6)
    parts = train(tiny(optimisation__accumulation="2"), tmp_path / "parts", cache_dir=cache)["metrics"]["loss"]
    assert parts == pytest.approx(plain, rel=1e-5)
    norms = [[m["grad_norm"] for m in read_metrics(tmp_path / n) if "grad_norm" in m] for n in ("plain", "parts")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    narrow = train(tiny(precision="bfloat16"), tmp_path / "narrow", cache_dir=cache)["metrics"]["loss"]
    assert narrow == pytest.approx(plain, rel=2e-2)
    assert narrow != plain


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_attention_is_recorded_while_training(attention: str, tmp_path: Path, cache: Path) -> None:
    plain = train(tiny(attention), tmp_path / "plain", cache_dir=cache)["metrics"]
    found = train(tiny(attention, record_every="5"), tmp_path / "run", cache_dir=cache)["metrics"]
    assert found == plain  # watching changes nothing
    rows = [m for m in read_metrics(tmp_path / "run") if "heads" in m]
    assert [m["step"] for m in rows] == [1, 6, 11]
    for m in rows:
        assert len(m["heads"]) == 2  # one layer of two heads
        for head in m["heads"]:
            assert 0 < head["entropy"] <= head["max_entropy"]
            assert 0 <= head["spectral_gap"] <= 1
            assert head["temperature"] > 0
            assert (head["alpha"] is not None and head["alpha"] > 0) == (attention == "lln_diag")
        assert all(norm > 0 for norm in m["gradient_norms"].values())
        assert m["loss_scale"] is None
    means = [m for m in read_metrics(tmp_path / "run") if "attention/0/entropy" in m]
    first = [head["entropy"] for head in rows[0]["heads"]]
    assert means[0]["attention/0/entropy"] == pytest.approx(sum(first) / 2)
