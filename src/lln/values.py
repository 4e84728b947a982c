"""Rules for single values: numbers, counts, flags and names, each refused in a sentence that names the argument; and
seeds that follow from another."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lln.rules import check_choice as check_choice
from lln.rules import check_count as check_count
from lln.rules import check_listed as check_listed


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


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {describe(value)}.")


def derive_seed(seed: int, number: int) -> int:
    """The seed of the draw of that number, where one seed stands for many draws.

    >>> derive_seed(2, 7)
    2000013
    """
    return seed * 1_000_003 + number
