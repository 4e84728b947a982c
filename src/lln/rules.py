"""Rules for single values that hold in every framework, so that nothing is imported for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def check_count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = "a positive int" if least == 1 else f"an int of at least {least}"
        raise ValueError(f"{name} must be {allowed}; got {value!r}.")
    return value


def check_choice(name: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        *first, last = map(repr, allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}; got {value!r}.")


def check_listed(name: str, value: Any, allowed: Collection[str]) -> None:
    """As `check_choice`, of many names."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
