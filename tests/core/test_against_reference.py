"""Outputs and states equal eq. (8), for every option, in every precision, at every size of the exponents."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.call_options import draw_coefficient, draw_state, mask_keys
from helpers.tensors import State, make_inputs, normal, relative_error
from helpers.untyped import lln_attention, naive_attention
from lln import LLNState

exact_inputs = functools.partial(make_inputs, exact=True)
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, tuple):
        return tuple(cast(y, dtype) for y in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def check(qkv: tuple[Tensor, ...], alpha: Any = 1.25, beta: Any = 1.75, **options: Any) -> None:
    """Output and returned state against the reference. A `state` here is the reference's, in float64."""
    expected = naive_attention(*qkv, alpha, beta, **options)
    state = options.pop("state", None)
    for dtype, tolerance in PRECISIONS:
        if state is not None:
            given = state._replace(**{f: cast(getattr(state, f), dtype) for f in State._fields if f != "log_sum"})
            options["state"] = LLNState(**{f: x for f, x in given._asdict().items() if x is not None})
        arguments = (*cast(qkv, dtype), cast(alpha, dtype), cast(beta, dtype))
        with_dtype = {name: cast(x, dtype) for name, x in options.items()}
        out = lln_attention(*arguments, **with_dtype)
        assert out.dtype == dtype
        assert relative_error(out, expected.out) <= tolerance
        if options.get("block_size") is None or options.get("is_causal"):  # an open block is causal only
            out, returned = lln_attention(*arguments, **with_dtype, return_state=True)
            assert returned.mean_value.dtype == dtype
            assert returned.log_sum.dtype == torch.float64
            assert relative_error(out, expected.out) <= tolerance
            assert relative_error(returned.mean_value, expected.mean_value) <= tolerance
            assert torch.allclose(returned.log_sum, expected.log_sum, rtol=tolerance, atol=tolerance)


def key_masks(kind: str, batch: int, length: int) -> Tensor:
    return mask_keys(kind, [length] * batch).view(batch, length)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [3, 60, 64, 80])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
def test_attention_is_equation_8_at_every_length_and_dimension(length: int, dim: int, is_causal: bool) -> None:
    heads = 1 if length == 500 else 2  # the reference holds Nq x Nk x D numbers a head
    check(exact_inputs(1, heads, heads, length, dim=dim), 0.5 + dim / 40, 2.5 - dim / 40, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("length", [1, 63, 65, 130])
def test_block_part_is_softmax_in_blocks_at_every_size(length: int, block_size: int, is_causal: bool) -> None:
    check(exact_inputs(1, 2, 2, length, dim=16), block_size=block_size, is_causal=is_causal)
    check(exact_inputs(1, 2, 2, length, dim=3, value_dim=5), block_size=block_size, is_causal=is_causal, scale=1.5)


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["holes", "left", "right", "dead sample"])
def test_masked_keys_are_absent(kind: str, is_causal: bool, block_size: int | None) -> None:
    check(exact_inputs(3, 2, 1), key_mask=key_masks(kind, 3, 70), is_causal=is_causal, block_size=block_size)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize(("hq", "hk", "dv"), [(4, 2, 8), (3, 1, 5), (6, 2, 11)])
def test_grouped_heads_and_other_value_dimensions(
    hq: int, hk: int, dv: int, block_size: int | None, is_causal: bool
) -> None:
    check(exact_inputs(2, hq, hk, 66, dim=6, value_dim=dv), is_causal=is_causal, block_size=block_size)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ends", [[0, 70], [0, 1, 66, 66, 130], [0, 0, 40, 41, 105, 105]])
def test_packed_sequences_do_not_see_each_other(
    ends: list[int], is_causal: bool, block_size: int | None, masked: bool
) -> None:
    qkv = exact_inputs(1, 4, 2, ends[-1], dim=5)
    count = len(ends) - 1
    check(
        qkv,
        1.0 + normal(3, count, 4).abs() / 2,
        1.0 + normal(4, count, 2).abs() / 2,
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        key_mask=key_masks("holes", 1, ends[-1]) if masked else None,
        is_causal=is_causal,
        block_size=block_size,
    )


