"""Rules for single values: numbers, counts, flags and names, each refused in a sentence that names the argument; and
seeds that follow from another."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def describe(value: Any) -> str:
    """What came, for the end of an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def check_number(name: str, value: Any, or_tensor: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} must be a number{or_tensor}; got {describe(value)}.")
    # A compiler that treats numbers as symbols cannot look at them; they were looked at when it was not compiling.
    if not torch.compiler.is_compiling() and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}.")
    return float(value)


def check_fraction(name: str, value: Any, remedy: str = "") -> float:
    number = check_number(name, value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1; got {value}.{remedy}")
    return number


def check_positive(name: str, value: Any, unit: str = "") -> float:
    number = check_number(name, value)
    if number <= 0.0:
        raise ValueError(f"{name} must be positive{unit}; got {value}.")
    return number


def check_count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = "a positive int" if least == 1 else f"an int of at least {least}"
        raise ValueError(f"{name} must be {allowed}; got {value!r}.")
    return value


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {describe(value)}.")


def check_choice(name: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        *first, last = map(repr, allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}; got {value!r}.")


def check_listed(name: str, value: Any, allowed: Collection[str]) -> None:
    """As `check_choice`, of many names."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def derive_seed(seed: int, number: int) -> int:
    """The seed of the draw of that number, where one seed stands for many draws.

    >>> derive_seed(2, 7)
    2000013
    """
    return seed * 1_000_003 + number
