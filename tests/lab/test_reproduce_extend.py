"""A stored result is as good as the folders of its runs: more runs make of it what they would make of all folders."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers.command import run_command
from helpers.fake_runs import fail, finish, list_jobs, make_asked
from lln.lab.paper.experiments import EXPERIMENTS, Asked
from lln.lab.paper.jobs import Job
from lln.lab.paper.reproduction import Reproduction
from lln.lab.paper.run_records import restore_runs

RESULTS = Path(__file__).parents[2] / "results"
STORED = [path for path in sorted(RESULTS.glob("*/*/*.json")) if "runs" in json.loads(path.read_text())]
ATTENTIONS = {"fig1": ("softmax",), "fig9": ("lln",), "fig10": ("lln",), "lengths": ("softmax", "lln_diag")}
NAMES = ["table1", "table3", "table5", "fig1", "fig8", "fig9", "fig10", "lengths"]
TASKS = {"table1": ("sst2", "qqp"), "table5": ("text", "listops"), "fig9": ("image", "mlm")}


def want(name: str, runs: Path) -> Asked:
    """On a GPU, so that Figs. 8 and 10 have runs with a loss scale."""
    names = ATTENTIONS.get(name, ("softmax", "lln"))
    return make_asked(runs, attentions=names, tasks=TASKS.get(name, ()), seeds=2, tunings=2, device="cuda")


def write_run(runs: Path, job: Job) -> None:
    """A finished run with numbers of its own, and one that failed."""
    number = len(job.folder) + 0.37 * job.config.seed + 0.11 * len(job.config.attention.label)
    heads = [
        {"layer": f"l{i}", "temperature": 2.0 + i, "entropy": 3.0, "spectral_gap": 0.4, "alpha": number, "beta": 2.1}
        for i in range(2)
    ]
    lines = [{"step": s, "loss": number / s, "eval_loss": number, "loss_scale": 2.0**s, "heads": heads} for s in (1, 2)]
    if job.folder == "image-tiny-lln-seed1":
        fail(runs / job.folder, job.config, "The loss is not finite at step 7.")
        return
    finish(runs / job.folder, job.config, 1 / number, lines=lines)
    path = runs / job.folder / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"guess": {"accuracy": 0.25}, "step_seconds": number / 100}))


def assemble(name: str, what: Asked, folder: Path, stored: dict[str, Any] | None) -> dict[str, Any]:
    made = Reproduction(EXPERIMENTS[name], what, {}, folder, stored).assemble(folder)
    return json.loads(json.dumps(made, allow_nan=False))


@pytest.mark.parametrize("name", NAMES)
def test_a_result_and_new_runs_give_what_all_folders_give(tmp_path: Path, name: str) -> None:
    what = want(name, tmp_path)
    for job in list_jobs(name, what):
        write_run(tmp_path / "all", job)
        write_run(tmp_path / str(job.config.seed), job)
    whole = assemble(name, what, tmp_path / "all", None)
    assert len(whole["runs"]) > 1
    first = assemble(name, what, tmp_path / "0", None)
    assert first["rows"] != whole["rows"]
    assert assemble(name, what, tmp_path / "1", first) == whole
    assert assemble(name, what, tmp_path / "nowhere", whole) == whole
    assert assemble(name, what, tmp_path / "all", whole) == whole  # nothing twice


def test_a_result_of_another_scale_or_with_other_settings_does_not_mix(tmp_path: Path) -> None:
    what = want("table3", tmp_path)
    for job in list_jobs("table3", what):
        finish(tmp_path / job.folder, job.config, 0.5)
    stored = assemble("table3", what, tmp_path, None)
    assert assemble("table3", what, tmp_path / "x", stored | {"scale": "mini"})["runs"] == []
    longer = dataclasses.replace(what, changes={"optimisation.steps": "77"}, runs=tmp_path / "longer")
    for job in list_jobs("table3", longer):
        finish(longer.runs / job.folder, job.config, 0.9)
    result = assemble("table3", longer, longer.runs, stored)
    assert {run["score"] for run in result["runs"]} == {90.0}
    assert any("optimisation.steps is 300 there and 77 here" in text for text in result["remarks"])


def test_what_is_stored_is_not_run_again_unless_its_model_is_needed(tmp_path: Path) -> None:
    what = make_asked(tmp_path / "runs", tasks=("sst2",), attentions=("softmax",))
    for job in list_jobs("table1", what):
        finish(what.runs / job.folder, job.config, 0.5)
    work = Reproduction(EXPERIMENTS["table1"], what, {}, tmp_path)
    work.collect()
    what.runs.rename(tmp_path / "elsewhere")

    def plan(**changed: Any) -> list[str]:
        new = dataclasses.replace(what, **changed)
        return [job.folder for job in Reproduction(EXPERIMENTS["table1"], new, {}, tmp_path).plan(retry=False).jobs]

    assert plan() == []
    assert plan(seeds=2) == ["mlm-tiny-softmax-seed1", "glue-sst2-tiny-softmax-pre1-seed0"]
    assert plan(tunings=2) == ["mlm-tiny-softmax-seed0", "glue-sst2-tiny-softmax-pre0-seed1"]
    assert len(plan(changes={"optimisation.steps": "7"})) == 2


def test_the_command_extends_what_is_stored_and_reads_a_result_by_its_name(tmp_path: Path) -> None:
    what = make_asked(tmp_path / "runs")
    for job in list_jobs("table3", what):
        finish(what.runs / job.folder, job.config, 0.5)
    Reproduction(EXPERIMENTS["table3"], what, {}, tmp_path).collect()
    what.runs.rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")

    def reproduce(*words: str) -> Any:
        everything = ["reproduce", "table3", "--attentions", "softmax,lln", "--device", "cpu", *words]
        return run_command(*everything)

    dry = reproduce("--out", str(tmp_path), "--seeds", "2", "--dry-run")
    assert "4 runs of 2 attentions on cpu; 2 stored. To do: 2" in dry.stderr
    assert "image-tiny-softmax-seed0: stored\nimage-tiny-lln-seed0: stored\nimage-tiny-softmax-seed1: new" in dry.stdout
    before = (tmp_path / "table3.json").read_text()
    same = reproduce("--from", str(tmp_path / "table3.json"), "--out", str(tmp_path / "again"))
    assert same.exit_code == 0, same.output
    assert (tmp_path / "again" / "table3.json").read_text() == before
    other = run_command("reproduce", "table5", "--from", str(tmp_path / "table3.json"))
    assert other.exit_code == 2
    assert "holds another result than table5" in other.output


def list_changes(stored: dict[str, Any]) -> dict[str, str]:
    words = shlex.split(stored["provenance"]["command"])
    found = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--set")
    for name in ("lengths", "rates"):  # these say which runs there are, not how they are set
        found.pop(name, None)
    if stored.get("table") == "table5" and stored["scale"] == "mini":  # the recipe named this set itself
        found["lra.retrieval.data.name"] = "corpus/aan-like"
    return found


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_stored_result_can_be_extended(path: Path, tmp_path: Path) -> None:
    """Also those that were stored before configs and curves were: their tables come out as they are."""
    stored = json.loads(path.read_text())
    name, changes = path.stem, list_changes(stored)
    runs, left = restore_runs(stored, stored["scale"], changes)
    assert left == []
    held = [*stored["runs"], *stored.get("without_result", [])]  # these were stopped
    assert [(run.attention, run.column, run.seed, run.score) for run in runs] == [
        (run["attention"], run["column"], run["seed"], run["score"]) for run in held
    ]
    names = stored.get("attentions") or [row["attention"] for row in stored["rows"] if "attention" in row]
    names = names or [run["attention"] for run in stored["runs"] if ":alpha=" not in run["attention"]]
    what = make_asked(
        tmp_path,
        scale=stored["scale"],
        attentions=tuple(dict.fromkeys(names)),
        tasks=("image", "mlm"),
        changes=changes,
        rates=tuple(sorted({row["rate"] / 1e-3 for row in stored["rows"] if "rate" in row})),
    )
    result = assemble(name, what, tmp_path, stored)
    assert result["rows"] == stored["rows"]
    assert len(result["runs"]) == len(stored["runs"])
    for one, other in zip(result.get("differences", []), stored.get("differences", []), strict=True):
        assert one["noise"] == (other["noise"] and pytest.approx(other["noise"], rel=1e-9))
        assert one | {"noise": None} == other | {"noise": None}
    curves = [row for row in stored["rows"] if "step" in row]
    assert bool(curves) == any("were not stored, their means were" in text for text in result.get("missing", []))
