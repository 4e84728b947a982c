"""Attention of one's own on the command line: `file.py:function`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lln
from helpers.command import run_command
from lln.lab.core.errors import WrongOption
from lln.lab.core.plugin import load_attention, names_file

SOURCE = """
import torch

def attend(query, key, value, *, is_causal=False, key_mask=None, dropout_p=0.0, scale=1.0):
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    allowed = allowed.tril() if is_causal else allowed
    allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, -1e30)
    return torch.dropout(scores.softmax(-1) * allowed, dropout_p, dropout_p > 0) @ value
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "my_plugin.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    sys.modules.pop("my_plugin", None)


def test_compare_takes_a_file(plugin: Path, tmp_path: Path) -> None:
    sizes = ("--heads", "1", "--dim", "16", "--repeats", "1", "--lengths", "32,48", "--temperatures", "1")
    found = run_command(
        "compare", "--only", "softmax", "--plugin", f"{plugin}:attend", *sizes, "--out", str(tmp_path / "out")
    )
    assert found.exit_code == 0, found.output
    result = json.loads((tmp_path / "out" / "compare.json").read_text())
    rows = {row["mechanism"]: row for row in result["concentration"]}
    assert rows["attend"]["overlap"] == pytest.approx(1.0)
    assert rows["attend"]["entropy"] == pytest.approx(rows["softmax"]["entropy"])


def test_train_takes_a_file(plugin: Path, tmp_path: Path) -> None:
    options = ("--set", "optimisation.steps=2", "--set", "record_every=0", "--out", str(tmp_path / "run"))
    for _ in range(2):  # the second call finds the run finished, whose config names the mechanism
        found = run_command("train", "image", "--attention", f"{plugin}:attend", "--device", "cpu", *options)
        assert found.exit_code == 0, found.output
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["lln"]["implementation"] == "attend"


def test_a_file_that_registers_keeps_its_name(plugin: Path) -> None:
    plugin.write_text(SOURCE.replace("def attend", "import lln\n\n@lln.register('fancy', title='Fancy')\ndef attend"))
    assert load_attention(f"{plugin}:attend", "--plugin") == "fancy"
    assert lln.mechanisms()["fancy"].title == "Fancy"
    assert load_attention(f"{plugin}:attend", "--plugin") == "fancy"  # again, anew


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("nowhere.py:attend", SOURCE, "there is no file"),
        ("{path}:other", SOURCE, "defines no other"),
        ("{path}", SOURCE, "must be file.py:function"),
        ("{path}:attend", "import nothing_like_it", "does not run: ModuleNotFoundError"),
        ("{path}:softmax", "def softmax(query, key, value): ...", "lln does not use itself"),
        ("{path}:attend", "def attend(x): ...", "must take query, key and value"),
    ],
)
def test_what_is_wrong_is_one_sentence(plugin: Path, text: str, source: str, message: str) -> None:
    plugin.write_text(source)
    with pytest.raises(WrongOption, match=message):
        load_attention(text.format(path=plugin), "--plugin")


def test_a_module_that_is_loaded_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(SOURCE)
    with pytest.raises(WrongOption, match="has the name of the module json"):
        load_attention(f"{tmp_path / 'json.py'}:attend", "--plugin")
    assert sys.modules["json"] is json
    assert not names_file("lln_diag")
