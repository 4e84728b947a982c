"""A table holds the numbers of the run folders, says how far they spread and how they differ from the paper's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_runs import fail, finish, list_jobs, make_asked
from lln.lab.paper.experiments import EXPERIMENTS, Asked
from lln.lab.paper.jobs import configure
from lln.lab.paper.run_records import find_runs
from lln.lab.paper.run_tables import assemble_table, tell_row, write_table
from lln.lab.train.config import change


def table(name: str, what: Asked) -> dict[str, Any]:
    found = assemble_table(EXPERIMENTS[name], what, find_runs(what.runs), {})
    return json.loads(json.dumps(found, allow_nan=False))


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["attention"]: row for row in result["rows"]}


def show_table(result: dict[str, Any]) -> str:
    about = {"date": "2026-01-01", "commit": "abc", "command": "lln"}
    return write_table(result | {"provenance": about})


def test_the_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    what = make_asked(tmp_path, seeds=3)
    scores = {}
    for i, job in enumerate(list_jobs("table3", what)):
        scores[job.folder] = 0.5 + 0.03 * i
        finish(tmp_path / job.folder, job.config, scores[job.folder])
    result = table("table3", what)
    assert {run["folder"]: run["score"] for run in result["runs"]} == {f: 100 * s for f, s in scores.items()}
    for attention, row in rows(result).items():
        values = [100 * s for folder, s in scores.items() if f"-{attention}-" in folder]
        cell = row["cells"]["accuracy"]
        assert cell["n"] == 3
        assert cell["mean"] == pytest.approx(np.mean(values))
        assert cell["deviation"] == pytest.approx(np.std(values, ddof=1))
    assert rows(result)["softmax"]["paper"] == {"accuracy": 81.37}
    assert rows(result)["lln"]["paper"] == {}
    assert "| softmax | 56.0 ± 6.0 (3) | 81.37 |" in show_table(result)
    (said,) = result["differences"]
    assert (said["a"], said["b"], said["beyond"]) == ("softmax", "lln", False)
    assert "Within the noise:\n\n- accuracy: lln - softmax = +3.0 (noise 13.6)" in show_table(result)


def test_one_seed_has_no_spread_and_no_verdict(tmp_path: Path) -> None:
    what = make_asked(tmp_path)
    for job in list_jobs("table3", what):
        finish(tmp_path / job.folder, job.config, 0.75)
    result = table("table3", what)
    assert rows(result)["lln"]["cells"]["accuracy"]["deviation"] is None
    assert result["differences"][0]["beyond"] is None
    text = show_table(result)
    assert "| softmax | 75.0 (1) |" in text
    assert "One seed or pre-training, nothing to say:" in text


def test_a_difference_beyond_the_noise_is_named(tmp_path: Path) -> None:
    what = make_asked(tmp_path, seeds=2)
    for job in list_jobs("table3", what):
        score = {"softmax": 0.9, "lln": 0.6}[job.config.attention.name] + 0.001 * job.config.seed
        finish(tmp_path / job.folder, job.config, score)
    assert "Beyond the noise:\n\n- accuracy: lln - softmax = -30.0" in show_table(table("table3", what))


def test_part_of_a_table_is_a_table(tmp_path: Path) -> None:
    what = make_asked(tmp_path, tasks=("sst2", "qqp"), seeds=2)
    assert show_table(table("table1", what)).count("no run is finished yet") == 1
    for i, job in enumerate(list_jobs("table1", what)):
        finish(tmp_path / job.folder, job.config, 0.5)
        result = table("table1", what)
        assert len(result["runs"]) == i + 1
        assert show_table(result)
        assert tell_row(result, job.config.attention.name).startswith(job.config.attention.name)
    begun = list_jobs("table1", make_asked(tmp_path, tasks=("sst2",), attentions=("elu",)))[0]
    finish(tmp_path / begun.folder, begun.config, 0.5)
    (tmp_path / begun.folder / "result.json").unlink()
    assert f"{begun.folder} is not finished" in show_table(table("table1", what))


def test_fine_tunings_of_one_model_are_one_value(tmp_path: Path) -> None:
    """They share a pre-training, so they are not independent of each other."""
    what = make_asked(tmp_path, tasks=("sst2",), seeds=2, tunings=3, attentions=("softmax",))
    by_start: dict[str, list[float]] = {}
    for i, job in enumerate(list_jobs("table1", what)):
        score = 3.0 + i if job.after is None else 0.5 + 0.02 * i + 0.001 * i * i
        finish(tmp_path / job.folder, job.config, score)
        if job.after is not None:
            by_start.setdefault(job.after, []).append(100 * score)
    cells = rows(table("table1", what))["softmax"]["cells"]
    means = [np.mean(values) for values in by_start.values()]
    assert (cells["sst2"]["n"], cells["sst2"]["runs"], cells["sst2"]["unit"]) == (2, 6, "pre-trainings")
    assert cells["sst2"]["mean"] == pytest.approx(np.mean(means))
    assert cells["sst2"]["deviation"] == pytest.approx(np.std(means, ddof=1))
    assert (cells["MLM loss"]["n"], cells["MLM loss"]["mean"]) == (2, pytest.approx(5.0))
    # With one pre-training the fine-tunings are all there is, and the table says so.
    one = make_asked(tmp_path / "one", tasks=("sst2",), tunings=3, attentions=("softmax",))
    for i, job in enumerate(list_jobs("table1", one)):
        finish(one.runs / job.folder, job.config, 0.5 + 0.01 * i)
    result = table("table1", one)
    assert rows(result)["softmax"]["cells"]["sst2"]["n"] == 3
    assert "The spread of softmax (sst2) is over fine-tunings of one pre-trained model only." in show_table(result)


def test_one_pre_training_is_compared_with_nothing(tmp_path: Path) -> None:
    """However far its fine-tunings lie from another attention's."""
    what = make_asked(tmp_path, tasks=("sst2",), tunings=3, seeds=2, attentions=("softmax", "lln"))
    for i, job in enumerate(list_jobs("table1", what)):
        lln = job.config.attention.name == "lln"
        if lln and ("pre1" in job.folder or job.folder.endswith("lln-seed1")):
            continue
        score = 0.5 if lln else 0.9
        finish(tmp_path / job.folder, job.config, score + 0.001 * i)
    result = table("table1", what)
    (found,) = [d for d in result["differences"] if d["column"] == "sst2"]
    assert (found["noise"], found["beyond"]) == (None, None)
    assert abs(found["difference"]) > 30
    assert {run["how"]["precision"] for run in result["runs"]} == {"float32"}


