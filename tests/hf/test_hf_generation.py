"""Generation with a state of fixed size gives, token by token, what full recomputation gives."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import lln.hf
from helpers.hf_models import (
    CAUSAL,
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

KINDS = (*CAUSAL, "bart")
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
BLOCK = 4


def writer(kind: str, name: str = "lln_diag", **changes: Any) -> Any:
    model = build_writer(kind, name, **changes)
    options: dict[str, Any] = {"block_size": BLOCK} if name == "lln_diag" else {}
    statistics = {"encoder": "sample", "decoder": "running"}
    return lln.hf.convert(model, statistics=statistics, batches=[make_batch(kind)], **options)


def pad_left(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of these lengths with padding on their left, and the mask."""
    x = tokens(5, len(lengths), max(lengths))
    mask = torch.ones_like(x)
    for row, n in enumerate(lengths):
        mask[row, : x.shape[1] - n] = 0
    return x.masked_fill(mask == 0, 0), mask


def take_own(cache: Any) -> lln.hf.LLNCache:
    """The part for the model's own tokens."""
    return cache.self_attention_cache if isinstance(cache, tf.EncoderDecoderCache) else cache


def make_cache(kind: str, **options: Any) -> Any:
    caches = [lln.hf.LLNCache(**options) for _ in range(2)]
    return tf.EncoderDecoderCache(*caches) if kind == "bart" else caches[0]


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_decode_equals_full_recomputation(kind: str, name: str) -> None:
    model = writer(kind, name)
    x, mask = pad_left([14, 23, 20])
    how = {"max_new_tokens": 9, "attention_mask": mask, **GREEDY}
    want = model.generate(x, use_cache=False, **how)
    plain = model.generate(x, return_dict_in_generate=True, **how)
    assert torch.equal(plain.sequences, want)
    assert isinstance(take_own(plain.past_key_values), lln.hf.LLNCache)
    if kind == "bart":
        assert isinstance(plain.past_key_values.cross_attention_cache, lln.hf.LLNCache)
    handed = lln.hf.LLNCache()
    assert torch.equal(model.generate(x, past_key_values=handed, **how), want)
    assert handed.get_seq_length() == (9 if kind == "bart" else 23 + 8)
    assert handed.nbytes == take_own(plain.past_key_values).nbytes > 0
    if kind != "bart":
        assert torch.equal(model.generate(x, prefill_chunk_size=5, **how), want)
    for more in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2, "do_sample": True}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            found.append(model.generate(x, use_cache=use_cache, **how | more))
        assert torch.equal(*found)


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_padded_batches_equal_one_by_one(kind: str, name: str, dtype: torch.dtype) -> None:
    model = writer(kind, name).to(dtype)
    lengths = [1, 3, 4, 5, 17, 23]
    x, mask = pad_left(lengths)
    together = model.generate(x, attention_mask=mask, max_new_tokens=12, **GREEDY)
    for row, n in enumerate(lengths):
        alone = model.generate(x[row : row + 1, -n:], max_new_tokens=12, **GREEDY)
        assert torch.equal(together[row, -12:], alone[0, -12:])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_sequence_cut_anywhere_are_those_of_the_whole(kind: str) -> None:
    model = writer(kind)
    x, mask = pad_left([23, 16])
    extra = {"input_ids": tokens(0, 2), "attention_mask": pad_left([19, 23])[1]} if kind == "bart" else {}
    ids, masks = ("decoder_input_ids", "decoder_attention_mask") if kind == "bart" else ("input_ids", "attention_mask")
    # Positions of a padded row, which generate makes, do not reach BART.
    places = {} if kind == "bart" else {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    want = output(model, **extra, **{ids: x, masks: mask}, **places, use_cache=False)
    for cuts in ((1, 23), (2, 23), (3, 4, 5, 23), (4, 9, 23), (10, 23), (5, 6, 7, 8, 23)):
        cache, found, start = make_cache(kind), [], 0
        for end in cuts:
            part = {k: v[:, start:end] for k, v in places.items()}
            given = {ids: x[:, start:end], masks: mask[:, :end], "past_key_values": cache, **part, **extra}
            found.append(output(model, **given))
            start = end
        valid = mask.bool()
        assert relative_error(torch.cat(found, 1)[valid], want[valid]) < 1e-11


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_a_long_prompt_then_decoding(name: str) -> None:
    model = writer("llama", name, max_position_embeddings=1000)
    x = tokens(1, 2, 701)
    how = {"max_new_tokens": 6, **GREEDY}
    assert torch.equal(model.generate(x, **how), model.generate(x, use_cache=False, **how))


@pytest.mark.parametrize("kind", CAUSAL)
def test_going_on_from_a_returned_cache(kind: str) -> None:
    model = writer(kind)
    x, mask = pad_left([9, 14])
    first = model.generate(x, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    more = tokens(8, 2, 3)
    turn = torch.cat([first.sequences, more], 1)
    seen = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype)], 1)
    want = model.generate(turn, attention_mask=seen, max_new_tokens=4, use_cache=False, **GREEDY)
    for _ in range(2):  # a copy is a cache of its own
        cache = copy.deepcopy(first.past_key_values)
        found = model.generate(turn, attention_mask=seen, past_key_values=cache, max_new_tokens=4, **GREEDY)
        assert torch.equal(found, want)
    assert cache.get_seq_length() == 25
    # Only what is new, with the mask of everything.
    new = torch.cat([first.sequences[:, -1:], more], 1)
    found = model.generate(new, attention_mask=seen, past_key_values=first.past_key_values, max_new_tokens=4, **GREEDY)
    assert torch.equal(found[:, 4:], want[:, -4:])


