"""`lln report`: its parts say what their data says, are stored one by one, and are not measured twice."""

import csv
import dataclasses
import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command import run_command
from lln.lab.core import charts
from lln.lab.core.page import Chart, Section, write_page
from lln.lab.core.palette import Style
from lln.lab.core.tables import join_words, write_csv
from lln.lab.page import build, sentence_maps
from lln.lab.page import distribution_section as distribution
from lln.lab.page import explorer_section as explorer
from lln.lab.page import kernels_section as kernels
from lln.lab.page import lengths_section as lengths
from lln.lab.page import training_section as training
from lln.lab.paper.analysis import LLN
from lln.peers.simple_kernels import FEATURES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMALL = explorer.ExplorerPlan(length=48, dims=(16, 64), temperatures=(0.25, 1.0, 8.0), seeds=1)


@pytest.fixture(scope="module")
def explored() -> dict[str, Any]:
    return explorer.measure(SMALL, seed=0)


def test_a_histogram_counts_every_entry_once() -> None:
    shares = torch.tensor([0.0, 0.0, 1e-9, 1.0, 2.0, 1e9], dtype=torch.float64)
    found = explorer.count_shares(shares)
    assert found["zero"] == pytest.approx(2 / 6)
    assert sum(found["histogram"]) == pytest.approx(1e4 * 4 / 6, abs=3)
    assert found["histogram"][0] == found["histogram"][-1] == round(1e4 / 6)  # beyond the ends


def test_the_script_gets_what_was_measured(explored: dict[str, Any]) -> None:
    given = explorer.list_for_script(explored)
    for row in explored["rows"]:
        at = SMALL.temperatures.index(row["temperature"])
        shown = given["values"][str(row["dim"])][row["series"]][at]
        assert shown["entropy"] == pytest.approx(row["entropy"], abs=5e-4)
        assert shown["gap"] == pytest.approx(row["gap"], abs=5e-5)
    names = [look["name"] for look in given["looks"]]
    assert names[:3] == ["softmax", "LLN", "LLN, paper matching"]
    assert given["start"]["matching"] == "entropy"  # the recommended one
    assert {*names[3:], "softmax", *given["matchings"]} == set(given["values"]["16"])


def test_the_heat_maps_are_attention(explored: dict[str, Any]) -> None:
    given = explored["sentence"]
    count, maps = len(given["words"]), given["maps"]
    assert set(maps) == {"softmax", *(f"{name}, {kind}" for name in ("LLN", "LLN+Diag") for kind in LLN)}
    q, k = sentence_maps.draw_sentence(0)
    for at, temperature in enumerate(SMALL.temperatures):
        sigma = temperature**-0.5
        exact = torch.softmax(sigma**2 * q @ k.mT / q.shape[-1] ** 0.5, -1).flatten()
        assert max(abs(x / 1000 - y) for x, y in zip(maps["softmax"][at], exact.tolist(), strict=True)) < 6e-4
        for one in maps.values():
            rows = torch.tensor(one[at]).view(count, count).sum(-1)
            assert (rows - 1000).abs().max() <= count / 2  # rounded to thousandths
    mean = [sum(one) / count for one in ([row[i * count + i] for i in range(count)] for row in maps["softmax"])]
    assert mean == sorted(mean, reverse=True) or mean == sorted(mean)  # colder is sharper


def test_what_the_explorer_says_follows_from_its_rows(explored: dict[str, Any]) -> None:
    said = " ".join(explorer.write_sentences(explored))
    rows = {(r["series"], r["temperature"]): r["entropy"] for r in explored["rows"] if r["dim"] == 64}
    assert f"falls from {rows['softmax', 8.0]:.2f} to {rows['softmax', 0.25]:.2f} bits" in said
    flat = [name for name in FEATURES if abs(rows[name, 8.0] - rows[name, 0.25]) < 0.05]
    assert {"ReLU", "quadratic"} <= set(flat)
    assert f"{join_words(flat)} do not feel the temperature" in said
    for kind in ("paper", "entropy"):
        near = [t for t in SMALL.temperatures if abs(rows[kind, t] - rows["softmax", t]) <= 0.25]
        assert f"LLN with {kind} matching is within a quarter of a bit of softmax at {len(near)} of 3" in said
    gaps = {r["series"]: r["gap"] for r in explored["rows"] if (r["dim"], r["temperature"]) == (64, 0.25)}
    assert f"at 0.25, the coldest, it is {gaps['softmax']:.2f} with softmax" in explorer.write_captions(explored)[1]
    assert "(of one draw)" in explorer.write_captions(explored)[1]
    several = explored | {"settings": explored["settings"] | {"seeds": 8}}
    error = max(r["gap_error"] for r in explored["rows"] if r["dim"] == 64)
    assert f"(means over 8 draws, standard errors up to {error:.2f})" in explorer.write_captions(several)[1]


