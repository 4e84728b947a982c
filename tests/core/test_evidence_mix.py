"""mix="evidence" equals its definition for every option, and is softmax attention wherever the evidence is exact."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from helpers.tensors import assert_close, make_inputs, normal, relative_error
from helpers.untyped import lln_attention
from lln import LLNAttention, LLNState, MultiheadAttention
from lln.instruments import entropy, lln_map, record
from lln.naive import naive_evidence

SIZE = 8
LAYOUTS = list(itertools.product((False, True), (False, True)))  # causal, overlap


def attend(*qkv: Tensor, beta: Any = 1.3, **options: Any) -> Any:
    return lln_attention(*qkv, beta=beta, read="evidence", block_size=SIZE, mix="evidence", **options)


def define(q: Tensor, k: Tensor, v: Tensor, beta: Any = 1.3, **options: Any) -> Tensor:
    return naive_evidence(q, k, v, beta, block_size=SIZE, mix="evidence", **options)


def hide(kind: str, length: int) -> Tensor | None:
    """None, holes, or left padding of one sequence and nothing of another."""
    if kind == "none":
        return None
    mask = normal(7, 3, length) > -0.3
    mask[1, : length // 2], mask[2] = False, kind == "holes"
    return mask


@pytest.mark.parametrize(("is_causal", "overlap"), LAYOUTS)
@pytest.mark.parametrize("masked", ["none", "holes", "one is empty"])
@pytest.mark.parametrize("length", [1, 8, 37])
def test_outputs_and_gradients_equal_the_definition(is_causal: bool, overlap: bool, masked: str, length: int) -> None:
    q, k, v = make_inputs(3, 4, 2, length, 8, 5, exact=True)
    options: dict[str, Any] = {"is_causal": is_causal, "overlap": overlap, "scale": 0.4}
    options["key_mask"] = hide(masked, length)
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    ways: list[tuple[Any, list[Tensor]]] = [(define, wanted), (attend, found)]
    for attention, into in ways:
        leaves = [t.clone().requires_grad_() for t in (q, k, v, normal(9, 11).exp(), normal(5, 2, 11, 8), normal(4, 4))]
        out = attention(*leaves[:3], beta=leaves[3].view(1, 1, -1), directions=leaves[4], evidence_offset=leaves[5],
                        **options)  # fmt: skip
        into += [
            out.detach(),
            *torch.autograd.grad((out * normal(8, *out.shape)).sum(), leaves, materialize_grads=True),
        ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs, floor=1e-12) <= 1e-12
    cast = [t.float() for t in (q, k, v)]
    narrow = attend(*cast, beta=normal(9, 11).exp().float().view(1, 1, -1), directions=normal(5, 2, 11, 8).float(),
                    evidence_offset=normal(4, 4).float(), **options)  # fmt: skip
    assert narrow.dtype == torch.float32
    assert relative_error(narrow, wanted[0]) <= 1e-5


@pytest.mark.parametrize(("is_causal", "overlap"), LAYOUTS)
def test_packed_sequences_are_alone(is_causal: bool, overlap: bool) -> None:
    q, k, v = make_inputs(1, 2, 2, 40, 8)
    offsets = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
    options: dict[str, Any] = {"is_causal": is_causal, "overlap": overlap, "evidence_offset": normal(3, 3, 2)}
    beta = normal(2, 3, 2).exp()
    packed = attend(q, k, v, beta=beta, cu_seqlens=offsets, **options)
    assert_close(packed, define(q, k, v, beta=beta, cu_seqlens=offsets, **options), 1e-12)


@pytest.mark.parametrize(("is_causal", "overlap"), LAYOUTS)
def test_it_is_softmax_attention_where_nothing_lies_outside_or_equal_keys_do(is_causal: bool, overlap: bool) -> None:
    q, k, v = make_inputs(2, 2, 2, 40, 8)
    near = 4 if overlap else SIZE  # so many tokens are in one window whatever it is
    options = {"is_causal": is_causal, "overlap": overlap}
    q0, k0, v0 = (t[:, :, :near] for t in (q, k, v))
    assert_close(attend(q0, k0, v0, **options), scaled_dot_product_attention(q0, k0, v0, is_causal=is_causal), 1e-12)
    equal = k[:, :, :1].expand_as(k)
    wanted = scaled_dot_product_attention(q, equal, v, is_causal=is_causal)
    assert_close(attend(q, equal, v, **options), wanted, 1e-12)


def test_of_one_key_outside_it_is_softmax_attention() -> None:
    qkv = make_inputs(2, 2, 2, SIZE + 1, 8)
    found, wanted = attend(*qkv), scaled_dot_product_attention(*qkv)
    assert_close(found[:, :, :SIZE], wanted[:, :, :SIZE], 1e-12)  # the last row has eight keys outside
    assert relative_error(found[:, :, SIZE:], wanted[:, :, SIZE:]) > 1e-3


def show_rows(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """P: attention is linear in the values."""
    return attend(q, k, torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1), **options)


@pytest.mark.parametrize(("is_causal", "overlap"), LAYOUTS)
def test_rows_sum_to_one_nobody_sees_later_keys_and_no_more_is_given_away_than_softmax_gives(
    is_causal: bool, overlap: bool
) -> None:
    q, k, v = make_inputs(2, 2, 2, 90, 8)
    p = show_rows(q, k, is_causal=is_causal, overlap=overlap)
    assert p.min() >= 0
    assert_close(p.sum(-1), torch.ones(2, 2, 90, dtype=torch.float64), 1e-12)
    scores = q @ k.transpose(-1, -2) * 8**-0.5
    softmax = (scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf) if is_causal else scores).softmax(-1)
    last, window = 85, slice(84 if overlap else 80, 88)
    if overlap:
        window = slice(80, 88) if is_causal else slice(82, 90)
    inside = [m[:, :, last, window].sum(-1) for m in (p, softmax)]
    assert (inside[0] >= inside[1] - 1e-12).all()  # the evidence is a lower bound of what lies outside
    if is_causal:
        assert not p.triu(1).any()
        moved = k.clone()
        moved[:, :, 60:] += 1e3
        options = {"is_causal": True, "overlap": overlap}
        assert torch.equal(attend(q, k, v, **options)[:, :, :60], attend(q, moved, v, **options)[:, :, :60])


@pytest.mark.parametrize(("is_causal", "overlap"), LAYOUTS)
def test_a_vector_that_all_keys_share_changes_nothing(is_causal: bool, overlap: bool) -> None:
    q, k, v = (t.bfloat16().double() for t in make_inputs(2, 2, 2, 100, 8))
    k = (k * 4).round() / 4
    options = {"is_causal": is_causal, "overlap": overlap}
    wanted = attend(q, k, v, **options)
    for dtype, floor in ((torch.float64, 1e-11), (torch.float32, 3e-5), (torch.bfloat16, 3e-3)):
        shifted = attend(q.to(dtype), (k + 48).to(dtype), v.to(dtype), **options)
        plain = attend(q.to(dtype), k.to(dtype), v.to(dtype), **options)
        assert relative_error(shifted, wanted) <= max(2 * relative_error(plain, wanted), floor)


def test_padding_and_batch_mates_are_invisible() -> None:
    q, k, v = make_inputs(2, 2, 2, 30, 8)
    for is_causal, overlap in LAYOUTS:
        alone = attend(*(t[:1] for t in (q, k, v)), is_causal=is_causal, overlap=overlap)
        padded = [torch.cat([normal(1, 2, 2, 13, 8), t], 2) for t in (q, k, v)]
        mask = torch.arange(43) >= torch.tensor([[13], [2]])
        found = attend(*padded, is_causal=is_causal, overlap=overlap, key_mask=mask)
        assert_close(found[:1, :, 13:], alone, 1e-12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_split_equals_whole(overlap: bool, masked: bool) -> None:
    q, k, v = make_inputs(2, 4, 2, 41, 8, 5)
    mask = torch.arange(41) >= torch.tensor([[0], [11]]) if masked else torch.ones(2, 41, dtype=torch.bool)
    options: dict[str, Any] = {"is_causal": True, "overlap": overlap, "directions": "signed"}
    whole, end = attend(q, k, v, key_mask=mask, return_state=True, **options)
    for cuts in ([1] * 41, [3, 9, 1, 28], [16, 0, 25], [40, 1]):
        state = LLNState.empty(2, 2, 8, 5, block_size=SIZE, read="evidence", channels=16, mix="evidence",
                               overlap=overlap, dtype=torch.float64)  # fmt: skip
        outs, at = [], 0
        for size in cuts:
            part = slice(at, at + size)
            out, state = attend(q[:, :, part], k[:, :, part], v[:, :, part], key_mask=mask[:, part], state=state,
                                return_state=True, **options)  # fmt: skip
            outs.append(out)
            at += size
        assert_close(torch.cat(outs, 2), whole, 1e-12)
        for name in ("log_sum", "mean_value", "mean_key", "entropy", "count", "block_key", "block_value", "block_mask"):
            assert_close(getattr(state, name).double(), getattr(end, name).double(), 1e-12)
    assert end.nbytes == attend(q[:, :, :20], k[:, :, :20], v[:, :, :20], return_state=True, **options)[1].nbytes


def test_dropout_keeps_the_mean() -> None:
    q, k, v = make_inputs(1, 1, 1, 20, 4)
    torch.manual_seed(0)
    draws = torch.stack([attend(q, k, v, dropout_p=0.3) for _ in range(400)])
    plain = attend(q, k, v)
    assert draws.std(0).min() > 0
    assert relative_error(draws.mean(0), plain) < 0.1


def test_second_derivatives_are_those_of_the_definition() -> None:
    def square(attention: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in make_inputs(1, 2, 1, 11, 4)]
        (gradient,) = torch.autograd.grad(attention(*leaves, overlap=True).square().sum(), leaves[1], create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), leaves))

    for ours, theirs in zip(square(attend), square(define), strict=True):
        assert relative_error(ours, theirs) <= 1e-11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"read": "paper", "alpha": 1.0, "block_size": 4},
            "needs block_size and read=.evidence., because .*; got block_size=4",
        ),
        ({"read": "evidence"}, "needs block_size and read=.evidence., because .*; got block_size=None"),
        ({"read": "evidence", "block_size": 6, "overlap": True}, "multiple of 4; got 6"),
        ({"read": "evidence", "block_size": 4, "mix": 0.5, "overlap": True}, "overlap goes with mix='evidence'"),
        ({"read": "evidence", "block_size": 4, "mix": 0.5, "evidence_offset": 1.0}, "evidence_offset goes with mix"),
        ({"read": "evidence", "block_size": 4, "mix": "ratio"}, "a pair of them, or 'evidence'; got 'ratio'"),
        (
            {"read": "evidence", "block_size": 4, "evidence_offset": torch.ones(3)},
            "evidence_offset must be",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    q, k, v = make_inputs(1, 2, 2, 8, 4)
    with pytest.raises(ValueError, match=message):
        lln_attention(q, k, v, beta=1.0, **({"mix": "evidence"} | options))


def test_states_of_another_mix_do_not_serve() -> None:
    q, k, v = make_inputs(1, 2, 2, 8, 4)
    _, state = attend(q, k, v, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="made with mix='evidence', this call has another mix"):
        lln_attention(q, k, v, beta=1.3, read="evidence", block_size=SIZE, is_causal=True, state=state)
    with pytest.raises(ValueError, match="this call has mix='evidence' and overlap=True"):
        attend(q, k, v, is_causal=True, overlap=True, state=state)
    with pytest.raises(ValueError, match="overlap needs mix='evidence'"):
        LLNState.empty(1, 2, 4, block_size=8, overlap=True)


@pytest.mark.parametrize(("is_causal", "overlap"), LAYOUTS)
def test_maps_and_modules_show_what_values_are_multiplied_by(is_causal: bool, overlap: bool) -> None:
    q, k, v = make_inputs(2, 4, 2, 30, 8)
    mask = torch.arange(30) < torch.tensor([[30], [22]])
    options: dict[str, Any] = {"is_causal": is_causal, "overlap": overlap, "key_mask": mask}
    p = lln_map(q, k, None, 1.3, SIZE, mix="evidence", read="evidence", **options)
    out = attend(q, k, v, **options) * mask[:, None, :, None]
    assert_close(p.dense() @ v.repeat_interleave(2, 1), out, 1e-10)
    module = LLNAttention(
        4, 8, num_key_heads=2, statistics="fixed", read="evidence", directions=24, block_size=SIZE, mix="evidence",
        overlap=overlap,
    ).double()  # fmt: skip
    with torch.no_grad():
        module.evidence_offset.copy_(normal(3, 4))
    given = {"is_causal": is_causal, "key_mask": mask}
    with record(torch.nn.ModuleList([module]), every=1) as seen:
        out = module(q, k, v, **given)
    wanted = attend(q, k, v, beta=1.0, directions=module.channel_directions, evidence_offset=normal(3, 4), **options)
    assert_close(out, wanted, 1e-12)
    assert "entropy" in seen.table().columns
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_multihead_attention_gives_its_weights() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"read": "evidence", "block_size": 4, "mix": "evidence"}
    module = MultiheadAttention(16, 2, batch_first=True, **options)
    x = torch.randn(2, 13, 16)
    out, weights = module(x, x, x, need_weights=True, average_attn_weights=False)
    assert_close(weights.sum(-1), torch.ones(2, 2, 13), 1e-5)
    assert out.shape == x.shape
    assert entropy(lln_map(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), None, 1.0, 4, **{
        name: value for name, value in options.items() if name != "block_size"})).shape == (1, 2)  # fmt: skip
