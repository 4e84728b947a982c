"""LLNState as an object: fixed size, moving, reordering, and what it carries of an open block."""

import functools
from typing import Any

import pytest
import torch

from helpers.tensors import make_inputs
from helpers.untyped import lln_attention
from lln import LLNState

draw_inputs = functools.partial(make_inputs, batch=3, heads=4, key_heads=2, dim=6, value_dim=5)


def make_state(length: int, block_size: int | None, **options: Any) -> Any:
    q, k, v = draw_inputs(length=length, seed=length, **options)
    return lln_attention(q, k, v, 1.3, 0.8, is_causal=True, block_size=block_size, return_state=True)[1]


@pytest.mark.parametrize("block_size", [None, 8])
def test_a_state_has_the_same_size_after_one_token_and_after_a_thousand(block_size: int | None) -> None:
    assert make_state(1, block_size).nbytes == make_state(1000, block_size).nbytes


@pytest.mark.parametrize("block_size", [None, 8])
def test_the_empty_state_changes_nothing(block_size: int | None) -> None:
    q, k, v = draw_inputs(length=21, seed=21)
    options = {"is_causal": True, "block_size": block_size}
    empty = LLNState.empty(3, 2, 6, 5, block_size=block_size, dtype=torch.float64)
    out = lln_attention(q, k, v, 1.3, 0.8, state=empty, **options)
    torch.testing.assert_close(out, lln_attention(q, k, v, 1.3, 0.8, **options), rtol=1e-13, atol=1e-13)
    state = make_state(21, block_size)
    for merged in (empty.merge(state), state.merge(empty)):
        torch.testing.assert_close(merged.log_sum, state.log_sum)
        torch.testing.assert_close(merged.mean_value, state.mean_value)


def test_two_empty_states_merge_into_an_empty_one_with_zero_gradient() -> None:
    one, two = LLNState.empty(1, 1, 3), LLNState.empty(1, 1, 3)
    for state in (one, two):
        state.log_sum.requires_grad_()
        state.mean_value.requires_grad_()
    merged = one.merge(two)
    assert torch.equal(merged.log_sum, one.log_sum)
    assert torch.equal(merged.mean_value, one.mean_value)
    leaves = (one.log_sum, one.mean_value, two.log_sum, two.mean_value)
    (merged.mean_value.sum() + merged.log_sum.exp().sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_an_empty_state_that_meets_no_tokens_has_zero_gradient() -> None:
    state = LLNState.empty(1, 1, 3)
    nothing = torch.zeros(1, 1, 0, 3)
    for is_causal in (False, True):
        mean = state.mean_value.clone().requires_grad_()
        before = LLNState(state.log_sum, mean)
        _, after = lln_attention(
            nothing, nothing, nothing, 1.0, 1.0, is_causal=is_causal, state=before, return_state=True
        )
        assert torch.equal(torch.autograd.grad(after.mean_value.sum(), mean)[0], torch.zeros_like(mean))


def test_reordering_a_state_is_reordering_the_batch() -> None:
    order = torch.tensor([2, 0, 0])
    state = make_state(13, 8)
    q, k, v = (t[order] for t in draw_inputs(length=5, seed=5))
    out = lln_attention(q, k, v, 1.3, 0.8, is_causal=True, block_size=8, state=state.index_select(order))
    q0, k0, v0 = (torch.cat([a[order], b], 2) for a, b in zip(draw_inputs(length=13, seed=13), (q, k, v), strict=True))
    whole = lln_attention(q0, k0, v0, 1.3, 0.8, is_causal=True, block_size=8)
    torch.testing.assert_close(out, whole[:, :, 13:], rtol=1e-12, atol=1e-12)


def test_a_state_moves_to_other_dtypes_but_keeps_its_precision() -> None:
    state = make_state(13, 8, dtype=torch.float32).to(torch.bfloat16)
    assert state.log_sum.dtype == torch.float64
    assert state.mean_value.dtype == torch.float32
    assert state.block_key.dtype == state.block_value.dtype == torch.bfloat16
    assert state.to("meta").mean_value.device.type == "meta"
    assert state.to(device="meta", dtype=torch.float64).mean_value.dtype == torch.float64


def test_detaching_a_state_cuts_the_graph() -> None:
    q, k, v = draw_inputs(length=9, seed=9)
    _, state = lln_attention(q, k.requires_grad_(), v, 1.3, 0.8, return_state=True)
    assert state.mean_value.requires_grad
    assert not state.detach().mean_value.requires_grad
    assert state.detach().clone().nbytes == state.nbytes


def test_the_open_block_holds_the_last_tokens_and_nothing_else() -> None:
    _, k, v = draw_inputs(length=13, seed=13)
    state = make_state(13, 8)
    assert state.count.tolist() == [13, 13, 13]
    assert state.block_mask.tolist() == [[True] * 5 + [False] * 3] * 3
    assert torch.equal(state.block_key[:, :, :5], k[:, :, 8:])
    assert torch.equal(state.block_value[:, :, :5], v[:, :, 8:])
    assert not state.block_key[:, :, 5:].any()
    assert not make_state(16, 8).block_mask.any()


def test_a_learned_beta_in_a_state_is_a_copy() -> None:
    beta = torch.full((2,), 0.8, dtype=torch.float64, requires_grad=True)
    q, k, v = draw_inputs(length=9, seed=9)
    _, state = lln_attention(q, k, v, 1.3, beta, return_state=True)
    with torch.no_grad():
        beta += 1.0  # as an optimiser does
    with pytest.raises(ValueError, match="another beta"):
        lln_attention(q, k, v, 1.3, beta, state=state)


def test_a_state_shows_its_sizes() -> None:
    assert repr(make_state(13, 8)) == (
        "LLNState(batch=3, heads=2, head_dim=6, value_dim=5, block_size=8, dtype=torch.float64, device=cpu)"
    )
