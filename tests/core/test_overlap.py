"""Overlapping blocks are softmax attention in windows, key by key, mixed with LLN attention."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lln
import lln.hf
from helpers.hf_models import build_model, make_batch, output, tokens
from helpers.memory import LargestTensor
from helpers.runs import read_metrics
from helpers.tensors import make_inputs, relative_error
from helpers.untyped import naive_attention
from lln.instruments import lln_map, record, spectral_gap
from lln.lab.recipes import recipe
from lln.lab.train.config import change
from lln.lab.train.run import train
from lln.nn.weights import dense_weights

WIDE = torch.float64
OFFSETS = torch.tensor([0, 9, 9, 24, 25, 31], dtype=torch.int32)


def windows(
    q: Tensor, k: Tensor, v: Tensor, size: int, is_causal: bool = False, mask: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Row by row in float64: which keys a query sees, one after another, and the softmax over them."""
    batch, heads, length, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, length, v.shape[-1], dtype=WIDE)
    ends = [0, length] if offsets is None else offsets.tolist()
    for b in range(batch):
        valid = [mask is None or bool(mask[b, j]) for j in range(length)]
        for start, end in itertools.pairwise(ends):
            first = next((j for j in range(start, end) if valid[j]), end)
            for i in range(first, end):
                block = (i - first) // (size // 2) * (size // 2) + first
                low = block - (size // 2 if is_causal else size // 4)
                seen = [j for j in range(max(low, first), min(low + size, end)) if valid[j]]
                seen = [j for j in seen if j <= i] if is_causal else seen
                for h in range(heads if seen else 0):
                    scores = q[b, h, i] @ k[b, h // group, seen].T / math.sqrt(dim)
                    out[b, h, i] = scores.softmax(-1) @ v[b, h // group, seen]
    return out


def make_module(heads: int, dim: int, size: int, **options: Any) -> lln.LLNAttention:
    given = {"statistics": "fixed", "alpha": 1.3, "beta": 0.8, "dtype": WIDE, **options}
    return lln.LLNAttention(heads, dim, block_size=size, overlap=True, **given).eval()


def hide_keys(how: str) -> tuple[Tensor | None, Tensor | None, int]:
    """(key mask, offsets, batch) over 31 tokens."""
    masks = {
        "left": torch.arange(31) >= torch.tensor([[0], [11]]),
        "right": torch.arange(31) < torch.tensor([[31], [18]]),
        "holes": torch.rand(2, 31, generator=torch.Generator().manual_seed(5)) > 0.6,
        "desert": (torch.arange(31) < 3).expand(2, 31),  # most windows have no key
        "nothing": torch.zeros(2, 31, dtype=torch.bool),
        "packed and left": (torch.arange(31) % 9 > 1)[None],
    }
    return masks.get(how), OFFSETS if "packed" in how else None, 1 if "packed" in how else 2


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "how", ["plain", "left", "right", "holes", "desert", "nothing", "packed", "packed and left"]
)  # fmt: skip
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(3, 3, 8), (4, 2, 12)])
def test_it_is_the_windows_written_out(heads: int, key_heads: int, size: int, how: str, is_causal: bool) -> None:
    mask, offsets, batch = hide_keys(how)
    q, k, v = make_inputs(batch, heads, key_heads, 31, 5, 3)
    module = make_module(heads, 5, size, num_key_heads=key_heads, mix=0.3)
    where: dict[str, Any] = {"is_causal": is_causal, "key_mask": mask, "cu_seqlens": offsets}
    linear = naive_attention(q, k, v, 1.3, 0.8, **where).out
    want = 0.3 * linear + 0.7 * windows(q, k, v, size, is_causal, mask, offsets)
    found = module(q, k, v, **where)
    if how == "nothing":
        assert not found.any()
    else:
        assert relative_error(found, want) < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 16, 17])