def test_retrieval_is_marked_as_a_stand_in(tmp_path: Path) -> None:
    what = make_asked(tmp_path, tasks=("retrieval",), attentions=("lln_diag",))
    for job in list_jobs("table5", what):
        finish(tmp_path / job.folder, job.config, 0.5)
    assert "| retrieval † |" in show_table(table("table5", what))


def test_an_average_needs_every_task(tmp_path: Path) -> None:
    tasks = ("text", "listops", "retrieval", "pathfinder", "image")
    what = make_asked(tmp_path, tasks=tasks, attentions=("lln_diag",), seeds=2)
    scores: dict[int, list[float]] = {0: [], 1: []}
    for i, job in enumerate(list_jobs("table5", what)):
        if i == 9:
            assert table("table5", what)["rows"][0]["cells"]["average"]["n"] == 1  # the first seed is whole
        finish(tmp_path / job.folder, job.config, 0.3 + 0.02 * i)
        scores[job.config.seed].append(30 + 2.0 * i)
    result = table("table5", what)
    assert result["columns"] == [*tasks, "average"]
    cell = result["rows"][0]["cells"]["average"]
    means = [np.mean(v) for v in scores.values()]
    assert (cell["n"], cell["mean"]) == (2, pytest.approx(np.mean(means)))
    assert cell["deviation"] == pytest.approx(np.std(means, ddof=1))
    assert result["rows"][0]["paper"]["average"] == 57.86
    some = make_asked(tmp_path / "some", tasks=("text",), attentions=("lln_diag",))
    for job in list_jobs("table5", some):
        finish(some.runs / job.folder, job.config, 0.3)
    assert table("table5", some)["columns"] == ["text"]


def test_time_and_memory_stand_beside_table_4(tmp_path: Path) -> None:
    what = make_asked(tmp_path, tasks=("text",), attentions=("softmax",))
    (job,) = list_jobs("table5", what)
    finish(tmp_path / job.folder, job.config, 0.3)
    times = [{"seconds": 40.0, "bytes": 3_000_000}, {"seconds": 2.0, "bytes": 5_000_000}]
    (tmp_path / job.folder / "attempts.json").write_text(json.dumps(times))
    (tmp_path / job.folder / "environment.json").write_text("[{}, {}, {}]")  # one of three was killed
    result = table("table5", what)
    (run,) = result["runs"]
    assert (run["seconds"], run["bytes"], run["starts"], run["all_times_known"]) == (42.0, 5_000_000, 3, False)
    text = show_table(result)
    assert "| softmax | 42 | 21468 |" in text
    assert "| softmax | 5 | 17108 |" in text
    assert "> 42 s" in text
    (tmp_path / job.folder / "attempts.json").write_text(json.dumps([{"seconds": 40.0, "bytes": None}]))
    assert "MB of the GPU" not in show_table(table("table5", what))


