"""One call changes a model's options, and measures what they need on inputs."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from helpers.hf_models import CAUSAL, ENCODERS, build_model, make_batch, output, record_calls, sentence, tokens
from helpers.tensors import relative_error
from lln.hf.find import attention_modules
from lln.hf.watch import WATCHERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"implementation": "sdpa"}, "model.set_attn_implementation('sdpa') runs it again"),
        ({"implementation": "flash"}, "implementation must be one of lln, lln_diag"),
        ({"implementation": "lln-diag"}, "Perhaps you mean 'lln_diag'"),
        (
            {"blocksize": 8},
            "has no option 'blocksize'; see the arguments of lln.hf.convert. Perhaps you mean 'block_size'.",
        ),
        ({"implementation": "lln", "block_size": 8}, "block_size goes with implementation='lln_diag'"),
        ({"alpha": 1.0}, "alpha and beta go together"),
        ({"matching": "data"}, "matching='data' needs batches"),
        ({"alpha": -1.0, "beta": 1.0}, "alpha must be positive"),
        ({"alpha": torch.ones(3), "beta": 1.0}, "alpha must be a number or a tensor"),
        ({"alpha": {}, "beta": {}}, "alpha has no value for encoder.layer.0"),
        ({"statistics": "running", "batches": []}, "batches must hold at least one batch"),
        ({"statistics": "running", "batches": [torch.ones(3)]}, "batches must be dicts"),
        ({"matching": "worst"}, "matching must be 'paper', 'variance', 'entropy' or 'data'"),
        ({"implementation": "lln", "mix": "ratio"}, "mix goes with implementation='lln_diag'"),
        ({"batches": [{"input_ids": tokens(0)}]}, "batches are measured only for"),
        ({"alpha": 1.0, "beta": 1.0, "batches": [{"input_ids": tokens(0)}]}, "batches are measured only for"),
        ({"alpha": "x", "beta": 1.0}, "alpha must be a number or a tensor; got 'x'"),
        ({"alpha": {"nowhere": 1.0}, "beta": 1.0}, "alpha: 'nowhere' is no attention module"),
        (
            {"matching": "data", "statistics": "running", "batches": [{"input_ids": tokens(0)}]},
            "matching='data' goes with statistics='fixed'",
        ),
        (
            {"statistics": "running", "batches": [{"input_ids": tokens(0, 1), "cu_seq_lens_q": torch.tensor([0, 23])}]},
            "batches: softmax attention does not keep packed sequences apart here",
        ),
        (
            {"statistics": "running", "batches": [{"input_ids": tokens(0), "attention_mask": torch.ones(3, 1, 1, 23)}]},
            "batches: attention_mask must be a padding mask",
        ),
    ],
)
def test_a_wrong_conversion_is_named_and_leaves_the_model_alone(arguments: dict[str, Any], message: str) -> None:
    for start in ("sdpa", "lln"):
        model, given = build_model("bert", start), make_batch("bert")
        want, held = output(model, **given), getattr(model.config, "lln", None)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)) as problem:
            lln.hf.convert(model, **arguments)
        sentence(problem)
        assert getattr(model.config, "lln", None) == held
        assert model.config._attn_implementation == start
        assert torch.equal(output(model, **given), want)
    with pytest.raises(TypeError, match="model must be a transformers model"):
        lln.hf.convert(torch.nn.Linear(2, 2), **arguments)


def test_causal_models_refuse_statistics_that_look_ahead() -> None:
    model = build_model("llama")
    for statistics in ("sample", "batch"):
        with pytest.raises(ValueError, match="would depend on later ones") as problem:
            lln.hf.convert(model, statistics=statistics)
        sentence(problem)
    assert model.config.lln["statistics"] == "auto"


def test_a_model_that_brings_scaled_queries_gets_the_same_attention() -> None:
    made = tf.OPTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=40, vocab_size=61, word_embed_proj_dim=32,
        max_position_embeddings=64,
    )  # fmt: skip
    model = tf.OPTModel(made).double().eval()
    with torch.no_grad():
        model.decoder.layers[0].self_attn.q_proj.weight.mul_(30.0)
    lln.hf.convert(model, statistics="running", block_size=4, batches=[{"input_ids": tokens(0)}])
    with record_calls() as calls:
        output(model, input_ids=tokens(0))
    call = calls[0]
    plain = lln.LLNAttention(4, 8, statistics="running", block_size=4, scale=1.0).eval()
    queries = call.q.transpose(0, 1).flatten(1)
    plain.running_variance_q.copy_(queries.var(1))
    plain.running_variance_k.copy_(call.k.transpose(0, 1).flatten(1).var(1))
    want = plain(call.q, call.k, call.v, is_causal=True)
    assert relative_error(call.out.transpose(1, 2), want) < 1e-6


def test_every_kind_of_matching_reaches_the_attention() -> None:
    given = make_batch("bert")
    seen = {}
    kinds: tuple[Any, ...] = ("paper", "variance", "entropy", "data")
    for matching in kinds:
        model = build_model("bert")
        lln.hf.convert(model, "lln", matching=matching, batches=[given] if matching == "data" else None)
        with record_calls() as calls:
            output(model, **given)
        call = calls[0]
        want = lln.LLNAttention(4, 8, matching="paper" if matching == "data" else matching)
        if matching != "data":
            assert relative_error(call.out.transpose(1, 2), want(call.q, call.k, call.v, key_mask=call.mask)) < 1e-12
        seen[matching] = call.out
    assert all(relative_error(seen[a], seen[b]) > 1e-4 for a in seen for b in seen if a < b)


@pytest.mark.parametrize("kind", [*ENCODERS, *CAUSAL, "bart", "vit"])
def test_batches_measure_the_softmax_model(kind: str) -> None:
    model, batches = build_model(kind), [make_batch(kind, s) for s in range(2)]
    before = dict(model.named_buffers())
    lln.hf.convert(model, statistics="running", batches=batches)
    # Once more by hand: the same queries and keys from softmax's own run.
    softmax = build_model(kind, "sdpa")
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, module in attention_modules(softmax):
        found[name] = []

        def hook(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
            mask = kwargs.get("attention_mask")
            found[name].append((args, mask))

        module.register_forward_pre_hook(hook, with_kwargs=True)
    for batch in batches:
        output(softmax, **batch)
    name, module = next(iter(attention_modules(softmax)))
    layer = dict(attention_modules(model))[name].lln
    assert layer.running_count == 1
    assert not torch.equal(layer.running_variance_q, torch.ones_like(layer.running_variance_q))
    if kind == "bert":
        queries: list[list[torch.Tensor]] = [[], []]
        keys: list[list[torch.Tensor]] = [[], []]
        for (args, _), batch in zip(found[name], batches, strict=True):
            valid = batch["attention_mask"].bool()
            for store, projection in ((queries, module.query), (keys, module.key)):
                store[0].append(projection(args[0])[valid])
        for store, measured in ((queries, layer.running_variance_q), (keys, layer.running_variance_k)):
            want = torch.cat(store[0]).unflatten(-1, (4, 8)).transpose(0, 1).flatten(1).var(1)
            assert relative_error(measured, want) < 1e-6
    assert not WATCHERS
    assert model.config._attn_implementation == "lln_diag"
    assert set(before) <= set(dict(model.named_buffers()))


def test_data_matching_brings_the_entropy_to_that_of_softmax() -> None:
    model, batches = build_model("gpt2", "sdpa"), [make_batch("gpt2", s) for s in range(2)]

    def entropy(implementation: str | None = None, **options: Any) -> torch.Tensor:
        if implementation is None:
            model.set_attn_implementation("eager")
        else:
            lln.hf.convert(model, implementation, **options)
        with torch.no_grad():
            p = model(input_ids=tokens(0), output_attentions=True).attentions[0]
        return torch.special.entr(p).sum(-1).mean((0, 2))

    softmax = entropy()
    matched = entropy("lln", matching="data", batches=batches)
    unmatched = entropy("lln", matching="paper", statistics="fixed", alpha=2.1, beta=2.1)
    assert (matched - softmax).abs().mean() < 0.25 * (unmatched - softmax).abs().mean()


def test_given_numbers_are_those_used() -> None:
    model, given = build_model("bert"), make_batch("bert")
    names = [name for name, _ in attention_modules(model)]
    alpha = {name: torch.linspace(1, 2, 4) + i for i, name in enumerate(names)}
    beta = {name: torch.linspace(1, 2, 32).view(4, 8) for name in names}
    lln.hf.convert(model, "lln", alpha=alpha, beta=beta)
    assert model.config.lln["coefficients"] == "channel"
    with record_calls() as calls:
        output(model, **given)
    for call, name in zip(calls, names, strict=True):
        want = lln.lln_attention(
            call.q, call.k, call.v, alpha[name].double()[None, :, None], beta[name].double()[None], key_mask=call.mask
        )
        assert relative_error(call.out.transpose(1, 2), want) < 1e-6  # 1 to 2 in float32 steps
    model.train()
    lln.hf.convert(model, learnable="channel")
    kept = model.encoder.layer[0].attention.self.lln.log_alpha
    assert kept.requires_grad
    assert kept.shape == (4, 8)


def test_what_was_measured_stays_when_other_options_change() -> None:
    model, given = build_model("bert"), make_batch("bert")
    lln.hf.convert(model, statistics="running", batches=[given])
    layer = model.encoder.layer[0].attention.self
    measured = layer.lln.running_variance_q.clone()
    lln.hf.convert(model, matching="entropy", block_size=16)
    assert torch.equal(layer.lln.running_variance_q, measured)
    assert (layer.lln.matching, layer.lln.block_size, layer.lln.statistics) == ("entropy", 16, "running")
    model.set_attn_implementation("lln")
    assert torch.equal(layer.lln.running_variance_q, measured)
    model.set_attn_implementation("lln_diag")
    assert layer.lln.block_size == 16


def test_options_that_replace_each_other() -> None:
    model, given = build_model("bert"), make_batch("bert")
    start = output(model, **given)
    lln.hf.convert(model, matching="data", batches=[given])
    assert (model.config.lln["statistics"], model.config.lln["coefficients"]) == ("fixed", "head")
    lln.hf.convert(model, statistics="running", batches=[given])
    assert (model.config.lln["matching"], model.config.lln["coefficients"]) == ("paper", None)
    lln.hf.convert(model, matching="data", batches=[given])
    lln.hf.convert(model, matching="paper")
    assert model.config.lln["statistics"] == "auto"
    assert torch.equal(output(model, **given), start)
    lln.hf.convert(model, learnable="head")
    assert model.config.lln["statistics"] == "fixed"
    lln.hf.convert(model, statistics="sample")
    assert model.config.lln["learnable"] is None
    assert torch.equal(output(model, **given), start)


def test_a_learned_mix_is_not_lost_by_a_switch() -> None:
    model = build_model("bert")
    lln.hf.convert(model, mix="ratio")
    with pytest.raises(ValueError, match="would be lost") as problem:
        model.set_attn_implementation("lln")
    sentence(problem)
    assert model.config._attn_implementation == "lln_diag"
    lln.hf.convert(model, "lln", mix=0.5)
    assert not [n for n, _ in model.named_parameters() if ".lln." in n]


def test_coefficients_go_to_the_part_whose_statistics_are_fixed() -> None:
    parts = {"encoder": "sample", "decoder": "fixed"}
    for options in ({"alpha": 1.5, "beta": 1.5}, {"matching": "data", "batches": [make_batch("bart")]}):
        model = build_model("bart")
        lln.hf.convert(model, statistics=parts, **options)
        for name, module in attention_modules(model):
            decoder = name.startswith("decoder")
            assert module.lln.statistics == ("fixed" if decoder else "sample")
            assert ("fixed_alpha" in dict(module.lln.named_buffers())) == decoder
        if "alpha" in options:
            assert (model.decoder.layers[0].self_attn.lln.fixed_alpha == 1.5).all()


def test_packed_sequences_are_measured_whole() -> None:
    model = build_model("llama")
    x, positions = tokens(0, 1), torch.cat([torch.arange(15), torch.arange(8)])[None]
    with recorded_projection(model.model.layers[0].self_attn.k_proj) as seen:
        lln.hf.convert(
            model, statistics="running", batches=[{"input_ids": x, "position_ids": positions, "use_cache": False}]
        )
    # Rotary positions turn pairs of channels, so that the sum of squares is that of the projection.
    squares = seen[0].unflatten(-1, (2, 8)).square().sum((0, 1, 3))
    layer = model.model.layers[0].self_attn.lln
    assert (layer.running_variance_k * (23 * 8 - 1) <= squares * (1 + 1e-6)).all()
    assert (layer.running_variance_k * (23 * 8 - 1) > 0.8 * squares).all()


def test_padding_of_the_encoder_says_nothing_about_the_queries_of_a_decoder() -> None:
    model, given = build_model("bart"), make_batch("bart")
    given["decoder_input_ids"] = tokens(1)  # of the encoder's length, by chance
    cross = model.decoder.layers[0].encoder_attn
    with recorded_projection(cross.q_proj) as seen:
        parts = {"encoder": "sample", "decoder": "running"}
        lln.hf.convert(model, statistics=parts, batches=[given])
    want = seen[0].unflatten(-1, (4, 8)).transpose(1, 2).transpose(0, 1).flatten(1).var(1)
    assert relative_error(cross.lln.running_variance_q, want) < 1e-6


@contextlib.contextmanager
def recorded_projection(layer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    yield seen
    handle.remove()


def test_packed_cross_attention_has_offsets_of_its_own() -> None:
    module = build_model("bart", "lln").decoder.layers[0].encoder_attn
    q, k, v = torch.randn(3, 1, 4, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cu_q, cu_k = (torch.tensor(o, dtype=torch.int32) for o in ([0, 4, 12], [0, 9, 12]))
    out = lln.hf.interface.attend("lln", module, q, k, v, None, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)[0]
    apart = [
        lln.hf.interface.attend("lln", module, q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], None)[0]
        for a, b, c, d in ((0, 4, 0, 9), (4, 12, 9, 12))
    ]
    assert relative_error(out, torch.cat(apart, 1)) < 1e-12
