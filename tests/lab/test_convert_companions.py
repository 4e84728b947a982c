"""`lln convert` changes a model and nothing that lies beside it: pooling, normalisation, prompts, tokenizer files."""

import filecmp
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.command import run_command
from helpers.hf_models import build_model, make_tokenizer, write_words
from lln.lab.convert.companions import fetch_companions, find_transformer, list_companions

run_convert = functools.partial(run_command, "convert", columns=160)
QUICK = ("--match-only", "--block-size", "8", "--batch-size", "2")
PARTS = {"1_Pooling": {"pooling_mode_cls_token": True}, "2_Dense": {"in_features": 32}, "3_Normalize": None}


def make_sentences(folder: Path, inside: str = "") -> Path:
    """A folder as sentence-transformers writes it, with a model whose places are few."""
    place = folder / inside
    build_model("bert", "sdpa", max_position_embeddings=64).float().save_pretrained(place)
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(place)
    (place / "special_tokens_map.json").write_text('{"pad_token": "[PAD]"}')
    (place / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    types = {inside: "sentence_transformers.models.Transformer"}
    types |= {part: f"sentence_transformers.models.{part[2:]}" for part in PARTS}
    modules = [{"idx": i, "name": str(i), "path": part, "type": kind} for i, (part, kind) in enumerate(types.items())]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Q: "}}')
    for part, held in PARTS.items():
        (folder / part).mkdir()
        if held:
            (folder / part / "config.json").write_text(json.dumps(held))
    save_file({"linear.weight": torch.eye(32)}, folder / "2_Dense" / "model.safetensors")
    return folder


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(write_words(700))
    return path


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_every_file_beside_the_model_comes_along(inside: str, text: Path, tmp_path: Path) -> None:
    source, out = make_sentences(tmp_path / "source", inside), tmp_path / "out"
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_text("the softmax model in another form")
    (source / inside / "pytorch_model.bin").write_text("and in another")
    code, said, err = run_convert(source, out, "--calibration", text, *QUICK)
    assert code in (0, 3, 4), err
    mine = {f"{inside}/{name}".removeprefix("/") for name in ("config.json", "model.safetensors")} | {"README.md"}
    others = {"onnx/model.onnx", f"{inside}/pytorch_model.bin".removeprefix("/")}
    kept = list_files(source) - mine - others
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= kept
    for name in kept:
        assert filecmp.cmp(source / name, out / name, shallow=False), name
    assert not others & list_files(out)
    new = {f"{inside}/modeling_lln.py".removeprefix("/"), "conversion.json"}
    assert list_files(out) == kept | mine | new
    report = json.loads((out / "conversion.json").read_text())
    assert set(report["files"]["kept"]) == kept
    assert set(report["files"]["left_out"]) == {"onnx", *others} - {"onnx/model.onnx"}
    assert "sentence-transformers loads it, too, after `import lln.hf`" in said
    assert "Not in the folder, because other forms of the softmax model may be in it: " in said
    card = (out / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert "license: mit" in card
    assert json.loads((out / inside / "config.json").read_text())["lln"]["implementation"] == "lln_diag"


def test_a_longer_model_is_given_longer_texts(text: Path, tmp_path: Path) -> None:
    source, out = make_sentences(tmp_path / "source"), tmp_path / "out"
    code, _, err = run_convert(source, out, "--calibration", text, *QUICK, "--length", "96")
    assert code in (0, 3, 4), err
    assert json.loads((out / "sentence_bert_config.json").read_text()) == {"max_seq_length": 96, "do_lower_case": False}
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 96
    assert filecmp.cmp(source / "special_tokens_map.json", out / "special_tokens_map.json", shallow=False)
    assert load_file(out / "model.safetensors")["embeddings.position_embeddings.weight"].shape[0] == 96


def test_a_folder_without_modules_keeps_the_files_beside_the_model(tmp_path: Path) -> None:
    for name in ("config.json", "vocab.txt", "model.safetensors", "model.safetensors.index.json", "note.md"):
        (tmp_path / name).write_text("{}")
    for name in ("openvino", "checkpoint-7", ".cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.json").write_text("{}")
    found = {path.as_posix(): stays for path, stays in list_companions(tmp_path)}
    weights = {"model.safetensors", "model.safetensors.index.json", "openvino", "checkpoint-7"}
    assert found == dict.fromkeys(("config.json", "vocab.txt", "note.md"), False) | dict.fromkeys(weights, True)
    assert find_transformer(tmp_path) == ""


def test_of_a_hub_id_the_files_in_the_cache_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    held = tmp_path / "models--me--mine"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text("0123456789")
    make_sentences(held / "snapshots" / "0123456789")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    folder, known = fetch_companions("me/mine")
    assert folder is not None
    assert os.path.samefile(folder, held / "snapshots" / "0123456789")
    assert not known  # nobody could say whether there is more
    nothing: Any = fetch_companions("me/other")
    assert nothing == (None, False)