def test_failed_runs_are_in_the_table(tmp_path: Path) -> None:
    what = make_asked(tmp_path, seeds=2)
    first, *rest = list_jobs("table3", what)
    fail(tmp_path / first.folder, first.config, "The loss is not finite at step 7.")
    finish(tmp_path / rest[0].folder, rest[0].config, 0.5)
    result = table("table3", what)
    assert result["failed"] == [{"folder": first.folder, "sentence": "The loss is not finite at step 7."}]
    assert "| softmax | failed |" in show_table(result)
    assert f"- {first.folder} failed: The loss is not finite at step 7." in show_table(result)
    finish(tmp_path / rest[1].folder, rest[1].config, 0.5)
    assert "| softmax | 50.0 (1), 1 failed |" in show_table(table("table3", what))


def test_what_differs_from_the_paper_is_said(tmp_path: Path) -> None:
    what = make_asked(tmp_path)
    for job in list_jobs("table3", what):
        finish(tmp_path / job.folder, job.config, 0.5, notes=["A part of it.", "Card of x: all\nof it"])
    text = show_table(table("table3", what))
    assert "| attention | accuracy † | paper |" in text
    assert "- accuracy: Data: embedded/digits, where the paper's recipe has microsoft/cats_vs_dogs." in text
    assert "- accuracy: Model: 2 layers, 64 wide, 2 heads; in the paper's recipe 12 layers, 128 wide, 8 heads." in text
    assert "- accuracy: A part of it." in text
    assert "\n\n> Card of x: all\n> of it\n" in text
    paper = make_asked(tmp_path / "paper", scale="paper")
    for job in list_jobs("table3", paper):
        finish(paper.runs / job.folder, job.config, 0.5, notes=["Card of x: complete"])
    text = show_table(table("table3", paper))
    assert "†" not in text
    assert "Nothing that is known of." in text


def test_runs_with_other_settings_do_not_mix(tmp_path: Path) -> None:
    what = make_asked(tmp_path)
    for job in list_jobs("table3", what):
        finish(tmp_path / job.folder, job.config, 0.5)
    other = change(configure("image", "tiny", "softmax", 9, {}), {"optimisation.steps": "77"})
    finish(tmp_path / "elsewhere", other, 0.9)
    result = table("table3", what)
    assert rows(result)["softmax"]["cells"]["accuracy"]["n"] == 1
    assert result["remarks"] == ["elsewhere is left out: optimisation.steps is 77 there and 300 here for the others."]
    # Where nobody asked for these settings, those that most runs have are taken.
    foreign = table("table3", dataclasses.replace(what, changes={"optimisation.steps": "5"}))
    assert rows(foreign)["softmax"]["cells"]["accuracy"]["mean"] == 50.0


def test_fixed_alpha_is_shown_to_those_who_ask(tmp_path: Path) -> None:
    for job in list_jobs("fig10", make_asked(tmp_path, attentions=("lln",))):
        finish(tmp_path / job.folder, job.config, 0.5)
    assert set(rows(table("table3", make_asked(tmp_path)))) == {"lln"}
    assert set(rows(table("table3", make_asked(tmp_path, attentions=("lln:alpha=4",))))) == {"lln", "lln:alpha=4"}


def test_mnli_counts_by_its_matched_part(tmp_path: Path) -> None:
    what = make_asked(tmp_path, scale="mini", tasks=("mnli",), attentions=("softmax",))
    job = list_jobs("table1", what)[1]
    finish(tmp_path / job.folder, job.config, 0.5)
    path = tmp_path / job.folder / "result.json"
    result = json.loads(path.read_text())
    parts = {"validation_matched_loss": 1.0, "validation_matched_accuracy": 0.7, "validation_mismatched_accuracy": 0.6}
    path.write_text(json.dumps(result | {"metrics": parts}))
    assert rows(table("table1", what))["softmax"]["cells"]["mnli"]["mean"] == pytest.approx(70.0)
