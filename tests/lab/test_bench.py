"""lln bench: what it stores follows from what it measured, and it refuses what it could not stand for."""

import contextlib
import dataclasses
import functools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from helpers.command import run_command
from lln import LLNAttention
from lln.lab.bench.attentions import ATTENTIONS, Case, Shape
from lln.lab.bench.calls import describe_failure
from lln.lab.bench.kernel_plan import BenchPlan, choose_attentions, make_plan
from lln.lab.bench.kernel_times import build_works, derive, explain_skip, measure
from lln.lab.core import timing as clock

CPU = torch.device("cpu")
TINY = ("--heads", "2", "--dim", "8", "--repeats", "2")
VARIANTS = "LLN", "LLN-sample", "LLN+Diag", "LLN+Diag-sample"
run_bench = functools.partial(run_command, "bench")


@pytest.fixture(autouse=True)
def small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "COPY_BYTES", {"cpu": 2**16})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """One small run of everything: its folder, result and what it printed."""
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "COPY_BYTES", {"cpu": 2**16})
        code, stdout, _ = run_bench("--lengths", "32,80", "--batch", "2", *TINY, "--out", str(out))
    assert code == 0
    return out, json.loads((out / "bench.json").read_text()), stdout


def test_every_attention_of_a_cpu_has_a_row_for_each_shape(stored: tuple[Path, dict[str, Any], str]) -> None:
    _, result, _ = stored
    found = {(row["attention"], row["causal"], row["length"]) for row in result["rows"]}
    both, bidirectional = {"flash", "math", "LLN", "LLN+Diag"}, {"usual", "LLN-sample", "LLN+Diag-sample"}
    pairs = {(name, causal) for name in both for causal in (False, True)} | {(name, False) for name in bidirectional}
    assert found == {(*pair, length) for pair in pairs for length in (32, 80)}
    for row in result["rows"]:
        assert row["error"] is None
        assert (row["batch"], row["heads"], row["dim"]) == (2, 2, 8)
        for part in ("forward", "training"):
            timing = row["device_ms"][part]
            assert 0 < timing["low"] <= timing["median"] <= timing["high"]
            assert timing["repeats"] == 2
        assert row["training_bytes"] >= 3 * 2 * 2 * row["length"] * 8 * 4  # at least the three gradients
        assert row["host_ms"] is row["graph"] is None
    assert result["finished"]
    assert {"command", "commit", "device", "seed", "torch"} <= result["provenance"].keys()
    assert result["settings"]["dtype"] == "float32"
    assert result["settings"]["shapes"] == [[2, 2, 32, 8], [2, 2, 80, 8]]


def test_every_timed_variant_was_checked_with_its_gradients(stored: tuple[Path, dict[str, Any], str]) -> None:
    _, result, _ = stored
    checked = {(entry["attention"], entry["causal"]) for entry in result["checks"]}
    assert checked == {(name, False) for name in VARIANTS} | {("LLN", True), ("LLN+Diag", True)}
    for entry in result["checks"]:
        assert set(entry["errors"]) == {"out", "gradient of q", "gradient of k", "gradient of v"}
        assert all(0 < error <= 1e-4 for error in entry["errors"].values())


def test_floors_count_what_must_move(stored: tuple[Path, dict[str, Any], str]) -> None:
    _, result, _ = stored
    counts = {"LLN": (4, 11), "LLN-sample": (6, 13), "LLN+Diag": (4, 11), "LLN+Diag-sample": (6, 13)}
    seen = set()
    for row in result["rows"]:
        if row["causal"] or row["attention"] not in counts:
            assert row["floor_ms"] is row["percent_of_floor"] is None
            continue
        for part, count in zip(("forward", "training"), counts[row["attention"]], strict=True):
            bytes_ = count * 2 * 2 * row["length"] * 8 * 4
            assert row["floor_ms"][part] == pytest.approx(1e3 * bytes_ / result["copy_bytes_per_second"])
            share = row["floor_ms"][part] / row["device_ms"][part]["median"]
            assert row["percent_of_floor"][part] == pytest.approx(100 * share)
        seen.add(row["attention"])
    assert seen == set(counts)


