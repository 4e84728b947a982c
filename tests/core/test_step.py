"""One token after a state, without gradients, takes a short way to what the long way gives."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.tensors import relative_error
from helpers.untyped import lln_attention, naive_attention
from lln import LLNState

FIELDS = ("log_sum", "mean_value", "count", "block_key", "block_value", "block_mask")


def step_both_ways(*args: Any, **options: Any) -> tuple[tuple[Tensor, LLNState], tuple[Tensor, LLNState]]:
    with torch.no_grad():
        short = lln_attention(*args, is_causal=True, return_state=True, **options)
        with mock.patch("lln.functional.is_step", return_value=False):
            long = lln_attention(*args, is_causal=True, return_state=True, **options)
    return short, long


@pytest.mark.parametrize("block_size", [None, 1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_short_and_long_way_agree_in_every_number(block_size: int | None, dtype: torch.dtype, masked: bool) -> None:
    torch.manual_seed(0)
    batch, heads, groups, dim, value_dim = 4, 2, 3, 7, 5
    alpha, beta = torch.rand(heads * groups, dim) + 1.5, torch.rand(batch, heads) + 1.5
    options: dict[str, Any] = {}
    if block_size is not None:
        options = {"block_size": block_size, "mix": (torch.rand(heads * groups, value_dim), torch.rand(1, 6, 1))}
    state = LLNState.empty(batch, heads, dim, value_dim, block_size=block_size, dtype=dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    for number in range(14):
        q = torch.randn(batch, heads * groups, 1, dim).to(dtype)
        k, v = torch.randn(batch, heads, 1, dim).to(dtype), torch.randn(batch, heads, 1, value_dim).to(dtype)
        # Left padding of 0, 2, 5 and 14 tokens, and a hole in the first row.
        mask = torch.tensor([[number != 6], [number >= 2], [number >= 5], [False]]) if masked else None
        short, long = step_both_ways(q, k, v, alpha, beta, key_mask=mask, state=state, **options)
        assert short[0].dtype == dtype
        assert short[0].shape == long[0].shape
        assert relative_error(short[0].double(), long[0].double(), 1e-30) < tolerance
        for name in FIELDS if block_size is not None else FIELDS[:2]:
            mine, theirs = getattr(short[1], name), getattr(long[1], name)
            assert mine.dtype == theirs.dtype
            assert torch.allclose(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)
            if name in ("count", "block_mask", "block_key", "block_value"):
                assert torch.equal(mine, theirs)
        state = short[1]
    if masked:
        assert (short[0][3] == 0).all()


@pytest.mark.parametrize("block_size", [None, 4])
def test_steps_are_equation_8(block_size: int | None) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, 11, 6, dtype=torch.float64) for h in (4, 2, 2))
    options = {} if block_size is None else {"block_size": block_size}
    want = naive_attention(q, k, v, 2.0, 1.5, is_causal=True, **options).out
    state = LLNState.empty(2, 2, 6, block_size=block_size, dtype=torch.float64)
    for t in range(11):
        row = slice(t, t + 1)
        with torch.no_grad():
            out, state = lln_attention(
                q[:, :, row], k[:, :, row], v[:, :, row], 2.0, 1.5, is_causal=True, state=state, return_state=True,
                **options,
            )  # fmt: skip
        assert relative_error(out, want[:, :, row]) < 1e-12


def test_gradients_take_the_long_way() -> None:
    q, k, v = (torch.randn(1, 2, 1, 4, requires_grad=True) for _ in range(3))
    state = LLNState.empty(1, 2, 4)
    with mock.patch("lln.functional.step", side_effect=AssertionError("the short way has no backward")):
        lln_attention(q, k, v, 2.0, 2.0, is_causal=True, state=state).sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum() > 0
