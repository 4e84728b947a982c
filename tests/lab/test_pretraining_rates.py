"""Each attention at the best of a few learning rates, controls without a pre-training, and how many runs at once."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command import run_command
from helpers.fake_runs import finish, list_jobs, make_asked
from helpers.runs import SMALLEST, make_tiny
from lln.lab.core.errors import Refused
from lln.lab.paper.experiments import EXPERIMENTS, find_refusal
from lln.lab.paper.rates import BEST, list_known_rates, parse_rates
from lln.lab.paper.reproduction import Reproduction
from lln.lab.paper.run_jobs import MOST_AT_ONCE, cap_at_once
from lln.lab.paper.run_records import CONTROL, find_runs
from lln.lab.train.models import build
from lln.lab.train.run import train
from lln.lab.train.tasks import load

SHORT = [
    "optimisation.steps=4", "optimisation.batch=4", "optimisation.warmup=1", "log_every=1", "save_every=2",
    "evaluate_every=4", "data.evaluation=8", "data.train=16", "model.layers=1", "model.width=16", "model.heads=2",
    "model.inner=16", "mlm.data.length=48", "mlm.data.vocabulary=300", "mlm.record_every=0",
]  # fmt: skip


def plan(work: Reproduction) -> list[str]:
    return [job.folder for job in work.plan(retry=False).jobs]


def test_the_grid_comes_first_and_then_the_seeds_at_the_best_rate(tmp_path: Path) -> None:
    what = make_asked(tmp_path / "runs", attentions=("softmax", "lln"), seeds=3, rates=(0.5, 1.0, 2.0))
    work = Reproduction(EXPERIMENTS["pretraining"], what, {}, tmp_path)
    grid = plan(work)
    assert grid == [f"mlm-tiny-{a}-seed0-rate{r}" for a in ("softmax", "lln") for r in ("0.0015", "0.003", "0.006")]
    losses = {"softmax": (5.0, 4.0, 4.5), "lln": (5.0, 4.5, 4.2)}
    for job in list_jobs("pretraining", what):
        name = job.config.attention.label
        place = round(job.config.optimisation.rate / 0.003 * 2) // 2  # 0, 1 or 2
        finish(what.runs / job.folder, job.config, losses[name][place])
        if name == "softmax" and place == 1:  # a grid that is not finished says nothing
            assert list_known_rates(what, find_runs(what.runs)) == {}
    assert plan(work)[6:] == [f"mlm-tiny-{a}-rate{r}" for a, r in (
        ("softmax-seed1", "0.003"), ("lln-seed1", "0.006"), ("softmax-seed2", "0.003"), ("lln-seed2", "0.006")
    )]  # fmt: skip
    for job in work.plan(retry=False).jobs[6:]:
        finish(what.runs / job.folder, job.config, losses[job.config.attention.label][1] + 0.1 * job.config.seed)
    result = work.collect()
    assert result["columns"] == [f"MLM loss, rate {r}" for r in ("0.0015", "0.003", "0.006")] + [BEST]
    rows = {row["attention"]: row for row in result["rows"]}
    assert (rows["softmax"]["rate"], rows["lln"]["rate"]) == (0.003, 0.006)
    assert rows["softmax"]["cells"][BEST]["values"] == {"seed 0": 4.0, "seed 1": 4.1, "seed 2": 4.2}
    assert rows["lln"]["cells"][BEST]["n"] == 3
    assert rows["lln"]["cells"]["MLM loss, rate 0.003"]["n"] == 1
    assert [d["column"] for d in result["differences"]] == [BEST]
    assert any("At an edge of the grid, so that others may be better still: lln." in text for text in result["remarks"])
    text = (tmp_path / "pretraining.md").read_text()
    assert any(line.startswith("| lln ") and "5.000 (1)" in line and "(3)" in line for line in text.splitlines())
    # What is stored is known without its folders.
    what.runs.rename(tmp_path / "elsewhere")
    assert plan(work) == []
    assert plan(Reproduction(work.experiment, dataclasses.replace(what, seeds=4), {}, tmp_path)) == [
        "mlm-tiny-softmax-seed3-rate0.003", "mlm-tiny-lln-seed3-rate0.006"
    ]  # fmt: skip


def test_with_one_rate_all_seeds_are_planned_at_once(tmp_path: Path) -> None:
    what = make_asked(tmp_path / "runs", attentions=("softmax", "mala"), seeds=2, rates=(1.0,))
    assert plan(Reproduction(EXPERIMENTS["pretraining"], what, {}, tmp_path)) == [
        f"mlm-tiny-{run}-rate0.003" for run in ("softmax-seed0", "mala-seed0", "softmax-seed1")
    ]  # fmt: skip


def test_from_the_command_to_the_table(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLN_CACHE", os.fspath(cache))
    asked = [
        "pretraining",
        "--attentions",
        "softmax,mala",
        "--seeds",
        "2",
        "--set",
        "rates=1,4",
        "--out",
        tmp_path / "o",
    ]
    changes = [word for change in SHORT for word in ("--set", change)]
    done = run_command("reproduce", *asked, "--device", "cpu", *changes)
    assert done.exit_code == 0, done.output
    assert "an hour" in done.stderr  # throughput
    result = json.loads((tmp_path / "o" / "pretraining.json").read_text())
    cells = {row["attention"]: row["cells"][BEST]["n"] for row in result["rows"]}
    assert cells == {"softmax": 2, "mala": 1}  # one seed is enough for a peer
    again = run_command("reproduce", *asked, "--device", "cpu", *changes)
    assert "all 5 runs are there" in again.stderr


@pytest.mark.parametrize("text", ["0,1", "-1", "a", "inf"])
def test_wrong_rates_are_one_sentence(text: str) -> None:
    with pytest.raises(Refused, match="rates: they are factors of the recipe's learning rate"):
        parse_rates(text)


def test_every_arm_of_the_pretraining_can_be_run() -> None:
    names = EXPERIMENTS["pretraining"].attentions
    assert {"mala", "rala", "polaformer", "nalaformer", "sla"} <= set(names)
    assert [name for scale in ("tiny", "mini") for name in names if find_refusal("mlm", scale, name)] == []
    for kind in ("softmax", "block_diagonal", "lln", "lln_diag"):
        assert {kind, f"{kind}:value_convolution=5"} <= set(names)


# Controls


def test_a_control_stands_beside_every_fine_tuning(tmp_path: Path) -> None:
    what = make_asked(tmp_path / "runs", tasks=("sst2",), attentions=("softmax",), seeds=2, tunings=2, controls=True)
    jobs = list_jobs("table1", what)
    tuned = [job for job in jobs if job.config.task == "glue"]
    assert [job.folder for job in tuned if job.config.model.untrained] == [
        "glue-sst2-tiny-softmax-new0-seed0", "glue-sst2-tiny-softmax-new1-seed1"
    ]  # fmt: skip
    assert len(tuned) == 6
    scores = {True: 0.5, False: 0.8}
    for job in jobs:
        finish(what.runs / job.folder, job.config, scores[job.config.model.untrained] + 0.01 * job.config.seed)
    result = Reproduction(EXPERIMENTS["table1"], what, {}, tmp_path).collect()
    assert result["columns"] == ["MLM loss", "sst2", "sst2" + CONTROL]
    cells = result["rows"][0]["cells"]
    assert cells["sst2"]["unit"] == "pre-trainings"
    assert cells["sst2" + CONTROL]["values"] == {"seed 0": 50.0, "seed 1": 51.0}
    assert cells["sst2" + CONTROL]["unit"] == "seeds"
    assert result["remarks"] == EXPERIMENTS_REMARKS


EXPERIMENTS_REMARKS: list[str] = json.loads(
    (Path(__file__).parents[2] / "src/lln/data/published.json").read_text()
)["table1"].get("remarks", [])  # fmt: skip


def test_a_control_has_the_tokenizer_and_the_sizes_and_new_weights(tmp_path: Path, cache: Path) -> None:
    small = SMALLEST | {"optimisation.steps": "2", "log_every": "1", "save_every": "2", "evaluate_every": "2",
                        "record_every": "0"}  # fmt: skip
    train(make_tiny(small, "softmax"), tmp_path / "before", cache_dir=cache)
    given = {"model.start": os.fspath(tmp_path / "before" / "model"), "data.evaluation": "8", "data.length": "32"}
    given |= {name: small[name] for name in small if name.startswith(("model.", "optimisation."))}
    own: dict[str, Any] = {k.replace(".", "__"): v for k, v in given.items()}
    short = {"log_every": "1", "save_every": "2", "evaluate_every": "2", "record_every": "0"}
    tuned = make_tiny(short, "softmax", "glue", "sst2", **own)
    control = make_tiny(short, "softmax", "glue", "sst2", **own, model__untrained="yes")
    assert "untrained" not in tuned.to_dict()["model"]
    data = [load(config, cache_dir=cache) for config in (tuned, control)]
    assert data[0].identity == data[1].identity  # the tokenizer of the model that it names
    pretrained = train(tuned, tmp_path / "tuned", cache_dir=cache)
    new = train(control, tmp_path / "control", cache_dir=cache)
    assert new["parameters"] == pretrained["parameters"]
    torch.manual_seed(0)
    one, other = (build(config, d.sizes).state_dict() for config, d in zip((tuned, control), data, strict=True))
    name = next(n for n in one if n.endswith("query.weight"))
    assert float((one[name] - other[name]).abs().max()) > 0.05
    with pytest.raises(ValueError, match=r"model.untrained needs model.start"):
        make_tiny(short, "softmax", "glue", "sst2", model__untrained="yes")


# At once


def test_at_most_four_runs_are_side_by_side_on_one_gpu() -> None:
    said: list[str] = []
    assert cap_at_once(9, "cpu", said.append) == 9
    assert cap_at_once(4, "cuda", said.append) == 4
    assert said == []
    assert cap_at_once(9, "cuda", said.append) == MOST_AT_ONCE == 4
    assert said == ["4 runs at once and not 9: more would only wait for each other on one GPU."]