def row(attention: str, ms: float | None, *, causal: bool = False, length: int = 64, batch: int = 1) -> dict[str, Any]:
    timing = None if ms is None else {"median": ms, "low": ms, "high": ms, "repeats": 1}
    return {
        "attention": attention, "causal": causal, "batch": batch, "heads": 2, "length": length, "dim": 8,
        "device_ms": timing and {"forward": timing, "training": timing}, "host_ms": None, "training_bytes": None,
        "graph": None, "error": None if ms else "out of memory",
    }  # fmt: skip


def derive_result(*rows: dict[str, Any]) -> dict[str, Any]:
    result = {"settings": {"dtype": "float32"}, "copy_bytes_per_second": 1e9, "rows": list(rows)}
    derive(result)
    return result


def test_speedups_are_over_the_fastest_softmax_at_the_same_shape_and_causality() -> None:
    rows = derive_result(
        row("flash", 8.0), row("math", 6.0), row("efficient", None), row("LLN", 2.0), row("LLN", 1.0, causal=True),
        row("flash", 1.0, length=128), row("LLN+Diag", 4.0, length=128), row("flash", 1.0, batch=3),
    )["rows"]  # fmt: skip
    found = [entry["speedup"] and entry["speedup"]["training"] for entry in rows]
    assert found == [6 / 8, 1.0, None, 3.0, None, 1.0, 0.25, 1.0]


def test_exponents_are_between_the_two_greatest_lengths_at_one_batch_size() -> None:
    quadratic = [row("flash", ms, length=n) for n, ms in ((64, 9.0), (128, 1.0), (256, 4.0), (512, None))]
    result = derive_result(*quadratic, row("LLN", 1.0, length=64), row("LLN", 2.0, length=128, batch=2))
    (entry,) = result["scaling"]
    assert (entry["attention"], entry["lengths"], entry["training"]) == ("flash", [128, 256], pytest.approx(2.0))


def scaled_output(attend: Any) -> Callable[..., Tensor]:
    def attend_wrongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v)
        return out + 0.001 * out.detach()

    return attend_wrongly


def scaled_gradient(attend: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(q, 1.001 * k - 0.001 * k.detach(), v)


def not_a_number(attend: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: attend(q, k, v) * float("nan")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (scaled_output, "out is off by 1.0e-03 from float64"),
        (scaled_gradient, "gradient of k is off by 1.0e-03"),
        (not_a_number, "out is off by nan"),
        (lambda attend: 1 / 0, "fails: division by zero"),
    ],
)
@pytest.mark.parametrize("name", ["LLN", "LLN+Diag-sample"])
def test_a_wrong_attention_is_not_timed(
    wrong: Any, message: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = ATTENTIONS[name]
    broken = dataclasses.replace(right, build=lambda case: wrong(right.build(case)))
    monkeypatch.setitem(ATTENTIONS, name, broken)
    code, stdout, stderr = run_bench("--lengths", "32", "--causal", "no", *TINY, "--out", str(tmp_path))
    assert code == 1
    assert f"{name} at 2 x 2 x 257 x 8 in float32" in stderr
    assert message in stderr
    assert stderr.strip().endswith("Nothing was timed.")
    assert "Traceback" not in stderr
    assert stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_what_fails_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(case: Case) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 96.00 GiB. GPU 0 has 1 [of]\nmany lines"
            )

        return attend

    monkeypatch.setitem(ATTENTIONS, "flash", dataclasses.replace(ATTENTIONS["flash"], build=build))
    code, stdout, _ = run_bench("--lengths", "32", "--only", "flash,math,lln", *TINY, "--out", str(tmp_path))
    assert code == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [entry["attention"] for entry in rows] == 2 * ["flash", "math", "LLN"]
    for entry in rows:
        if entry["attention"] == "flash":
            assert entry["error"] == "out of memory: tried to allocate 96.00 GiB"
            assert entry["device_ms"] is entry["speedup"] is None
        else:
            assert entry["speedup"]["training"] > 0  # over what is left, math
    assert stdout.count("out of memory: tried to allocate 96.00 GiB") == 2
    assert "| flash | out of memory: tried to allocate 96.00 GiB |" in (tmp_path / "bench.md").read_text()


def test_errors_become_short_sentences() -> None:
    assert describe_failure(RuntimeError("No available kernel. Aborting execution.")).startswith(
        "torch has no such back end"
    )
    assert describe_failure(ValueError()) == "ValueError"
    assert len(describe_failure(ValueError("long " * 100))) <= 160


