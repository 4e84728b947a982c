"""What benchmarks/counters.py reads of the table of hardware counters."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("counters")
    sys.modules.pop("counters")


def write_table(counters: Any, unit: str, *kernels: tuple[str, str, str]) -> str:
    """As `ncu --csv --page raw` writes it: (name, duration, percent and the rest) of each kernel."""
    names = ["ID", "Kernel Name", *counters.METRICS.values()]
    units = ["", "", unit, *["%"] * (len(names) - 3)]
    rows = [[str(i), name, time, *[rest] * (len(names) - 3)] for i, (name, time, rest) in enumerate(kernels)]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in (names, units, *rows))


def test_units_and_thousands_are_read(counters: Any) -> None:
    text = "==PROF== Connected\n" + write_table(
        counters, "nsecond", ("fold_kernel", "53,632", "12.25"), ("merge", "8,608", "4")
    )
    fold, merge = counters.read_table(text, "LLN")
    assert (fold["call"], fold["kernel"], fold["microseconds"], fold["memory_percent"]) == (
        "LLN",
        "fold",
        53.632,
        12.25,
    )
    assert (merge["kernel"], merge["microseconds"], merge["registers"]) == ("merge", 8.608, 4)
    assert counters.read_table(write_table(counters, "us", ("fold", "1.5", "0")), "LLN")[0]["microseconds"] == 1.5
    assert "| LLN | fold | 53.632 | 12.25 |" in counters.table({"kernels": [fold]})


def test_what_is_no_table_is_told(counters: Any) -> None:
    with pytest.raises(RuntimeError, match=r"wrote no table.*permission"):
        counters.read_table("==ERROR== no permission to read counters", "LLN")


def test_a_missing_tool_and_a_wrong_shape_are_refused(
    counters: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, said in (
        (["--ncu", "no-such-ncu"], "there is no program 'no-such-ncu'"),
        (["--shape", "16x12"], "as in"),
    ):
        monkeypatch.setattr(sys, "argv", ["counters.py", *given])
        with pytest.raises(SystemExit):
            counters.main()
        assert said in capsys.readouterr().err
