"""Packed sequences as DataCollatorWithFlattening makes them: each comes out as it would alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import lln.hf
from helpers.hf_models import BERT, CAUSAL, build_model, expect_guess, output, parameter_gradients, sentence, tokens

LENGTHS = (7, 1, 11)
SMALL = {**BERT, "num_hidden_layers": 1}
OTHERS: dict[str, Any] = {
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(ffn_dim=40, word_embed_proj_dim=32, **{k: v for k, v in SMALL.items() if k != "intermediate_size"})
    ),
    "eurobert": lambda: tf.EuroBertModel(tf.EuroBertConfig(num_key_value_heads=4, **SMALL)),
    "minilm": lambda: tf.BertModel(tf.BertConfig(**{**SMALL, "hidden_size": 48, "num_attention_heads": 12})),
}
KINDS = ("bert", "roberta", "distilbert", "electra", "albert", "minilm", "eurobert", "opt", "llama", "gpt2")


def make(kind: str, implementation: str = "lln_diag") -> Any:
    if kind not in OTHERS:
        model = build_model(kind, implementation)
    else:
        torch.manual_seed(0)
        model = OTHERS[kind]().double().eval()
    own: dict[str, Any] = {"block_size": 4} if implementation == "lln_diag" else {}
    with expect_guess():
        return lln.hf.convert(model, implementation, **own, statistics="fixed" if kind in (*CAUSAL, "opt") else "auto")


def pack(kind: str, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Sequences, and the batch that transformers' collator makes of them."""
    apart = [tokens(seed, 1, length) for seed, length in enumerate(LENGTHS)]
    collator = tf.DataCollatorWithFlattening(**options)
    batch = collator([{"input_ids": one[0].tolist()} for one in apart], return_tensors="pt")
    batch.pop("labels")
    if kind == "roberta":
        batch["position_ids"] += 1  # behind the padding's, which is 0 here
    return apart, batch


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_is_as_it_would_be_alone(kind: str) -> None:
    model = make(kind)
    apart, batch = pack(kind)
    want = torch.cat([output(model, input_ids=one) for one in apart], 1)
    with torch.no_grad():
        assert (output(model, **batch) - want).abs().max() < 1e-9
    two = {name: value.repeat(2, 1) for name, value in batch.items()}
    assert (output(model, **two) - want).abs().max() < 1e-9
    _, flash = pack(kind, return_flash_attn_kwargs=True)
    assert (output(model, **flash) - want).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_training_has_the_gradients_of_sequences_apart(kind: str) -> None:
    model = make(kind, "lln")
    apart, batch = pack(kind)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    want = parameter_gradients(model, torch.cat([output(model, input_ids=one) for one in apart], 1))
    found = parameter_gradients(model, output(model, **batch))
    assert found.keys() == want.keys()
    assert all((found[name] - want[name]).abs().max() < 1e-9 for name in want)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_activation_checkpointing_keeps_them_apart_when_it_computes_again(kind: str) -> None:
    model = make(kind, "lln")
    _, batch = pack(kind)
    want = parameter_gradients(model, output(model, **batch))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    out = output(model, **batch)
    with torch.no_grad():
        output(model, input_ids=tokens(5))  # another call in between
    found = parameter_gradients(model, out)
    assert all((found[name] - want[name]).abs().max() < 1e-9 for name in want)


def test_blocks_and_p_end_with_a_sequence() -> None:
    model = make("bert")
    _, batch = pack("bert")
    p = model(**batch, output_attentions=True).attentions[0]
    own = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).bool()
    assert p.shape == (1, 4, 19, 19)
    assert (p[:, :, ~own] == 0).all()
    assert (p.sum(-1) - 1).abs().max() < 1e-9


def test_a_packed_call_leaves_no_cache() -> None:
    model = make("llama")
    _, batch = pack("llama")
    assert model(**batch).past_key_values is None
    assert model(input_ids=batch["input_ids"]).past_key_values is not None


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "roberta",
            {"shift": -1},
            "counts its tokens from 1 on, .*position_ids_start=1",
        ),
        ("bert", {"attention_mask": torch.ones(1, 19)}, "begin anew within a row, .* leave attention_mask out"),
        ("llama", {"past_key_values": lln.hf.LLNCache()}, "packed sequences cannot go into a cache"),
        ("llama", {"past_key_values": tf.DynamicCache()}, "packed sequences cannot go into a cache"),
    ],
)
def test_what_would_leak_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    model = make(kind)
    _, batch = pack(kind)
    batch["position_ids"] += changes.pop("shift", 0)
    with pytest.raises(ValueError, match=words) as problem:
        model(**batch, **changes)
    sentence(problem)


def test_layers_with_softmax_attention_would_not_keep_them_apart() -> None:
    model = lln.hf.convert(build_model("bert", "sdpa"), "lln", layers=[0])
    _, batch = pack("bert")
    with pytest.raises(ValueError, match="layers with softmax attention would not keep packed") as problem:
        model(**batch)
    sentence(problem)


def test_positions_of_padding_begin_nothing() -> None:
    model = make("bert")
    ids, mask = tokens(0, 2), torch.ones(2, 23, dtype=torch.int64)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = output(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    assert (padded[:1, 5:] - output(model, input_ids=ids[:1, 5:])).abs().max() < 1e-9


def test_softmax_that_would_be_learned_from_may_not_leak_either() -> None:
    model = make("bert")
    _, batch = pack("bert")
    with pytest.raises(ValueError, match="softmax attention does not keep packed sequences apart here") as problem:
        lln.hf.convert(model, statistics="running", batches=[batch])
    sentence(problem)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_trainer_with_the_collator_has_the_loss_of_sequences_apart(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: Any
    if kind == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))
    else:
        model = tf.BertForTokenClassification(tf.BertConfig(**shape))
    lln.hf.convert(model, "lln_diag", block_size=4, statistics="fixed" if kind == "llama" else "auto")
    data, losses, count = [], 0.0, 0
    for seed, length in enumerate(LENGTHS):
        ids = tokens(seed, 1, length)
        labels = ids[0] if kind == "llama" else ids[0] % 2
        data.append({"input_ids": ids[0].tolist(), "labels": labels.tolist()})
        scores = model.eval()(input_ids=ids).logits[0]  # the collator leaves the first label of each sequence out
        scores = scores[:-1] if kind == "llama" else scores[1:]
        losses += float(torch.nn.functional.cross_entropy(scores, labels[1:], reduction="sum").detach())
        count += length - 1
    told = tf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=len(data), max_steps=1, logging_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = tf.Trainer(model, told, train_dataset=data, data_collator=tf.DataCollatorWithFlattening())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses / count, rel=1e-5)
