"""Flags of a run: compiled models, TensorBoard, and what cannot be asked for."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
import transformers

from helpers.command import run_command
from helpers.runs import SMALLEST, make_tiny, read_metrics, write_options
from lln.lab.recipes import recipe
from lln.lab.train import loop
from lln.lab.train.config import Optimisation
from lln.lab.train.models import Sizes, build
from lln.lab.train.run import train

SMALL = SMALLEST | {
    "optimisation.steps": "6", "log_every": "2", "save_every": "4", "evaluate_every": "6", "record_every": "0",
}  # fmt: skip
tiny = functools.partial(make_tiny, SMALL)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_a_compiled_model_trains_alike_and_goes_on(
    attention: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without code generation, which takes a minute on a CPU and is torch's own affair.
    monkeypatch.setattr(loop, "COMPILER", "aot_eager")
    counters = torch._dynamo.utils.counters["stats"]
    plain = train(tiny(attention), tmp_path / "plain", cache_dir=cache)
    before = counters["unique_graphs"]
    made = train(tiny(attention, compile="yes"), tmp_path / "compiled", cache_dir=cache)
    assert counters["unique_graphs"] > before
    assert made["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)
    for one, other in zip(read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "compiled"), strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    whole = read_metrics(tmp_path / "compiled")
    for lost in ("result.json", "checkpoint-6/manifest.json"):
        (tmp_path / "compiled" / lost).unlink()
    said: list[str] = []
    train(tiny(attention, compile="yes"), tmp_path / "compiled", cache_dir=cache, say=said.append)
    assert "Going on from step 4." in said
    assert read_metrics(tmp_path / "compiled") == whole


def test_a_compiled_model_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="record_every must be 0 with compile"):
        tiny(compile="yes", record_every="2")


@pytest.mark.parametrize("graph", ["no", "yes"])
def test_tensorboard_gets_what_is_logged_and_recorded(graph: str, tmp_path: Path, cache: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    made = tiny(record_every="2", graph=graph)
    train(made, tmp_path / "run", cache_dir=cache, report_to=["tensorboard"])
    files = sorted((tmp_path / "run").rglob("events.out.tfevents.*"))  # of training, and of the evaluation at its end
    found: dict[str, dict[int, float]] = {}
    for event in (event for file in files for event in EventFileLoader(str(file)).Load()):
        for value in event.summary.value:
            if value.HasField("tensor") and value.tensor.float_val:
                found.setdefault(value.tag, {})[event.step] = value.tensor.float_val[0]
    wanted = [m for m in read_metrics(tmp_path / "run") if "heads" not in m]
    names = 0
    for line in wanted:
        for name, value in line.items():
            if name == "step":
                continue
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            assert found[tag][line["step"]] == pytest.approx(value, rel=1e-6)
            names += 1
    assert {
        "train/loss",
        "eval/loss",
        "train/grad_norm",
        "train/attention/0/entropy",
        "train/attention/0/alpha",
    } <= set(found)
    assert sorted(found["train/attention/0/temperature"]) == [1, 3, 5]
    assert names > 20


def test_an_unknown_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report_to must be among tensorboard, wandb, trackio; got 'tensorbord'"):
        train(tiny(), tmp_path / "run", report_to=["tensorbord"])
    with pytest.raises(ValueError, match="report_to: wandb is not installed; install it with: pip install wandb"):
        train(tiny(), tmp_path / "run", report_to=["wandb"])
    result = run_command("train", "mlm", "--out", tmp_path / "run", "--report-to", "paper")
    assert result.exit_code == 2
    assert "got 'paper'" in result.output
    assert not (tmp_path / "run").exists()


def test_flags_of_the_command_line_reach_the_config() -> None:
    result = run_command("train", "mlm", "--graph", "--fsdp", "--dry-run", *write_options(SMALL))
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output[: result.output.rindex("}") + 1])
    assert shown["graph"] is True
    assert shown["fsdp"] is True


def test_the_stored_runs_of_the_tiny_presets_learned() -> None:
    """Of benchmarks/learning.py: every task and attention beats a guess, digits by far."""
    stored = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "learning.json").read_text())
    found = {(row["task"], row["name"], row["attention"]): row for row in stored["rows"]}
    assert len(found) == 27
    for (task, _, _), row in found.items():
        metrics, guess = row["metrics"], row["guess"]
        if task == "mlm":
            assert metrics["loss"] < guess["loss"] - 0.3
            assert row["seconds"] < 180
        else:
            assert metrics["accuracy"] > guess["accuracy"] + 0.05
        if task == "image":
            assert metrics["accuracy"] >= 0.9


def test_a_gpu_that_is_not_there_is_refused_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device: torch cannot use 'cuda' here: .*, or use device=\"cpu\"\.$"):
        train(tiny(), tmp_path / "run", device="cuda")
    assert not (tmp_path / "run").exists()
    found = run_command("train", "mlm", "--device", "cuda", "--out", tmp_path / "run")
    assert found.exit_code == 2
    assert "torch cannot use 'cuda' here" in found.output


def test_what_the_device_or_the_processes_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="precision: float16 needs a GPU"):
        train(tiny(precision="float16"), tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch must be a multiple of accumulation times processes; got 4 for 1 x 3"):
        train(tiny(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("schedule", "name"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")]
)
@pytest.mark.parametrize(("steps", "warmup"), [(13, 0), (40, 7), (5, 5)])
def test_learning_rates_are_those_of_transformers(schedule: str, name: str, steps: int, warmup: int) -> None:
    o = Optimisation(steps=steps, batch=1, rate=3e-4, warmup=warmup, schedule=schedule)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=o.rate)
    wanted = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    for step in range(steps):
        assert loop.find_rate(o, step) == wanted.get_last_lr()[0]  # to the last bit
        optimizer.step()
        wanted.step()


@pytest.mark.parametrize(("task", "before"), [("mlm", 0.02), ("glue", 0.02), ("lra", 64**-0.5), ("image", 0.02)])
def test_the_spread_of_first_weights_can_be_set(task: str, before: float) -> None:
    config = recipe(task, "tiny", "softmax")
    sizes = Sizes(vocabulary=300, padding=1, labels=2, channels=1)
    cases = (("width", 0.0, 64**-0.5), ("width", 0.3, 0.3), ("architecture", 0.0, 0.02), ("", 0.0, before))
    for rule, given, want in (*cases, ("torch", 0.0, (3 * 64) ** -0.5)):
        torch.manual_seed(0)
        model = dataclasses.replace(config.model, width=64, heads=2, initial=given, initialisation=rule)
        built = build(dataclasses.replace(config, model=model), sizes)
        weights = next(w for name, w in built.named_parameters() if ".0." in name and w.ndim == 2)  # of the first layer
        assert float(weights.detach().std()) == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("task", ["mlm", "lra", "image"])
def test_matrices_decay_whatever_their_module_is_called(task: str, pre_norm: bool) -> None:
    config = recipe(task, "tiny", "lln_diag")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, pre_norm=pre_norm))
    model = build(config, Sizes(vocabulary=300, padding=1, labels=2, channels=1))
    decaying = set(loop.find_decaying(model))
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert norms
    assert decaying == {name for name, _ in model.named_parameters()} - norms - biases
