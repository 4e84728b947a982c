"""Rules for single values that hold in every framework, so that nothing is imported for them."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any

BRIEF = reprlib.Repr()
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 100


def show(value: Any) -> str:
    """A value in an error message: on one line, the beginning alone of what is long, and no array."""
    if hasattr(value, "shape"):
        kind = str(getattr(value, "dtype", ""))
        name = f"a {kind.removeprefix('torch.')} tensor" if kind.startswith("torch.") else "an array"
        return f"{name} of shape {list(value.shape)}"
    return " ".join(BRIEF.repr(value).split())


def is_among(value: Any, allowed: Collection[Any]) -> bool:
    """`value in allowed`, also of arrays, which have no single answer to whether they are equal to something."""
    return not hasattr(value, "shape") and value in list(allowed)


def suggest(value: Any, allowed: Collection[Any]) -> str:
    """The end of an error message about a name that is none of those allowed: the one that was probably meant, or
    nothing.

    >>> suggest("lln-dig", ["softmax", "lln", "lln_diag"])
    " Perhaps you mean 'lln_diag'."
    """
    import difflib

    meant = str(value).strip().lower().replace("-", "_") if isinstance(value, str) else ""
    close = difflib.get_close_matches(meant, [name for name in allowed if isinstance(name, str)], 1)
    return f" Perhaps you mean {close[0]!r}." if close else ""


def check_count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = "a positive int" if least == 1 else f"an int of at least {least}"
        raise ValueError(f"{name} must be {allowed}; got {show(value)}.")
    return value


def check_choice(name: str, value: Any, *allowed: Any) -> None:
    if not is_among(value, allowed):
        *first, last = map(repr, allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}; got {show(value)}.{suggest(value, allowed)}")


def check_listed(name: str, value: Any, allowed: Collection[str]) -> None:
    """As `check_choice`, of many names."""
    if not is_among(value, allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {show(value)}.{suggest(value, allowed)}")
