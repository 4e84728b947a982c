"""Assisted decoding gives what the target gives alone, whatever attention the target and its draft model have; and what
cannot be is refused in one sentence whose remedy works."""

from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.hf_models import build_model, build_writer, tokens

GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 14}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def make(name: str, **changes: Any) -> Any:
    if name == "softmax":
        return build_writer("llama", "sdpa", **changes)
    options: dict[str, Any] = {"block_size": 4} if name == "lln_diag" else {}
    return lln.hf.convert(build_writer("llama", name, **changes), name, statistics="fixed", **options)


@pytest.mark.parametrize("draft", ["softmax", "lln_diag"])
@pytest.mark.parametrize("target", ["softmax", "lln", "lln_diag"])
def test_a_draft_model_changes_no_token(target: str, draft: str) -> None:
    model, x = make(target), tokens(0, 1, 11)
    want = model.generate(x, **GREEDY)
    for assistant in (make(draft), make(draft, num_hidden_layers=1)):
        assert torch.equal(model.generate(x, assistant_model=assistant, **GREEDY), want)


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_prompt_lookup_changes_no_token_and_leaves_nothing_behind(name: str) -> None:
    model, x, cache = make(name), tokens(0, 1, 5).repeat(1, 3), lln.hf.LLNCache()
    want = model.generate(x, **GREEDY)
    assert torch.equal(model.generate(x, prompt_lookup_num_tokens=3, past_key_values=cache, **GREEDY), want)
    assert not any(layer.past for layer in cache.layers)
    assert cache.get_seq_length() == want.shape[1] - 1


def test_a_recorded_cache_goes_back_to_any_token_since_the_last_crop() -> None:
    model, x, cache = make("lln_diag"), tokens(0, 1, 23), lln.hf.LLNCache()
    cache.activate_past_recording()
    for first, last, removed in ((0, 9, 0), (9, 16, 5), (11, 12, 1)):
        model(x[:, first:last], past_key_values=cache)
        cache.crop(-removed)
    model(x[:, 11:13], past_key_values=cache)
    model(x[:, 13:17], past_key_values=cache)
    cache.crop(-5)  # over the whole of the last call, and into the one before it
    rest = model(x[:, 12:], past_key_values=cache).logits
    torch.testing.assert_close(rest, model(x).logits[:, 12:])
    with pytest.raises(ValueError, match="only those since the last crop"):
        cache.crop(-12)


def test_deepseek_generates_as_without_a_cache() -> None:
    config = tf.DeepseekV3Config(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=30, max_position_embeddings=64, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = lln.hf.convert(tf.DeepseekV3ForCausalLM(config), "lln_diag", statistics="fixed", block_size=4).eval()
    x = torch.arange(1, 10)[None]
    want = model.generate(x, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(x, **GREEDY), want)
    with pytest.raises(RuntimeError, match=r"use past_key_values=DynamicCache\(\)"):
        model.generate(x, past_key_values=lln.hf.LLNCache(), **GREEDY)
    assert torch.equal(model.generate(x, past_key_values=tf.DynamicCache(), **GREEDY), want)


def test_a_mask_that_depends_on_values_is_refused_when_a_model_is_converted_or_made() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.DogeConfig(**shape, num_key_value_heads=2, vocab_size=30, max_position_embeddings=64)
    model = tf.DogeForCausalLM(config)
    with pytest.raises(ValueError, match=r"DogeAttention of .* adds scores of its own to single query-key pairs"):
        lln.hf.convert(model, "lln", statistics="fixed")
    assert model(torch.arange(9)[None]).logits.isfinite().all()  # it is as it was
    config._attn_implementation = "lln"
    with pytest.raises(ValueError, match=r"DogeAttention of .* adds scores of its own to single query-key pairs"):
        tf.DogeForCausalLM(config)


def test_a_wrong_name_is_answered_with_ours_too() -> None:
    with pytest.raises(ValueError, match="'lln', 'lln_diag'"):
        build_model("bert", "lln_dig")
