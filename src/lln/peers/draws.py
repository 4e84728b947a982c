"""Random numbers that mechanisms are defined with: functions of a seed, the same on every device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.kernels.common import kept, traced_as_constant

# What was drawn, where it is needed: a copy from the host would make each call wait, and cannot be captured in a CUDA
# graph.
KEPT: dict[tuple[object, ...], Tensor] = {}


@traced_as_constant
def gaussian(
    rows: int, columns: int, seed: int, orthogonal: bool = False, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A matrix of independent standard normal rows; orthogonal: rows at right angles in each square block, which keeps
    every row's distribution and lowers the variance of what is averaged over rows. Nobody may change it."""
    key = rows, columns, seed, orthogonal, device, dtype
    return kept(KEPT, key, lambda: draw_gaussian(rows, columns, seed, orthogonal).to(dtype).to(device))


@traced_as_constant
def uniform(count: int, seed: int, *, device: torch.device) -> Tensor:
    """[count] in [0, 1), in float32. Nobody may change it."""

    def make() -> Tensor:
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(torch.float32).to(device)

    return kept(KEPT, (count, seed, device), make)


def draw_gaussian(rows: int, columns: int, seed: int, orthogonal: bool) -> Tensor:
    """On the CPU, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if not orthogonal:
        return draw(rows, columns)
    blocks = [make_rotation(draw(columns, columns)) for _ in range(math.ceil(rows / columns))]
    found: Tensor = torch.cat(blocks)[:rows] * draw(rows, columns).norm(dim=-1, keepdim=True)
    return found


def make_rotation(square: Tensor) -> Tensor:
    """A rotation without preferred direction: without the signs QR would have one."""
    q, r = torch.linalg.qr(square)
    signed: Tensor = q * r.diagonal().sign()
    return signed
