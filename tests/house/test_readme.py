"""What the README says is what was measured. That what it shows runs is tested with the documentation."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from lln.files import put_between

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def load_program(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # a program imports its neighbours
        return importlib.import_module(name)


def benchmark(name: str) -> tuple[Any, dict[str, Any]]:
    """The program and its stored result."""
    program = load_program(name)
    return program, json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["cpu_forward", "decoding"])
def test_a_table_of_times_is_the_stored_result(name: str) -> None:
    program, result = benchmark(name)
    assert put_between(README, program.MARKS, program.table(result)) == README


def test_the_table_of_the_gpu_is_the_stored_result() -> None:
    program = load_program("gpu")
    stored = program.table(ROOT / "benchmarks" / "results" / "2026-11-15-h200")
    assert put_between(README, program.MARKS, stored) == README


def test_the_cost_of_recording_is_the_stored_result_and_small_enough() -> None:
    program, result = benchmark("record")
    assert put_between(README, program.MARKS, program.sentence(result)) == README
    assert all(row["cost"] < 0.1 for row in result["rows"].values())
