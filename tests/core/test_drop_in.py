"""`lln.scaled_dot_product_attention`: torch's signature, masks as people write them, and eq. (8) inside."""

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lln
from helpers.tensors import make_inputs
from lln.naive import naive_lln, naive_lln_diag

KEPT = torch.arange(20) < torch.tensor([[20], [13]])
PADDING = KEPT[:, None, None]


def match_by_hand(
    q: torch.Tensor, k: torch.Tensor, kept: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha and beta [B, H] of the tokens that are kept, from their standard deviations alone."""
    q, k = (t.unflatten(1, (k.shape[1], -1)) for t in (q, k))
    sigma_q, sigma_k = (
        torch.stack([torch.stack([head[:, row].std() for head in sample]) for sample, row in zip(t, kept, strict=True)])
        for t in (q, k)
    )
    alpha, beta = lln.match_moments(sigma_q, sigma_k, q.shape[-1], **options)
    assert isinstance(alpha, torch.Tensor)
    assert isinstance(beta, torch.Tensor)
    return alpha.repeat_interleave(q.shape[2], 1), beta


def test_the_arguments_are_torchs() -> None:
    names = list(inspect.signature(lln.scaled_dot_product_attention).parameters)
    assert names[:6] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    q, k, v = make_inputs(length=20)
    given = q, k, v, PADDING, 0.0, False
    softmax = F.scaled_dot_product_attention(*given, scale=0.3, enable_gqa=False)
    assert softmax.shape == lln.scaled_dot_product_attention(*given, scale=0.3, enable_gqa=False).shape


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_it_is_equation_8_with_the_moments_of_each_sample(block_size: int | None, scale: float | None) -> None:
    q, k, v = make_inputs(2, 4, 2, 20)
    q[1] *= 2
    alpha, beta = match_by_hand(q, k, KEPT, scale=scale)
    assert alpha.std() > 0.01  # samples and heads differ
    out = lln.scaled_dot_product_attention(q, k, v, PADDING, scale=scale, enable_gqa=True, block_size=block_size)
    if block_size is None:
        expected = naive_lln(q, k, v, alpha, beta, key_mask=KEPT)
    else:
        expected = naive_lln_diag(q, k, v, alpha, beta, block_size, scale=scale, key_mask=KEPT)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_a_causal_call_takes_the_spread_for_1_and_knows_padding_too() -> None:
    q, k, v = make_inputs(length=20)
    alpha, beta = lln.match_moments(1.0, 1.0, 8)
    out = lln.scaled_dot_product_attention(q, k, v, PADDING, is_causal=True)
    torch.testing.assert_close(out, naive_lln(q, k, v, alpha, beta, is_causal=True, key_mask=KEPT))
    given = lln.scaled_dot_product_attention(q, k, v, is_causal=True, alpha=1.5, beta=0.5)
    torch.testing.assert_close(given, naive_lln(q, k, v, 1.5, 0.5, is_causal=True))


@pytest.mark.parametrize("number", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_masks_that_are_added_hide_as_bool_ones_do(number: float) -> None:
    q, k, v = make_inputs(length=20)
    added = torch.zeros(2, 1, 1, 20).masked_fill(~PADDING, number)
    expected = lln.scaled_dot_product_attention(q, k, v, PADDING)
    assert torch.equal(lln.scaled_dot_product_attention(q, k, v, added), expected)
    x = q.transpose(1, 2).flatten(2)
    layer = lln.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    ours, wanted = (layer(x, x, x, mask, need_weights=False)[0] for mask in (added[:, 0, 0], ~KEPT))
    assert torch.equal(ours, wanted)


def test_a_mask_is_expanded_as_torch_does() -> None:
    q, k, v = make_inputs(length=20)
    row = torch.arange(20) < 15
    expected = lln.scaled_dot_product_attention(q, k, v, row.expand(2, 1, 1, 20))
    for shape in ([20], [1, 20], [1, 1, 20], [1, 1, 1, 20]):
        assert torch.equal(lln.scaled_dot_product_attention(q, k, v, row.view(shape)), expected)


def test_three_dimensions_are_one_head() -> None:
    q, k, v = (t[:, 0] for t in make_inputs(length=20))
    out = lln.scaled_dot_product_attention(q, k, v, KEPT[:, None])
    expected = lln.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], PADDING)
    assert torch.equal(out, expected[:, 0])


def test_other_numbers_of_dimensions_are_batches_as_for_torch() -> None:
    q, k, v = (torch.stack([t, 2 * t, -t]) for t in make_inputs(length=20))  # three windows of [2, 2, 20, dim]
    padding = torch.stack([PADDING, PADDING.roll(3, 0), PADDING])
    parts = zip(q, k, v, padding, strict=True)
    expected = torch.stack([lln.scaled_dot_product_attention(*part) for part in parts])
    assert torch.equal(lln.scaled_dot_product_attention(q, k, v, padding), expected)
    assert torch.equal(
        lln.scaled_dot_product_attention(q, k, v, padding[:1])[1],
        lln.scaled_dot_product_attention(q[1], k[1], v[1], padding[0]),
    )
    row = lln.scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])
    assert torch.equal(row, lln.scaled_dot_product_attention(q[0, :1, :1], k[0, :1, :1], v[0, :1, :1])[0, 0])
    with pytest.raises(ValueError, match="the same dimensions before the heads"):
        lln.scaled_dot_product_attention(q, k[:2], v)
    with pytest.raises(ValueError, match="attn_mask must be padding"):
        lln.scaled_dot_product_attention(q, k, v, padding[:2])


def test_dropout_is_drawn_whenever_it_is_not_0() -> None:
    q, k, v = make_inputs(length=20)
    plain = lln.scaled_dot_product_attention(q, k, v)
    torch.manual_seed(0)
    first, second = (lln.scaled_dot_product_attention(q, k, v, dropout_p=0.4) for _ in range(2))
    assert not torch.allclose(first, plain)
    assert not torch.allclose(first, second)


def test_cross_attention_counts_all_queries() -> None:
    q, k, v = make_inputs(length=11, key_length=20)
    spread_q, spread_k = q.std((2, 3)), torch.stack([k[0].std((1, 2)), k[1, :, :13].std((1, 2))])
    expected = naive_lln(q, k, v, *lln.match_moments(spread_q, spread_k, 8), key_mask=KEPT)
    torch.testing.assert_close(lln.scaled_dot_product_attention(q, k, v, PADDING), expected)


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "pairs": (ValueError, "attn_mask must be padding, .*is_causal=True", {"attn_mask": torch.ones(20, 20) > 0}),
    "a square": (ValueError, r"use attn_mask\[\.\.\., :1, :\]", {"attn_mask": PADDING.expand(2, 1, 20, 20)}),
    "heads": (ValueError, "attn_mask must be padding", {"attn_mask": PADDING.expand(2, 2, 1, 20)}),
    "two dimensions": (ValueError, r"attn_mask must be padding.*Use attn_mask\[:, None, None\]", {"attn_mask": KEPT}),
    "a bias": (ValueError, "attn_mask as float may hold 0 and -inf", {"attn_mask": -0.5 * PADDING}),
    "ones": (ValueError, r"Where 1 means attend, use attn_mask\.bool\(\)", {"attn_mask": PADDING.float()}),
    "integers": (TypeError, r"attn_mask must be a tensor, bool.*Use attn_mask\.bool\(\)", {"attn_mask": PADDING.int()}),
    "one coefficient": (ValueError, "alpha and beta go together", {"alpha": 1.0}),
    "groups": (ValueError, "pass enable_gqa=True", {"heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(name: str) -> None:
    kind, words, options = REFUSED[name]
    q, k, v = make_inputs(2, options.get("heads", 2), 2, 20)
    with pytest.raises(kind, match=words):
        lln.scaled_dot_product_attention(q, k, v, **{n: o for n, o in options.items() if n != "heads"})


def test_it_stands_in_for_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (t.requires_grad_() for t in make_inputs(length=20))

    def model() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0)

    before = model()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lln.scaled_dot_product_attention)
    out = model()
    assert out.shape == before.shape
    torch.testing.assert_close(out, lln.LLNAttention(2, 8)(q, k, v))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
