"""Options are checked, changed by one call, and what cannot be done is refused in one sentence."""

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.hf_models import (
    BERT,
    CAUSAL,
    build_model,
    expect_guess,
    expect_harm,
    find_minilm,
    make_config,
    output,
    record_calls,
    sentence,
    tokens,
)
from helpers.tensors import relative_error
from lln.hf.find import attention_modules
from lln.hf.masks import lln_mask


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"matching": "best"}, "matching must be 'paper', 'variance', 'entropy' or 'data'"),
        ({"statistics": "all"}, "statistics must be one of"),
        ({"statistics": {"encoder": "sample"}}, "statistics must be one of"),
        ({"statistics": {"encoder": "sample", "decoder": "batch"}}, "looks at all tokens"),
        ({"block_size": 0}, "block_size must be a positive int"),
        ({"block_size": None}, "implementation='lln'"),
        ({"mix": 2.0}, "mix must lie between 0 and 1"),
        ({"mix": "both"}, "mix must be a number, 'ratio', 'scales' or 'evidence'"),
        ({"learnable": "head"}, "learnable goes with statistics='fixed'"),
        ({"learnable": "all", "statistics": "fixed"}, "learnable must be None, 'head' or 'channel'"),
        ({"coefficients": "row", "statistics": "fixed"}, "coefficients must be None"),
        ({"matching": "data", "statistics": "fixed"}, "needs alpha and beta"),
        ({"momentum": 3.0}, "momentum must lie between 0 and 1"),
        ({"length": 0}, "length must be a positive int"),
        ({"blocksize": 3}, "unknown option 'blocksize'; allowed are implementation"),
        ({"implementation": 3}, "implementation must be a name"),
        ("lln", "must be a dict of options"),
    ],
)
def test_wrong_options_in_a_config_are_named(held: Any, message: str) -> None:
    made = make_config("bert")
    made.lln = {"implementation": "lln_diag", **held} if isinstance(held, dict) else held
    if held == {"learnable": "head"}:
        made.lln["statistics"] = "sample"
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as problem:
        tf.BertModel(made)
    sentence(problem)


def make_small(kind: type, **more: Any) -> Any:
    return kind(**{**BERT, **more})


REFUSED_MODELS = {
    "mpnet": lambda: make_small(tf.MPNetConfig),
    "falcon": lambda: make_small(tf.FalconConfig),
    "longformer": lambda: make_small(tf.LongformerConfig, attention_window=8),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]], vocab_size=61
    ),
    # Only a part of these ignores it.
    "git": lambda: make_small(tf.GitConfig, bos_token_id=1, eos_token_id=2, vision_config={**BERT, "image_size": 16}),
}


@pytest.mark.parametrize("kind", REFUSED_MODELS)
def test_models_that_ignore_the_interface_raise(kind: str) -> None:
    with pytest.raises(ValueError, match="would go on to run softmax") as problem:
        tf.AutoModel.from_config(REFUSED_MODELS[kind](), attn_implementation="lln_diag")
    sentence(problem)
    model = tf.AutoModel.from_config(REFUSED_MODELS[kind]())
    before = model.config._attn_implementation
    for change in (model.set_attn_implementation, lambda name: lln.hf.convert(model, name)):
        with pytest.raises(ValueError, match="would go on to run softmax"):
            change("lln")
        assert model.config._attn_implementation == before
        assert not hasattr(model.config, "lln")


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_what_needs_pairs_is_refused_in_one_sentence(name: str) -> None:
    x = tokens(0)
    modern = make_small(tf.ModernBertConfig, local_attention=8, global_attn_every_n_layers=2)
    with pytest.raises(ValueError, match="sliding_window") as problem:
        tf.AutoModel.from_config(modern, attn_implementation=name)
    sentence(problem)
    sizes = tf.T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=40, vocab_size=61)
    for make in (
        lambda: tf.T5EncoderModel._from_config(copy.deepcopy(sizes), attn_implementation=name),
        lambda: lln.hf.convert(tf.T5EncoderModel(sizes), name),
    ):
        with pytest.raises(ValueError, match=r"position_bias|would go on to run softmax") as problem:
            make()
        sentence(problem)
    for kind in ("bert", "distilbert", "llama"):
        model = build_model(kind, name)
        for mask in (torch.ones(3, 1, 23, 23), torch.ones(3, 1, 1, 23, dtype=torch.bool)):
            with pytest.raises(ValueError, match=r"attention_mask must be a padding mask \[batch, length\]") as problem:
                model(input_ids=x, attention_mask=mask)
            assert "[3, 1," in sentence(problem)


def test_an_attention_that_was_not_set_up_says_so() -> None:
    model = build_model("bert", "sdpa")
    model.config._attn_implementation = "lln"  # behind the back of everyone
    with pytest.raises(RuntimeError, match=r"model\.set_attn_implementation\('lln'\)") as problem:
        model(input_ids=tokens(0))
    sentence(problem)


