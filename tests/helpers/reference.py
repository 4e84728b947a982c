"""What tests compare with, and how: the float64 reference is `lln.naive`, which the package ships."""

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """|actual - expected| / |expected| in the 2-norm; inf where a NaN or infinity appears. `floor` bounds the
    denominator from below, for quantities (some gradients) that are exactly zero in theory."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.double() - expected.double()).norm().item()
    scale = max(expected.double().norm().item(), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and difference == difference else float("inf")


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal float64 numbers that float32 holds exactly, so that one reference serves both types."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
