"""Tensors that tests attend with, and how results are compared; the float64 reference itself is `lln.naive`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """A state for the reference to go on from: a tuple of the fields of `lln.LLNState`, whatever their dtypes."""

    log_sum: Tensor  # [B, Hk, D]            logsumexp_j(beta k_jc); -inf: nothing yet
    mean_value: Tensor  # [B, Hk, D, Dv]        sum_j softmax_j(beta k_jc) v_j
    count: Tensor | None = None  # type: ignore[assignment]  # [B], positions since the first valid token
    block_key: Tensor | None = None  # [B, Hk, block_size, D]
    block_value: Tensor | None = None  # [B, Hk, block_size, Dv]
    block_mask: Tensor | None = None  # [B, block_size]

    def index_select(self, index: Tensor) -> State:
        return State(*(x if x is None else x[index] for x in self))  # type: ignore[arg-type]


def normal(seed: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal float64 numbers that float32 holds exactly, so that one reference serves both types; with a
    dtype, numbers with all digits of that."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype or torch.float32).to(dtype or torch.float64)


def make_inputs(
    batch: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    length: int = 70,
    dim: int = 8,
    value_dim: int | None = None,
    *,
    key_length: int | None = None,
    seed: int = 0,
    exact: bool = False,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q [B, Hq, Nq, D], k [B, Hk, Nk, D] and v [B, Hk, Nk, Dv]. `exact`: the numbers of `normal`, for tests that
    compare types; otherwise one draw after the other."""
    key_heads, key_length = heads if key_heads is None else key_heads, length if key_length is None else key_length
    value_dim = dim if value_dim is None else value_dim
    shapes = (batch, heads, length, dim), (batch, key_heads, key_length, dim), (batch, key_heads, key_length, value_dim)
    if exact:
        q, k, v = (spread * normal(3 * seed + i, *shape).to(device, dtype) for i, shape in enumerate(shapes))
    else:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (spread * torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in shapes)
    return q, k, v


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """|actual - expected| / |expected| in the 2-norm; inf where a NaN or infinity appears. `floor` bounds the
    denominator from below, for quantities (some gradients) that are exactly zero in theory."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.double() - expected.double()).norm().item()
    scale = max(expected.double().norm().item(), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and difference == difference else float("inf")


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11, *, absolute: float | None = None) -> None:
    """Every element, relatively and absolutely to the same tolerance unless another is given for the latter."""
    atol = tolerance if absolute is None else absolute
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=atol)


def assert_norm_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """As a whole: an element may be further off than `tolerance` where it is small beside the others."""
    assert relative_error(actual, expected) <= tolerance


def weighted_gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum in which every element of `out` has a weight of its own."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad(out, leaves, weights)