def test_quadratic_attentions_are_skipped_where_they_would_take_too_long() -> None:
    earlier = [row("flash", 3_000.0, length=1024), row("LLN", 3_000.0, length=1024), row("flash", None, length=2048)]
    longer = Case(Shape(1, 2, 4096, 8), False, torch.float32, CPU)
    assert (
        explain_skip("flash", ATTENTIONS["flash"], longer, earlier)
        == "skipped: about 48 s a call, judged by length 1,024"
    )
    assert explain_skip("LLN", ATTENTIONS["LLN"], longer, earlier) is None
    shorter = dataclasses.replace(longer, shape=Shape(1, 2, 2048, 8))
    assert explain_skip("flash", ATTENTIONS["flash"], shorter, earlier) is None
    assert explain_skip("flash", ATTENTIONS["flash"], dataclasses.replace(longer, causal=True), earlier) is None
    endless = dataclasses.replace(longer, shape=Shape(1, 2, 2**22, 8))
    reason = explain_skip("math", ATTENTIONS["math"], endless, [])
    assert reason == "skipped: would need about 524,288 GiB"


def test_a_stored_result_is_rendered_again_without_measuring(
    stored: tuple[Path, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, result, printed = stored
    monkeypatch.setattr("lln.lab.bench.kernel_times.measure", None)
    code, stdout, _ = run_bench("--render", str(folder / "bench.json"), "--out", str(tmp_path))
    assert (code, stdout) == (0, printed)
    drawn = {path.name for path in tmp_path.iterdir()}
    charts = {f"{what}-{way}.svg" for what in ("time", "speedup") for way in ("bidirectional", "causal")}
    assert drawn == charts | {"percent-of-floor.svg", "bench.md"}
    for name in drawn:
        assert (tmp_path / name).read_text() == (folder / name).read_text()
    code, stdout, _ = run_bench("--render", str(folder / "bench.json"), "--json", "--out", str(tmp_path))
    assert json.loads(stdout) == result


def test_the_markdown_holds_every_row_and_how_it_was_made(stored: tuple[Path, dict[str, Any], str]) -> None:
    from lln.lab.core.tables import show_timing

    folder, result, _ = stored
    text = (folder / "bench.md").read_text()
    for entry in result["rows"]:
        timings = " | ".join(show_timing(entry["device_ms"][part]) for part in ("forward", "training"))
        assert f"| {entry['attention']} | {timings} |" in text
    assert text.count("## 2 x 2 x 80 x 8, ") == 2
    assert "from 32 to 80 tokens time grows with length to the power of flash" in text
    assert result["how"] in text
    assert result["provenance"]["torch"] in text
    assert "Checked first" in text
    assert "cut short" not in text


def test_without_the_extra_there_are_no_charts_and_the_remedy_is_named(
    stored: tuple[Path, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lln.lab.cli.shared.EXTRAS", {"report": ("no_such_module",)})
    code, _, stderr = run_bench("--render", str(stored[0] / "bench.json"), "--out", str(tmp_path))
    assert code == 0
    assert "pip install 'lln-attention[report]'" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bench.md"]


def test_a_run_that_is_killed_keeps_its_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lln.lab.bench.kernel_times import measure_shape

    def interrupt(plan: BenchPlan, shape: Shape, *rest: Any) -> Any:
        if shape.length > 32:
            raise KeyboardInterrupt
        return measure_shape(plan, shape, *rest)

    monkeypatch.setattr("lln.lab.bench.kernel_times.measure_shape", interrupt)
    code, _, stderr = run_bench(
        "--shapes", "1x2x32x8,1x2x64x8", "--only", "flash", "--repeats", "2", "--out", str(tmp_path)
    )
    assert code != 0
    assert "Traceback" not in stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert not result["finished"]
    assert [entry["length"] for entry in result["rows"]] == [32, 32]
    code, _, _ = run_bench("--render", str(tmp_path / "bench.json"), "--out", str(tmp_path))
    assert code == 0
    assert "cut short" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (["--lengths", "many"], "--lengths", "like 512,2048; got 'many'"),
        (["--lengths", ""], "--lengths", "got ''"),
        (["--shapes", "1x2x3"], "--shapes", "like 16x12x4096x64"),
        (["--shapes", "1x2x0x8"], "--shapes", "got '1x2x0x8'"),
        (["--shapes", "1x2x8x8", "--batch", "2"], "--shapes", "leave out --batch"),
        (["--tokens", "64", "--batch", "2"], "--tokens", "leave out --batch or --tokens"),
        (["--heads", "0"], "--heads", "1"),
        (["--dtype", "int8"], "--dtype", "int8"),
        (["--causal", "maybe"], "--causal", "maybe"),
        (["--causal", "yes", "--only", "usual"], "--causal", "nothing is left to measure: usual"),
        (["--only", "LLN,swift"], "--attentions", "'swift' is not among those that run here: flash, math, usual, LLN"),
        (["--only", "cudnn"], "--attentions", "'cudnn' is not among"),
        (["--peers", "fla"], "--peers", "CUDA devices only"),
        (["--peers", "other"], "--peers", "must be fla; got 'other'"),
        (["--dropout", "0.1", "--only", "usual"], "--dropout", "usual has none"),
        (["--dropout", "1.5"], "--dropout", "0.9"),
        (["--device", "nowhere"], "--device", "torch cannot use 'nowhere' here"),
        (["--device", "meta"], "--device", "on it tensors have shapes and no numbers"),
        (["--out", __file__], "--out", "is a file; name a folder"),
        (["--render", "no-such.json"], "--render", "cannot read no-such.json"),
        (["--render", __file__], "--render", "it is not JSON"),
    ],
)
def test_a_wrong_option_is_named_with_exit_code_2(arguments: list[str], option: str, message: str) -> None:
    if "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]
    code, _, stderr = run_bench(*arguments)
    assert code == 2
    text = " ".join(stderr.replace("│", " ").split())
    assert re.search(f"Invalid value for '?{option}'?: ", text)
    assert message in text
    assert "Traceback" not in text


def test_a_foreign_json_is_not_rendered(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text('{"rows": []}')
    code, _, stderr = run_bench("--render", str(path), "--out", str(tmp_path))
    assert code == 2
    assert "is not a result of lln bench" in " ".join(stderr.replace("│", " ").split())


def test_help_teaches() -> None:
    code, stdout, _ = run_bench("--help")
    assert code == 0
    assert "Examples: lln bench --quick" in " ".join(stdout.split())


def plan_on_cpu(**options: Any) -> BenchPlan:
    return make_plan(**{"device": CPU, **options})


def test_tokens_set_the_batch_and_shapes_replace_the_grid() -> None:
    assert plan_on_cpu(lengths=[96, 400], tokens=200).shapes == [Shape(2, 12, 96, 64), Shape(1, 12, 400, 64)]
    assert plan_on_cpu(shapes="3x2x64x8, 1x4x32x16,3x2x64x8").shapes == [Shape(3, 2, 64, 8), Shape(1, 4, 32, 16)]


def test_a_gpu_has_more_attentions_and_peers_make_a_run_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    ours = [name for name in ATTENTIONS if not name.startswith("fla-")]
    assert choose_attentions(None, None, [False, True], cuda) == ours
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace())
    beside = ["flash", "cudnn", "LLN", "LLN+Diag"]
    assert choose_attentions(None, "fla", [True], cuda) == [*beside, "fla-linear", "fla-gla"]
    assert choose_attentions("fla-gla", "fla", [True], cuda) == ["fla-gla"]
    plan = plan_on_cpu(peers="fla", device=cuda, quick=True)
    assert (plan.causal, plan.dtype) == ([True], torch.bfloat16)


def test_dropout_is_timed_where_there_is_one_and_checked_without(tmp_path: Path) -> None:
    code, _, _ = run_bench("--dropout", "0.5", "--causal", "no", "--lengths", "32", *TINY, "--out", str(tmp_path))
    assert code == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["attention"]: row for row in result["rows"]}
    assert rows.keys() == {"flash", "math", *VARIANTS}
    assert [name for name, row in rows.items() if row["error"]] == ["flash"]  # torch has none with dropout on a CPU
    assert max(error for entry in result["checks"] for error in entry["errors"].values()) < 1e-4
    assert "dropout 0.5" in (tmp_path / "bench.md").read_text()
    plan = plan_on_cpu(dropout=0.5, shapes="1x2x64x8")
    for name in ("math", *VARIANTS):
        forward = build_works(plan, ATTENTIONS[name], plan.shapes[0], False)["forward"]
        assert not torch.equal(forward(), forward()), name


@pytest.mark.parametrize("causal", [False, True])
def test_math_is_softmax_attention(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 33, 8, dtype=torch.float64) for _ in range(3))
    got = ATTENTIONS["math"].build(Case(Shape(2, 3, 33, 8), causal, torch.float64, CPU))(q, k, v)
    torch.testing.assert_close(got, scaled_dot_product_attention(q, k, v, is_causal=causal))


