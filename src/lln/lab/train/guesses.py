"""Of a masked language model only what is to be guessed needs a guess: 15 % of the tokens. The head, which has a column
for each token of the vocabulary, would otherwise be most of a small model's work."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lln.lab.data.examples import IGNORE


class Guesses:
    """Lets a model's head see the places that are to be guessed alone, while `only` is open.

    Masking takes an exact share of each sequence, so there is a number of places that always suffices: shapes do not
    depend on the data, and the step can be captured in a graph. evaluated: in evaluations, too, whose scores then know
    what to do with logits of these places alone."""

    def __init__(self, head: nn.Module, probability: float, *, evaluated: bool = False) -> None:
        self.probability, self.evaluated = probability, evaluated
        self.places: Tensor | None = None  # [B, most]
        head.register_forward_pre_hook(self.pick)

    def pick(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.places is None:
            return None
        states, *rest = args  # [B, N, C]
        return states.gather(1, self.places[..., None].expand(-1, -1, states.shape[-1])), *rest

    @contextlib.contextmanager
    def only(self, labels: Tensor) -> Iterator[Tensor]:
        """Yields the labels [B, most] of the places, in their order."""
        most = min(math.ceil(self.probability * labels.shape[1]) + 1, labels.shape[1])
        self.places = torch.sort((labels == IGNORE).to(torch.uint8), dim=1, stable=True).indices[:, :most]
        try:
            yield labels.gather(1, self.places)
        finally:
            self.places = None