def test_a_normal_sample_is_called_log_normal_and_its_quantiles_are_a_line() -> None:
    values = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 5
    fit = {"distance": 0.001, "qq_r2": 1.0, "skewness": 0.0, "entropy": 5.0}
    found = distribution.summarize(values, [fit])
    assert found["mean"] == pytest.approx(-5, abs=0.02)
    assert found["deviation"] == pytest.approx(2, rel=0.01)
    assert found["quantiles"] == pytest.approx(found["normal_quantiles"], abs=0.06)
    width = found["log_p"][1] - found["log_p"][0]
    assert sum(found["density"]) * width == pytest.approx(1, abs=0.002)
    rough = fit | {"distance": 0.05, "skewness": 0.8}
    said = distribution.write_sentences(fit, rough, 256)[0]
    assert "softmax attention is close to log-normal" in said
    assert "LLN log-normal only roughly (0.050)" in said
    assert "heavier towards large weights" in said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    runs = tmp_path_factory.mktemp("runs")
    plan = training.TrainingPlan(steps=6, evaluate_every=3, record_every=3, log_every=3)
    return runs, json.loads(json.dumps(training.measure(plan, seed=0, device="cpu", runs=runs)))


def test_the_training_run_shows_each_layer_and_matches_its_folders(trained: tuple[Path, dict[str, Any]]) -> None:
    runs, result = trained
    made = training.make_section(result)
    names = [chart.name for chart in made.charts]
    panels = [f"training-{q}" for q in ("loss", "temperature", "entropy", "spectral-gap", "alpha", "beta")]
    assert names == panels
    for name, title in training.ATTENTIONS.items():
        stored = json.loads((runs / name / "result.json").read_text())
        assert result["attentions"][title]["loss"] == stored["metrics"]["loss"]
        assert set(result["attentions"][title]["layers"]["entropy"]) == {"layer 1", "layer 2"}
    assert not result["attentions"]["softmax"]["layers"]["alpha"]  # it has none
    assert f"{result['attentions']['LLN']['loss']:.2f} with LLN" in made.sentences[0]


def test_a_loss_above_guessing_is_not_called_learning(trained: tuple[Path, dict[str, Any]]) -> None:
    result = json.loads(json.dumps(trained[1]))
    for name, loss in (("softmax", 9.0), ("LLN", 1.0), ("LLN+Diag", 9.0)):
        result["attentions"][name] |= {"loss": loss, "guess": 5.0}
    assert "LLN has learned more than that" in training.write_sentences(result)[0]


def test_the_summary_ranks_nothing_and_the_footer_speaks_of_the_times(
    tmp_path: Path, trained: tuple[Path, dict[str, Any]]
) -> None:
    result = trained[1]
    said = build.summarize({"training": result})[0]
    assert said.startswith("The short training run below ended at a loss of")
    assert "too short a run to rank them" in said
    timed = {"provenance": {"threads": 7}, "heads": 1, "dim": 8, "rows": []}
    empty = Section("name", "title", [], [], [], [], {})
    parts = [build.Part(name, 1, {}, lambda progress: {}, lambda found: empty) for name in ("training", "lengths")]
    page = build.write(build.Options(tmp_path), parts, {"training": result, "lengths": timed}, [])
    assert "<dt>threads</dt><dd>7</dd>" in page.read_text()  # all else is measured with one