def test_the_usual_form_is_lln_with_the_statistics_of_the_whole_batch() -> None:
    q, k, v = (torch.randn(2, 3, 333, 8) for _ in range(3))
    got = ATTENTIONS["usual"].build(Case(Shape(2, 3, 333, 8), False, torch.float32, CPU))(q, k, v)
    expected = LLNAttention(3, 8, statistics="batch")(q, k, v)
    assert (got - expected).norm() < 2e-3 * expected.norm()  # its epsilon, and n - 1 under its deviations


def test_fla_gets_its_own_layout_and_no_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def linear(q: Tensor, k: Tensor, v: Tensor, normalize: bool = True) -> tuple[Tensor, None]:
        assert not normalize
        seen.append((q.shape, q.is_contiguous()))
        return q * k * v, None

    def run_gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, None]:
        assert g.shape == q.shape
        assert (g <= 0).all()  # logarithms of gates
        return linear(q, k, v, normalize=False)

    modules: dict[str, dict[str, Any]] = {"fla": {}, "fla.ops": {}}
    modules |= {"fla.ops.linear_attn": {"chunk_linear_attn": linear}, "fla.ops.gla": {"chunk_gla": run_gated}}
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    shape = Shape(2, 3, 16, 8)
    plan = BenchPlan([shape], ["fla-linear", "fla-gla"], [True], torch.float32, CPU, 1, 0)
    for name in plan.attentions:
        calls = build_works(plan, ATTENTIONS[name], shape, True)
        assert [gradient.shape for gradient in calls["training"]()] == 3 * [(2, 16, 3, 8)]
    assert seen == 2 * [((2, 16, 3, 8), True)]


def test_tune_is_handed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    module = types.ModuleType("lln.lab.bench.tune")
    module.__dict__["tune"] = lambda **options: (options["progress"]("a step"), calls.append(options))
    monkeypatch.setitem(sys.modules, "lln.lab.bench.tune", module)
    assert run_bench("--tune", "--device", "cpu", "--out", str(tmp_path))[0] == 0
    assert [(options["device"], options["out"]) for options in calls] == [(CPU, tmp_path)]


class FakeCuda:
    """torch.cuda with a clock that only work moves: 3 ms for a plain call, 2 ms for the replay of a graph."""

    def __init__(self, capture_fails: bool) -> None:
        self.now, self.capturing, self.streams = 0.0, False, ["default"]
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                assert outer.streams == ["default"]
                self.at = outer.now

            def elapsed_time(self, other: "Event") -> float:
                return other.at - self.at

        class Graph:
            def replay(self) -> None:
                outer.now += 2.0

        @contextlib.contextmanager
        def stream(side: Any) -> Iterator[None]:
            outer.streams.append("side")
            try:
                yield
            finally:
                outer.streams.pop()

        @contextlib.contextmanager
        def graph(graph: Any, stream: Any) -> Iterator[None]:
            outer.capturing = True
            yield
            outer.capturing = False
            if capture_fails:
                raise RuntimeError("operation not permitted when stream is capturing")

        waiting = types.SimpleNamespace(wait_stream=lambda other: None)
        self.Event, self.CUDAGraph, self.stream, self.graph = Event, Graph, stream, graph
        self.Stream = self.current_stream = lambda device: waiting
        self.synchronize = lambda device: None

    def work(self) -> None:
        if not self.capturing:
            self.now += 3.0


@pytest.mark.parametrize(("capture_fails", "ms"), [(False, 2.0), (True, 3.0)])
def test_device_time_replays_a_graph_or_says_that_it_could_not(
    capture_fails: bool, ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda(capture_fails)
    monkeypatch.setattr(torch, "cuda", fake)
    timing, graph = clock.time_device(fake.work, repeats=7, device=torch.device("cuda"))
    assert graph is not capture_fails
    assert (timing.low, timing.median, timing.high, timing.repeats) == (ms, ms, ms, 7)


def test_the_measured_plan_reports_as_many_steps_as_it_says() -> None:
    plan = plan_on_cpu(shapes="1x2x32x8,2x2x16x8", only="flash,LLN-sample", repeats=1)
    steps: list[str] = []
    measure(plan, progress=steps.append)
    assert len(steps) == plan.steps()
