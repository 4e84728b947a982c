"""Masked language modelling: which tokens a model must guess, and what it sees in their place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lln.lab.core.seeds import UNIT, pick, to_unit
from lln.lab.data.examples import IGNORE
from lln.lab.data.tokenizer import TextTokenizer

HIGHEST = 2**63 - 1


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
        for name, share in (("random_share", self.random_share), ("keep_share", self.keep_share)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} must lie between 0 and 1; got {share}.")
        if self.random_share + self.keep_share > 1.0:
            raise ValueError(
                f"random_share + keep_share must be at most 1; got {self.random_share} + {self.keep_share}."
            )

    @staticmethod
    def count_draws(length: int) -> int:
        """How many random numbers a sequence takes."""
        return 3 * length + 1

    def __call__(self, ids: Tensor, tokenizer: TextTokenizer, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """(what the model sees, what it must guess: -100 elsewhere), each [B, N] int64, of ids [B, N] int64 and random
        numbers [B, count_draws(N)] of `seeds.draws`. Whole numbers alone: every device masks the same tokens."""
        special, ordinary = tokenizer.tables(ids.device)  # [vocabulary] bool, [ordinary ids]
        n = ids.shape[1]
        if n == 0:
            return ids, ids
        rank, fate, instead, rest = drawn.split([n, n, n, 1], 1)  # [B, N] each, and [B, 1]
        candidates = ~special[ids]  # [B, N]
        count = (round(self.probability * UNIT) * candidates.sum(1) + to_unit(rest[:, 0])) // UNIT  # [B]
        order = torch.where(candidates, rank, HIGHEST)
        last = order.sort(1).values.gather(1, (count - 1).clamp_min(0)[:, None])  # [B, 1]
        chosen = candidates & (order <= last) & (count > 0)[:, None]
        labels = torch.where(chosen, ids, IGNORE)
        at_random = chosen & (to_unit(fate) < round(self.random_share * UNIT))
        masked = chosen & (to_unit(fate) >= round((self.random_share + self.keep_share) * UNIT))
        seen = torch.where(at_random, ordinary[pick(instead, len(ordinary))], ids)
        return torch.where(masked, tokenizer.mask_id, seen), labels