def test_times_of_a_busy_machine_are_doubted() -> None:
    quiet = {"median": 1.0, "low": 0.9, "high": 1.1}
    rows = [{"attention": name, "length": 64, "training": quiet} for name in ("softmax", "LLN")]
    assert lengths.describe_doubts({"rows": rows, "load": 2.0, "cores": 2}) == []
    assert lengths.describe_doubts({"rows": rows}) == []  # an older result
    said = " ".join(lengths.describe_doubts({"rows": rows, "load": 5.26, "cores": 2}))
    assert "the machine was busy while they were measured (a load of 5.3 on 2 cores)" in said
    assert "repeats differ" not in said
    rows[1] = rows[1] | {"training": {"median": 1.0, "low": 0.8, "high": 1.6}}
    said = " ".join(lengths.describe_doubts({"rows": rows, "load": 5.26, "cores": 2}))
    assert "repeats differ by up to 80 % of their median (LLN at 64 tokens" in said
    assert "busy" not in " ".join(lengths.describe_doubts({"rows": rows, "load": 0.1, "cores": 2}))


def test_half_of_lln_diag_never_leaves_its_blocks(trained: tuple[Path, dict[str, Any]]) -> None:
    result = json.loads(json.dumps(trained[1]))
    layer = result["attentions"]["LLN+Diag"]["layers"]["spectral_gap"]["layer 1"]
    for one in result["attentions"]["LLN+Diag"]["layers"]["spectral_gap"].values():
        one.update(dict.fromkeys(one, 0.5))
    middle = sorted(layer, key=int)[len(layer) // 2]
    layer[middle] = 0.25  # neither the first record nor a mean
    assert "The spectral gap of LLN+Diag was 0.25 to 0.50" in " ".join(training.write_sentences(result))
    layer[middle] = 0.9
    assert "never leaves them" not in " ".join(training.write_sentences(result))


@pytest.mark.parametrize(
    "names", [["softmax"], ["a", "b", "c", "d", "e", "f"], [f"LLN+Diag, layer {i}" for i in range(6)]]
)
def test_a_legend_is_no_wider_than_its_chart(names: list[str]) -> None:
    rows = [{"series": name, "x": x, "y": x} for name in names for x in (0.0, 1.0)]
    styles = {name: Style("#000000", (1, 0), "circle") for name in names}
    drawn = charts.draw_lines(rows, styles, charts.Axis("x", "x"), charts.Axis("y", "y"))
    width = float(re.search(r'width="([0-9.]+)"', drawn)[1])  # type: ignore[index]
    assert width < charts.WIDTH + 60


def test_the_kernels_of_a_gpu_are_shown_from_a_result_of_bench() -> None:
    result = json.loads((RESULTS / "2026-11-15-h200" / "batch1" / "bench.json").read_text())
    made = kernels.make_section(result)
    assert {chart.name for chart in made.charts} == {"time-bidirectional", "speedup-bidirectional", "percent-of-floor"}
    row = next(r for r in result["rows"] if r["attention"] == "LLN+Diag" and r["length"] == 65536)
    assert f"LLN+Diag is {row['speedup']['training']:.3g} times as fast" in " ".join(made.sentences)
    assert len(made.table) == len(result["rows"])


def test_a_stopped_report_goes_on_and_measures_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def parts(fail: bool) -> list[build.Part]:
        def count_measure(name: str) -> Any:
            def measure(progress: Any) -> dict[str, Any]:
                calls.append(name)
                if fail and name == "second":
                    raise KeyboardInterrupt
                return {"value": name}

            return measure

        def section(result: dict[str, Any]) -> Section:
            raise AssertionError

        return [build.Part(name, 1, {"seed": 0}, count_measure(name), section) for name in ("first", "second")]

    options = build.Options(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        build.make(options, parts(True), lambda text: None)
    found = build.make(options, parts(False), lambda text: None)
    assert calls == ["first", "second", "second"]
    assert found == {"first": {"value": "first"}, "second": {"value": "second"}}
    build.make(options, parts(False), lambda text: None, again=True)
    assert calls[3:] == ["first", "second"]
    (tmp_path / "second.json").write_text("{half a fi")
    build.make(options, parts(False), lambda text: None)
    assert calls[5:] == ["second"]


def test_a_training_run_is_begun_anew_where_that_is_asked_for_and_for_every_seed(tmp_path: Path) -> None:
    first, other = (build.make_part("training", build.Options(tmp_path, quick=True, seed=seed)) for seed in (0, 1))
    assert first.begun is not None
    assert first.begun != other.begun  # a run with another seed cannot go on
    assert build.make_part("training", build.Options(tmp_path, seed=0)).begun != first.begun
    (first.begun / "softmax").mkdir(parents=True)

    def measure(progress: Any) -> dict[str, Any]:
        return {"begun": (tmp_path / "runs").exists() and first.begun.exists()}  # type: ignore[union-attr]

    one = dataclasses.replace(first, measure=measure)
    options = build.Options(tmp_path, quick=True)
    assert build.make(options, [one], lambda text: None)["training"] == {"begun": True}  # goes on
    assert build.make(options, [one], lambda text: None, again=True)["training"] == {"begun": False}


def test_a_stopped_report_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "make", stop)
    found = run_command("report", "--sections", "distribution", "--out", str(tmp_path))
    assert found.exit_code == 130
    assert "the same command goes on" in found.output


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    found = run_command("report", "--sections", "distribution", "--out", str(tmp_path / "file" / "page"))
    assert found.exit_code == 2
    assert "is a file; name a folder" in " ".join(found.output.replace("│", " ").split())

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write everywhere
    found = run_command("report", "--sections", "distribution", "--out", str(tmp_path / "page"))
    assert found.exit_code == 2
    assert "may not write to" in " ".join(found.output.replace("│", " ").split())


def test_other_settings_are_measured_anew(tmp_path: Path) -> None:
    def report_at(seed: int) -> str:
        out = run_command(
            "report", "--quick", "--sections", "distribution", "--seed", str(seed), "--out", str(tmp_path)
        )
        assert out.exit_code == 0, out.output
        return out.output

    assert "Kept from before" not in report_at(0)
    assert "Kept from before: distribution" in report_at(0)
    assert "Kept from before" not in report_at(1)


def test_options_that_do_not_fit_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for arguments, words in (
        (["--sections", "lengths,nonsense"], "got 'nonsense'"),
        (["--sections", "kernels"], "needs a GPU"),
        (["--lengths", "12,x"], "positive whole numbers"),
        (["--device", "nowhere"], "torch cannot use"),
    ):
        found = run_command("report", "--out", str(tmp_path / "page"), *arguments)
        assert found.exit_code == 2
        assert words in " ".join(found.output.replace("│", " ").split())
        assert not (tmp_path / "page").exists()


def test_text_on_the_page_is_escaped_and_charts_have_their_data(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    rows = [{"series": bad, "x": 1.0, "all": [1, 2]}, {"series": "b,c", "y": 2.0}]
    chart = Chart("chart", "<svg></svg>", f"caption {bad}", rows=rows)
    made = Section(bad, bad, [bad], [chart], [bad], [[bad]], {"x": 1}, lead=bad, explorer=None)
    path = write_page(tmp_path, [Section("name", *[getattr(made, f) for f in FIELDS])], {bad: bad}, summary=[bad])
    assert "<script>alert" not in path.read_text()
    read = list(csv.DictReader((tmp_path / "chart.csv").read_text().splitlines()))
    assert read == [{"series": bad, "x": "1.0", "y": ""}, {"series": "b,c", "x": "", "y": "2.0"}]
    assert write_csv(rows).count("\n") == 3


FIELDS = ("title", "sentences", "charts", "header", "table", "data", "caption", "lead", "explorer")


def test_data_of_the_explorer_cannot_end_its_script(tmp_path: Path, explored: dict[str, Any]) -> None:
    made = explorer.make_section(explored)
    assert made.explorer is not None
    made.explorer["note"] = "</script><script>alert(1)</script>"
    text = write_page(tmp_path, [made], {}).read_text()
    assert "</script><script>alert" not in text
    between = text.split('id="explorer-data">')[1].split("</script>")[0]
    assert json.loads(between)["note"] == made.explorer["note"]