def test_scales_have_no_single_p() -> None:
    model = build_model("bert")
    lln.hf.convert(model, mix="scales")
    with pytest.raises(ValueError, match="output_attentions: every value channel has its own P"):
        model(input_ids=tokens(0), output_attentions=True)


def test_without_transformers_the_extra_is_named() -> None:
    code = """
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "transformers" else real(name, *a)
try:
    import lln.hf
except ModuleNotFoundError as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'lln-attention[hf]'" in done.stdout


SENTENCES = [
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "The central bank raised interest rates again this quarter, to the surprise of most analysts.",
]


def embed(model: Any, tokenizer: Any, sentences: list[str]) -> torch.Tensor:
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def test_minilm_embeds_sentences_saves_and_reloads(tmp_path: Path) -> None:
    folder = find_minilm()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    with expect_harm():
        model = tf.AutoModel.from_pretrained(folder, attn_implementation="lln_diag")
    softmax = tf.AutoModel.from_pretrained(folder)
    ours, theirs = (embed(m, tokenizer, SENTENCES) for m in (model, softmax))
    assert relative_error(ours, theirs) > 1e-3
    likeness = ours @ ours.T
    assert likeness[0, 1] > likeness[0, 2]
    assert (ours * theirs).sum(-1).min() > 0.7  # one block of 64 is half softmax
    for row, one in enumerate(SENTENCES):  # alone as in the batch
        assert relative_error(embed(model, tokenizer, [one])[0], ours[row]) < 1e-5
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = tf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(embed(again, tf.AutoTokenizer.from_pretrained(tmp_path), SENTENCES), ours)
    pipe = tf.pipeline("feature-extraction", model=again, tokenizer=tokenizer)
    with record_calls() as calls:
        assert torch.tensor(pipe(SENTENCES[0])).shape[-1] == 384
    assert len(calls) == 6


@pytest.mark.parametrize("length", [20, 30])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_mask_of_another_length_is_named(kind: str, length: int) -> None:
    model = build_model(kind)
    more = {"use_cache": False} if kind in CAUSAL else {}
    with pytest.raises(ValueError, match="mask must have .*23.*; got .*" + str(length)):
        model(input_ids=tokens(0), attention_mask=torch.ones(3, length), **more)


def test_a_mask_shorter_than_what_the_cache_holds_is_named() -> None:
    model = build_model("llama")
    first = model(input_ids=tokens(0), use_cache=True)
    with pytest.raises(ValueError, match="each of the 46 tokens, those in the cache included") as problem:
        model(input_ids=tokens(1), past_key_values=first.past_key_values, attention_mask=torch.ones(3, 23))
    sentence(problem)


def test_a_text_tower_whose_masks_are_causal_is_a_decoder_from_the_start() -> None:
    with expect_guess():
        model = tf.CLIPTextModel._from_config(make_small(tf.CLIPTextConfig), attn_implementation="lln_diag")
    model.double().eval()
    assert {(m.lln.kind, m.lln.statistics) for _, m in attention_modules(model)} == {("decoder", "fixed")}
    x = tokens(0)
    changed = x.clone()
    changed[:, 15:] = tokens(9)[:, 15:]
    wishes: list[dict[str, Any]] = [{}, {"statistics": "running", "batches": [{"input_ids": x}]}]
    for options in wishes:
        with expect_guess():
            lln.hf.convert(model, block_size=4, **options)
        assert torch.equal(output(model, input_ids=x)[:, :15], output(model, input_ids=changed)[:, :15])


def test_a_decoder_whose_self_attention_is_not_called_causal_has_blocks() -> None:
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
             (("layers", 1), ("attention_heads", 4), ("ffn_dim", 40))}  # fmt: skip
    made = tf.NllbMoeConfig(d_model=32, vocab_size=61, num_experts=2, **sides)
    with expect_guess():
        model = tf.NllbMoeModel._from_config(made, attn_implementation="lln_diag").double().eval()
    found = {name: (m.lln.kind, m.lln.cross, m.lln.block_size) for name, m in attention_modules(model)}
    assert found == {
        "encoder.layers.0.self_attn": ("encoder", False, 64),
        "decoder.layers.0.self_attn": ("decoder", False, 64),
        "decoder.layers.0.cross_attention": ("decoder", True, None),
    }
    changed = tokens(1)
    changed[:, 15:] = tokens(9)[:, 15:]
    first, second = (output(model, input_ids=tokens(0), decoder_input_ids=x)[:, :15] for x in (tokens(1), changed))
    assert torch.equal(first, second)


def test_a_mask_that_is_made_twice_is_the_mask() -> None:
    """As PaliGemma does it: for the model inside, which does it again."""
    model = build_model("llama")
    want = output(model, input_ids=tokens(0))
    for given in (None, torch.ones(3, 23, dtype=torch.bool)):
        once = lln_mask(3, 23, attention_mask=given, q_length=23, q_offset=0, device="cpu")
        assert torch.equal(output(model, input_ids=tokens(0), attention_mask=once), want)
