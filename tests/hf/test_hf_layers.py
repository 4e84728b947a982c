"""Models in which some layers run LLN attention and the others stay as they are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import lln.hf
from lln.hf.find import rescale_query
from lln.instruments import record

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0}
HEADS = {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
KINDS = ["sliding_attention", "full_attention"]


def make(kind: str, **given: Any) -> Any:
    """A model of two or three layers with random weights."""
    torch.manual_seed(0)
    name = {"Gemma3": "Gemma3Text"}.get(kind, kind)
    settings: dict[str, Any] = dict(SHAPE)
    if kind == "Bert":
        return transformers.BertModel(transformers.BertConfig(**settings, num_hidden_layers=2, **given)).eval()
    if kind == "ModernBert":
        special = dict.fromkeys(("bos_token_id", "cls_token_id"), 1) | dict.fromkeys(
            ("eos_token_id", "sep_token_id"), 2
        )
        settings |= special | {"num_hidden_layers": 3, "local_attention": 4, "global_attn_every_n_layers": 2}
        return transformers.ModernBertModel(transformers.ModernBertConfig(**settings | given)).eval()
    settings |= HEADS
    if kind in ("Gemma2", "Gemma3", "GptOss"):
        settings |= {"sliding_window": 4, "layer_types": KINDS}
    if kind == "GptOss":
        settings |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    if kind == "Mistral":
        settings |= {"sliding_window": None}
    config = getattr(transformers, f"{name}Config")(**settings | given)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def make_batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def list_attention(model: Any) -> dict[int, Any]:
    from lln.hf.find import attention_modules
    from lln.hf.layers import find_index

    return {find_index(name, module): module for name, module in attention_modules(model)}


@pytest.mark.parametrize("kind", ["ModernBert", "Gemma2", "Gemma3", "GptOss", "Mistral", "Llama", "Bert"])
@pytest.mark.filterwarnings("ignore:.*changes single scores")
def test_other_layers_are_the_models_own_bit_by_bit(kind: str) -> None:
    """Given the same hidden states, masks included: whatever came in is handed to the original model's module."""
    model = make(kind)
    own, batch = copy.deepcopy(model), make_batch()
    layers: Any = {"ModernBert": [0, 2], "Bert": [0], "Llama": [0], "Mistral": [0]}.get(kind, "full_attention")
    lln.hf.convert(model, "lln", statistics={"encoder": "sample", "decoder": "fixed"}, layers=layers)
    kept = {index: module for index, module in list_attention(model).items() if not hasattr(module, "lln")}
    assert 0 < len(kept) < len(list_attention(model))
    seen: dict[int, Tensor] = {}
    for where in (model, own):
        for index in kept:
            module = list_attention(where)[index]

            def look(_: Any, args: Any, given: Any, out: Any, where: Any = where, index: int = index) -> Any:
                if where is model:
                    seen[index] = given["hidden_states"] if "hidden_states" in given else args[0]
                    results[index] = out[0]
                else:
                    assert torch.equal(out[0], results[index])
                    reached.append(index)

            def exchange(_: Any, args: Any, given: Any, index: int = index) -> Any:
                if "hidden_states" in given:
                    return args, given | {"hidden_states": seen[index]}
                return (seen[index], *args[1:]), given

            module.register_forward_hook(look, with_kwargs=True)
            if where is own:
                module.register_forward_pre_hook(exchange, with_kwargs=True)
    results: dict[int, Tensor] = {}
    reached: list[int] = []
    with torch.no_grad():
        model(**batch)
        own(**batch)
    assert sorted(reached) == sorted(kept)


