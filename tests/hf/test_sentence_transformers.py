"""sentence-transformers with LLN attention: converted in place or by `lln convert`, saved and loaded, with the pooling
and the normalisation that the model had."""

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - transformers' Trainer needs it
import numpy as np
import pytest
import torch
import transformers as tf
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

import lln.hf
from helpers.command import run_command
from helpers.hf_models import BERT, build_model, make_batch, make_tokenizer, sentence, write_words

run_convert = functools.partial(run_command, "convert", columns=160)
TEXTS = write_words(31 * 6, seed=1).splitlines()
OPTIONS: dict[str, Any] = {"block_size": 8, "mix": "ratio", "learnable": "head"}


def make_sentences(folder: Path, pooling: str = "cls") -> Any:
    """A SentenceTransformer that pools this way, and then normalises."""
    build_model("bert", "sdpa", max_position_embeddings=64).float().save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    width = BERT["hidden_size"]
    return SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(width, pooling), Dense(width, 12), Normalize()], device="cpu"
    )


def encode(model: Any) -> Any:
    return model.encode(TEXTS, batch_size=3, show_progress_bar=False)


def batches(model: Any) -> list[dict[str, Any]]:
    return [dict(model.tokenizer(TEXTS[at : at + 3], padding=True, return_tensors="pt")) for at in (0, 3)]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_converted_folder_pools_and_normalises_as_before(pooling: str, tmp_path: Path) -> None:
    softmax = make_sentences(tmp_path / "bare", pooling)
    softmax.save(str(tmp_path / "source"))
    (tmp_path / "text.txt").write_text(write_words(700))
    quick = ("--match-only", "--matching", "variance", "--block-size", "8")
    code, _, err = run_convert(tmp_path / "source", tmp_path / "out", "--calibration", tmp_path / "text.txt", *quick)
    assert code in (0, 3, 4), err
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert [type(module) for module in model] == [type(module) for module in softmax]
    assert model[1].pooling_mode == pooling
    found, want = encode(model), encode(softmax)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert found.shape == want.shape == (6, 12)
    # What pools is the model's own: by hand, of the last hidden states.
    (batch, *_) = batches(model)
    with torch.no_grad():
        hidden = model[0].auto_model(**batch).last_hidden_state
        rows = batch["attention_mask"].unsqueeze(-1).float()
        pooled = hidden[:, 0] if pooling == "cls" else (hidden * rows).sum(1) / rows.sum(1)
        by_hand = torch.nn.functional.normalize(torch.tanh(softmax[2].linear(pooled)), dim=-1)
    assert np.allclose(found[:3], by_hand.numpy(), atol=1e-5)
    assert not np.allclose(found, want, atol=1e-3)  # it runs LLN attention
    assert model[0].auto_model.config._attn_implementation == "lln_diag"


def test_a_sentence_transformer_is_converted_taught_and_saved(tmp_path: Path) -> None:
    softmax = make_sentences(tmp_path / "bare")
    model: Any = copy.deepcopy(softmax)
    assert lln.hf.convert(model, "lln_diag", **OPTIONS) is model
    losses: list[float] = []
    lln.hf.fit(model, batches(model))
    lln.hf.distill(model, batches(model), steps=6, progress=lambda done, loss: losses.append(loss))
    lln.hf.fine_tune(model, softmax, batches(model), steps=2)
    assert losses[-1] < losses[0]
    want = encode(model)
    model.save(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert np.array_equal(encode(again), want)
    assert again[0].auto_model.config.lln["learnable"] == "head"
    lln.hf.extend_positions(again, 96)
    assert again[0].auto_model.config.max_position_embeddings == 96


ALONE = """
import sys, numpy, transformers
from sentence_transformers import SentenceTransformer
assert "lln" not in sys.modules
for folder in sys.argv[2:]:
    try:
        SentenceTransformer(folder, device="cpu")
    except ValueError as problem:
        print("refused" if "needs `import lln.hf` before the model is loaded" in str(problem) else problem)
model = SentenceTransformer(sys.argv[1], device="cpu", trust_remote_code=True)
print(model[0].auto_model.config._attn_implementation)
"""


def test_nobody_runs_softmax_where_a_card_of_others_has_taken_the_place_of_ours(tmp_path: Path) -> None:
    model = lln.hf.convert(make_sentences(tmp_path / "bare"), "lln_diag", **OPTIONS)
    model.save(str(tmp_path / "saved"))  # its card is sentence-transformers' own
    body: Any = model[0].auto_model
    trainer = tf.Trainer(
        body, tf.TrainingArguments(str(tmp_path / "trained"), report_to=[], use_cpu=True), train_dataset=[{}]
    )
    trainer.save_model()
    trainer.create_model_card()
    make_tokenizer().save_pretrained(tmp_path / "trained")
    for folder in ("saved", "trained"):
        assert "import lln.hf" not in (tmp_path / folder / "README.md").read_text()
    places = [str(tmp_path / folder) for folder in ("saved", "trained")]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, places[0], *places], check=True, capture_output=True, text=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.stdout.split() == ["refused", "refused", "lln_diag"]
    held = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert held["lln_values"]


def test_a_module_with_two_models_is_refused() -> None:
    pair = torch.nn.ModuleList([build_model("bert"), build_model("vit")])
    with pytest.raises(TypeError, match=r"ModuleList holds 2 \(BertModel, ViTModel\): give them one by one") as problem:
        lln.hf.convert(pair)
    sentence(problem)
    one = torch.nn.Sequential(build_model("bert", "sdpa"))
    assert lln.hf.convert(one, "lln") is one
    assert one[0](**make_batch("bert")).last_hidden_state.isfinite().all()
