"""Figures from recorded runs: what is drawn is what was recorded, and each sentence follows its numbers."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_runs import finish, list_jobs, make_asked
from lln.lab.paper.experiments import EXPERIMENTS, Asked
from lln.lab.paper.result_charts import draw_figure, mix_colour
from lln.lab.paper.run_figures import assemble_figure
from lln.lab.paper.run_records import find_runs


def figure(name: str, what: Asked) -> dict[str, Any]:
    return json.loads(json.dumps(assemble_figure(EXPERIMENTS[name], what, find_runs(what.runs), {}), allow_nan=False))


def head(layer: str, number: int, **values: float | None) -> dict[str, Any]:
    usual = {"temperature": 2.0, "entropy": 5.0, "spectral_gap": 0.5, "alpha": None, "beta": None}
    return {"layer": layer, "head": number, **(usual | values)}


def index_rows(result: dict[str, Any], chart: str) -> dict[tuple[str, float], float]:
    rows = [row for row in result["rows"] if row["chart"] == chart]
    return {(row["series"], row.get("step", row.get("alpha"))): row["value"] for row in rows}


def holds(result: dict[str, Any]) -> list[bool]:
    return [verdict["holds"] for verdict in result["verdicts"]]


def drawings(result: dict[str, Any]) -> set[str]:
    drawn = draw_figure(result)
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in drawn.values())
    return set(drawn)


@pytest.mark.parametrize("cooling", [True, False])
def test_fig1_is_a_line_a_layer_of_means_over_heads_and_seeds(tmp_path: Path, cooling: bool) -> None:
    what = make_asked(tmp_path, attentions=("softmax",), seeds=2)
    for job in list_jobs("fig1", what):
        lines: list[dict[str, Any]] = []
        for step in (1, 101):
            sign = (-1 if cooling else 1) * (step > 1)
            heads = [
                head(f"layer.{i}.attention", h, temperature=3.0 + h + sign * (1 + i), entropy=6.0 - i + h + 5.5 * sign,
                     spectral_gap=0.5 + 0.1 * sign)
                for i in range(3) for h in range(2)
            ]  # fmt: skip
            lines.append({"step": step, "heads": heads, "loss_scale": None})
        lines[0]["heads"][0]["temperature"] += 2 * job.config.seed
        finish(tmp_path / job.folder, job.config, 4.0, lines=[*lines, {"step": 101, "loss": 3.0}])
    result = figure("fig1", what)
    points = index_rows(result, "temperature-softmax")
    assert points["layer 1", 1] == pytest.approx(3.5 + 0.5)  # two heads, two seeds
    assert points["layer 2", 101] == pytest.approx(3.5 + (-2 if cooling else 2))
    assert holds(result) == [cooling, cooling, cooling]
    last = 1.5 if cooling else 5.5
    assert f"temperature 3.67 to {last}, entropy" in result["verdicts"][0]["sentence"]
    assert drawings(result) == {"-temperature-softmax", "-entropy-softmax", "-spectral_gap-softmax"}


def test_two_layers_have_no_middle(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("softmax",))
    (job,) = list_jobs("fig1", what)
    lines = [{"step": s, "heads": [head(f"l{i}", 0) for i in range(2)]} for s in (1, 101)]
    finish(tmp_path / job.folder, job.config, 4.0, lines=lines)
    assert not any("middle layers" in verdict["claim"] for verdict in figure("fig1", what)["verdicts"])


def test_fig1_says_what_was_not_recorded(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("softmax",))
    (job,) = list_jobs("fig1", what)
    finish(tmp_path / job.folder, job.config, 4.0, lines=[{"step": 1, "loss": 3.0}])
    result = figure("fig1", what)
    assert "softmax: no entropy was recorded" in " ".join(result["missing"])
    assert drawings(result) == set()


def losses(final: float, scale: float | None = None) -> list[dict[str, Any]]:
    found = [{"step": s, "loss": final + 1 / s, "loss_scale": scale and scale / s} for s in (10, 20, 30)]
    return [*found, {"step": 20, "eval_loss": final + 0.5}, {"step": 30, "eval_loss": final}]


def test_fig8_says_who_follows_softmax(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("softmax", "lln", "lln_diag"))
    final = {"softmax": 3.28, "lln": 4.9, "lln_diag": 3.1}
    for job in list_jobs("fig8", what):
        name = job.config.attention.name
        finish(tmp_path / job.folder, job.config, final[name], lines=losses(final[name]))
    result = figure("fig8", what)
    assert holds(result) == [None, None]  # one seed
    for text in ("lln_diag", "falls below"):
        assert text in result["verdicts"][1]["claim"]
    assert "Final validation loss 4.900, of softmax 3.280: +1.620 with one seed" in result["verdicts"][0]["sentence"]
    assert index_rows(result, "a-validation")["lln", 20] == pytest.approx(5.4)
    assert index_rows(result, "a-training")["lln", 10] == pytest.approx(5.0)
    assert drawings(result) == {"-a-validation", "-a-training"}
    assert any("float16 alone" in text for text in result["missing"])
    for apart, said in ((0.001, [False, True]), (1.0, [None, True])):  # a noise that LLN's distance exceeds, and not
        more = make_asked(tmp_path / str(apart), attentions=("softmax", "lln", "lln_diag"), seeds=2)
        for job in list_jobs("fig8", more):
            score = final[job.config.attention.name] + apart * job.config.seed
            finish(more.runs / job.folder, job.config, score, lines=losses(score))
        assert holds(figure("fig8", more)) == said


def test_fig8_has_the_loss_scale_of_float16_runs(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("softmax", "lln", "lln_diag"), device="cuda")
    scales = {"softmax": 2.0**14, "lln": 2.0**13, "lln_diag": 2.0**15}
    for job in list_jobs("fig8", what):
        half = job.config.precision == "float16"
        lines = losses(3.0, scales[job.config.attention.name] if half else None)
        finish(tmp_path / job.folder, job.config, 3.0, lines=lines)
    result = figure("fig8", what)
    assert index_rows(result, "b-loss-scale")["lln", 30] == pytest.approx(30 / 2**13)
    assert [v["holds"] for v in result["verdicts"] if "inverse loss scale" in v["claim"]] == [False, True]
    assert "lowered 2 times, that of softmax 2 times" in result["verdicts"][-1]["sentence"]
    assert "in float16. They end at: lln 3, lln_diag 3, softmax 3." in result["differs"][-1]
    for path in tmp_path.glob("*float16*"):  # scales that only rise
        text = "".join(json.dumps({"step": s, "loss": 3.0, "loss_scale": 2.0**s}) + "\n" for s in (10, 20))
        (path / "metrics.jsonl").write_text(text)
    verdict = figure("fig8", what)["verdicts"][-1]
    assert verdict["holds"] is None
    assert "(the one that runs begin with); the loss scale was lowered 0 times" in verdict["sentence"]
    assert "-b-loss-scale" in drawings(result)
    assert result["missing"] == []
    # Those runs are not part of Fig. 8a.
    assert all(row["seeds"] == 1 for row in result["rows"] if row["chart"] == "a-validation")


def test_a_curve_has_no_points_that_few_of_its_runs_have(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("softmax",), seeds=3)
    for job in list_jobs("fig8", what):
        steps = (10, 30) if job.config.seed < 2 else (20, 30)
        lines = [{"step": step, "eval_loss": 5.0 + job.config.seed} for step in steps]
        finish(tmp_path / job.folder, job.config, 5.0, lines=lines)
    assert index_rows(figure("fig8", what), "a-validation") == {("softmax", 10): 5.5, ("softmax", 30): 6.0}


def test_fig9_has_alpha_and_beta_of_every_layer(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("lln",))
    (job,) = list_jobs("fig9", what)
    lines: list[dict[str, Any]] = [
        {"step": s, "heads": [head(f"l{i}", 0, alpha=2.05 + 0.1 * i, beta=2.1) for i in range(2)]} for s in (1, 101)
    ]
    finish(tmp_path / job.folder, job.config, 0.9, lines=lines)
    result = figure("fig9", what)
    assert index_rows(result, "alpha-lln") == {
        (f"layer {i + 1}", s): pytest.approx(2.05 + 0.1 * i) for s in (1, 101) for i in (0, 1)
    }
    assert holds(result) == [True]
    lines[1]["heads"][0]["beta"] = 2.5
    finish(tmp_path / job.folder, job.config, 0.9, lines=lines)
    outside = figure("fig9", what)["verdicts"][0]
    assert not outside["holds"]
    assert outside["numbers"] == {"lowest": 2.05, "highest": 2.5, "inside": 0.875}
    assert drawings(result) == {"-alpha-lln", "-beta-lln"}


def test_fig9_of_a_language_model(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("lln",), tasks=("mlm",))
    (job,) = list_jobs("fig9", what)
    assert job.config.task == "mlm"
    lines = [{"step": s, "heads": [head("l", 0, alpha=2.05, beta=2.1)]} for s in (1, 101)]
    finish(tmp_path / job.folder, job.config, 5.0, lines=lines)
    result = figure("fig9", what)
    assert index_rows(result, "alpha-lln-mlm") == {("layer 1", s): pytest.approx(2.05) for s in (1, 101)}
    assert "(lln, a language model)" in result["verdicts"][0]["claim"]
    assert drawings(result) == {"-alpha-lln-mlm", "-beta-lln-mlm"}


@pytest.mark.parametrize("seeds", [1, 3])
def test_fig10_compares_fixed_values_with_matching(tmp_path: Path, seeds: int) -> None:
    what = make_asked(tmp_path, attentions=("lln",), seeds=seeds)
    scores = {None: 0.9, 1: 0.8, 1.5: 0.85, 2: 0.9, 3: 0.91, 4: 0.8999}
    for job in list_jobs("fig10", what):
        score = scores[job.config.attention.options.get("alpha")] + 0.001 * job.config.seed
        finish(tmp_path / job.folder, job.config, score)
    result = figure("fig10", what)
    assert holds(result) == ([None, None] if seeds == 1 else [True, True])
    assert "-10.0 at 1, -5.0 at 1.5 (" in result["verdicts"][0]["sentence"]
    middle = 100 * 0.001 * (seeds - 1) / 2
    points = index_rows(result, "a-accuracy")
    assert points["lln, alpha = beta", 1.5] == pytest.approx(85 + middle)
    assert points["lln, matched", 4] == pytest.approx(90 + middle)
    assert all(("low" in row) == (seeds > 1) for row in result["rows"])
    assert drawings(result) == {"-a-accuracy"}
    # Without the loss at small values the first claim does not hold; with one at large values the second does not.
    for job in list_jobs("fig10", what):
        alpha = job.config.attention.options.get("alpha")
        finish(tmp_path / job.folder, job.config, (0.5 if alpha == 4 else 0.9) + 0.001 * job.config.seed)
    assert holds(figure("fig10", what)) == ([None, None] if seeds == 1 else [False, False])


def test_fig10_has_the_loss_scale_of_fixed_values(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("lln",), device="cuda")
    for job in list_jobs("fig10", what):
        alpha = job.config.attention.options.get("alpha", 2)
        scale = 2.0 ** (18 - alpha) if job.config.precision == "float16" else None
        finish(tmp_path / job.folder, job.config, 0.9, lines=losses(1.0, scale))
    result = figure("fig10", what)
    assert {series for series, _ in index_rows(result, "b-loss-scale-lln")} == {
        "matched", "alpha = beta = 2", "alpha = beta = 4"
    }  # fmt: skip
    assert all(2.0 ** row["power"] == pytest.approx(row["value"]) for row in result["rows"] if "power" in row)
    said = result["verdicts"][-1]
    assert said["holds"]
    assert said["numbers"]["four"] == pytest.approx(4 * said["numbers"]["two"])
    assert "-b-loss-scale-lln" in drawings(result)


def test_figures_of_foreign_runs_take_the_settings_that_most_have(tmp_path: Path) -> None:
    what = make_asked(tmp_path, attentions=("softmax",), changes={"optimisation.steps": "9"})
    (job,) = list_jobs("fig8", what)
    finish(tmp_path / "deep" / "down", job.config, 3.0, lines=losses(3.0))
    found = figure("fig8", make_asked(tmp_path, attentions=("softmax",)))
    assert [run["folder"] for run in found["runs"]] == ["deep/down"]
    assert job.config.attention.label == "softmax"


def test_the_colours_of_layers_run_from_first_to_last() -> None:
    found = [mix_colour(i / 11) for i in range(12)]
    assert len(set(found)) == 12
    assert all(len(colour) == 7 for colour in found)
