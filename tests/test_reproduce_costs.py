"""`lln reproduce table2 | table4`: a step of the models that the tables name, beside the paper's numbers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lln.cli import app
from lln.reproduce import costs
from lln.reproduce.costs import TABLES, Cell, markdown, measure, step_cost
from lln.training.models import build

CPU = torch.device("cpu")


def small(cell: Cell) -> Cell:
    model = dataclasses.replace(cell.config.model, layers=1, width=16, heads=2, inner=16)
    config = dataclasses.replace(cell.config, model=model, data=dataclasses.replace(cell.config.data, length=64))
    sizes = dataclasses.replace(cell.sizes, vocabulary=40)
    return dataclasses.replace(cell, config=config, sizes=sizes, batch=2, length=64)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_a_step_of_a_real_model(name: str) -> None:
    for cell in TABLES[name].cells("tiny"):
        model = build(small(cell).config, small(cell).sizes)
        runs = model.config._attn_implementation
        assert runs == ("sdpa" if cell.attention == "softmax" else cell.attention)
    for attention in ("softmax", "lln_diag"):
        cell = next(c for c in TABLES[name].cells("tiny") if c.attention == attention)
        found = step_cost(small(cell), CPU, 1)
        assert found["ms"]["median"] > 0
        assert found["bytes"] > 0


def test_the_paper_scale_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(c for c in TABLES["table2"].cells("paper") if c.column == "512")
    assert (cell.config.model.layers, cell.config.model.width, cell.batch) == (12, 768, 1)
    assert {c.column for c in TABLES["table2"].cells("paper")} == {"512", "1024", "2048", "4096", "8192", "16384"}
    lengths = {c.column: (c.length, c.batch) for c in TABLES["table4"].cells("paper")}
    assert lengths == {
        "text": (4000, 32), "listops": (2000, 32), "retrieval": (4000, 16), "pathfinder": (1024, 128),
        "image": (1024, 256),
    }  # fmt: skip


def test_out_of_memory_and_refusals_are_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cell: Cell, device: torch.device, repeats: int) -> dict[str, Any]:
        if cell.attention == "softmax":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if cell.attention == "reformer":
            raise ValueError("reformer cannot")
        return {"ms": {"median": 2.0}, "bytes": 3 * 2**20}

    monkeypatch.setattr(costs, "step_cost", fail)
    stored: list[int] = []
    table = TABLES["table4"]
    result = measure(
        table, "tiny", device=CPU, repeats=1, seed=0, progress=lambda text: None,
        store=lambda found: stored.append(len(found["rows"])),
    )  # fmt: skip
    assert stored == list(range(1, 26))
    text = markdown(table, result)
    assert "| softmax | OOM | OOM | OOM | OOM | OOM |" in text
    assert "| reformer | no | no | no | no | no |" in text
    assert "| lln_diag | 2 | 2 | 2 | 2 | 2 |" in text
    assert "| lln_diag | 1641 | 821 | 1586 | 1639 | 3276 |" in text  # the paper's


def test_the_command_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [small(c) for c in TABLES["table2"].cells("tiny") if c.column == "256" and c.attention in ("softmax", "lln")]
    monkeypatch.setitem(TABLES, "table2", dataclasses.replace(TABLES["table2"], cells=lambda scale: few))
    done = CliRunner().invoke(app, ["reproduce", "table2", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "table2.json").read_text())
    assert [row["attention"] for row in result["rows"]] == ["softmax", "lln"]
    assert all(row["note"] is None for row in result["rows"])
    assert "| nystromformer | 1.8 | 1.9 | 2.6 | 4.7 | 8.8 | 16.7 |" in (tmp_path / "table2.md").read_text()
