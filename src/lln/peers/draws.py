"""Random numbers that mechanisms are defined with: functions of a seed, the same on every device; and the module whose
features are random projections, drawn anew every so many training steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.kernels.common import make_once, trace_as_constant
from lln.nn.statistics import is_in_backward
from lln.peers.modules import AttentionModule
from lln.values import check_count

# What was drawn, where it is needed: a copy from the host would make each call wait, and cannot be captured in a CUDA
# graph.
KEPT: dict[tuple[object, ...], Tensor] = {}


@trace_as_constant
def gaussian(
    rows: int, columns: int, seed: int, orthogonal: bool = False, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A matrix of independent standard normal rows; orthogonal: rows at right angles in each square block, which keeps
    every row's distribution and lowers the variance of what is averaged over rows. Nobody may change it."""
    key = rows, columns, seed, orthogonal, device, dtype
    return make_once(KEPT, key, lambda: draw_gaussian(rows, columns, seed, orthogonal).to(dtype), device)


@trace_as_constant
def uniform(count: int, seed: int, *, device: torch.device) -> Tensor:
    """[count] in [0, 1), in float32. Nobody may change it."""

    def make() -> Tensor:
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return drawn.to(torch.float32)

    return make_once(KEPT, (count, seed, device), make, device)


def draw_gaussian(rows: int, columns: int, seed: int, orthogonal: bool) -> Tensor:
    """On the CPU, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if not orthogonal:
        return draw(rows, columns)
    # Rotations without preferred direction: without the signs QR would have one.
    pairs = (torch.linalg.qr(draw(columns, columns)) for _ in range(math.ceil(rows / columns)))
    blocks = [q * r.diagonal().sign() for q, r in pairs]
    found: Tensor = torch.cat(blocks)[:rows] * draw(rows, columns).norm(dim=-1, keepdim=True)
    return found


class RandomFeatures(AttentionModule):
    """projection [features, dim] is a function of (seed, calls // redraw_every); redraw_every None: drawn once."""

    projection: Tensor
    calls: Tensor
    usual_features: Callable[[int], int]  # of a head dim

    def __init__(
        self, *sizes: Any, features: int | None = None, seed: int = 0, orthogonal: bool = True,
        redraw_every: int | None = 1000, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(*sizes, **common)
        if redraw_every is not None:
            check_count("redraw_every", redraw_every)
        count = self.usual_features(self.head_dim) if features is None else features
        self.features, self.seed, self.orthogonal = check_count("features", count), seed, orthogonal
        self.redraw_every = redraw_every
        self.register_buffer("projection", self.draw(0).to(torch.get_default_dtype()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # training calls so far
        self._known: int | None = None  # the same on the host, so that no step waits for a device to read it

    def draw(self, number: int) -> Tensor:
        return draw_gaussian(self.features, self.head_dim, self.seed + number, self.orthogonal)

    def current_projection(self) -> Tensor:
        if self.training and self.redraw_every is not None and not is_in_backward():
            if self._known is None:
                self._known = int(self.calls)
            if self._known and self._known % self.redraw_every == 0:
                self.projection.copy_(self.draw(self._known // self.redraw_every))
            self._known += 1
            self.calls += 1
        return self.projection

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._known = None
        super()._load_from_state_dict(*args, **kwargs)