def test_packed_cross_attention_reads_its_own_source_only() -> None:
    rows, cols = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 70, 75], [0, 66, 70, 70, 100]))
    qkv = exact_inputs(1, 4, 2, 75, key_length=100, value_dim=3)
    check(qkv, cu_seqlens=(rows, cols))
    check(qkv, cu_seqlens=(rows, cols), key_mask=key_masks("holes", 1, 100))


@pytest.mark.parametrize(("nq", "nk"), [(5, 70), (70, 5), (1, 65), (65, 1), (0, 9), (9, 0), (0, 0)])
def test_cross_attention_at_every_pair_of_lengths(nq: int, nk: int) -> None:
    check(exact_inputs(2, 4, 2, nq, key_length=nk))
    check(exact_inputs(2, 4, 2, nq, key_length=nk), state=draw_state(2, 2, 8, 8))


@pytest.mark.parametrize("block_size", [None, 4])
def test_an_empty_causal_sequence_gives_an_empty_output(block_size: int | None) -> None:
    check(exact_inputs(2, 2, 2, 0), is_causal=True, block_size=block_size)


@pytest.mark.parametrize("block_size", [None, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_memory_layout_is_invisible(is_causal: bool, block_size: int | None) -> None:
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in exact_inputs(2, 4, 2)
    )  # as projections give them
    check((q, k, v[:, :1].expand(-1, 2, -1, -1)), is_causal=is_causal, block_size=block_size)


SHAPES = ["[]", "[H]", "[B, H]", "[H, D]", "[B, H, D]"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_alpha_and_beta_scale_their_own_sample_head_and_channel(kind: str, is_causal: bool, packed: bool) -> None:
    alpha, beta = draw_coefficient(kind, 3, 3, 4, 5), draw_coefficient(kind, 4, 3, 2, 5)
    cu_seqlens = torch.tensor([0, 20, 66, 70], dtype=torch.int32) if packed else None
    check(exact_inputs(1 if packed else 3, 4, 2, dim=5), alpha, beta, is_causal=is_causal, cu_seqlens=cu_seqlens)
    check(exact_inputs(1 if packed else 3, 4, 2, dim=5), 0.5, beta, is_causal=is_causal, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_mix_weighs_both_parts_per_sample_head_and_channel(kind: str, is_causal: bool, packed: bool) -> None:
    r, p = draw_coefficient(kind, 5, 3, 4, 6), draw_coefficient(kind, 6, 3, 4, 6)
    cu_seqlens = torch.tensor([0, 20, 66, 70], dtype=torch.int32) if packed else None
    for mix in (r, (r, p), (0.25, p), 0.75, (1.0, 0.0), (0.0, 1.0)):
        qkv = exact_inputs(1 if packed else 3, 4, 2, dim=5, value_dim=6)
        check(qkv, block_size=8, mix=mix, is_causal=is_causal, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("kind", ["none", "holes", "left", "dead sample"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_state_is_everything_that_came_before(is_causal: bool, kind: str) -> None:
    check(exact_inputs(2, 4, 2), state=draw_state(2, 2, 8, 8), is_causal=is_causal, key_mask=key_masks(kind, 2, 70))


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_each_have_their_state(is_causal: bool) -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 70], dtype=torch.int32)
    check(exact_inputs(1, 4, 2), state=draw_state(3, 2, 8, 8), is_causal=is_causal, cu_seqlens=cu_seqlens)


def test_an_empty_state_is_no_state() -> None:
    q, k, v = exact_inputs(2, 4, 2, 9, value_dim=3)
    for block_size in (None, 4):
        empty = LLNState.empty(2, 2, 8, 3, block_size=block_size, dtype=torch.float64)
        options = {"is_causal": True, "block_size": block_size}
        out = lln_attention(q, k, v, 1.2, 0.8, state=empty, **options)
        assert relative_error(out, lln_attention(q, k, v, 1.2, 0.8, **options)) <= 1e-14


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("large_keys", [False, True])
@pytest.mark.parametrize("size", [10, 60, 200, 400])
def test_float32_holds_at_large_exponents(
    size: float, large_keys: bool, is_causal: bool, block_size: int | None
) -> None:
    """max|alpha q| = size through alpha, so that the block's own logits stay those of ordinary attention."""
    q, k, v = exact_inputs(1, 2, 2, 200, dim=16)
    alpha = (size / q.abs().max()).float().item()
    beta = (size / k.abs().max()).float().item() if large_keys else 1.5
    options = {"is_causal": is_causal, "block_size": block_size}
    out = lln_attention(q.float(), k.float(), v.float(), alpha, beta, **options)
    assert relative_error(out, naive_attention(q, k, v, alpha, beta, **options).out) <= 3e-5


def two_softmaxes(q: Tensor, k: Tensor, v: Tensor, alpha: float, beta: float) -> Tensor:
    """The plain PyTorch of one head group: float32 inside, input type outside."""
    x = beta * k.float()
    a = (alpha * q.float() + x.logsumexp(-2, keepdim=True)).softmax(-1)
    return (a @ (x.softmax(-2).transpose(-1, -2) @ v.float())).to(q.dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_plain_pytorch(dtype: torch.dtype, size: float, is_causal: bool) -> None:
    q, k, v = cast(exact_inputs(1, 2, 2, 130, dim=16), dtype)
    alpha, beta = 1.5 * size, 1.25 * size
    if is_causal:  # each row: the two softmaxes of its prefix
        rows = [two_softmaxes(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], alpha, beta) for i in range(130)]
        plain = torch.cat(rows, 2)
    else:
        plain = two_softmaxes(q, k, v, alpha, beta)
    out = lln_attention(q, k, v, alpha, beta, is_causal=is_causal)
    expected = naive_attention(q, k, v, alpha, beta, is_causal=is_causal).out
    assert out.dtype == dtype
    assert relative_error(out, expected) <= 2 * relative_error(plain, expected)


def test_autocast_gives_the_type_that_torch_attention_gives() -> None:
    q, k, v = (x.float().requires_grad_() for x in exact_inputs(2, 2, 2, 66))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        outs = [lln_attention(q, k, v, 1.5, 1.5, is_causal=c, block_size=b) for c in (False, True) for b in (None, 8)]
    for out, (is_causal, block_size) in zip(outs, [(c, b) for c in (False, True) for b in (None, 8)], strict=True):
        assert out.dtype == theirs.dtype == torch.bfloat16
        expected = naive_attention(q, k, v, 1.5, 1.5, is_causal=is_causal, block_size=block_size).out
        assert relative_error(out, expected) <= 1e-2  # a few roundings to bfloat16, each up to 2 ** -9
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        for actual, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
            assert actual.dtype == torch.float32
            assert relative_error(actual, wanted) <= 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [1, 70])
def test_nothing_is_ever_nan_or_infinite(length: int, is_causal: bool, size: float, dtype: torch.dtype) -> None:
    for block_size in (None, 8):
        for kind in ("none", "holes", "left", "dead sample"):
            q, k, v = cast(exact_inputs(2, 2, 1, length), dtype)
            q, k = size * q, size * k
            alpha, beta = torch.full((2,), 1.5), torch.full((1,), 2.5)
            leaves = [x.requires_grad_() for x in (q, k, v, alpha, beta)]
            key_mask = key_masks(kind, 2, length)
            options = {"is_causal": is_causal, "block_size": block_size, "key_mask": key_mask}
            out = lln_attention(*leaves, **options)
            loss = out.float().mean()  # not a sum: gradients of size N * 1e4 would rightly overflow float16
            if is_causal or block_size is None:
                _, state = lln_attention(*leaves, **options, return_state=True)
                loss = loss + state.mean_value.mean()
                assert state.mean_value.isfinite().all()
                assert not state.log_sum.isnan().any()
            gradients = torch.autograd.grad(loss, leaves)
            assert all(x.isfinite().all() for x in (out, *gradients))
            if kind == "dead sample":
                assert not any(x[0].any() for x in (out, *gradients[:3]))
