"""A run with `graph` is the ordinary run: on a CPU to the last bit, on a GPU up to rounding."""

import functools
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import masking_utils

from helpers.runs import SMALLEST, Stop, make_tiny, read_metrics, stop_at
from lln.hf.distillation import NotFinite
from lln.lab.data.examples import Stream
from lln.lab.train.graph import AHEAD, Feed
from lln.lab.train.models import Sizes, build, skip_masks
from lln.lab.train.run import train
from lln.lab.train.tasks import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SMALLEST | {
    "optimisation.steps": "20", "log_every": "2", "save_every": "8", "evaluate_every": "8", "record_every": "6",
    "attention.options.block_size": "8",
}  # fmt: skip
tiny = functools.partial(make_tiny, SMALL)


def compare(plain: Any, graph: Any, name: str = "", exactly: bool = DEVICE == "cpu") -> None:
    """Equal on a CPU; on a GPU the order of sums may differ."""
    if isinstance(plain, dict):
        assert plain.keys() == graph.keys(), name
        for key in plain:
            compare(plain[key], graph[key], f"{name}.{key}", exactly)
    elif isinstance(plain, list):
        assert len(plain) == len(graph), name
        for i, (a, b) in enumerate(zip(plain, graph, strict=True)):
            compare(a, b, f"{name}[{i}]", exactly)
    elif isinstance(plain, float) and not exactly:
        assert graph == pytest.approx(plain, rel=2e-3, abs=2e-3), name
    else:
        assert graph == plain, name


