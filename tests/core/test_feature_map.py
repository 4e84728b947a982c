"""The feature map is what its formula says, in everything that attends with it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lln
from helpers.recorded import assert_instruments_see_p
from helpers.tensors import make_inputs, relative_error
from helpers.untyped import lln_attention
from lln.nn.feature_map import map_features

WIDE = torch.float64


def make_moved(heads: int, key_heads: int, dim: int, **options: Any) -> lln.LLNAttention:
    """With a map that is far from the identity."""
    made = lln.LLNAttention(
        heads, dim, num_key_heads=key_heads, statistics="fixed", alpha=1.3, beta=0.8, feature_map="linear",
        dtype=WIDE, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (made.map_q, made.map_k, made.key_offset):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=WIDE))
    return made


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(3, 3, 5), (4, 2, 8), (6, 1, 7)])
def test_attention_is_that_of_the_formula_written_out(heads: int, key_heads: int, dim: int) -> None:
    """P_ij ~ sum_c exp(alpha q'_ic + beta k'_jc), and softmax of q' . k' inside blocks."""
    q, k, v = make_inputs(2, heads, key_heads, 13, dim)
    module = make_moved(heads, key_heads, dim, block_size=4, mix=0.3)
    out, group = module(q, k, v), heads // key_heads
    block = torch.arange(13) // 4
    for head in range(heads):
        own = head // group
        fq = torch.einsum("bnd,de->bne", q[:, head], torch.eye(dim) + module.map_q[head].detach())
        fk = torch.einsum("bnd,de->bne", k[:, own], torch.eye(dim) + module.map_k[own].detach())
        fk = fk + module.key_offset[own].detach()
        p = (1.3 * fq).exp() @ (0.8 * fk).exp().mT
        p = p / p.sum(-1, keepdim=True)
        scores = (fq @ fk.mT / dim**0.5).masked_fill(block[:, None] != block, -torch.inf)
        want = (0.3 * p + 0.7 * scores.softmax(-1)) @ v[:, own]
        assert relative_error(out[:, head], want) < 1e-12
    assert relative_error(out, lln_attention(q, k, v, 1.3, 0.8, block_size=4, mix=0.3)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_starts_at_the_identity_to_the_last_bit(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in make_inputs(2, 4, 2, 9, 8))
    options: dict[str, Any] = {"num_key_heads": 2, "statistics": "fixed", "block_size": 4, "dtype": dtype}
    mapped, plain = (lln.LLNAttention(4, 8, **options, feature_map=name) for name in ("linear", None))
    for one, other in zip(mapped.features(q, k), (q, k), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == dtype
    assert torch.equal(mapped(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal: bool) -> None:
    q, k, v = (t[:1] for t in make_inputs(2, 2, 1, 5, 3))
    draw = torch.Generator().manual_seed(3)
    maps = [0.3 * torch.randn(shape, dtype=WIDE, generator=draw) for shape in ((2, 3, 3), (1, 3, 3), (1, 3))]

    def attend(q: Tensor, k: Tensor, *maps: Tensor) -> Tensor:
        return lln_attention(*map_features(q, k, *maps), v, 1.1, 0.9, block_size=3, is_causal=is_causal)

    given = (q, k, *maps)
    for t in given:
        t.requires_grad_()
    assert torch.autograd.gradcheck(attend, given)


def test_a_split_sequence_is_the_whole_one_and_a_batch_mate_is_invisible() -> None:
    q, k, v = make_inputs(2, 4, 2, 20, 8)
    module = make_moved(4, 2, 8, block_size=4)
    whole = module(q, k, v, is_causal=True)
    first, state = module(q[:, :, :7], k[:, :, :7], v[:, :, :7], is_causal=True, return_state=True)
    last = module(q[:, :, 7:], k[:, :, 7:], v[:, :, 7:], is_causal=True, state=state)
    assert relative_error(torch.cat([first, last], 2), whole) < 1e-12
    assert relative_error(module(q[:1], k[:1], v[:1], is_causal=True), whole[:1]) < 1e-13


def test_p_and_the_instruments_are_those_of_the_mapped_queries_and_keys() -> None:
    q, k, v = make_inputs(2, 4, 2, 12, 8)
    module = make_moved(4, 2, 8, block_size=4)
    p, out = assert_instruments_see_p(module, q, k, v)
    assert relative_error(p @ v.repeat_interleave(2, 1), out) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "cubic", "statistics": "fixed"}, "feature_map must be None or 'linear'; got 'cubic'."),
        ({"feature_map": "linear"}, "feature_map goes with statistics='fixed'; got statistics='sample'."),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lln.LLNAttention(2, 8, **options)
