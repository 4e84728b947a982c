"""What a model learns from a batch, and what an evaluation tells of it."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lln.lab.data.examples import IGNORE
from lln.lab.data.needles import average_by_distance, score_answers

Batch = dict[str, Tensor]
Forward = Callable[..., Any]  # a model, or what stands around it


class Objective:
    """One label an example: the models' own loss, which is a mean, and the share of right answers."""

    def divide_by(self, batches: list[Batch]) -> Tensor | int:
        """What the losses of all passes of an update are divided by."""
        return len(batches)

    def compute_loss(self, model: Forward, batch: Batch) -> Tensor:
        found: Tensor = model(**batch)["loss"]
        return found.float()

    def measure(self, model: Forward, batch: Batch) -> Tensor:
        """[B, ...]: what `score` needs of each example. A loss of an evaluation is made of these: a mean over batches
        would depend on how examples are put into them, and several processes fill the last ones up."""
        found: Tensor = model(**batch)["logits"]
        return found.float()

    def score(self, found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Of what was measured, and the labels, of all examples."""
        loss = nn.functional.cross_entropy(torch.from_numpy(found).double(), torch.from_numpy(labels))
        return {"loss": float(loss), "accuracy": float((found.argmax(-1) == labels).mean())}


class Guesses(Objective):
    """Tokens that are hidden. In training the mean of their cross entropy over the whole batch: parts of it, on other
    processes or in other passes, need not hold equally many. In evaluation the mean over sequences of their means.

    Only what is to be guessed needs a guess, 15 % of the tokens. The head, which has a column for each token of the
    vocabulary, would otherwise be most of a small model's work: while `narrow` is open it sees these places alone.
    Masking takes an exact share of each sequence, so there is a number of places that always suffices: shapes do not
    depend on the data, and the step can be captured in a graph."""

    def __init__(self, head: nn.Module, share: float) -> None:
        self.share = share
        self.places: Tensor | None = None  # [B, most]
        self.whole: int | None = None  # tokens of a sequence, where there are only some of them here
        head.register_forward_pre_hook(self.pick)

    def pick(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.places is None:
            return None
        states, *rest = args  # [B, N, C]
        return states.gather(1, self.places[..., None].expand(-1, -1, states.shape[-1])), *rest

    @contextlib.contextmanager
    def narrow(self, labels: Tensor) -> Iterator[Tensor]:
        """Yields the labels [B, most] of the places, in their order."""
        most = min(math.ceil(self.share * (self.whole or labels.shape[1])) + 1, labels.shape[1])
        self.places = torch.sort((labels == IGNORE).to(torch.uint8), dim=1, stable=True).indices[:, :most]
        try:
            yield labels.gather(1, self.places)
        finally:
            self.places = None

    def divide_by(self, batches: list[Batch]) -> Tensor | int:
        return torch.stack([(batch["labels"] != IGNORE).sum() for batch in batches]).sum()

    def compute_loss(self, model: Forward, batch: Batch) -> Tensor:
        given, labels = split_labels(batch)
        with self.narrow(labels) as chosen:
            return compare_tokens(model(**given)["logits"], chosen).sum()

    def measure(self, model: Forward, batch: Batch) -> Tensor:
        given, labels = split_labels(batch)
        return compare_tokens(model(**given)["logits"], labels).sum(1) / (labels != IGNORE).sum(1).clamp_min(1)

    def score(self, found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"loss": float(found.astype("float64").mean())}


class NeedleGuesses(Guesses):
    """Judged by how far a question stands from its needle."""

    def __init__(self, head: nn.Module, share: float, distances: np.ndarray) -> None:
        super().__init__(head, share)
        self.distances = distances

    def measure(self, model: Forward, batch: Batch) -> Tensor:
        given, labels = split_labels(batch)
        with self.narrow(labels):
            return score_answers(model(**given)["logits"], labels)

    def score(self, found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        scores = average_by_distance(found, self.distances)
        return {"loss": scores["loss"], **scores}


def split_labels(batch: Batch) -> tuple[Batch, Tensor]:
    return {name: t for name, t in batch.items() if name != "labels"}, batch["labels"]


def compare_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, N], zero where nothing is to be guessed"""
    flat = logits.float().flatten(0, 1)  # [B N, vocabulary]
    return nn.functional.cross_entropy(flat, labels.flatten(), reduction="none").view_as(labels)