@pytest.mark.parametrize(
    ("kind", "layers", "caches"),
    [
        ("Gemma2", "full_attention", ["DynamicSlidingWindowLayer", "StateLayer"]),
        ("Gemma3", "full_attention", ["DynamicSlidingWindowLayer", "StateLayer"]),
        ("GptOss", "full_attention", ["DynamicSlidingWindowLayer", "StateLayer"]),
        ("Mistral", slice(0, 1), ["StateLayer", "DynamicLayer"]),
        ("Llama", [-1], ["DynamicLayer", "StateLayer"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*changes single scores")
def test_generation_holds_states_and_keys(kind: str, layers: Any, caches: list[str]) -> None:
    model, batch = lln.hf.convert(make(kind), "lln", statistics="fixed", layers=layers), make_batch()
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    found = model.generate(**batch, **how, return_dict_in_generate=True)
    assert [type(layer).__name__ for layer in found.past_key_values.layers] == caches
    assert torch.equal(found.sequences, model.generate(**batch, **how, use_cache=False))
    with torch.no_grad():
        cache = lln.hf.make_cache(model.config)
        model(batch["input_ids"][:1, :7], past_key_values=cache)
        later = model(batch["input_ids"][:1, 7:], past_key_values=cache).logits
        assert torch.allclose(later, model(batch["input_ids"][:1], use_cache=False).logits[:, 7:], atol=1e-5)
        if kind == "Llama":
            with pytest.raises(ValueError, match="make_cache"):
                model(batch["input_ids"], past_key_values=lln.hf.LLNCache())
    with pytest.raises(ValueError, match="static"):
        model.generate(**batch, **how, cache_implementation="static")


@pytest.mark.parametrize("kind", ["ModernBert", "Bert"])
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model, batch = make(kind), make_batch()
    layers = "full_attention" if kind == "ModernBert" else {1: "lln"}
    lln.hf.convert(model, layers=layers, learnable="head")
    expected = model(**batch).last_hidden_state
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert loaded.config.lln["layers"] == ([0, 2] if kind == "ModernBert" else {"1": "lln"})
    assert torch.equal(loaded(**batch).last_hidden_state, expected)
    assert {i for i, m in list_attention(loaded).items() if hasattr(m, "lln")} == (
        {0, 2} if kind == "ModernBert" else {1}
    )


@pytest.mark.filterwarnings("ignore:.*changes single scores")
@pytest.mark.parametrize("kind", ["ModernBert", "Gemma2", "Gemma3"])
def test_measured_fitted_distilled_and_recorded(kind: str) -> None:
    model, batch = make(kind), make_batch()
    given: dict[str, Any] = {"matching": "data", "learnable": "channel", "mix": "scales", "block_size": 4}
    lln.hf.convert(model, "lln_diag", layers="full_attention", batches=[batch], **given)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lln.hf.fit(model, [batch])
    lln.hf.distill(model, [batch], steps=2)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(".lln." in name for name in moved)
    if kind != "Gemma2":
        with record(model) as rec:
            model(**batch)
        assert len({row["layer"] for row in rec.rows()}) == len(list_attention(model))


@pytest.mark.filterwarnings("ignore:.*changes single scores")
@pytest.mark.parametrize(("kind", "what"), [("Gemma2", "a cap on"), ("GptOss", "attention sinks")])
def test_layers_that_no_instrument_knows_hide_no_others(kind: str, what: str) -> None:
    model, batch = make(kind), make_batch()
    with pytest.raises(ValueError, match=f"{what} .* cannot be recorded"), record(model):
        model(**batch)
    lln.hf.convert(model, "lln", layers="full_attention", statistics="fixed")
    want = model(**batch).logits
    with (
        pytest.warns(UserWarning, match=f"keeps softmax attention with {what} .* this layer is left out"),
        record(model) as rec,
    ):
        assert torch.equal(model(**batch).logits, want)
    assert {row["layer"] for row in rec.rows()} == {
        f"model.layers.{at}.self_attn" for at, one in enumerate(KINDS) if one == "full_attention"
    }


@pytest.mark.filterwarnings("ignore:.*changes single scores")
def test_a_model_that_makes_a_cache_of_its_own_gets_it() -> None:
    shape = {**SHAPE, **HEADS, "sliding_window": 4, "layer_types": KINDS}
    sides = {side: transformers.T5GemmaModuleConfig(**shape) for side in ("encoder", "decoder")}
    config = transformers.T5GemmaConfig(**sides, vocab_size=32)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    lln.hf.convert(model, layers="full_attention", statistics={"encoder": "sample", "decoder": "fixed"})
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 1}
    found = model.generate(**make_batch(), **how)
    assert torch.equal(found, model.generate(**make_batch(), **how, use_cache=False))
    with pytest.raises(ValueError, match=r"past_key_values must be left out: T5Gemma"):
        model.generate(**make_batch(), **how, past_key_values=lln.hf.make_cache(model.config))


def test_forms_of_layers() -> None:
    def convert(layers: Any) -> Any:
        return lln.hf.convert(make("Bert"), "lln", layers=layers).config.lln["layers"]

    assert convert(range(1)) == [0] == convert(slice(1)) == convert(lambda index, module: index == 0)
    assert convert("full_attention") == [0, 1]
    assert convert("all") is None
    assert convert({0: "lln", 1: "softmax"}) == {"0": "lln"}
    for wrong, said in (
        ([2], "between 0 and 1"),
        ([], "names no layer"),
        ("local", "layers must be"),
        ({0: "x"}, "'x'"),
    ):
        with pytest.raises(ValueError, match=said):
            convert(wrong)
    with pytest.raises(TypeError, match="layers"):
        convert(3)


def test_windows_are_refused_when_converted_and_classes_that_could_have_them_are_not() -> None:
    with pytest.raises(ValueError, match="layers='full_attention'"):
        lln.hf.convert(make("ModernBert"), "lln")
    with pytest.raises(ValueError, match="sliding"):
        lln.hf.convert(make("Mistral", sliding_window=4), "lln", statistics="fixed")
    with pytest.raises(ValueError, match="names no layer that attends; all are 'sliding_attention'"):
        lln.hf.convert(make("Mistral", sliding_window=4), "lln", statistics="fixed", layers="full_attention")
    model = lln.hf.convert(make("ModernBert", global_attn_every_n_layers=1), "lln")
    assert model(**make_batch()).last_hidden_state.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_factor_of_scores_is_compared_in_a_graph() -> None:
    torch.compiler.reset()
    rescale = torch.compile(rescale_query, dynamic=True, fullgraph=True, backend="eager")
    query = torch.randn(2, 4)
    for factor in (0.25, 0.5):  # a number that changes is a symbol in the graph
        torch.testing.assert_close(rescale(query, None, factor), query * (factor / 0.5))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_one_graph_serves_every_length() -> None:
    torch.compiler.reset()
    model, made = make("Gemma3", query_pre_attn_scalar=9), []  # whose scores have another factor than usual
    lln.hf.convert(model, "lln_diag", block_size=4, layers="full_attention", statistics="fixed")

    def keep(graph: Any, examples: Any) -> Any:
        made.append(graph)
        return graph

    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=keep)
    for length in (12, 7, 9):
        given = {"input_ids": make_batch()["input_ids"][:, :length].clone(), "use_cache": False}
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits)
    assert len(made) == 1


def test_the_command_line_names_layers() -> None:
    from lln.lab.convert.conversion_plan import ConversionPlan

    def read(layers: str) -> Any:
        return ConversionPlan(layers=layers).options(8, {"block_size": 4}, causal=False)["layers"]

    assert [read("full_attention"), read("0,2"), read("1:")] == ["full_attention", [0, 2], slice(1, None)]
    with pytest.raises(ValueError, match="layers must be full_attention"):
        read("0-2")


@pytest.mark.filterwarnings("ignore:.*changes single scores")
def test_layers_are_compared_where_lln_runs() -> None:
    from lln.lab.convert.layer_report import compare_layers

    model = lln.hf.convert(make("ModernBert"), "lln_diag", block_size=4, layers="full_attention")
    assert [row["layer"] for row in compare_layers(model, [make_batch()])] == ["layers.0.attn", "layers.2.attn"]
