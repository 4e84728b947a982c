"""`lln reproduce` for tables and figures of training runs, from the command to the files, with very short runs."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.command import Answer, run_command
from helpers.fake_runs import finish, list_jobs, make_asked
from helpers.mirror import write_card, write_set
from lln.lab.cli import reproduce as command
from lln.lab.core.errors import DataError
from lln.lab.paper.jobs import Job
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.tasks import load as load_data

SHORT = [
    "optimisation.steps=6", "optimisation.batch=4", "optimisation.warmup=1", "log_every=1", "save_every=2",
    "evaluate_every=6", "data.evaluation=12", "data.train=24", "model.layers=1", "model.width=16", "model.heads=2",
    "model.inner=16", "image.record_every=2", "mlm.data.length=48", "glue.data.length=32", "mlm.data.vocabulary=300",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path_factory.getbasetemp() / "reproduce-cache"
    monkeypatch.setenv("LLN_CACHE", os.fspath(base))
    monkeypatch.delenv("LLN_DATA_ROOT", raising=False)


def reproduce(*arguments: str | Path, short: bool = True) -> Answer:
    changes = [word for change in SHORT for word in ("--set", change)] if short else []
    return run_command("reproduce", *arguments, "--device", "cpu", *changes)


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_table_1_from_the_command_to_the_table_and_nothing_twice(tmp_path: Path) -> None:
    first = reproduce(
        "table1", "--attentions", "softmax,elu_diag", "--tasks", "sst2", "--tunings", "2", "--out", tmp_path
    )
    assert first.exit_code == 0, first.output
    assert "table1, scale tiny: 8 runs of 2 attentions on cpu. To do: 8, very roughly" in first.stderr
    result = load(tmp_path / "table1.json")
    assert result["columns"] == ["MLM loss", "sst2", "sst2, untrained"]
    assert {"command", "commit", "device", "torch", "seeds"} <= result["provenance"].keys()
    for row in result["rows"]:
        stored = [
            load(tmp_path / "runs" / f"glue-sst2-tiny-{row['attention']}-pre0-seed{seed}" / "result.json")
            for seed in (0, 1)
        ]
        accuracies = [100 * one["metrics"]["accuracy"] for one in stored]
        assert list(row["cells"]["sst2"]["values"].values()) == accuracies
        before = load(tmp_path / "runs" / f"mlm-tiny-{row['attention']}-seed0" / "result.json")
        assert row["cells"]["MLM loss"]["mean"] == before["metrics"]["loss"]
    assert all(run["seconds"] > 0 and run["provenance"]["torch"] for run in result["runs"])
    assert first.stdout.startswith("# Table 1")
    assert (tmp_path / "table1.md").read_text() in first.stdout
    assert "Made from this Python's help texts" in first.stdout  # the runs' own notes
    before_again = files(tmp_path / "runs")
    again = reproduce(
        "table1", "--attentions", "softmax,elu_diag", "--tasks", "sst2", "--tunings", "2", "--out", tmp_path
    )
    assert again.exit_code == 0
    assert "all 8 runs are there (8 finished)" in again.stderr
    assert files(tmp_path / "runs") == before_again
    # More seeds are added to what is there; other attentions stay in the table.
    more = reproduce(
        "table1", "--attentions", "softmax", "--tasks", "sst2", "--tunings", "3", "--out", tmp_path, "--json"
    )
    assert more.exit_code == 0, more.output
    assert {k: v for k, v in files(tmp_path / "runs").items() if k in before_again} == before_again
    rows = {row["attention"]: row["cells"]["sst2"]["n"] for row in json.loads(more.stdout)["rows"]}
    assert rows == {"softmax": 3, "elu_diag": 2}


def test_a_stopped_command_goes_on_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "image-tiny-softmax-seed0"
    whole = reproduce("table3", "--attentions", "softmax", "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    step = command.RunBars.step

    def stop(self: command.RunBars, job: Job, number: int, values: dict[str, float]) -> None:
        if number == 5:
            raise KeyboardInterrupt
        step(self, job, number, values)

    with monkeypatch.context() as patch:
        patch.setattr(command.RunBars, "step", stop)
        stopped = reproduce("table3", "--attentions", "softmax", "--out", tmp_path / "parts")
    assert stopped.exit_code == 130
    assert "Stopped. The same command goes on where it was" in stopped.stderr
    assert load(tmp_path / "parts" / "table3.json")["unfinished"] == [name]
    dry = reproduce("table3", "--attentions", "softmax", "--out", tmp_path / "parts", "--dry-run")
    assert "1 begun" in dry.stderr
    assert dry.stdout == f"{name}: begun\n"
    resumed = reproduce("table3", "--attentions", "softmax", "--out", tmp_path / "parts")
    assert resumed.exit_code == 0, resumed.output
    assert "Going on from step 4" in resumed.stderr
    texts = [(tmp_path / p / "runs" / name / "metrics.jsonl").read_text() for p in ("whole", "parts")]
    assert texts[0] == texts[1]
    assert load(tmp_path / "parts" / "table3.json")["runs"][0]["starts"] == 2


def test_a_run_that_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    done = reproduce("table3", "--attentions", "softmax,lln", "--out", tmp_path, "--set", "optimisation.rate=1e30")
    assert done.exit_code == 1
    result = load(tmp_path / "table3.json")
    assert [failed["folder"] for failed in result["failed"]] == ["image-tiny-lln-seed0", "image-tiny-softmax-seed0"]
    assert all("not finite at step" in failed["sentence"] for failed in result["failed"])
    assert "| softmax | failed | 81.37 |" in done.stdout
    again = reproduce("table3", "--attentions", "softmax,lln", "--out", tmp_path, "--set", "optimisation.rate=1e30")
    assert "all 2 runs are there (2 failed)" in again.stderr


def test_running_and_drawing_are_separable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # as on a machine without altair
        patch.setattr("lln.lab.cli.shared.find_missing", lambda extra: ["altair"] if extra == "report" else [])
        refused = reproduce("fig9", "--out", tmp_path / "gpu")
        assert refused.exit_code == 2
        assert "charts need altair" in refused.stderr
        ran = reproduce("fig9", "--out", tmp_path / "gpu", "--no-charts")
        assert ran.exit_code == 0, ran.output
    assert {p.name for p in (tmp_path / "gpu").iterdir()} == {"fig9.json", "fig9.csv", "runs"}
    before = files(tmp_path / "gpu")
    drawn = reproduce("fig9", "--from", tmp_path / "gpu", "--out", tmp_path / "page", short=False)
    assert drawn.exit_code == 0, drawn.output
    assert files(tmp_path / "gpu") == before
    assert {p.name for p in (tmp_path / "page").iterdir()} == {
        "fig9.json", "fig9.csv", "fig9-alpha-lln.svg", "fig9-beta-lln.svg"
    }  # fmt: skip
    result = load(tmp_path / "page" / "fig9.json")
    assert result["verdicts"][0]["sentence"] in drawn.stdout
    recorded = [
        json.loads(line)
        for line in (tmp_path / "gpu" / "runs" / "image-tiny-lln-seed0" / "metrics.jsonl").read_text().splitlines()
    ]
    heads = next(line for line in recorded if "heads" in line)["heads"]
    row = next(row for row in result["rows"] if row["chart"] == "alpha-lln" and row["step"] == 1)
    assert row["value"] == pytest.approx(sum(head["alpha"] for head in heads) / len(heads))
    with (tmp_path / "page" / "fig9.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(result["rows"])
    assert float(table[0]["value"]) == result["rows"][0]["value"]
    # The stored result alone is enough to draw from.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "fig9.json").write_text((tmp_path / "page" / "fig9.json").read_text())
    again = reproduce("fig9", "--from", alone, "--out", tmp_path / "again", short=False)
    assert again.exit_code == 0, again.output
    svgs = [(tmp_path / p / "fig9-alpha-lln.svg").read_text() for p in ("page", "again")]
    assert svgs[0] == svgs[1]


def test_charts_of_every_figure_are_written(tmp_path: Path) -> None:
    what = make_asked(tmp_path / "runs", attentions=("softmax", "lln", "lln_diag"), device="cuda")
    heads = [{"layer": f"l{i}", "head": 0, "temperature": 2.0, "entropy": 3.0, "spectral_gap": 0.4} for i in range(3)]
    for name in ("fig8", "fig10"):
        for job in list_jobs(name, what):
            half = job.config.precision == "float16"
            lines = [
                {
                    "step": s,
                    "loss": 4.0 / s,
                    "eval_loss": 4.0 / s,
                    "heads": heads,
                    "loss_scale": 2.0**s if half else None,
                }
                for s in (1, 2, 3)
            ]
            finish(tmp_path / "runs" / job.folder, job.config, 0.5, lines=lines)
    for name, charts in (("fig1", 3), ("fig8", 3), ("fig10", 2)):
        done = reproduce(name, "--from", tmp_path, "--out", tmp_path / name, short=False)
        assert done.exit_code == 0, done.output
        assert len(list((tmp_path / name).glob(f"{name}-*.svg"))) == charts
        assert load(tmp_path / name / f"{name}.json")["provenance"]["seeds"] == [0]


def test_attentions_that_models_cannot_run_are_said_to_be_missing(tmp_path: Path) -> None:
    plan = reproduce(
        "table1",
        "--scale",
        "paper",
        "--dry-run",
        "--out",
        tmp_path,
        "--data-root",
        mirror(tmp_path / "hub"),
        short=False,
    )
    assert plan.exit_code == 0, plan.output
    assert "Left out" not in plan.stderr
    assert "mlm-paper-tnn-seed0: new" in plan.stdout
    assert "mlm-paper-block_diagonal-seed0: new" in plan.stdout
    assert not (tmp_path / "runs").exists()


def mirror(root: Path, first: str = "train") -> Path:
    """Cards of the sets that table 1 asks for, without their data."""

    def files(*splits: str) -> dict[str, str]:
        return {split: f"{split}-*" for split in splits}

    write_card(root / "Salesforce" / "wikitext", {"wikitext-103-v1": files(first, "validation")})
    names = ("mnli", "qnli", "qqp", "sst2")
    write_card(root / "nyu-mll" / "glue", {name: files("train", "validation") for name in names})
    return root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table3", "--attentions", "quantum"], "quantum is no mechanism of lln.mechanisms()"),
        (["table3", "--attentions", ","], "there is none to run"),
        (["table3", "--attentions", "lln:alpha"], "options look like lln:matching=entropy"),
        (["table3", "--tasks", "sst2"], "--tasks goes with table1, table5, fig9, matching, variants"),
        (["table1", "--tasks", "mnli"], "--tasks must be among sst2, qqp (at scale tiny); got 'mnli'"),
        (["table5", "--tasks", "chess"], "--tasks must be among text, listops"),
        (["table3", "--set", "optimisation.speed=1"], "there is no such option"),
        (["table3", "--set", "optimisation.steps=many"], "must be a whole number"),
        (["table3", "--set", "seed=1"], "seeds counted with --seeds"),
        (["table3", "--set", "steps"], "must be NAME=VALUE"),
        (["table3", "--quick"], "--scale says how long they are"),
        (["fig2", "--attentions", "lln"], "it goes with table1, table3"),
        (["fig8", "--from", "nowhere"], "nowhere is not a folder"),
        (["fig8", "--from", "."], "there are no runs in ., and no fig8.json"),
        (["fig8", "--from", ".", "--at-once", "2"], "has no effect with --from"),
        (["table3", "--scale", "mini", "--data-root", "."], "microsoft/cats_vs_dogs"),
        (["table3", "--device", "abacus"], "torch cannot use 'abacus'"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_command("reproduce", *arguments, columns=250)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_what_is_planned_says_how_many_run_at_once(tmp_path: Path) -> None:
    arguments = "table3", "--attentions", "softmax", "--out", tmp_path / "parts", "--dry-run"
    assert "one by one" not in reproduce(*arguments).stderr
    assert "one by one, and less with 3 at once" in reproduce(*arguments, "--at-once", "3").stderr


def test_a_set_without_training_data_is_refused_before_anything_runs(tmp_path: Path) -> None:
    root = mirror(tmp_path / "hub", first="test")
    done = reproduce("fig8", "--scale", "mini", "--data-root", root, "--out", tmp_path / "out", short=False)
    assert done.exit_code == 2
    assert "wikitext-103-v1 has no split 'train' here (it has test, validation)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_mnli_is_scored_on_the_parts_that_a_mirror_has(tmp_path: Path) -> None:
    texts = [f"{word} sentence number {i}" for i, word in enumerate(("one", "another", "a third"))]
    content = {"premise": texts, "hypothesis": texts[::-1], "label": [0, 1, 2]}
    config = change(recipe("glue", "mini", "softmax", "mnli"), {"data.vocabulary": "300", "data.length": "32"})
    for parts in (["validation_matched"], ["validation_matched", "validation_mismatched"]):
        root = tmp_path / str(len(parts))
        write_set(root, "nyu-mll/glue", "mnli", dict.fromkeys(["train", *parts], content))
        assert list(load_data(config, root).evaluations) == parts
    write_set(tmp_path / "none", "nyu-mll/glue", "mnli", {"train": content})
    with pytest.raises(DataError, match="validation_matched"):
        load_data(config, tmp_path / "none")
