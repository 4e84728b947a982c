"""Needles in text: a task that only looking far solves, at any length.

A needle is one token that stands for a key with a value. Needles are planted in text at random places; elsewhere,
before or behind, questions are planted: tokens that name a key alone. In the place of a question the model must guess
the needle with that key. Which keys a sequence has, their values and all places are drawn anew for each sequence, so
neither the text nor the weights tell a value: only the needle does, wherever it stands. Values are independent of each
other, so other needles tell nothing either.

Key and value are one token, so that one layer of attention suffices: what is asked is how far attention reaches, not
whether two layers learn in a short run to work together (one that brings a key to the value behind it, one that looks).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from lln.lab.core.errors import DataError
from lln.lab.core.seeds import draws, pick, stream_key
from lln.lab.data.examples import IGNORE, Examples
from lln.lab.data.sources import Selection, read
from lln.lab.data.text import PlacedTokens, tokenise
from lln.lab.data.tokenizer import TextTokenizer
from lln.values import check_count

EDGES = tuple(4**power for power in range(3, 12))  # of bands of distances: 64, 256, 1024, ...


@dataclass(frozen=True)
class Planting:
    """What is planted into a sequence.

    needles_every, questions_every: tokens for each needle and each question. There are never more needles than keys, so
    few keys make their number the same at all lengths; with more questions than needles, keys are asked for several
    times. keys, values: how many there are; a needle is one of keys x values tokens.
    """

    needles_every: int = 64
    questions_every: int = 32
    keys: int = 256
    values: int = 4

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            check_count(name, number, least=2 if name == "values" else 1)  # with one value there is nothing to guess

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Planting:
        """From a config's data.options; ValueError for names that are none."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise ValueError(f"data.options: needles have {', '.join(known)}; got {unknown[0]!r}.")
        return cls(**options)

    def count_needles(self, length: int) -> int:
        return min(length // self.needles_every, self.keys)

    def count_questions(self, length: int) -> int:
        return length // self.questions_every

    def check(self, length: int) -> None:
        needles, questions = self.count_needles(length), self.count_questions(length)
        if needles < 1 or questions < 1 or needles + questions > length - 1:
            raise ValueError(
                f"length must have room for a needle, a question and the start token; got {length} with {needles} "
                f"needles and {questions} questions."
            )


class Needles(Examples):
    """Sequences of `length` tokens with needles: the start token, then text from a random place on, over and over where
    it is too short. Items: `input_ids` and `labels` [length], which depend on (seed, split, epoch, index) alone."""

    def __init__(
        self, tokens: np.ndarray, tokenizer: TextTokenizer, *, length: int, count: int, planting: Planting, seed: int,
        split: str, identity: dict[str, Any], notes: list[str],
    ) -> None:  # fmt: skip
        planting.check(length)
        if len(tokens) < 1:
            raise DataError("The text has no tokens.")
        self.tokens, self.tokenizer, self.length, self.count, self.planting = tokens, tokenizer, length, count, planting
        self.first_question = tokenizer.vocab_size
        self.first_needle = self.first_question + planting.keys
        self.vocab_size = self.first_needle + planting.keys * planting.values
        self.needles, self.questions = planting.count_needles(length), planting.count_questions(length)
        self.key = stream_key("needles", split, seed)
        self.identity = {
            **identity, "length": length, "count": count, "planting": asdict(planting), "needle_seed": seed,
            "needle_split": split,
        }  # fmt: skip
        self.notes = notes
        self.placed = PlacedTokens(tokens)

    def __len__(self) -> int:
        return self.count

    def read(self, indices: np.ndarray | slice) -> dict[str, Tensor]:
        """Nothing is stored by example: `finish` draws all of it."""
        return {}

    def draw(self, index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        """Of each sequence: the start of its text [B]; keys, values and places of its needles [B, needles]; places of
        its questions [B, questions], of which the j-th asks for needle j modulo needles. Whole numbers alone, so that
        every device draws the same."""
        sizes = [self.length - 1, self.planting.keys, self.needles, 1]
        places, keys, values, start = draws(self.key, epoch, index, sum(sizes)).split(sizes, 1)
        order = 1 + places.argsort(1)
        return {
            "start": pick(start[:, 0], len(self.tokens)),
            "keys": keys.argsort(1)[:, : self.needles],
            "values": pick(values, self.planting.values),
            "needles": order[:, : self.needles],
            "questions": order[:, self.needles : self.needles + self.questions],
        }

    def finish(self, rows: dict[str, Tensor], index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        d, device = self.draw(index, epoch), index.device
        asked = torch.arange(self.questions, device=device) % self.needles  # needle of each question
        needle = self.first_needle + d["keys"] * self.planting.values + d["values"]  # [B, needles]
        text = self.placed.on(device)
        ids = text[(d["start"][:, None] + torch.arange(self.length, device=device)) % len(text)].long()  # [B, N]
        ids[:, 0] = self.tokenizer.start_id
        ids.scatter_(1, d["needles"], needle)
        ids.scatter_(1, d["questions"], self.first_question + d["keys"][:, asked])
        labels = torch.full_like(ids, IGNORE).scatter_(1, d["questions"], needle[:, asked])
        return {"input_ids": ids, "labels": labels}

    def measure_distances(self) -> np.ndarray:
        """[count, questions]: tokens from each question to its needle, in the order of places, in epoch 0."""
        found = []
        for index in torch.arange(self.count).split(max(2**20 // self.length, 1)):
            d = self.draw(index, torch.zeros_like(index))
            asked = torch.arange(self.questions) % self.needles
            distance = (d["questions"] - d["needles"][:, asked]).abs()
            found.append(distance.gather(1, d["questions"].argsort(1)))
        return torch.cat(found).numpy()


def load_needles(
    name: str,
    split: str,
    tokenizer: TextTokenizer,
    *,
    length: int,
    count: int,
    planting: Planting | None = None,
    seed: int = 0,
    **selection: Unpack[Selection],
) -> Needles:
    """`count` sequences in the text of a set; selection as in `load_text`."""
    rows = read(name, split, **selection)
    tokens, _ = tokenise(rows, tokenizer)
    identity = {"rows": rows.identity, "tokenizer": tokenizer.identity}
    return Needles(
        tokens, tokenizer, length=length, count=count, planting=planting or Planting(), seed=seed, split=split,
        identity=identity, notes=rows.notes,
    )  # fmt: skip


# What a model's guesses are worth


def score_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, questions, 2]: of each question, in the order of places, its loss and 1 where the guess is right. logits
    [B, places, vocabulary]: of all places, or as `Guesses` gives them, of the questions first. Sequences hold equally
    many questions."""
    asked = labels != IGNORE  # [B, N]
    right = labels[asked].view(len(labels), -1)  # [B, questions]
    picked = logits[asked] if logits.shape[1] == labels.shape[1] else logits[:, : right.shape[1]].flatten(0, 1)
    picked, right = picked.float(), right.flatten()  # [B questions, vocabulary], [B questions]
    loss = torch.nn.functional.cross_entropy(picked, right, reduction="none")
    hit = (picked.argmax(-1) == right).float()
    return torch.stack([loss, hit], -1).view(len(labels), -1, 2)


def average_by_distance(found: np.ndarray, distances: np.ndarray) -> dict[str, float]:
    """Of `score_answers` [sequences, questions, 2] and their distances: accuracy, loss, and `to_256_accuracy` of
    questions at most so far from their needle and farther than the band before. Bands without questions are left out.
    """
    loss, hit = found.astype(np.float64).transpose(2, 0, 1)
    scores = {"accuracy": float(hit.mean()), "loss": float(loss.mean())}
    for low, high in zip((0, *EDGES[:-1]), EDGES, strict=True):
        inside = (distances > low) & (distances <= high)
        if inside.any():
            scores[f"to_{high}_accuracy"] = float(hit[inside].mean())
    return scores
