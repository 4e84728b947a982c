"""Random numbers that depend on names and whole numbers alone: the same in every process, worker and resumed run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np


def fingerprint(value: Any) -> str:
    """SHA-256 (hex) of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def generator(*key: str | int) -> np.random.Generator:
    """A generator for this key. Keys that differ anywhere give independent generators."""
    return np.random.Generator(_bits(key))


def permutation(n: int, *key: str | int) -> np.ndarray:
    """0 .. n-1 in an order that the key decides. [n] int64"""
    # numpy promises the raw stream of a bit generator for all versions, but not what Generator makes of it.
    return np.argsort(_bits(key).random_raw(n), kind="stable") if n else np.zeros(0, np.int64)


def _bits(key: tuple[str | int, ...]) -> np.random.PCG64:
    digest = fingerprint([part if isinstance(part, str) else int(part) for part in key])
    return np.random.PCG64(int(digest[:32], 16))
