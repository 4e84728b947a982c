"""Checkpoints that are damaged or named with intent: one line names the file or the model, and a name stays a name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from helpers.command import assert_sentence, run_command
from helpers.hf_models import make_config
from lln.files import write_text
from lln.lab.convert.layer_report import write_report
from lln.lab.core.tables import escape_markdown
from lln.lab.data.made_once import build_once
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.models import Sizes, build
from lln.lab.train.run_folder import list_facts

NAME = "evil](javascript:x) <script> `rm` |\n\n# Kept"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tf.BertModel(make_config("bert")).save_pretrained(folder)
    return folder


def test_weights_that_are_not_finite_are_named(model: Path) -> None:
    loaded = tf.BertModel.from_pretrained(model)
    for value in (float("nan"), float("-inf")):
        with torch.no_grad():
            loaded.encoder.layer[1].output.dense.weight[3, 4] = value
        loaded.save_pretrained(model)
        answer = run_command("inspect", model, "--text", "some words")
        assert answer.exit_code == 2
        said = ("are not finite: encoder.layer.1.output.dense.weight holds NaN or infinity",)
        assert_sentence(answer.stderr, *said, command="lln inspect", alone=False)
        assert not answer.stdout


@pytest.mark.parametrize("harm", ["cut", "empty", "nonsense", "config cut", "config of another kind"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_damaged_checkpoint_is_one_line(harm: str, command: str, model: Path, tmp_path: Path) -> None:
    weights, config = model / "model.safetensors", model / "config.json"
    if harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif harm == "empty":
        weights.write_bytes(b"")
    elif harm == "nonsense":
        weights.write_bytes(b"\xff" * 1000)
    elif harm == "config cut":
        config.write_text(config.read_text()[:-10])
    else:
        config.write_text('["bert"]')
    (tmp_path / "notes.txt").write_text("words " * 100)
    more: dict[str, list[Any]] = {
        "inspect": ["--text", "words"],
        "convert": [tmp_path / "out", "--calibration", tmp_path / "notes.txt"],
    }
    answer = run_command(command, model, *more[command])
    assert answer.exit_code == 2
    assert_sentence(answer.stderr, str(model), command=f"lln {command}", alone=False)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("harm", ["cut", "nonsense"])
def test_weights_to_start_from_that_are_damaged_are_named(harm: str, tmp_path: Path) -> None:
    folder = tmp_path / "start"
    config = change(recipe("mlm", "tiny", "lln"), {"model.layers": "1", "data.vocabulary": "300"})
    build(config, Sizes(300, padding=1)).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50] if harm == "cut" else b"\xff" * 64)
    again = change(config, {"model.start": str(folder)})
    with pytest.raises(ValueError, match=r"^model.start: .*start cannot be loaded: ") as caught:
        build(again, Sizes(300, padding=1))
    assert "\n" not in str(caught.value)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^model.start: .*config.json cannot be read"):
        build(again, Sizes(300, padding=1))


def test_facts_name_a_start_without_reading_on_where_its_run_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("[]")
    config = change(recipe("glue", "tiny", "lln", "sst2"), {"model.start": str(tmp_path / "run" / "model")})
    with pytest.raises(ValueError, match=r"config.json must hold an object"):
        list_facts(config)


@pytest.mark.parametrize("name", [NAME, "a_b/c_d", "_x_", "a*b*", "![x](http://y)", "<!--", "&amp;", "~~gone~~"])
def test_a_name_is_no_markdown(name: str) -> None:
    shown = escape_markdown(name)
    assert "\n" not in shown
    assert "<" not in shown
    for mark in "`*[]|!~":
        assert shown.count(mark) == shown.count(f"\\{mark}")
    assert escape_markdown("sentence-transformers/all-MiniLM_L6.v2") == "sentence-transformers/all-MiniLM_L6.v2"


def test_a_card_shows_a_name_as_text() -> None:
    layer = {"entropy": 1.0, "spectral_gap": 0.5, "error": 0.1, "mix": None}
    result: dict[str, Any] = {
        "request": {"model": NAME, "attention": "lln", "match_only": True, "matching": "paper", "read": "paper",
                    "distill": 0, "fine_tune": 0},
        "class": "BertModel", "stages": ["matched"], "hidden_error": {"matched": 0.1}, "loss": {},
        "layers": [{"layer": "a", "label": "1", "softmax": layer, "matched": layer}],
        "passages": {"learned": 8, "reported": 4, "judged": 8, "held_out": True, "called": "passages", "tokens": 8},
        "verdict": {"verdict": "kept", "measure": "cosine", "value": 0.99, "bar": 0.95, "blocks_alone": 0.9,
                    "passages": 8, "held_out": True, "better_than_blocks": True},
        "files": {"kept": [], "left_out": ["<b>.bin", "two"], "known": True},
    }  # fmt: skip
    told = write_report(result, licence="MIT](x)")
    for part in ("<script>", "\n# Kept", "evil](java", "<b>", "MIT](x)"):
        assert part not in told
    for part in (r"evil\](javascript:x)", "&lt;script&gt;", "&lt;b&gt;.bin and two", r"MIT\](x)"):
        assert part in told
    assert result["request"]["model"] == NAME  # in conversion.json it is what it is


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_what_is_made_once_follows_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        folder = build_once("words", {"a": umask}, lambda place: write_text(place / "a.txt", "a"), tmp_path)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o666 & ~umask}
    assert json.loads((folder / "manifest.json").read_text())["key"] == {"a": umask}
