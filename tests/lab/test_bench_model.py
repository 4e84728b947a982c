"""lln bench --model: whole models, each beside torch's attention, checked before anything is timed."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.command import run_command
from helpers.hf_models import build_model
from lln.hf.attach import ModelAttention
from lln.lab.bench import model_times
from lln.lab.bench.calls import CheckFailed
from lln.lab.core.errors import WrongOption

CPU = torch.device("cpu")
run_bench = functools.partial(run_command, "bench")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in ("bert", "llama", "vit"):
        found[kind] = tmp_path_factory.mktemp(kind)
        build_model(kind, "sdpa").save_pretrained(found[kind])
    return found


@pytest.mark.parametrize(("kind", "kinds"), [("bert", 2), ("llama", 4)])
def test_every_attention_is_timed_beside_torchs(
    folders: dict[str, Path], tmp_path: Path, kind: str, kinds: int
) -> None:
    given = ("--lengths", "8,12", "--batch", "2", "--modes", "eager", "--repeats", "2")
    code, stdout, _ = run_bench("--model", str(folders[kind]), *given, "--out", str(tmp_path))
    assert code == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["finished"]
    names = ("inference", "training", "prefill", "token")[:kinds]
    assert [(row["length"], row["kind"]) for row in result["rows"]] == [(n, k) for n in (8, 12) for k in names]
    for row in result["rows"]:
        assert row["failed"] == {}
        assert set(row["times"]) == set(row["ratios"]) == set(row["bytes"]) == {"sdpa", "lln", "lln_diag"}
        assert row["ratios"]["sdpa"] == 1.0
        assert row["ratios"]["lln"] == pytest.approx(row["times"]["lln"]["median"] / row["times"]["sdpa"]["median"])
        assert row["bytes"]["lln"] > 0
    assert all(0 < error < 1e-5 for error in result["errors"].values())
    assert "token, eager, 2 x 12" in stdout or kind == "bert"
    assert {"model.md", "inference-eager.svg", "training-eager.svg"} <= {path.name for path in tmp_path.iterdir()}
    again = tmp_path / "again"
    code, _, _ = run_bench("--render", str(tmp_path / "bench.json"), "--out", str(again))
    assert code == 0
    assert (again / "model.md").read_text() == (tmp_path / "model.md").read_text()


def test_a_training_step_leaves_the_model_as_it_was(folders: dict[str, Path]) -> None:
    plan = model_times.plan_model(model=str(folders["bert"]), device=CPU, lengths=[8], modes="eager", repeats=1)
    model = model_times.build_model(plan, "lln")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    row = model_times.measure_row(plan, {"sdpa": model}, 1, 8, "eager", "training")
    assert set(row["times"]) == {"sdpa"}
    assert not model.training
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name]), name


def test_a_wrong_result_is_not_timed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = model_times.plan_model(model=str(folders["bert"]), device=CPU, lengths=[8], modes="eager", repeats=1)
    forward = ModelAttention.forward

    def attend_wrongly(self: ModelAttention, *args: Any, **options: Any) -> Any:
        out: Any = forward(self, *args, **options)
        return out * (1.0 if self.backend == "eager" else 1.01)

    monkeypatch.setattr(ModelAttention, "forward", attend_wrongly)
    with pytest.raises(CheckFailed, match="lln: hidden states are off by"):
        model_times.measure_model(plan)


def test_what_does_not_work_is_a_result(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = model_times.plan_model(model=str(folders["bert"]), device=CPU, lengths=[8], modes="eager", repeats=1)
    model = model_times.build_model(plan, "lln")
    usual = model_times.make_work

    def fail(plan: Any, built: Any, *rest: Any) -> Any:
        if built is model:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 3 GiB. more")
        return usual(plan, built, *rest)

    monkeypatch.setattr(model_times, "make_work", fail)
    models = {"sdpa": model_times.build_model(plan, "sdpa"), "lln": model}
    row = model_times.measure_row(plan, models, 1, 8, "eager", "inference")
    assert row["failed"] == {"lln": "out of memory: tried to allocate 3 GiB"}
    assert set(row["times"]) == {"sdpa"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"only": "flash"}, "must be among sdpa, lln, lln_diag"),
        ({"modes": "graph"}, "must be among eager, compiled"),
        ({"kinds": "all"}, "must be among inference, training, prefill, token"),
        ({"heads": 4}, "concerns single calls of attention"),
        ({"batch": 2, "tokens": 64}, "already sets the batch"),
    ],
)
def test_options_that_do_not_go_with_a_model_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongOption, match=said):
        model_times.plan_model(model="roberta-base", device=CPU, **given)


def test_commands_say_what_is_wrong(folders: dict[str, Path], tmp_path: Path) -> None:
    for given, said in (
        (("--model", str(folders["vit"])), "does not take tokens alone"),
        (("--model", str(tmp_path / "none")), "there is no folder"),
        (("--modes", "eager"), "goes with --model"),
    ):
        code, _, stderr = run_bench(*given, "--lengths", "8", "--out", str(tmp_path / "out"))
        assert code == 2
        assert said in " ".join(stderr.split())
        assert "Traceback" not in stderr