@pytest.mark.parametrize(
    ("attention", "task", "name", "changes"),
    [
        ("lln_diag", "mlm", None, {"attention__options__statistics": "batch"}),
        ("lln_diag", "mlm", None, {"attention__options__statistics": "running", "optimisation__clip": "0"}),
        ("lln", "mlm", None, {"optimisation__schedule": "linear"}),
        ("softmax", "mlm", None, {}),
        ("elu", "mlm", None, {}),
        ("lln_diag", "image", None, {"data__options__augment": "true"}),
        ("lln_diag", "lra", "image", {}),
    ],
)  # fmt: skip
def test_a_run_with_a_graph_is_the_run_without(
    attention: str, task: str, name: str | None, changes: dict[str, str], tmp_path: Path, cache: Path
) -> None:
    plain, graph = (tiny(attention, task, name, **changes, graph=g) for g in ("no", "yes"))
    train(plain, tmp_path / "plain", cache_dir=cache, device=DEVICE)
    train(graph, tmp_path / "graph", cache_dir=cache, device=DEVICE)
    compare(read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "graph"))
    files = [{p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*")} for n in ("plain", "graph")]
    assert files[0] == files[1]
    losses = [m["loss"] for m in read_metrics(tmp_path / "graph") if "loss" in m]
    assert min(losses[-3:]) < losses[0]


def test_dropout_in_a_graph_is_drawn_anew_each_step(tmp_path: Path, cache: Path) -> None:
    dropped = {"model__dropout": "0.3", "model__attention_dropout": "0.3", "model__initialisation": "architecture"}
    for name, g in (("plain", "no"), ("graph", "yes")):
        train(tiny(**dropped, graph=g, record_every="0"), tmp_path / name, cache_dir=cache, device=DEVICE)
    found = [[m["loss"] for m in read_metrics(tmp_path / name) if "loss" in m] for name in ("plain", "graph")]
    assert found[1] == pytest.approx(found[0], rel=0.02)  # other numbers are drawn, so only alike
    assert len(set(found[1])) == len(found[1])


def test_padded_sequences_of_one_width_change_nothing_but_rounding(tmp_path: Path, cache: Path) -> None:
    for name, g in (("plain", "no"), ("graph", "yes")):
        made = tiny("lln_diag", "glue", "sst2", graph=g, optimisation__steps="10", record_every="0")
        train(made, tmp_path / name, cache_dir=cache, device=DEVICE)
    found = [[m["loss"] for m in read_metrics(tmp_path / name) if "loss" in m] for name in ("plain", "graph")]
    assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_bfloat16_in_a_graph(tmp_path: Path, cache: Path) -> None:
    for name, g in (("plain", "no"), ("graph", "yes")):
        train(tiny(precision="bfloat16", graph=g), tmp_path / name, cache_dir=cache, device=DEVICE)
    found = [[m["loss"] for m in read_metrics(tmp_path / name) if "loss" in m] for name in ("plain", "graph")]
    assert found[1] == (pytest.approx(found[0], rel=2e-2) if DEVICE == "cuda" else found[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize(
    ("attention", "task", "backend"),
    [
        ("softmax", "mlm", "aot_eager"),  # traced and cut as for any back end; compiling kernels takes longest
        pytest.param("softmax", "mlm", "inductor", marks=pytest.mark.long),
        pytest.param("lln_diag", "mlm", "inductor", marks=pytest.mark.long),
        pytest.param("lln", "image", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_layers_in_a_graph_change_nothing_but_rounding(
    attention: str, task: str, backend: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_backend = functools.partialmethod(torch.nn.Module.compile, backend=backend)
    monkeypatch.setattr(torch.nn.Module, "compile", with_backend)
    for compiled in ("no", "yes"):
        one = tiny(attention, task, optimisation__steps="8", graph="yes", compile=compiled, model__layers="2")
        torch._dynamo.utils.counters.clear()
        train(one, tmp_path / compiled, cache_dir=cache, device=DEVICE)
        # Two layers that are alike, and no break in them: one graph.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (compiled == "yes")
        assert not torch._dynamo.utils.counters["graph_break"]
    plain, compiled_ones = (read_metrics(tmp_path / n) for n in ("no", "yes"))
    assert any("layer" in str(m) or "entropy" in str(m) for m in compiled_ones)  # recorded, in a step of its own
    compare(plain, compiled_ones, exactly=False)


def test_a_stopped_run_with_a_graph_goes_on(tmp_path: Path, cache: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(tiny(graph="yes"), whole, cache_dir=cache, device=DEVICE)

    with pytest.raises(Stop):
        train(tiny(graph="yes"), stopped, cache_dir=cache, device=DEVICE, progress=stop_at(13))
    said: list[str] = []
    train(tiny(graph="yes"), stopped, cache_dir=cache, device=DEVICE, say=said.append)
    assert "Going on from step 8." in said
    compare(read_metrics(whole), read_metrics(stopped))


def test_a_feed_gives_what_the_data_loader_gives(cache: Path) -> None:
    """At any step, also across epochs and where the names of examples run out."""
    data = load(tiny(data__train="60", data__length="128"), cache_dir=cache)
    steps = AHEAD + 20
    stream = Stream(data.train, seed=3, length=4 * steps)
    assert len(stream) > 2 * len(data.train)
    feed = Feed(stream, 4, torch.device(DEVICE))
    for step in (0, 1, 7, 8, AHEAD - 1, AHEAD, AHEAD + 1, AHEAD + 19, 0):
        feed.seek(step)
        found, wanted = feed.batch(), stream.__getitems__(range(4 * step, 4 * step + 4))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].cpu(), wanted[name]) for name in wanted)


def test_a_loss_that_is_not_finite_stops_a_graph(tmp_path: Path, cache: Path) -> None:
    wild = tiny(optimisation__rate="1e30", optimisation__clip="0", graph="yes", record_every="0")
    with pytest.raises(NotFinite, match=r"not finite at step \d+: the weights \S+ are not|first part of the model"):
        train(wild, tmp_path / "run", cache_dir=cache, device=DEVICE)


@pytest.mark.parametrize(
    ("attention", "changes", "message"),
    [
        ("lln_diag", {"optimisation__accumulation": "2"}, "graph needs optimisation.accumulation=1"),
        ("lln_diag", {"precision": "float16"}, "graph needs no float16"),
        ("lln_diag", {"checkpointing": "yes"}, "graph needs checkpointing=no"),
        ("elu", {"model__attention_dropout": "0.1"}, "graph needs model.attention_dropout=0"),
    ],
)
def test_what_a_graph_cannot_hold_is_said(
    attention: str, changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(tiny(attention, **changes, graph="yes"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_padding_a_traced_model_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides nothing would keep torch from its fast attention, and take memory for all pairs of tokens."""
    masks: list[Any] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                masks.append(node.kwargs.get("attn_mask"))
        return graph.forward

    torch.compiler.reset()
    model = build(tiny("softmax"), Sizes(vocabulary=300))
    ids = torch.randint(5, 300, (2, 16))
    asked: list[bool] = []

    def note_asked(tensor: Any = None) -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(masking_utils, "is_tracing", note_asked)
    compiled = torch.compile(model, backend=look)
    for _ in range(2):  # the second time nothing is compiled
        with skip_masks():
            found = compiled(input_ids=ids).logits
    assert masks == [None]
    assert not asked  # transformers of before 5.20 asks, and would make a mask
    torch.testing.assert_close(found, model(input_ids=ids).logits)


def test_masks_are_skipped_in_one_thread_and_while_that_is_asked_for() -> None:
    usual, answers = masking_utils.is_tracing, []

    def ask_elsewhere() -> None:
        thread = threading.Thread(target=lambda: answers.append(masking_utils.is_tracing(None)))
        thread.start()
        thread.join()

    with mock.patch.object(masking_utils, "is_tracing", return_value=True) as traced:
        with skip_masks():
            with skip_masks():
                assert not masking_utils.is_tracing(None)
            assert not masking_utils.is_tracing(None)
            ask_elsewhere()
        assert masking_utils.is_tracing is traced
    assert answers == [True]
    assert masking_utils.is_tracing is usual