def test_going_on_with_an_encoder() -> None:
    model = writer("bart")
    x, mask = pad_left([14, 23])
    how = {"attention_mask": mask, **GREEDY}
    first = model.generate(x, max_new_tokens=5, return_dict_in_generate=True, **how)
    found = model.generate(
        x, decoder_input_ids=first.sequences, past_key_values=first.past_key_values, max_new_tokens=4, **how
    )
    assert torch.equal(found, model.generate(x, max_new_tokens=9, use_cache=False, **how))


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("kind", KINDS)
def test_size_does_not_depend_on_length(kind: str, name: str) -> None:
    model = writer(kind, name)
    sizes = []
    for length, new in ((5, 2), (20, 40)):
        cache = model.generate(
            tokens(0, 2, length), max_new_tokens=new, return_dict_in_generate=True, **GREEDY
        ).past_key_values
        parts = [cache] if kind != "bart" else [cache.self_attention_cache, cache.cross_attention_cache]
        sizes.append(sum(part.nbytes for part in parts))
        heads, dim = (2 if kind == "llama" else 4), 8
        numbers = 2 * 2 * heads * (dim + dim * dim) * 8  # two rows, two layers, float64
        open_block = 2 * 2 * (2 * heads * BLOCK * dim * 8 + BLOCK + 8) if name == "lln_diag" else 0
        beta = 2 * heads * 8
        assert take_own(cache).nbytes == numbers + open_block + beta
    assert sizes[0] == sizes[1]


def test_an_encoder_is_folded_once() -> None:
    model = writer("bart")
    with record_calls() as calls:
        model.generate(
            **{k: v for k, v in make_batch("bart").items() if "decoder" not in k}, max_new_tokens=5, **GREEDY
        )
    lengths = [call.k.shape[2] for call in calls if call.module.lln.cross]
    assert lengths == [23, 23] + [0] * 8


