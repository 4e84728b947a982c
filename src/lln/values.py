"""Rules for single values: numbers, counts, flags and names, each refused in a sentence that names the argument; and
seeds that follow from another."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lln.kernels.common import can_look
from lln.rules import check_choice as check_choice
from lln.rules import check_count as check_count
from lln.rules import check_listed as check_listed
from lln.rules import is_among as is_among
from lln.rules import show as show
from lln.rules import suggest as suggest


def describe(value: Any) -> str:
    """What came, for the end of an error message, with its type."""
    return show(value) if isinstance(value, Tensor) else f"{show(value)} ({type(value).__name__})"


def check_positive_values(name: str, t: Tensor) -> None:
    """ValueError for a tensor that holds something else than positive finite numbers, where that can be seen."""
    if not can_look(t) or not t.numel() or not t.is_floating_point():
        return
    low, high = (one.item() for one in t.detach().aminmax())
    if not (low > 0.0 and high < math.inf):  # NaN is neither
        wrong = low if low <= 0.0 else high
        raise ValueError(f"{name} must be positive and finite in every place; got {wrong} in {describe(t)}.")


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
