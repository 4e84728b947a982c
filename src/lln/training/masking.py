"""Masked language modelling: which tokens a model must guess, and what it sees in their place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lln.training.examples import IGNORE
from lln.training.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Masking:
    """RoBERTa's rule as in fairseq: a share of the tokens is to be guessed; of these, 80 % appear as the mask token,
    10 % as a random token, 10 % as they are.

    The number a sequence is exact (its fraction rounded up or down at random), not a coin for each token. Unlike in
    fairseq, special tokens are neither guessed nor put in.
    """

    probability: float = 0.15
    random_share: float = 0.1
    keep_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"probability must be above 0 and at most 1; got {self.probability}.")
        for name in ("random_share", "keep_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie between 0 and 1; got {getattr(self, name)}.")
        if self.random_share + self.keep_share > 1.0:
            raise ValueError(
                f"random_share + keep_share must be at most 1; got {self.random_share} + {self.keep_share}."
            )

    @property
    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def __call__(
        self, ids: np.ndarray, tokenizer: TextTokenizer, draw: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(what the model sees, what it must guess: -100 elsewhere), each [n] int64"""
        candidates = np.flatnonzero(~np.isin(ids, tokenizer.special_ids))
        count = int(self.probability * len(candidates) + draw.random())
        chosen = draw.choice(candidates, count, replace=False)
        seen, labels = ids.astype(np.int64), np.full(len(ids), IGNORE, np.int64)
        labels[chosen] = ids[chosen]
        fate = draw.random(count)
        at_random = fate < self.random_share
        masked = fate >= self.random_share + self.keep_share
        seen[chosen[masked]] = tokenizer.mask_id
        seen[chosen[at_random]] = draw.choice(tokenizer.ordinary_ids, int(at_random.sum()))
        return seen, labels
