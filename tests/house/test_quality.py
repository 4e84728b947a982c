"""What benchmarks/conversion_quality.py says of its results, and in which order it measures."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = "Wikipedia", "Python's documentation"
MADE = {"device": "card", "torch": "2", "transformers": "5", "date": "2026-01-01", "commit": "abc"}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def row(value: float, chosen: float) -> dict[str, float]:
    return dict.fromkeys(TEXTS, value) | {f"chosen, {text}": chosen for text in TEXTS}


def test_rate_is_chosen_on_other_passages_and_a_gain_is_told_beside_the_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = load("quality_tables", monkeypatch)
    rows = {
        "seeds/distilled/64/0/0.01": row(0.9, 0.8),  # would be better where it is measured
        "seeds/distilled/64/0/0.03": row(0.88, 0.85),
        "seeds/distilled/64/1/0.03": row(0.86, 0.85),
        "seeds/blocks_distilled/64/0/0.01": row(0.80, 0.7),
        "seeds/blocks_distilled/64/0/0.03": row(0.79, 0.6),
        "seeds/blocks_distilled/64/1/0.01": row(0.84, 0.7),
    }
    part = {"part": "seeds", "how": {"rates": [0.01, 0.03], "length": 512, "distill": 8}, "provenance": MADE}
    text = "\n".join(tables.seeds(part | {"rows": rows}))
    assert "| 0.870 (0.860 to 0.880) |" in text
    assert "| 0.820 (0.800 to 0.840) |" in text
    assert "+0.050 from distilled blocks on Wikipedia, more than the spread of seeds (0.040), and misses 0.985" in text
    rows["seeds/blocks_distilled/64/2/0.01"] = row(0.88, 0.7)
    assert "no more than the spread of seeds (0.080)" in "\n".join(tables.seeds(part | {"rows": rows}))


def test_speed_is_told_only_where_quality_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = load("quality_tables", monkeypatch)
    times = {name: {"median": ms} for name, ms in (("softmax", 4.0), ("distilled", 1.0), ("hedgehog", 2.0))}
    rows = {"speed/1024/all": {"attention": times, "model": times, "batch": 2}}
    rows["quality/distilled/1024"] = rows["quality/distilled/2048"] = {"spearman": 0.9}
    (found,) = tables.gather_speed({"rows": rows})
    assert (found["kind"], found["length"], found["attention"], found["quality"]) == ("distilled", 1024, 4.0, 0.9)


def test_a_part_whose_turn_is_over_comes_last_and_kinds_wait_for_what_they_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quality = load("conversion_quality", monkeypatch)
    given = ["x", "--parts", "seeds,long", "--turns", "seeds=0", "--out", str(tmp_path)]
    with mock.patch.object(sys, "argv", given):
        args = quality.parse()
        store = quality.Store(args)
    parts = [job.part for job in quality.plan(args, store) if job.rank == 0]
    assert parts == sorted(parts, key=("long", "seeds").index)
    jobs = quality.plan(args, store)
    assert not [job for job in jobs if job.name == "fold" and job.given[0] == "distilled"]
    assert not [job for job in jobs if job.name == "seeds" and job.given[2] != 0]
    store.keep(quality.Job("long", "adapt", ("distilled",)), {"spearman": 0.9})
    assert [job for job in quality.plan(args, store) if job.name == "fold" and job.given[0] == "distilled"]
    with mock.patch.object(sys, "argv", given):  # and what is stored is found again
        assert quality.Store(quality.parse()).parts["long"]["rows"]
    with mock.patch.object(sys, "argv", [*given, "--epochs", "9"]):  # but not if it was measured otherwise
        assert not quality.Store(quality.parse()).parts["long"]["rows"]
    assert json.loads((tmp_path / "long.json").read_text())["rows"] == {"adapt/distilled": {"spearman": 0.9}}


def test_what_is_timed_runs_alone_and_a_job_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quality = load("conversion_quality", monkeypatch)
    under_way: list[Any] = []
    alone: list[tuple[bool, int]] = []

    class Slow(quality.Future):  # type: ignore[name-defined]
        pass

    def begin(job: Any) -> Any:
        one = Slow()
        under_way.append((one, job))
        alone.extend([(job.name in quality.QUIET, len(under_way))])
        return one

    def wait(running: Any, **how: Any) -> tuple[set[Any], set[Any]]:
        one, job = under_way.pop(0)
        if job.given[0] == "hedgehog":
            one.set_exception(ValueError("no"))
        else:
            one.set_result({"spearman": 0.9})
        return {one}, set()

    given = ["x", "--parts", "speed", "--lengths", "512,1024", "--at-once", "3", "--out", str(tmp_path)]
    with mock.patch.object(sys, "argv", given), mock.patch.object(quality, "wait", wait):
        args = quality.parse()
        store = quality.Store(args)
        assert quality.work_off(args, store, argparse.Namespace(begin=begin))
    assert {count for quiet, count in alone if quiet} == {1}
    assert max(count for _, count in alone) == 3
    missing = {job.label for job in quality.plan(args, store) if store.find(job) is None}
    assert missing == {"quality/hedgehog/512", "quality/hedgehog/1024"}
