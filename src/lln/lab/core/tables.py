"""Tables and numbers as text: Markdown, CSV, and lists in a sentence."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]], align: str = "lr") -> list[str]:
    """The lines of a Markdown table. `align` has a letter for each column, l or r; its last one serves all that follow.

    >>> markdown_table(["attention", "ms"], [["LLN", 1.5]])
    ['| attention | ms |', '|---|---:|', '| LLN | 1.5 |']
    """
    sides = align.ljust(len(header), align[-1])[: len(header)]
    rule = "".join("|---:" if side == "r" else "|---" for side in sides) + "|"

    def line(texts: Sequence[object]) -> str:
        return "| " + " | ".join(str(text).replace("|", "\\|") for text in texts) + " |"

    return [line(header), rule, *map(line, rows)]


def write_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV text: every column that holds single values, in the order in which they first occur."""
    names = list(dict.fromkeys(name for row in rows for name, x in row.items() if not isinstance(x, (list, dict))))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def join_words(parts: Iterable[object]) -> str:
    """
    >>> join_words([1, 2, 3])
    '1, 2 and 3'
    """
    *most, last = (str(part) for part in parts)
    return f"{', '.join(most)} and {last}" if most else last


def show_number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show_timing(timing: dict[str, Any]) -> str:
    """A stored `timing.Timing` as text: median (low to high)."""
    return f"{show_number(timing['median'])} ({show_number(timing['low'])} to {show_number(timing['high'])})"
