"""Bars and spinners for what takes more than a moment. They go to stderr, and only where somebody watches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(
        items, description=what, total=total, console=console, transient=True, disable=not console.is_terminal
    )


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield
