"""`lln reproduce table2 | table4`: a step of the models that the tables name, beside the paper's numbers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command import run_command
from lln.lab.core.timing import time_calls
from lln.lab.paper import costs
from lln.lab.paper.costs import TABLES, Cell, Setting, measure_step, measure_steps, parse_setting, write_costs
from lln.lab.train.models import build

CPU = torch.device("cpu")
PLAIN = Setting()


def shrink(cell: Cell) -> Cell:
    model = dataclasses.replace(cell.config.model, layers=1, width=16, heads=2, inner=16)
    config = dataclasses.replace(cell.config, model=model, data=dataclasses.replace(cell.config.data, length=64))
    sizes = dataclasses.replace(cell.sizes, vocabulary=40)
    return dataclasses.replace(cell, config=config, sizes=sizes, batch=2, length=64)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_step_of_a_real_model(name: str) -> None:
    for cell in TABLES[name].cells("tiny", PLAIN):
        model = build(shrink(cell).config, shrink(cell).sizes)
        runs = cell.implementation or model.config._attn_implementation
        usual = "eager" if name == "table2" else "sdpa"  # the paper's Table 2 forms the matrix
        assert runs == {"softmax": usual, "torch": "sdpa"}.get(cell.attention, cell.attention)
    for attention in ("softmax", "lln_diag"):
        cell = next(c for c in TABLES[name].cells("tiny", PLAIN) if c.attention == attention)
        found = measure_step(shrink(cell), CPU, 1, PLAIN)
        assert found["ms"]["median"] > 0
        assert found["bytes"] > 0


def test_the_paper_scale_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(c for c in TABLES["table2"].cells("paper", PLAIN) if c.column == "512")
    assert (cell.config.model.layers, cell.config.model.width, cell.batch) == (12, 768, 1)
    assert {c.column for c in TABLES["table2"].cells("paper", PLAIN)} == {
        "512",
        "1024",
        "2048",
        "4096",
        "8192",
        "16384",
    }
    lengths = {c.column: (c.length, c.batch) for c in TABLES["table4"].cells("paper", PLAIN)}
    assert lengths == {
        "text": (4000, 32), "listops": (2000, 32), "retrieval": (4000, 16), "pathfinder": (1024, 128),
        "image": (1024, 256),
    }  # fmt: skip


def test_out_of_memory_and_refusals_are_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cell: Cell, device: torch.device, repeats: int, setting: Setting) -> dict[str, Any]:
        if cell.attention == "softmax":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if cell.attention == "reformer":
            raise ValueError("reformer cannot")
        return {"ms": {"median": 2.0}, "bytes": 3 * 2**20}

    monkeypatch.setattr(costs, "measure_step", fail)
    stored: list[int] = []
    table = TABLES["table4"]
    result = measure_steps(
        table, table.cells("tiny", PLAIN), "tiny", PLAIN, device=CPU, repeats=1, seed=0, progress=lambda text: None,
        store=lambda found: stored.append(len(found["rows"])),
    )  # fmt: skip
    assert stored == list(range(1, 26))
    text = write_costs(table, result)
    assert "| softmax | OOM | OOM | OOM | OOM | OOM |" in text
    assert "| reformer | no | no | no | no | no |" in text
    assert "| lln_diag | 2 | 2 | 2 | 2 | 2 |" in text
    assert "| lln_diag | 1641 | 821 | 1586 | 1639 | 3276 |" in text  # the paper's


def test_the_command_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [
        shrink(c)
        for c in TABLES["table2"].cells("tiny", PLAIN)
        if c.column == "256" and c.attention in ("softmax", "lln")
    ]
    monkeypatch.setitem(TABLES, "table2", dataclasses.replace(TABLES["table2"], cells=lambda scale, setting: few))
    done = run_command("reproduce", "table2", "--quick", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "table2.json").read_text())
    assert [row["attention"] for row in result["rows"]] == ["softmax", "lln"]
    assert all(row["note"] is None for row in result["rows"])
    assert "| nystromformer | 1.8 | 1.9 | 2.6 | 4.7 | 8.8 | 16.7 |" in (tmp_path / "table2.md").read_text()
    again = tmp_path / "again"
    done = run_command("reproduce", "table2", "--from", tmp_path, "--out", again)
    assert done.exit_code == 0, done.output
    for name in ("table2.json", "table2.md", "table2-time.svg", "table2-memory.svg"):
        assert (again / name).read_text() == (tmp_path / name).read_text()
    assert "lln" in (again / "table2-time.svg").read_text()
    done = run_command("reproduce", "table2", "--from", tmp_path, "--no-charts", "--out", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["table2.json", "table2.md"]


def test_steps_are_timed_together_where_the_host_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: enough of them for half a second, at most eight, at least one."""
    gpu, calls = torch.device("cuda"), []

    def run_timed(ms: float) -> int:
        timing = time_calls({"step": lambda: None}, repeats=1, device=torch.device("cpu"))["step"]
        stand_in = {"step": dataclasses.replace(timing, median=ms)}
        with monkeypatch.context() as patch:
            patch.setattr(costs, "time_calls", lambda works, **how: calls.append(how) or stand_in)
            return costs.count_together(lambda: None, gpu)

    assert [run_timed(ms) for ms in (1.0, 60.0, 80.0, 200.0, 400.0, 2000.0)] == [8, 8, 6, 2, 1, 1]
    assert all(how["device"] == gpu for how in calls)
    assert costs.count_together(lambda: None, torch.device("cpu")) == 1


def test_charts_leave_out_what_did_not_fit() -> None:
    from lln.lab.paper.result_charts import draw_costs

    step = {"median": 2.0, "low": 1.0, "high": 3.0}
    rows = [
        {"attention": "torch", "length": 512, "ms": step, "bytes": 2**20},
        {"attention": "softmax", "length": 512, "ms": None, "bytes": None},
    ]
    assert set(draw_costs({"table": "table2", "rows": rows})) == {"-time", "-memory"}
    assert "softmax" not in draw_costs({"table": "table2", "rows": rows})["-time"]
    assert draw_costs({"table": "table2", "rows": rows[1:]}) == {}
    assert draw_costs({"table": "table4", "rows": rows}) == {}


def test_table_2_at_other_lengths_batches_and_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = parse_setting(["lengths=64,256", "tokens=128", "compile=yes", "precision=bfloat16"])
    cells = TABLES["table2"].cells("tiny", setting)
    assert {(c.length, c.batch) for c in cells} == {(64, 2), (256, 1)}
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(type(model).__name__) or model)
    mixed = set[torch.dtype]()
    cell = next(c for c in cells if c.attention == "lln" and c.length == 64)
    monkeypatch.setattr(torch.nn.functional, "linear", watch_linear(torch.nn.functional.linear, mixed))
    measure_step(dataclasses.replace(shrink(cell), batch=2), CPU, 1, setting)
    assert compiled == ["RobertaForMaskedLM"]
    assert mixed == {torch.bfloat16}
    monkeypatch.setitem(TABLES, "table2", dataclasses.replace(TABLES["table2"], cells=lambda s, t: [shrink(cell)]))
    asked = ["--set", "tokens=128", "--set", "compile=yes", "--attentions", "lln", "--quick", "--out", str(tmp_path)]
    done = run_command("reproduce", "table2", *asked)
    assert done.exit_code == 0, done.output
    assert "batches of 128 tokens, float32, torch.compile" in (tmp_path / "table2-128-tokens-compiled.md").read_text()


def watch_linear(linear: Any, seen: set[torch.dtype]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        out = linear(*args, **kwargs)
        seen.add(out.dtype)
        return out

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table2", "--set", "tokens=many"], "got 'tokens=many'"),
        (["table2", "--set", "model.layers=2"], "of single steps these can be set"),
        (["table2", "--attentions", "lnn"], "table2 has softmax, torch, nystromformer, lln, lln_diag; got 'lnn'"),
        (["table4", "--set", "tokens=4096"], "can be set for table2 only"),
        (["table2", "--tasks", "text"], "it goes with table1"),
        (["table2", "--from", "."], "holds no table2.json"),
        (["table2", "--from", ".", "--attentions", "lln"], "leave it out with --from"),
        (["lengths", "--tunings", "2"], "it goes with table1, matching, variants, not with lengths"),
        (["fig2", "--no-charts"], "table2, table4, not with fig2"),
    ],
)
def test_what_single_steps_cannot_have_is_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = run_command("reproduce", *arguments, "--out", tmp_path / "x")
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())
