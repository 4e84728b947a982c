"""Runs side by side are the runs one after the other; only their times differ."""

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fake_runs import list_jobs, make_asked
from helpers.forking import make_context
from helpers.runs import SMALLEST
from lln.lab.paper import run_jobs as side_by_side
from lln.lab.paper.jobs import Job, find_state
from lln.lab.paper.run_jobs import Hooks, run_jobs
from lln.lab.paper.run_records import find_runs

SMALL = SMALLEST | {
    "optimisation.steps": "6", "log_every": "2", "save_every": "6", "evaluate_every": "6", "record_every": "0",
    "glue.data.train": "50",
}  # fmt: skip


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need not import everything anew, as those of a user do: one test has those."""
    monkeypatch.setattr(side_by_side, "make_context", make_context)


def jobs(runs: Path) -> list[Job]:
    found = list_jobs("table1", make_asked(runs, attentions=("softmax", "lln"), tasks=("sst2",), changes=SMALL))
    assert [job.config.task for job in found] == ["mlm", "glue", "mlm", "glue"]
    return found


def read_all_metrics(runs: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in sorted(runs.glob("*/metrics.jsonl"))}


@pytest.mark.long
def test_runs_at_once_give_what_they_give_one_by_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # the order of sums depends on it
    said: list[Any] = []
    hooks = Hooks(
        step=lambda job, number, values: said.append((job.folder, number)),
        begin=lambda job: said.append(("begin", job.folder)), end=lambda job, now: said.append((now, job.folder)),
    )  # fmt: skip
    run_jobs(jobs(tmp_path / "one"), tmp_path / "one", device="cpu", cache_dir=cache)
    run_jobs(jobs(tmp_path / "two"), tmp_path / "two", at_once=2, device="cpu", cache_dir=cache, hooks=hooks)
    assert read_all_metrics(tmp_path / "one") == read_all_metrics(tmp_path / "two")
    assert len(read_all_metrics(tmp_path / "two")) == 4
    folders = [job.folder for job in jobs(tmp_path)]
    for folder in folders:
        assert said.index(("begin", folder)) < said.index((folder, 6)) < said.index(("finished", folder))
    assert said.index(("finished", folders[0])) < said.index(("begin", folders[1]))  # fine-tuning waits for its model
    for name, beside in (("one", 0), ("two", 1)):
        attempts = [json.loads(p.read_text())[0] for p in (tmp_path / name).glob("*/attempts.json")]
        assert [a["beside"] for a in attempts] == [beside] * 4
    run_jobs(
        jobs(tmp_path / "two"),
        tmp_path / "two",
        at_once=2,
        device="cpu",
        hooks=Hooks(begin=lambda job: pytest.fail(job.folder)),
    )


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, cache: Path) -> None:
    first, tuning, *others = jobs(tmp_path)
    wild = dataclasses.replace(first.config.optimisation, rate=1e30, clip=0.0)
    bad = dataclasses.replace(first, config=dataclasses.replace(first.config, optimisation=wild))
    ended: dict[str, str] = {}
    said: list[str] = []
    hooks = Hooks(say=said.append, end=lambda job, now: ended.update({job.folder: now}))
    run_jobs([bad, tuning, *others], tmp_path, at_once=3, device="cpu", cache_dir=cache, hooks=hooks)
    assert [ended[job.folder] for job in (bad, tuning, *others)] == ["failed", "left out", "finished", "finished"]
    assert any("failed: The loss is not finite" in text for text in said)


def die(*args: Any) -> str:
    os._exit(1)


@pytest.mark.usefixtures("forked")
def test_a_killed_process_is_said_and_nothing_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "run_here", die)
    with pytest.raises(OSError, match="a process that trained was killed"):
        run_jobs(jobs(tmp_path), tmp_path, at_once=2, device="cpu")
    assert {find_state(tmp_path / job.folder) for job in jobs(tmp_path)} == {"new"}


@pytest.mark.usefixtures("forked")
def test_an_interrupt_stops_the_others_and_the_same_call_goes_on(tmp_path: Path, cache: Path) -> None:
    """Ctrl-C reaches this process alone: those that train never hear it."""

    def lengthen(job: Job) -> Job:
        more = dataclasses.replace(job.config.optimisation, steps=100_000)
        return dataclasses.replace(job, config=dataclasses.replace(job.config, optimisation=more))

    endless = [lengthen(job) for job in jobs(tmp_path) if job.after is None]

    def stop(job: Job, number: int, values: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(endless, tmp_path, at_once=2, device="cpu", cache_dir=cache, hooks=Hooks(step=stop))
    assert not multiprocessing.active_children()
    assert all((tmp_path / job.folder / "attempts.json").exists() for job in endless)


def test_what_other_processes_write_is_not_read_as_a_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-10" / "config.json").write_text('{"half of')
    assert find_runs(tmp_path) == []
