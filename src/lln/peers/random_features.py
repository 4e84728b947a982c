"""A module whose features are random projections, drawn anew every so many training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks import check_positive_int
from lln.nn.statistics import in_backward
from lln.peers.draws import draw_gaussian
from lln.peers.modules import AttentionModule
from lln.peers.registry import Mechanism


class RandomFeatures(AttentionModule):
    """projection [features, dim] is a function of (seed, calls // redraw_every); redraw_every None: drawn once."""

    projection: Tensor
    calls: Tensor

    def __init__(
        self, entry: Mechanism, *sizes: Any, features: int, seed: int, orthogonal: bool, redraw_every: int | None,
        **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(entry, *sizes, **common)
        if redraw_every is not None:
            check_positive_int("redraw_every", redraw_every)
        self.features, self.seed, self.orthogonal = check_positive_int("features", features), seed, orthogonal
        self.redraw_every = redraw_every
        self.register_buffer("projection", self.draw(0).to(torch.get_default_dtype()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))  # training calls so far
        self._known: int | None = None  # the same on the host, so that no step waits for a device to read it

    def draw(self, number: int) -> Tensor:
        return draw_gaussian(self.features, self.head_dim, self.seed + number, self.orthogonal)

    def current_projection(self) -> Tensor:
        if self.training and self.redraw_every is not None and not in_backward():
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
