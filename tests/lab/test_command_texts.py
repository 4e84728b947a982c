"""What the command line says: help that shows flags as flags, examples one a line, lists with times, signs of life."""

import json
from pathlib import Path

import pytest
import torch
import typer

from helpers.command import run_command
from lln.lab.cli import reproduce, shared
from lln.lab.cli.app import app
from lln.lab.core import progress
from lln.lab.core.devices import find_device_problem
from lln.lab.core.errors import Refused
from lln.lab.core.pretrained import load_tokenizer

RESULTS = Path(__file__).parents[2] / "results"
GROUP = typer.main.get_command(app)
COMMANDS = list(GROUP.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_flags_without_a_kind_and_examples_one_a_line(name: str) -> None:
    found = run_command(name, "--help")
    assert found.exit_code == 0
    assert "<bool>" not in found.output
    lines = [line.strip() for line in found.output.split("Examples:")[1].splitlines() if line.strip()]
    assert lines[0].startswith(("lln ", "make "))
    assert all(line.count("lln " + name) <= 1 for line in lines)


def test_the_list_of_commands_says_one_sentence_of_each_and_shows_no_kind_of_flags() -> None:
    output = run_command("--help", columns=80).output
    assert "<bool>" not in output
    assert max(map(len, output.splitlines())) <= 80
    assert "cut off" not in output  # what only the help of one command says
    for name in COMMANDS:
        told = GROUP.commands[name].short_help  # type: ignore[attr-defined]
        assert told[0].isupper()
        assert ". " not in told
        assert "\n" not in told


@pytest.mark.parametrize("name", COMMANDS)
def test_device_means_the_same_everywhere(name: str) -> None:
    options = {o: p for p in GROUP.commands[name].params for o in p.opts}  # type: ignore[attr-defined]
    if "--device" not in options:
        assert name in ("info", "plan")  # the one looks at every device, the other at none
        return
    assert options["--device"].show_default == "the GPU where there is one"
    if name == "convert":  # which refuses other things first
        return
    callback = options["--device"].callback
    assert callback is not None


def test_without_a_choice_the_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from lln.lab.cli.shared import choose_device

    assert choose_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("") == "cpu"
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("lln.lab.cli.shared.parse_device", lambda text: asked.append(text) or text)
    assert choose_device("") == "cuda"
    assert asked == ["cuda"]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "this build of torch knows the CPU alone; install a CUDA build of torch, or use --device cpu."),
        ("abacus", "there is no such kind of device; use cpu, cuda, or cuda:1 for the second GPU."),
        ("meta", "tensors have shapes and no numbers; use a device that computes, or use --device cpu."),
        (
            "xla",
            "there is no xla device that this build of torch can use; install a build for it, or use --device cpu.",
        ),
    ],
)
def test_a_device_that_torch_cannot_use_is_refused_with_the_remedy(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    problem = find_device_problem(device)
    assert problem is not None
    assert problem.startswith(f"torch cannot use {device!r} here: ")
    assert problem.endswith(said)


def test_a_gpu_that_is_not_found_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "see whether nvidia-smi lists one" in str(find_device_problem("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "the last GPU is cuda:1, or use device=0." in str(find_device_problem("cuda:2", "device=0"))


def test_the_list_of_figures_has_the_times_that_were_measured() -> None:
    output = run_command("reproduce", "--list", columns=80).output
    assert max(map(len, output.splitlines())) <= 80
    assert "block diagrams" in output
    for name, (title, time) in reproduce.LISTED.items():
        assert name in output
        paths = [RESULTS / "paper" / "tiny" / f"{name}.json", RESULTS / name / "tiny" / f"{name}.json"]
        for path in paths:
            if path.exists():
                runs = json.loads(path.read_text())["runs"]
                minutes = sum(run["seconds"] for run in runs) / 60
                assert time == f"{minutes:.0f} min", name
        if not name.startswith(("fig", "table")):
            assert title.startswith("ours: ")


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.progress_bar(4) as step:
        step("first")
        step("second")
    assert "second, 50 %, after 0 s" in capsys.readouterr().err
    monkeypatch.setattr(progress, "EVERY", 1e9)
    with progress.progress_bar(4) as step:
        step("first")
    assert "after" not in capsys.readouterr().err


def test_a_wrong_choice_is_told_in_our_words_alone() -> None:
    found = run_command("reproduce", "fig3")
    assert found.exit_code == 2
    assert "'fig3' is not one of 'fig1'" in " ".join(found.output.replace("│", " ").split())
    assert "Value error" not in found.output


def test_a_command_that_is_interrupted_says_that_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stopped, shared.explain("compare"):
        raise KeyboardInterrupt
    assert stopped.value.exit_code == 130
    assert capsys.readouterr().err == "lln compare: stopped.\n"


def test_of_several_gpus_train_tells_how_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lln.lab.core.devices.explain", lambda name: None)  # every device is there
    found = run_command("train", "mlm", "--device", "cuda:1")
    assert found.exit_code == 2
    assert "CUDA_VISIBLE_DEVICES" in found.output


def test_a_list_that_is_cut_off_is_not_told_of_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def refuse(*given: object, **options: object) -> None:
        raise ValueError("It could not be made from one of:\n(1) a file\n(2) another")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(Refused) as told:
        load_tokenizer(None, "here", {})
    assert str(told.value).startswith("here has no tokenizer that can be loaded: transformers finds no tokenizer.json")
