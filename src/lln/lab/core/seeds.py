"""Random numbers that depend on names and whole numbers alone: the same in every process, worker and resumed run.

generator, permutation   numpy, for what is made once: by a key of names and numbers
stream_key, draws, pick  torch, for what a batch draws: whole numbers, bit-equal on every device
normal                   torch, normal numbers for what is measured: by a key of numbers
"""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
XX_FIRST, XX_SECOND, XX_FIFTH = 11400714785074694791, 14029467366897019727, 2870177450012600261  # of xxHash
UNIT = 2**32  # draws that stand for a number between 0 and 1 are whole numbers below this


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
    return np.random.PCG64(int(_hash_key(key)[:32], 16))


def _hash_key(key: tuple[str | int, ...]) -> str:
    return fingerprint([part if isinstance(part, str) else int(part) for part in key])


def normal(key: tuple[int, ...], *shape: int, device: torch.device) -> Tensor:
    """Standard normal numbers in float64 that belong to this key, on this kind of device."""
    generator = torch.Generator(device).manual_seed(number_key(*key))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)


def number_key(*key: int) -> int:
    """A number from 0 to 2^63 - 1 for a list of numbers that are not negative.

    The shipped curves and the stored figures were drawn with `hash(key) & (2**63 - 1)`: this is that hash, CPython's
    own since 3.8 (xxHash by 64-bit lanes), written out, so that they stay what these seeds give in any Python."""
    found = XX_FIFTH
    for part in key:
        found = (found + int(part) % (2**61 - 1) * XX_SECOND) % 2**64
        found = ((found << 31 | found >> 33) * XX_FIRST) % 2**64
    return (found + (len(key) ^ XX_FIFTH ^ 3527539)) % 2**63


def draws(key: int, epoch: Tensor, index: Tensor, count: int) -> Tensor:
    """`count` random numbers for each example, from 0 to 2^63 - 1: [B] and [B] -> [B, count] int64.

    Whole-number arithmetic alone (SplitMix64), so that every device gives the same bits, for one example as for many.
    """
    start = scramble(scramble(epoch + key) + index)  # [B]
    return shift_right(scramble(start[:, None] + torch.arange(count, device=index.device) * to_signed(GOLDEN)), 1)


def to_unit(drawn: Tensor) -> Tensor:
    """From 0 to UNIT - 1."""
    return drawn >> 31


def pick(drawn: Tensor, n: int) -> Tensor:
    """From 0 to n - 1."""
    return to_unit(drawn) * n // UNIT


def stream_key(*key: str | int) -> int:
    """What `draws` calls a key, for a list of names and numbers."""
    return to_signed(int(_hash_key(key)[:16], 16))


def scramble(x: Tensor) -> Tensor:
    x = x + to_signed(GOLDEN)
    x = (x ^ shift_right(x, 30)) * to_signed(FIRST)
    x = (x ^ shift_right(x, 27)) * to_signed(SECOND)
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """With zeros from the left: torch has no unsigned numbers of 64 bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def to_signed(x: int) -> int:
    """The number with the same 64 bits."""
    return x - 2**64 if x >= 2**63 else x
