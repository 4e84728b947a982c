"""`lln compare`: what it measures is what it says, and cells that cannot be filled say why."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lln
from helpers.command import run_command
from helpers.hf_models import find_minilm
from lln.instruments import entropy, record, softmax_map, spectral_gap
from lln.lab.bench import comparison as measuring
from lln.lab.bench.bench_tables import list_columns, make_compare_table, write_compare
from lln.lab.bench.comparison import ComparisonPlan, build, find_sigma, measure, measure_concentrations, measure_costs
from lln.lab.core.pretrained import load
from lln.lab.inspect.inspection import TEXTS
from lln.peers import mechanisms

SMALL: dict[str, Any] = {"lengths": (48, 65), "heads": 2, "dim": 16, "repeats": 1, "temperatures": (0.5, 1.0, 2.0)}


def compare(*args: str, code: int = 0) -> str:
    result = run_command("compare", *args)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return measure(
        ComparisonPlan(names=("softmax", "lln", "elu", "linformer", "skyformer", "longformer", "tnn"), **SMALL)
    )


def rows(result: dict[str, Any], kind: str, name: str) -> list[dict[str, Any]]:
    return [row for row in result[kind] if row["mechanism"] == name]


def test_every_mechanism_has_a_cell_at_every_length_and_temperature(result: dict[str, Any]) -> None:
    for name in result["settings"]["names"]:
        assert [row["length"] for row in rows(result, "costs", name)] == [48, 65]
        assert all(row["training_ms"]["median"] > 0 for row in rows(result, "costs", name))
        assert all(row["training_bytes"] > 0 for row in rows(result, "costs", name))
        assert [row["temperature"] for row in rows(result, "concentration", name)] == [0.5, 1.0, 2.0]


def test_softmax_is_the_measure_of_the_others(result: dict[str, Any]) -> None:
    plan = ComparisonPlan(names=("softmax",), **SMALL)
    for row in rows(result, "concentration", "softmax"):
        q, k, _, _ = (t.double() for t in plan.draw_inputs(65, find_sigma(row["temperature"])))
        p = softmax_map(q, k)
        assert row["error"] < 1e-12
        assert row["entropy"] == pytest.approx(entropy(p).mean().item(), abs=1e-9)
        assert row["gap"] == pytest.approx(spectral_gap(p).mean().item(), abs=1e-7)
    found = [row["entropy"] for row in rows(result, "concentration", "softmax")]
    assert found == sorted(found)  # hotter is more even


def test_errors_are_those_of_the_outputs(result: dict[str, Any]) -> None:
    q, k, v, _ = (t.double() for t in ComparisonPlan(**SMALL).draw_inputs(65, find_sigma(2.0)))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    off = (lln.attention("elu", q, k, v) - exact).norm() / exact.norm()
    assert rows(result, "concentration", "elu")[2]["error"] == pytest.approx(off.item(), rel=1e-9)


def test_overlap_is_the_weight_on_the_same_tokens(result: dict[str, Any]) -> None:
    q, k, _, _ = (t.double() for t in ComparisonPlan(**SMALL).draw_inputs(65, find_sigma(2.0)))
    usual = softmax_map(q, k).dense()
    elu = lln.peers.attention_matrix("elu", q, k)
    shared = 1 - (elu - usual).abs().sum(-1).mean() / 2  # one less the total variation distance of the rows
    assert rows(result, "concentration", "elu")[2]["overlap"] == pytest.approx(shared.item(), rel=1e-9)
    assert rows(result, "concentration", "softmax")[2]["overlap"] == pytest.approx(1.0)
    even = 1 - (1 / 65 - usual).abs().sum(-1).mean() / 2
    assert [one["temperature"] for one in result["uniform"]] == [0.5, 1.0, 2.0]
    assert result["uniform"][2]["overlap"] == pytest.approx(even.item(), rel=1e-9)
    assert f"{result['uniform'][1]['overlap']:.2f} for looking at all tokens alike" in caption(result)


def caption(result: dict[str, Any]) -> str:
    return " ".join(str(make_compare_table(result).caption).split())


def test_what_cannot_be_measured_says_why(result: dict[str, Any]) -> None:
    assert {row["note"] for row in rows(result, "concentration", "linformer")} == {"learned"}
    assert {row["note"] for row in rows(result, "concentration", "skyformer")} == {"not stochastic"}
    assert all(row["error"] > 0 for row in rows(result, "concentration", "skyformer"))
    causal = ComparisonPlan(names=("linformer",), causal=True, **SMALL)
    for row in measure_costs(causal, "linformer", lambda text: None):
        assert row["note"] == "unsupported"
        assert "linformer does not support is_causal=True" in row["reason"]
    refused = {**result, "costs": measure_costs(causal, "linformer", lambda text: None)}
    headings, cells = list_columns(refused, [48], 1.0)
    assert dict(zip(headings, cells[3], strict=True))["ms @48"] == "no"
    refused["costs"][-1]["reason"] = "it must return [batch, heads]"
    assert "must return [batch, heads]" in str(make_compare_table(refused).caption)


def test_out_of_memory_and_too_slow_are_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: ComparisonPlan, name: str, length: int) -> dict[str, Any]:
        if length == 48:
            return {"training_ms": {"median": 1e9}}
        raise AssertionError("a slow mechanism must not be tried at a longer length")

    monkeypatch.setattr(measuring, "measure_cost", fail)
    assert [row["note"] for row in measure_costs(ComparisonPlan(**SMALL), "lln", lambda text: None)] == [
        None,
        "too slow",
    ]

    def run_out_of_memory(plan: ComparisonPlan, name: str, length: int) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measuring, "measure_cost", run_out_of_memory)
    assert [row["note"] for row in measure_costs(ComparisonPlan(**SMALL), "lln", lambda text: None)] == [
        "out of memory",
        "too slow",
    ]

    def raise_error(plan: ComparisonPlan, name: str, length: int) -> dict[str, Any]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(measuring, "measure_cost", raise_error)
    with pytest.raises(RuntimeError, match="a bug"):
        measure_costs(ComparisonPlan(**SMALL), "lln", lambda text: None)


@pytest.mark.parametrize("causal", [False, True])
def test_every_mechanism_can_be_built_or_refuses(causal: bool) -> None:
    plan = ComparisonPlan(names=tuple(mechanisms()), causal=causal, **SMALL)
    for name, entry in mechanisms().items():
        q, k, v, _ = plan.draw_inputs(48)
        if causal and not entry.supports("causal"):
            with pytest.raises(ValueError, match=name):
                build(plan, name, 48)(q, k, v)
        else:
            assert build(plan, name, 48)(q, k, v).shape == v.shape


def test_inputs_are_the_same_for_all_and_follow_the_seed() -> None:
    first, again, other = (ComparisonPlan(seed=s, **SMALL).draw_inputs(48) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    q, _, _, _ = ComparisonPlan(lengths=(2048,), heads=4).draw_inputs(2048, find_sigma(0.25))
    assert q.std().item() == pytest.approx(2.0, rel=0.02)


def test_the_command_writes_table_result_and_charts(tmp_path: Path) -> None:
    sizes = ("--heads", "1", "--dim", "16", "--repeats", "1")
    output = compare("--only", "softmax,lln", "--lengths", "32,48", *sizes, "--out", str(tmp_path))
    assert max(map(len, output.splitlines())) <= 110
    result = json.loads((tmp_path / "compare.json").read_text())
    assert result["finished"]
    assert {p.name for p in tmp_path.glob("*.svg")} == {
        f"{n}.svg" for n in ("time", "memory", "entropy", "gap", "overlap")
    }
    assert "| lln |" in (tmp_path / "compare.md").read_text()
    assert write_compare(result) == (tmp_path / "compare.md").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--only", "lln, softmx"), "no mechanism 'softmx'"),
        (
            ("--only", "softmx"),
            "Perhaps you mean 'softmax'. Attention of your own goes with --plugin file.py:function.",
        ),
        (("--only", "lln", "--all"), "exclude each other"),
        (("--temperatures", "0,1"), "positive numbers"),
        (("--temperatures", "hot"), "positive numbers"),
        (("--lengths", "12,x"), "positive whole numbers"),
        (("--device", "abacus"), "abacus"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(args: tuple[str, ...], message: str) -> None:
    output = compare(*args, code=2)
    assert message in " ".join(output.replace("│", " ").split())
    assert "Traceback" not in output


def test_concentrations_of_a_causal_map() -> None:
    plan = ComparisonPlan(names=("softmax",), causal=True, **SMALL)
    q, k, _, _ = (t.double() for t in plan.draw_inputs(65))
    row = measure_concentrations(plan, "softmax", lambda text: None)[1]
    assert row["entropy"] == pytest.approx(entropy(softmax_map(q, k, is_causal=True)).mean().item(), abs=1e-9)


def test_on_the_queries_and_keys_of_a_model(tmp_path: Path) -> None:
    sizes = ("--heads", "1", "--dim", "16", "--repeats", "1", "--lengths", "32", "--temperatures", "1")
    output = compare("--only", "softmax,lln,linformer", "--model", str(find_minilm()), *sizes, "--out", str(tmp_path))
    assert "queries and keys of model" in " ".join(output.split())
    found = json.loads((tmp_path / "compare.json").read_text())["recorded"]
    softmax = [row for row in found if row["mechanism"] == "softmax"]
    assert len(softmax) == 6 * 4  # layers and texts
    assert max(row["error"] for row in softmax) < 1e-12

    model, tokenizer = load(str(find_minilm()))
    with record(model) as rec:
        model(**tokenizer(TEXTS[0], truncation=True, max_length=32, return_tensors="pt"))
    rows = rec.rows()
    for row in softmax[:6]:
        heads = [one["entropy"] for one in rows if one["layer"] == row["layer"]]
        assert row["entropy"] == pytest.approx(sum(heads) / len(heads), abs=1e-5)
    assert all(row["error"] > 0.1 for row in found if row["mechanism"] == "lln")
    assert {row["note"] for row in found if row["mechanism"] == "linformer"} == {"learned"}


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "holds no config.json" in " ".join(compare("--model", str(tmp_path), code=2).split())
