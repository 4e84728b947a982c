"""What an earlier version saved loads, and gives what it gave: models, states, caches, weights and runs."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from torch import Tensor

import lln
import lln.hf
from helpers.runs import read_metrics
from helpers.tensors import assert_close

SAVED = Path(__file__).parents[1] / "saved" / "523d99b"
# Not to the last bit: another processor sums in another order.
assert_same = functools.partial(assert_close, tolerance=1e-5)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return load_file(SAVED / "expected.safetensors")


@pytest.mark.parametrize("name", ["encoder", "convolved", "performer", "hedgehog"])
def test_an_encoder_gives_what_it_gave(name: str, expected: dict[str, Tensor]) -> None:
    model = tf.AutoModel.from_pretrained(SAVED / name).eval()
    assert model.config.lln["implementation"] in ("lln_diag", "performer", "hedgehog")
    with torch.no_grad():
        found = model(input_ids=expected["input_ids"], attention_mask=expected["attention_mask"]).last_hidden_state
    assert_same(found, expected[name])


def test_a_decoder_goes_on_from_its_cache(expected: dict[str, Tensor]) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(SAVED / "decoder").eval()
    cache = torch.load(SAVED / "cache.pt", weights_only=False)
    assert isinstance(cache, lln.hf.LLNCache)
    with torch.no_grad():
        assert_same(model(input_ids=expected["input_ids"]).logits, expected["decoder"])
        later = model(input_ids=expected["input_ids"][:, 11:], past_key_values=cache).logits
    assert_same(later, expected["decoder_after_cache"])
    assert_same(later, expected["decoder"][:, 11:])


@pytest.mark.parametrize(("name", "options"), [("lln", {}), ("lln_diag", {"block_size": 4})])
def test_a_state_is_gone_on_from(name: str, options: dict[str, Any], expected: dict[str, Tensor]) -> None:
    state = torch.load(SAVED / f"state_{name}.pt")
    assert isinstance(state, lln.LLNState)
    query, key, value = (expected[part] for part in ("query", "key", "value"))
    found = lln.lln_attention(query, key, value, 1.5, 1.25, is_causal=True, state=state, **options)
    assert_same(found, expected[f"after_state_{name}"])


def test_the_weights_of_a_module_fit(expected: dict[str, Tensor]) -> None:
    module = lln.MultiheadAttention(16, 2, batch_first=True, statistics="running", block_size=4, mix="ratio")
    module.load_state_dict(load_file(SAVED / "multihead.safetensors"))
    x = expected["x"]
    assert_same(module.eval()(x, x, x)[0], expected["multihead"])


SMALL = {
    "model.layers": "1", "model.width": "16", "model.heads": "2", "model.inner": "16", "data.length": "40",
    "data.train": "64", "data.evaluation": "16", "optimisation.steps": "6", "optimisation.batch": "4",
    "optimisation.warmup": "2", "log_every": "1", "save_every": "3", "evaluate_every": "3", "record_every": "3",
    "attention.options.block_size": "8",
}  # fmt: skip


@pytest.mark.parametrize("name", ["finished_run", "stopped_run"])
def test_a_run_ends_where_it_ended(name: str, tmp_path: Path) -> None:
    """One that has ended is read, not run again; one that was stopped goes on from its checkpoint."""
    from lln.lab.recipes import recipe
    from lln.lab.train.config import change
    from lln.lab.train.run import train

    folder = tmp_path / "run"
    shutil.copytree(SAVED / name, folder)
    config = change(recipe("lra", "tiny", "lln_diag", "listops"), SMALL)
    assert config.to_dict() == json.loads((folder / "config.json").read_text())
    result = train(config, folder, cache_dir=tmp_path / "cache")
    wanted = json.loads((SAVED / "finished_run" / "result.json").read_text())
    assert result["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
    if name == "finished_run":
        assert result == wanted
    found, lines = read_metrics(folder), read_metrics(SAVED / "finished_run")
    assert [m["step"] for m in found] == [m["step"] for m in lines]
    for ours, theirs in zip(found, lines, strict=True):
        assert ours.keys() == theirs.keys()
        for field in ("loss", "eval_loss", "grad_norm", "learning_rate", "attention/0/entropy"):
            assert ours.get(field, 0.0) == pytest.approx(theirs.get(field, 0.0), rel=1e-4, abs=1e-12)