def test_every_length(length: int, is_causal: bool) -> None:
    q, k, v = make_inputs(2, 2, 1, length, 4)
    found = make_module(2, 4, 8, num_key_heads=1)(q, k, v, is_causal=is_causal)
    linear = naive_attention(q, k, v, 1.3, 0.8, is_causal=is_causal).out if length else q
    assert found.shape == q.shape
    assert torch.allclose(found, 0.5 * (linear + windows(q, k, v, 8, is_causal)), rtol=0, atol=1e-12)


def test_a_query_sees_as_many_keys_as_in_a_block_and_none_sits_at_the_edge() -> None:
    q, k, _ = make_inputs(2, 1, 1, 64, 4)
    p = dense_weights(make_module(1, 4, 16, mix=0.0), q, k)[0, 0]
    counts = (p > 0).sum(-1)
    assert (counts[8:-8] == 16).all()
    for i in range(8, 56):
        near = p[i].nonzero().flatten()
        assert near.min() <= i - 4
        assert near.max() >= i + 4


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", ["plain", "masked", "packed"])
def test_gradients(how: str, is_causal: bool) -> None:
    q, k, v = make_inputs(1, 2, 1, 9, 3, 2)
    mask = torch.arange(9)[None] % 4 != 1 if how == "masked" else None
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32) if how == "packed" else None
    module = make_module(2, 3, 4, num_key_heads=1, value_dim=2, mix="scales")
    scales = module.lln_scale, module.block_scale

    def run(q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> Tensor:
        named = dict(zip(("lln_scale", "block_scale"), scales, strict=True))
        where = {"is_causal": is_causal, "key_mask": mask, "cu_seqlens": offsets}
        return torch.func.functional_call(module, named, (q, k, v), where)

    assert torch.autograd.gradcheck(run, [t.detach().requires_grad_() for t in (q, k, v, *scales)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_narrow_dtypes_are_as_near_as_those_of_blocks(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (t.to(dtype) for t in make_inputs(2, 4, 2, 50, 8))
    where: dict[str, Any] = {"key_mask": hide_keys("left")[0] if masked else None}
    if masked:
        q, k, v = (t[:, :, :31] for t in (q, k, v))
    options: dict[str, Any] = {"num_key_heads": 2, "dtype": dtype}
    found = make_module(4, 8, 16, **options)(q, k, v, **where)
    wide = q.double(), k.double(), v.double()
    linear = naive_attention(*wide, 1.3, 0.8, **where).out
    mask = where["key_mask"]
    want = 0.5 * (linear + windows(*wide, 16, False, mask))
    assert found.dtype == dtype
    blocks = lln.LLNAttention(4, 8, block_size=16, statistics="fixed", alpha=1.3, beta=0.8, **options).eval()
    other = naive_attention(*wide, 1.3, 0.8, block_size=16, **where).out
    # Both parts are rounded before they are added, as in plain PyTorch.
    assert relative_error(found, want) <= 2 * max(
        relative_error(blocks(q, k, v, **where), other), relative_error(want.to(dtype).double(), want)
    )


def test_padding_packing_batch_mates_and_the_future_are_invisible() -> None:
    module = make_module(4, 6, 8, num_key_heads=2, statistics="sample", alpha=None, beta=None)
    q, k, v = make_inputs(2, 4, 2, 31, 6)
    mask = hide_keys("left")[0]
    assert mask is not None
    alone = module(*(t[1:, :, 11:] for t in (q, k, v)))
    for loud in (1.0, 30.0):
        noisy = [torch.where(mask[:, None, :, None] & torch.tensor([False, True])[:, None, None, None], t, loud * t)
                 for t in (q, k, v)]  # fmt: skip
        assert relative_error(module(*noisy, key_mask=mask)[1:, :, 11:], alone) < 1e-13
    q, k, v = make_inputs(1, 4, 2, 31, 6)
    packed = module(q, k, v, cu_seqlens=OFFSETS)
    for start, end in [(0, 9), (9, 24), (24, 25), (25, 31)]:
        part = module(*(t[:, :, start:end] for t in (q, k, v)))
        assert relative_error(packed[:, :, start:end], part) < 1e-13
    causal = make_module(4, 6, 8, num_key_heads=2)
    whole = causal(q, k, v, is_causal=True)
    for length in (1, 5, 12, 20):
        prefix = causal(*(t[:, :, :length] for t in (q, k, v)), is_causal=True)
        assert relative_error(whole[:, :, :length], prefix) < 1e-13


@pytest.mark.parametrize("how", ["plain", "masked", "causal", "packed"])
def test_no_tensor_grows_faster_than_the_length(how: str) -> None:
    def find_largest(length: int) -> int:
        q, k, v = (t.float().requires_grad_() for t in make_inputs(1, 2, 1, length, 8))
        where: dict[str, Any] = {"is_causal": how == "causal"}
        if how == "masked":
            where["key_mask"] = torch.arange(length)[None] % 7 != 0
        if how == "packed":
            where["cu_seqlens"] = torch.arange(0, length + 1, 256, dtype=torch.int32)
        with LargestTensor() as seen:
            make_module(2, 8, 16, num_key_heads=1, dtype=torch.float32)(q, k, v, **where).sum().backward()
        return seen.numel

    short, long = find_largest(1024), find_largest(2048)
    assert long <= 2 * short
    assert long < 2048 * 2 * 16 * 4  # of scores and windows; a matrix of all pairs would be 16 times that


def test_the_mix_is_learned() -> None:
    q, k, v = make_inputs(2, 4, 2, 20, 6)
    module = make_module(4, 6, 8, num_key_heads=2, mix="ratio")
    with torch.no_grad():
        module.mix_logit.copy_(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
    r = torch.tensor([-1.0, 0.0, 1.0, 3.0], dtype=WIDE).sigmoid()[:, None, None]
    want = r * naive_attention(q, k, v, 1.3, 0.8).out + (1 - r) * windows(q, k, v, 8)
    assert relative_error(module(q, k, v), want) < 1e-12


def test_dropout_acts_in_training_alone_and_keeps_the_mean() -> None:
    q, k, v = make_inputs(2, 2, 2, 24, 6)
    module = make_module(2, 6, 8, dropout=0.3, mix=0.0)
    still = module(q, k, v)
    module.train()
    torch.manual_seed(0)
    drawn = torch.stack([module(q, k, v).detach() for _ in range(400)])
    assert not torch.equal(drawn[0], drawn[1])
    assert relative_error(drawn.mean(0), still) < 0.1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", ["plain", "left", "right", "holes"])
def test_p_and_the_instruments_are_those_of_the_windows(how: str, is_causal: bool) -> None:
    mask, _, _ = hide_keys(how)
    q, k, v = make_inputs(2, 4, 2, 31, 6)
    module = make_module(4, 6, 8, num_key_heads=2, mix=0.4)
    where: dict[str, Any] = {"is_causal": is_causal, "key_mask": mask}
    p, out = dense_weights(module, q, k, **where), module(q, k, v, **where)
    assert relative_error(p @ v.repeat_interleave(2, 1), out) < 1e-12
    live = torch.ones(2, 31, dtype=torch.bool) if mask is None else mask
    found = lln_map(q, k, 1.3, 0.8, 8, mix=0.4, overlap=True, **where)
    assert relative_error(found.dense() * live[:, None, :, None], p * live[:, None, :, None]) < 1e-12
    if how == "left":  # rows that are no padding to the queries' side, before the first key
        everywhere = torch.ones(2, 31, dtype=torch.bool)
        dense = lln_map(q, k, 1.3, 0.8, 8, mix=0.4, overlap=True, query_mask=everywhere, **where).dense()
        assert relative_error(dense, p) < 1e-12
    with record(module, samples=None) as rec:
        assert torch.equal(module(q, k, v, **where), out)
    entropies = (torch.special.entr(p).sum(-1) / math.log(2) * live[:, None]).sum(-1) / live.sum(1)[:, None]
    measured = torch.tensor([row["entropy"] for row in rec.rows()], dtype=WIDE)
    assert relative_error(measured, entropies.mean(0)) < 1e-9
    if how == "plain" and not is_causal:
        gaps = 1 - torch.linalg.eigvals(p).abs().sort(-1).values[..., -2]
        assert relative_error(spectral_gap(found), gaps) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": True}, "overlap needs a block_size that is a multiple of 4; got block_size=None."),
        ({"overlap": True, "block_size": 6}, "overlap needs a block_size that is a multiple of 4; got block_size=6."),
        ({"overlap": 1, "block_size": 8}, "overlap must be True or False; got 1."),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        lln.LLNAttention(2, 8, **options)


def test_what_has_no_windows_is_refused_in_one_sentence() -> None:
    q, k, v = make_inputs(2, 2, 2, 8, 4)
    module = make_module(2, 4, 4)
    with pytest.raises(ValueError, match="overlap: a state keeps one open block, and overlapping windows reach"):
        module(q, k, v, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="block_size must be None in cross attention"):
        module(q[:, :, :5], k, v)
    with pytest.raises(ValueError, match="overlap goes with implementation='lln_diag'; got True"):
        lln.hf.convert(build_model("bert"), "lln", overlap=True)
    with pytest.raises(ValueError, match="overlap goes with 'lln' and 'lln_diag'; got implementation='elu'"):
        lln.hf.convert(build_model("bert"), "elu", overlap=True)
    with pytest.raises(ValueError, match="overlap needs a block_size that is a multiple of 4; got block_size=6"):
        lln.hf.convert(build_model("bert"), overlap=True, block_size=6)


@pytest.mark.parametrize("kind", ["bert", "llama", "bart"])
def test_models_keep_it_through_saving(kind: str, tmp_path: Path) -> None:
    model, given = build_model(kind), make_batch(kind, 0)
    statistics = {"encoder": "sample", "decoder": "fixed"}
    lln.hf.convert(model, block_size=8, statistics=statistics)
    before = output(model, **given)
    lln.hf.convert(model, overlap=True)
    after = output(model, **given)
    assert relative_error(after, before) > 1e-3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=WIDE).eval()
    assert again.config.lln["overlap"] is True
    assert torch.equal(output(again, **given), after)
    lln.hf.convert(model, overlap=False)
    assert torch.equal(output(model, **given), before)


def test_a_decoder_writes_with_all_its_keys() -> None:
    model = build_model("llama")
    lln.hf.convert(model, block_size=8, overlap=True, statistics="fixed")
    ids = tokens(0, 2, 11)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = model.generate(ids, **options)
    assert torch.equal(written, model.generate(ids, use_cache=False, **options))
    with pytest.raises(ValueError, match="overlap: a state keeps one open block"):
        model(ids, past_key_values=lln.hf.LLNCache(), use_cache=True)


def test_a_tiny_run_learns(tmp_path: Path) -> None:
    changes = {
        "model.layers": "1", "model.width": "32", "model.heads": "2", "model.inner": "32", "data.length": "32",
        "data.vocabulary": "300", "data.evaluation": "12", "optimisation.steps": "30", "optimisation.batch": "8",
        "optimisation.warmup": "2", "log_every": "5", "save_every": "15", "evaluate_every": "30", "record_every": "15",
        "attention.options.overlap": "true", "attention.options.block_size": "8", "graph": "yes",
    }  # fmt: skip
    train(change(recipe("mlm", "tiny", "lln_diag"), changes), tmp_path / "run", cache_dir=tmp_path / "cache")
    lines = read_metrics(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    measured = [head["entropy"] for line in lines for head in line.get("heads", [])]
    assert len(measured) == 4
    assert all(0 < value < 5 for value in measured)
