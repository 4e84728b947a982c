"""Sets that are made here: their splits, and what is made once of them and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from lln.lab.core.progress import track
from lln.lab.data.made_once import Place, build_arrays

SPLITS = ("train", "validation", "test")


def choose_split(number: int) -> str:
    """Eight of ten are for training."""
    return {8: "validation", 9: "test"}.get(number % 10, "train")


def generate(
    name: str,
    split: str,
    count: int,
    seed: int,
    options: Any,  # a dataclass: what decides the content, besides the seed
    rows: Iterator[np.ndarray],
    pack: Callable[[list[np.ndarray]], Mapping[str, np.ndarray]],
    cache_dir: Place,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(the arrays that `pack` makes of the first `count` rows, their identity), from the cache where they are there."""
    if split not in SPLITS:
        raise ValueError(f"split must be train, validation or test; got {split!r}.")
    if count < 1:
        raise ValueError(f"count must be at least 1; got {count}.")
    kind = name.lower()
    identity = {"name": f"generated/{kind}", "split": split, "count": count, "seed": seed, **asdict(options)}
    made = track(islice(rows, count), count, f"Generating {name} {split}")
    return build_arrays(kind, identity, lambda: pack(list(made)), cache_dir), identity