def test_rows_can_be_chosen_and_repeated() -> None:
    model = writer("llama")
    x = tokens(0, 3, 11)
    for change, rows in (
        (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    ):
        cache = lln.hf.LLNCache()
        output(model, input_ids=x[:, :7], past_key_values=cache)
        change(cache)
        assert cache.layers[0].batch_size == len(rows)
        found = output(model, input_ids=x[rows, 7:], past_key_values=cache)
        assert relative_error(found, output(model, input_ids=x[rows], use_cache=False)[:, 7:]) < 1e-12
    cache.reset()
    assert cache.get_seq_length() == 0
    assert relative_error(output(model, input_ids=x, past_key_values=cache), output(model, input_ids=x)) < 1e-12


def test_gradients_go_through_the_state() -> None:
    model = writer("llama")
    x = tokens(0, 2, 13)

    def gradients(cuts: tuple[int, ...]) -> dict[str, Tensor]:
        cache = lln.hf.LLNCache()
        ends = (*cuts, 13)
        parts = [
            output(model, input_ids=x[:, a:b], past_key_values=cache) for a, b in zip((0, *cuts), ends, strict=True)
        ]
        return parameter_gradients(model, torch.cat(parts, 1))

    whole, cut = gradients(()), gradients((6, 7))
    assert max(relative_error(cut[n], whole[n], 1e-12) for n in whole) < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = writer("llama", spread=1.0)
    x = tokens(0)
    want: Tensor | None = None
    for kind in (torch.float64, dtype):
        model, cache = model.to(kind), lln.hf.LLNCache()
        parts = [output(model, input_ids=x[:, a:b], past_key_values=cache) for a, b in ((0, 13), (13, 14), (14, 23))]
        found = torch.cat(parts, 1)
        want = found if want is None else want
    assert found.dtype == dtype
    assert want is not None
    assert relative_error(found.double(), want) < 4e-2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decoding_with_a_static_cache(kind: str) -> None:
    one: dict[str, Any] = {"n_layer": 1} if kind == "gpt2" else {"num_hidden_layers": 1}
    one |= {"decoder_layers": 1, "encoder_layers": 1} if kind == "bart" else {}
    model = writer(kind, **one)
    x, mask = pad_left([14, 23])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling = tf.CompileConfig(backend="aot_eager", fullgraph=True, mode=None, dynamic=False)
    compiling._compile_all_devices = True
    how = {"max_new_tokens": 9, "attention_mask": mask, **GREEDY}
    want = model.generate(x, use_cache=False, **how)
    static = {"cache_implementation": "static", "compile_config": compiling, "return_dict_in_generate": True}
    found = model.generate(x, **static, **how)
    assert torch.equal(found.sequences, want)
    cache = take_own(found.past_key_values)
    assert cache.is_compileable
    assert cache.get_seq_length() == found.sequences.shape[1] - 1
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1  # every step is the first one again
    assert not counters["graph_break"]
    longer = model.generate(x, **static, **how | {"max_new_tokens": 14})
    assert torch.equal(longer.sequences[:, : want.shape[1]], want)
    beams = model.generate(x, num_beams=2, **static | {"return_dict_in_generate": False}, **how)
    assert torch.equal(beams, model.generate(x, num_beams=2, use_cache=False, **how))


def test_a_static_cache_stays_where_it_is() -> None:
    model = writer("llama")
    x = tokens(0, 2, 17)
    cache = lln.hf.LLNCache(static=True)
    want = output(model, input_ids=x, use_cache=False)
    places = None
    for _ in range(2):
        with torch.no_grad():
            parts = [output(model, input_ids=x[:, a:b], past_key_values=cache) for a, b in ((0, 9), (9, 10), (10, 17))]
        assert relative_error(torch.cat(parts, 1), want) < 1e-12
        now = [
            t.data_ptr() for layer in cache.layers for t in (layer.length, layer.state.log_sum, layer.state.block_key)
        ]
        assert places in (None, now)
        places = now
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_compiled_forward_without_a_static_cache() -> None:
    model = writer("llama", num_hidden_layers=1)
    x, mask = pad_left([14, 23])
    how = {"max_new_tokens": 6, "attention_mask": mask, **GREEDY}
    want = model.generate(x, **how)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(model.generate(x, **how), want)


def assert_refused(match: str, call: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match=match) as problem:
        call()
    text = str(problem.value)
    assert "\n" not in text
    assert text.endswith(".")


def test_what_takes_tokens_back_is_refused_in_one_sentence() -> None:
    model = writer("llama")
    x = tokens(0, 1, 12)
    how = {"max_new_tokens": 6, **GREEDY}
    lookup = {"prompt_lookup_num_tokens": 2}
    assert_refused(
        r"LLNCache\(static=True\) writes every state over the one before it",
        lambda: model.generate(x, **lookup, past_key_values=lln.hf.LLNCache(static=True), **how),
    )
    cache = lln.hf.LLNCache()
    output(model, input_ids=x, past_key_values=cache)
    assert not cache.is_croppable
    assert_refused("no token can be taken away again", lambda: cache.crop(-2))
    for name in ("quantized", "offloaded", "offloaded_static"):
        assert_refused(
            f"cache_implementation='{name}'", lambda n=name: model.generate(x, cache_implementation=n, **how)
        )
    # What is promised in its place: a cache that keeps everything.
    how["eos_token_id"] = 2
    want = model.generate(x, **how)
    assert torch.equal(model.generate(x, **lookup, past_key_values=tf.DynamicCache(), **how), want)
    assert torch.equal(model.generate(x, **lookup, past_key_values=lln.hf.LLNCache(), **how), want)


def test_what_a_state_cannot_know_is_refused_in_one_sentence() -> None:
    model = writer("llama")
    x = tokens(0, 2, 12)
    cache = lln.hf.LLNCache()
    first = model(input_ids=x[:, :7], past_key_values=cache, output_attentions=True)
    assert first.attentions[0].shape == (2, 4, 7, 7)
    assert_refused("output_attentions: the keys of earlier tokens are gone",
            lambda: model(input_ids=x[:, 7:], past_key_values=cache, output_attentions=True))  # fmt: skip
    cache = lln.hf.LLNCache()
    output(model, input_ids=x[:, :7], past_key_values=cache)
    assert_refused("attention_mask must cover the 7 tokens in past_key_values and the 5 new ones; got 5",
            lambda: model(input_ids=x[:, 7:], attention_mask=torch.ones(2, 5), past_key_values=cache))  # fmt: skip
    cu = torch.tensor([0, 24], dtype=torch.int32)
    assert_refused("packed sequences cannot go into a cache",
            lambda: model(input_ids=x, past_key_values=lln.hf.LLNCache(), cu_seq_lens_q=cu))  # fmt: skip
    softmax, elu = build_model("llama", "sdpa"), build_model("llama", "elu")
    wrong = lln.hf.LLNCache()
    output(softmax, input_ids=x[:, :7], past_key_values=wrong)
    assert_refused("did not get the state", lambda: softmax(input_ids=x[:, 7:], past_key_values=wrong))
    assert_refused("LlamaAttention runs 'elu'", lambda: elu(input_ids=x, past_key_values=lln.hf.LLNCache()))
    both = build_model("llama", "lln", is_causal=False)
    assert_refused("is not causal here", lambda: both(input_ids=x, past_key_values=lln.hf.LLNCache()))
    bart = writer("bart")
    assert_refused(r"EncoderDecoderCache\(LLNCache\(\), LLNCache\(\)\)",
            lambda: bart(**make_batch("bart"), past_key_values=lln.hf.LLNCache()))  # fmt: skip


def test_other_models_keep_their_own_cache() -> None:
    for name in ("sdpa", "elu"):
        found = build_model("llama", name).generate(tokens(0), max_new_tokens=2, return_dict_in_generate=True, **GREEDY)
        assert type(found.past_key_values) is tf.DynamicCache
    made = make_config("llama")
    made.layer_types = ["full_attention", "linear_attention"]
    with expect_guess():
        hybrid = tf.AutoModelForCausalLM.from_config(make_config("llama"), attn_implementation="lln")
    assert lln.hf.hooks.decodes_with_lln(hybrid)
    hybrid.config.layer_types = made.layer_types
    assert not lln.hf.hooks.decodes_with_lln(hybrid)


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_cache_that_is_asked_for_is_used(kind: str) -> None:
    model = writer(kind)
    x, mask = pad_left([14, 23])
    how = {"max_new_tokens": 6, "attention_mask": mask, **GREEDY}
    found = model.generate(x, cache_implementation="dynamic", return_dict_in_generate=True, **how)
    assert type(take_own(found.past_key_values)) is tf.DynamicCache
    assert torch.equal(found.sequences, model.generate(x, **how))
