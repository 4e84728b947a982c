"""What softmax, LLN and LLN+Diag attend to in one sentence, for the heat maps of the page."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.instruments import lln_map, softmax_map
from lln.lab.core.seeds import normal
from lln.lab.paper.analysis import LLN, match_alpha

SENTENCE = "the old man sat by the river and the old dog sat by him"
DIM, BLOCK = 64, 4
NEAR = 0.5  # the share of variance that neighbours have in common, rather than equal words
SCALE = 1000  # weights are stored as whole thousandths


def draw_sentence(seed: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of unit spread, [1, 1, words, DIM]. Equal words have something in common, as in a trained model,
    and so have neighbours; nobody has trained this one."""
    words = SENTENCE.split()
    names = sorted(set(words))
    cpu = torch.device("cpu")
    counts = ((1, len(names)), (2, len(words)))
    own, places = (normal((seed, DIM, side), count, DIM, device=cpu).double() for side, count in counts)
    near = places + torch.roll(places, 1, 0) + torch.roll(places, -1, 0)
    mixed = (1 - NEAR) ** 0.5 * own[[names.index(word) for word in words]] + NEAR**0.5 * near / near.std()
    mixed = (mixed / mixed.std())[None, None]
    noise = normal((seed, DIM, 3), 2, len(words), DIM, device=cpu).double()
    query, key = (0.8 * mixed + 0.6 * one for one in noise)
    return query / query.std(), key / key.std()


def measure_sentence(temperatures: tuple[float, ...], seed: int) -> dict[str, Any]:
    """P of each attention at each temperature, row by row, in thousandths."""
    q, k = draw_sentence(seed)
    words = SENTENCE.split()
    found: dict[str, list[list[int]]] = {"softmax": []}
    for temperature in temperatures:
        sigma = temperature**-0.5
        found["softmax"].append(round_weights(softmax_map(sigma * q, sigma * k).dense()))
        for matching in LLN:
            alpha = match_alpha(matching, sigma, DIM, len(words))
            for name, block in (("LLN", None), ("LLN+Diag", BLOCK)):
                p = lln_map(sigma * q, sigma * k, alpha, alpha, block_size=block).dense()
                found.setdefault(f"{name}, {matching}", []).append(round_weights(p))
    return {"words": words, "block": BLOCK, "maps": found}


def round_weights(p: Tensor) -> list[int]:
    return [round(SCALE * x) for x in p.flatten().tolist()]
