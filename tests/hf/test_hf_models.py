"""Models of every kind really run LLN attention: against the equation in float64, and with everything that must be
invisible invisible."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lln.hf
from helpers.hf_models import ALL, CAUSAL, ENCODERS, IMAGES, build_model, make_batch, output, record_calls, tokens
from helpers.hf_reference import compute_expected
from helpers.tensors import relative_error


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
@pytest.mark.parametrize("kind", ALL)
def test_every_layer_computes_equation_8_and_not_softmax(kind: str, name: str) -> None:
    model, given = build_model(kind, name), make_batch(kind)
    if name == "lln_diag":
        lln.hf.convert(model, block_size=8, statistics="fixed" if kind in (*CAUSAL,) else None)
    with record_calls() as calls:
        ours = output(model, **given)
    assert len(calls) == (6 if kind == "bart" else 2)
    for call in calls:
        cross = getattr(call.module, "is_decoder", False) and not call.module.is_causal
        causal = bool(call.module.is_causal)
        statistics = "fixed" if causal or cross else "sample"
        block = 8 if name == "lln_diag" and not cross else None
        want = compute_expected(call, causal, statistics, block)
        assert relative_error(call.out, want) < 1e-12
        assert call.module.lln.statistics == statistics
    model.set_attn_implementation("sdpa")
    softmax = output(model, **given)
    assert relative_error(ours, softmax) > 1e-3
    model.set_attn_implementation(name)
    assert torch.equal(output(model, **given), ours)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_padding_and_batch_mates_are_invisible_to_encoders(kind: str, name: str) -> None:
    model = build_model(kind, name)
    lln.hf.convert(model, block_size=4 if name == "lln_diag" else None)
    lengths = [23, 14, 9]
    whole = [tokens(s, 1, n) for s, n in enumerate(lengths)]
    for left in (False, True):
        ids, mask = torch.zeros(3, 23, dtype=torch.long), torch.zeros(3, 23, dtype=torch.long)
        positions = torch.zeros(3, 23, dtype=torch.long)
        for row, one in enumerate(whole):
            n = one.shape[1]
            place = slice(23 - n, 23) if left else slice(0, n)
            ids[row, place], mask[row, place] = one[0], 1
            # RoBERTa counts positions from its padding index on and skips padding by itself.
            positions[row, place] = torch.arange(n) + (1 if kind == "roberta" else 0)
        extra = {} if kind == "distilbert" else {"position_ids": positions}
        if kind == "distilbert" and left:  # it takes no position_ids: feed embeddings that already have them
            embed = model.embeddings
            extra = {"inputs_embeds": embed.word_embeddings(ids)}
            place = embed.position_embeddings.weight
            with torch.no_grad():
                spots = place[positions] - place[torch.arange(23)]
            arguments = {"inputs_embeds": extra["inputs_embeds"] + spots, "attention_mask": mask}
        else:
            arguments = {"input_ids": ids, "attention_mask": mask, **extra}
        together = output(model, **arguments)
        for row, one in enumerate(whole):
            alone = output(
                model,
                input_ids=one,
                **(
                    {}
                    if "position_ids" not in extra
                    else {"position_ids": positions[row : row + 1][mask[row : row + 1] == 1][None]}
                ),
            )
            assert (together[row][mask[row] == 1] - alone[0]).abs().max() < 1e-9


@pytest.mark.parametrize("kind", IMAGES)
def test_images_do_not_see_their_batch_mates(kind: str) -> None:
    model, given = build_model(kind), make_batch(kind)
    together = output(model, **given)
    for row in range(3):
        alone = output(model, pixel_values=given["pixel_values"][row : row + 1])
        assert (together[row] - alone[0]).abs().max() < 1e-9


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_causal_models_see_neither_the_future_nor_left_padding(kind: str, name: str) -> None:
    model = build_model(kind, name)
    lln.hf.convert(model, statistics="fixed", block_size=4 if name == "lln_diag" else None)
    x = tokens(0)
    changed = x.clone()
    changed[:, 15:] = tokens(9)[:, 15:]
    assert torch.equal(output(model, input_ids=x)[:, :15], output(model, input_ids=changed)[:, :15])
    ids = torch.nn.functional.pad(x, (6, 0))
    mask = torch.nn.functional.pad(torch.ones_like(x), (6, 0))
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = output(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    assert (padded[:, 6:] - output(model, input_ids=x)).abs().max() < 1e-9


def test_bart_sees_no_padding_of_its_encoder() -> None:
    model = build_model("bart")
    x, d = tokens(0), tokens(1, 3, 9)
    ids = torch.nn.functional.pad(x, (0, 5))
    mask = torch.nn.functional.pad(torch.ones_like(x), (0, 5))
    padded = output(model, input_ids=ids, attention_mask=mask, decoder_input_ids=d)
    assert (padded - output(model, input_ids=x, decoder_input_ids=d)).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "llama", "gpt2"])
def test_packed_sequences_are_sequences_apart(kind: str) -> None:
    model = build_model(kind)
    lln.hf.convert(model, block_size=4, statistics="fixed" if kind in CAUSAL else "auto")
    lengths = [7, 1, 11]
    apart = [tokens(s, 1, n) for s, n in enumerate(lengths)]
    first = 1 if kind == "roberta" else 0
    positions = torch.cat([torch.arange(n) + first for n in lengths])[None]
    cu = torch.tensor([0, 7, 8, 19], dtype=torch.int32)
    packed: dict[str, Any] = {
        "input_ids": torch.cat(apart, 1), "position_ids": positions, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone(),
        "max_length_q": 11, "max_length_k": 11,
    }  # fmt: skip
    want = torch.cat(
        [output(model, input_ids=one, **({"use_cache": False} if kind in CAUSAL else {})) for one in apart], 1
    )
    assert (output(model, **packed) - want).abs().max() < 1e-9
    if kind in CAUSAL:  # the positions alone say it, for several rows too
        rows = {
            "input_ids": packed["input_ids"].repeat(2, 1),
            "position_ids": positions.repeat(2, 1),
            "use_cache": False,
        }
        both = model(**rows, output_attentions=True)
        assert (both[0] - want).abs().max() < 1e-9
        assert both.attentions[0].shape == (2, 4, 19, 19)
        assert (both.attentions[0][:, :, 8:, :8] == 0).all()


def test_a_causal_model_that_is_told_to_look_both_ways_does() -> None:
    model = build_model("llama", is_causal=False)
    lln.hf.convert(model, "lln", statistics="fixed")
    x = tokens(0)
    changed = x.clone()
    changed[:, 15:] = tokens(9)[:, 15:]
    assert relative_error(output(model, input_ids=changed)[:, :15], output(model, input_ids=x)[:, :15]) > 1e-3


@pytest.mark.parametrize("kind", ALL)
def test_output_attentions_is_the_p_that_was_used(kind: str) -> None:
    model, given = build_model(kind), make_batch(kind)
    lln.hf.convert(model, block_size=8)
    with record_calls() as calls:
        result = model(**given, output_attentions=True)
    names = ["attentions"] if kind != "bart" else ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    maps = [p for name in names for p in result[name]]
    assert len(maps) == len(calls)
    for call in calls:
        p = next(p for p in maps if p is call.weights)
        keys = call.v.repeat_interleave(p.shape[1] // call.v.shape[1], 1)
        assert relative_error((p @ keys).transpose(1, 2), call.out) < 1e-12
        valid = call.mask.bool().any(-1) if isinstance(call.mask, Tensor) and call.mask.shape[-1] else None
        assert valid is None or valid.all()
    assert torch.equal(result[0], output(model, **given))  # looking changes nothing


@pytest.mark.parametrize("kind", [*ENCODERS, "vit", "gpt2", "bart"])
def test_attention_dropout_acts_in_training_only(kind: str) -> None:
    rates = {
        "attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.0, "attention_dropout": 0.2, "dropout": 0.0,
        "attn_pdrop": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "activation_dropout": 0.0,
    }  # fmt: skip
    present: dict[str, Any] = {k: v for k, v in rates.items() if hasattr(build_model(kind).config, k)}
    model, given = build_model(kind, **present), make_batch(kind)
    calm = output(model, **given)
    assert torch.equal(output(model, **given), calm)
    model.train()
    torch.manual_seed(1)
    first = output(model, **given)
    assert not torch.allclose(first, output(model, **given))
    torch.manual_seed(1)
    assert torch.equal(output(model, **given), first)
    # On average dropout changes nothing in one layer's output; here: the attention of the first layer.
    with record_calls() as calls:
        for _ in range(100):
            output(model, **given)
    layers = len(calls) // 100
    mean = torch.stack([c.out for c in calls[::layers]]).mean(0)
    model.eval()
    with record_calls() as calls:
        output(model, **given)
    assert relative_error(mean, calls[0].out) < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_half_precision_stays_near_float64(kind: str, dtype: torch.dtype) -> None:
    model, given = build_model(kind, spread=2.0), make_batch(kind)
    want = output(model, **given)
    lln_error = relative_error(output(model.to(dtype), **given), want)
    model = build_model(kind, "sdpa", spread=2.0)
    softmax_error = relative_error(output(model.to(dtype), **given), output(model.double(), **given))
    assert lln_error < 2 * softmax_error + 1e-3


def test_grouped_heads_are_counted() -> None:
    layer = build_model("llama").model.layers[0].self_attn.lln
    assert (layer.num_heads, layer.num_key_heads, layer.head_dim) == (4, 2, 8)
