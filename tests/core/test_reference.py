"""The reference itself: it is eq. (8), its rows are distributions, its gradient is the derivative."""

import pytest
import torch

from helpers.tensors import State, normal, relative_error
from helpers.untyped import naive_attention
from lln.naive import log_similarity, masked_softmax, raw_map


@pytest.mark.parametrize("is_causal", [False, True])
def test_log_space_map_is_equation_8(is_causal: bool) -> None:
    aq, bk = 2.2 * normal(0, 2, 3, 20, 7), 1.7 * normal(1, 2, 3, 20, 7)
    allowed = torch.ones(20, 20, dtype=torch.bool)
    allowed = allowed.tril() if is_causal else allowed
    dense = masked_softmax(log_similarity(aq, bk), allowed)
    assert relative_error(dense, raw_map(aq, bk, allowed)) <= 1e-14


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_rows_of_the_map_sum_to_one(size: float) -> None:
    aq, bk = size * normal(0, 2, 9, 4), size * normal(1, 2, 11, 4)
    rows = masked_softmax(log_similarity(aq, bk), torch.ones(9, 11, dtype=torch.bool))
    assert rows.min() >= 0
    assert (rows.sum(-1) - 1).abs().max() <= 1e-14


@pytest.mark.parametrize("is_causal", [False, True])
def test_reference_is_equation_8_with_mask_and_grouped_heads(is_causal: bool) -> None:
    q, k, v = normal(0, 2, 4, 9, 3), normal(1, 2, 2, 9, 3), normal(2, 2, 2, 9, 5)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[1, 4:6] = False
    for head in range(4):
        allowed = key_mask[:, None, :].expand(2, 9, 9)
        allowed = allowed & torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else allowed
        expected = raw_map(1.5 * q[:, head], 0.75 * k[:, head // 2], allowed) @ v[:, head // 2]
        out = naive_attention(q, k, v, 1.5, 0.75, is_causal=is_causal, key_mask=key_mask).out
        assert relative_error(out[:, head], expected) <= 1e-14


def test_block_part_is_softmax_attention_inside_each_block() -> None:
    q, k, v = normal(0, 1, 2, 10, 3), normal(1, 1, 2, 10, 3), normal(2, 1, 2, 10, 3)
    out = naive_attention(q, k, v, 1.0, 1.0, block_size=4, mix=(0.0, 1.0)).out
    blocks = [
        torch.nn.functional.scaled_dot_product_attention(q[:, :, b : b + 4], k[:, :, b : b + 4], v[:, :, b : b + 4])
        for b in (0, 4, 8)
    ]
    assert relative_error(out, torch.cat(blocks, 2)) <= 1e-14


def test_a_state_stands_for_the_keys_that_were_folded_into_it() -> None:
    q, k, v = normal(0, 1, 2, 12, 3), normal(1, 1, 2, 12, 3), normal(2, 1, 2, 12, 4)
    head = naive_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], 1.2, 1.4, is_causal=True)
    state = State(head.log_sum, head.mean_value)
    tail = naive_attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], 1.2, 1.4, is_causal=True, state=state)
    whole = naive_attention(q, k, v, 1.2, 1.4, is_causal=True)
    for part, expected in zip(tail, (whole.out[:, :, 5:], *whole[1:]), strict=True):
        assert relative_error(part, expected) <= 1e-14


def test_a_coefficient_that_fits_nothing_is_refused() -> None:
    q = normal(0, 2, 4, 9, 3)
    with pytest.raises(ValueError, match=r"\[batch, heads\] = \[2, 4\] or \[heads, dim\] = \[4, 3\]; got \[4, 2\]"):
        naive_attention(q, q, q, torch.ones(4, 2), 1.0)


def test_reference_gradient_is_the_derivative() -> None:
    inputs = [normal(s, *shape).requires_grad_() for s, shape in enumerate([(1, 2, 4, 2), (1, 1, 4, 2), (1, 1, 4, 3)])]
    key_mask = torch.tensor([[False, True, True, False]])

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(naive_attention(q, k, v, 1.3, 0.7, is_causal=True, key_mask=key_mask, block_size=2))

    assert torch.autograd.gradcheck(function, inputs)
