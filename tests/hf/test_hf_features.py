"""What people do with models: train, compile, copy, generate, switch."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.hf_models import (
    ALL,
    CAUSAL,
    VOCABULARY,
    build_model,
    build_writer,
    expect_guess,
    make_batch,
    make_config,
    output,
    parameter_gradients,
    record_calls,
    tokens,
)
from helpers.tensors import relative_error
from lln.hf.find import attention_modules
from lln.hf.interface import collect_nothing


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "albert"])  # it has no checkpointing at all
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(kind: str, reentrant: bool) -> None:
    models = []
    for checkpointing in (False, True):
        model = build_model(kind)
        lln.hf.convert(model, block_size=8, statistics="running", mix="ratio")
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for name in ("dropout", "attention_dropout", "activation_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        given = make_batch(kind) | ({"use_cache": False} if kind in (*CAUSAL, "bart") else {})
        if kind in ("vit", "deit"):
            given["pixel_values"].requires_grad_()
        first, second = (parameter_gradients(model, output(model, **given)) for _ in range(2))
        models.append((first, second, model))
    (first, second, plain), (saved, again, other) = models
    assert any("mix_logit" in name for name in first)
    for want, found in ((first, saved), (second, again)):
        assert want.keys() == found.keys()
        assert max(relative_error(found[n], want[n], 1e-12) for n in want) < 1e-9
    assert any(not torch.equal(first[n], second[n]) for n in first)  # the running statistics moved on
    buffers = dict(plain.eval().named_buffers())
    assert all(torch.allclose(b, buffers[n]) for n, b in other.eval().named_buffers() if "running" in n)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("kind", ["vit", "llama", "bart"])
def test_compiled_in_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    one: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1} if kind == "bart" else {"num_hidden_layers": 1}
    model, given = build_model(kind, **one), make_batch(kind)
    lln.hf.convert(model, block_size=8, statistics="running", mix="ratio")
    if kind in (*CAUSAL, "bart"):
        given["use_cache"] = False
    want = output(model, **given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found = output(compiled, **given)
    assert relative_error(found, want) < 1e-12


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_sample_statistics_compile_and_train() -> None:
    torch._dynamo.reset()
    still: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "num_hidden_layers": 1}
    model, given = build_model("bert", **still), make_batch("bert")
    model.train()
    want = parameter_gradients(model, output(model, **given))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = parameter_gradients(compiled, output(compiled, **given))
    assert all(f"_orig_mod.{name}" in found for name in want)
    assert max(relative_error(found[f"_orig_mod.{name}"], want[name], 1e-12) for name in want) < 1e-9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_packing_inside_a_compiled_graph_stops_instead_of_leaking() -> None:
    torch._dynamo.reset()
    model = build_model("llama", "lln")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, positions = tokens(0, 1, 12), torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"cu_seq_lens_q|Observed exception"):
        compiled(input_ids=x, position_ids=positions, use_cache=False)


def test_copies_are_independent() -> None:
    model, given = build_model("bert"), make_batch("bert")
    lln.hf.convert(model, statistics="running")
    other = copy.deepcopy(model)
    want = output(model, **given)
    other.train()
    output(other, **given)
    output(other, **make_batch("bert", 3))
    other.eval()
    assert not torch.equal(output(other, **given), want)
    assert torch.equal(output(model, **given), want)


def test_models_with_different_options_live_side_by_side() -> None:
    options: list[dict[str, Any]] = [
        {"implementation": "lln"}, {"block_size": 4}, {"block_size": 8}, {"matching": "entropy"}, {"mix": 0.9},
        {"statistics": "batch"},
    ]  # fmt: skip
    models = [build_model("bert") for _ in options]
    for model, each in zip(models, options, strict=True):
        lln.hf.convert(model, **each)
    outputs = [output(model, **make_batch("bert")) for model in models]
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert relative_error(one, other) > 1e-6
        alone = build_model("bert")
        lln.hf.convert(alone, **options[i])
        assert torch.equal(output(alone, **make_batch("bert")), one)


def test_wrapped_projections_are_used() -> None:
    """As adapters do it: linear layers are replaced by modules around them."""

    class Around(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base = base
            self.shift = torch.nn.Parameter(torch.full((32,), 0.5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * (1 + self.shift)

    model, given = build_model("bert"), make_batch("bert")
    want = output(model, **given)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.encoder.layer:
        layer.attention.self.query = Around(layer.attention.self.query)
    assert relative_error(output(model, **given), want) > 1e-4
    assert {name.split(".")[-1] for name in parameter_gradients(model, output(model, **given))} == {"shift"}


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("kind", [*CAUSAL, "bart"])
def test_generation_with_a_growing_cache_equals_full_recomputation(kind: str, name: str) -> None:
    model = build_writer(kind, name)
    options: dict[str, Any] = {"block_size": 4} if name == "lln_diag" else {}
    batch = make_batch(kind)
    lln.hf.convert(model, statistics={"encoder": "sample", "decoder": "running"}, batches=[batch], **options)
    x = tokens(5)
    mask = torch.ones_like(x)
    mask[0, :9] = 0  # left padding
    how = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(x, cache_implementation="dynamic", **how)
    assert torch.equal(cached, model.generate(x, use_cache=False, **how))
    beams = model.generate(x, num_beams=3, cache_implementation="dynamic", **how)
    assert torch.equal(beams, model.generate(x, num_beams=3, use_cache=False, **how))
    if kind in CAUSAL:
        alone = model.generate(x[:1, 9:], **how | {"attention_mask": mask[:1, 9:]})
        assert torch.equal(cached[:1, -9:], alone[:, -9:])


def test_logits_with_a_cache_are_those_without() -> None:
    model = build_model("llama")
    lln.hf.convert(model, statistics="fixed", block_size=4)
    x = tokens(0)
    want = output(model, input_ids=x, use_cache=False)
    first = model(input_ids=x[:, :10], use_cache=True)
    second = model(input_ids=x[:, 10:], past_key_values=first.past_key_values, use_cache=True, output_attentions=True)
    assert relative_error(torch.cat([first[0], second[0]], 1), want) < 1e-12
    assert second.attentions[0].shape == (3, 4, 13, 23)


def test_a_static_cache_is_refused() -> None:
    model = build_model("llama")
    cache = tf.StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(ValueError, match="StaticCache"):
        model(input_ids=tokens(0), past_key_values=cache)


def test_training_learns_with_every_kind_of_option() -> None:
    x = tokens(0, 8, 12)
    choices: list[dict[str, Any]] = [
        {"mix": "ratio"},
        {"mix": "scales"},
        {"learnable": "head"},
        {"statistics": "running"},
    ]
    for options in choices:
        model = build_model("bert", head=tf.AutoModelForMaskedLM, spread=1.0).float()
        lln.hf.convert(model, **options)
        model.train()
        optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
        losses = []
        for _ in range(25):
            loss = model(input_ids=x, labels=x).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < 0.6 * losses[0] < 0.7 * torch.tensor(float(VOCABULARY)).log() * 1.2


def test_a_decoder_that_nobody_converted_warns_once_and_names_the_remedy() -> None:
    for kind in (*CAUSAL, "bart"):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = tf.AutoModel.from_config(make_config(kind), attn_implementation="lln_diag")
            for name in ("lln", "sdpa", "lln_diag"):
                model.set_attn_implementation(name)
        assert [w.category for w in seen] == [UserWarning]
        assert "lln.hf.convert(model, statistics='running', batches=...)" in str(seen[0].message)
        lln.hf.convert(model, statistics={"encoder": "sample", "decoder": "running"})


def test_shared_modules_of_albert_are_one() -> None:
    model = build_model("albert", num_hidden_layers=4)
    lln.hf.convert(model, statistics="running")
    found = [module for module in model.modules() if isinstance(module, lln.LLNAttention)]
    assert len(found) == 1
    with record_calls() as calls:
        output(model, **make_batch("albert"))
    assert len(calls) == 4


def test_switching_a_part_of_a_model_switches_that_part() -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    made = tf.CLIPConfig(
        text_config={**text, "vocab_size": 60, "max_position_embeddings": 30, "eos_token_id": 59},
        vision_config={**text, "image_size": 20, "patch_size": 4},
    )
    model = tf.CLIPModel(made).eval()
    with expect_guess():
        model.set_attn_implementation({"vision_config": "lln"})
    with record_calls() as calls:
        model(input_ids=tokens(0, 1, 9), pixel_values=torch.randn(1, 3, 20, 20))
    assert [type(c.module).__name__ for c in calls] == ["CLIPAttention"]
    assert calls[0].q.shape[2] == 26
    assert not hasattr(model.config.text_config, "lln")
    assert model.config.vision_config.lln["implementation"] == "lln"


@pytest.mark.parametrize("start", ["sdpa", "lln_diag"])
def test_a_model_of_two_models_switches_both(start: str, tmp_path: Path) -> None:
    """EncoderDecoderModel gives the models inside it new configs, of which their attention knows nothing."""
    decoding = {"is_decoder": True, "add_cross_attention": True, "decoder_start_token_id": 1}
    encoder = build_model("bert", start)
    decoder = build_model(
        "bert", start, head=type("Head", (), {"from_config": tf.BertLMHeadModel._from_config}), **decoding
    )
    model = tf.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    given = {"input_ids": tokens(0), "decoder_input_ids": tokens(1, 3, 9)}
    for name, count in (("sdpa", 0), ("lln", 6), ("eager", 0), ("lln_diag", 6)):
        with expect_guess():
            model.set_attn_implementation(name)
        with record_calls() as calls:
            output(model, **given)
        assert len(calls) == count
    model.set_attn_implementation("sdpa")
    parts = {"encoder": "sample", "decoder": "running"}
    lln.hf.convert(model, statistics=parts, block_size=4, batches=[given])
    with record_calls() as calls:
        want = output(model, **given)
    assert len(calls) == 6
    model.save_pretrained(tmp_path)
    assert torch.equal(output(tf.EncoderDecoderModel.from_pretrained(tmp_path), **given), want)


def test_a_model_that_collects_nothing_leaves_others_alone() -> None:
    one, two, x = build_model("bert", "lln"), build_model("bert", "lln"), make_batch("bert")
    with collect_nothing(one):
        assert not any(module.lln.collects for _, module in attention_modules(one))
        assert all(module.lln.collects for _, module in attention_modules(two))
        assert len(two(**x, output_attentions=True).attentions) == 2
    assert all(module.lln.collects for _, module in attention_modules(one))
