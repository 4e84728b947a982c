"""Two processes with FSDP train as one process does, hold half of the weights each, and go on from checkpoints."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.runs import SMALLEST, read_metrics
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.run import train

SMALL = SMALLEST | {
    "model.layers": "2", "optimisation.steps": "6", "log_every": "1", "save_every": "2", "evaluate_every": "3",
    "record_every": "2", "attention.options.block_size": "8", "attention.options.statistics": "running",
}  # fmt: skip
PROGRAM = """
import json, os, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from lln.lab.recipes import recipe
from lln.lab.train import loop
from lln.lab.train.config import change
from lln.lab.train.run import train

make = loop.make_optimizer
def make_and_tell(model, optimisation):
    made = make(model, optimisation)
    weights = [p for group in made.param_groups for p in group["params"]]
    held, all = sum(p.to_local().numel() for p in weights), sum(p.numel() for p in weights)
    Path(sys.argv[4] + os.environ["RANK"]).write_text(f"{held} {all}")
    return made
loop.make_optimizer = make_and_tell
train(change(recipe("mlm", "tiny"), json.loads(sys.argv[1])), Path(sys.argv[2]), cache_dir=sys.argv[3])
"""


def train_together(folder: Path, cache: Path, changes: dict[str, str]) -> None:
    script, shares = folder.parent / "program.py", folder.parent / "share"
    script.write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(20000 + (os.getpid() + 10_000) % 20000)]
    arguments = [str(script), json.dumps(changes), str(folder), str(cache), str(shares)]
    subprocess.run([*command, *arguments], check=True, capture_output=True)


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


def test_sharded_processes_train_as_one_and_go_on(tmp_path: Path) -> None:
    cache, one, two = tmp_path / "cache", tmp_path / "one", tmp_path / "two"
    train(change(recipe("mlm", "tiny"), SMALL), one, cache_dir=cache)
    train_together(two, cache, SMALL | {"fsdp": "yes"})
    plain = [[m for m in read_metrics(folder) if "heads" not in m] for folder in (one, two)]
    assert_nearly(plain[0], plain[1])
    # The queries of a step differ between one process and two: each looks at the first of its own batch.
    norms = [[m["gradient_norms"] for m in read_metrics(folder) if "heads" in m] for folder in (one, two)]
    assert_nearly(norms[0], norms[1])
    for process in (0, 1):
        held, whole = map(int, (tmp_path / f"share{process}").read_text().split())
        assert 0.45 * whole < held < 0.55 * whole
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[1][name].sub(value).abs().max() < 2e-4 for name, value in weights[0].items())

    before = read_metrics(two)
    (two / "result.json").unlink()
    shutil.rmtree(two / "checkpoint-6")
    train_together(two, cache, SMALL | {"fsdp": "yes"})
    assert read_metrics(two) == before
    assert len(json.loads((two / "environment.json").read_text())) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, "fsdp needs several processes: torchrun --nproc-per-node 2"), ({"graph": "yes"}, "fsdp needs several")],
)
def test_one_process_cannot_be_sharded(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(change(recipe("mlm", "tiny"), SMALL | {"fsdp": "yes"} | changes), tmp_path / "run")
