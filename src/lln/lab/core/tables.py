"""Tables and numbers as text: on the terminal, as Markdown and CSV, and lists in a sentence."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDEST_NAME = 30  # of the names in a first column, in columns of the terminal
NARROWEST = 80  # columns, where nobody looks at a terminal of some other width


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


def terminal_table(
    header: Sequence[str], rows: Iterable[Sequence[object] | str], align: str = "lr", *, title: str = "",
    caption: str = "", wrap: bool = True, **look: Any,
) -> Table:  # fmt: skip
    """The same as a table for the terminal. A row that is a string begins a section and is its title. Without a header
    there is no line for one. Texts are shown as they are; a cell may be a rich Text too. `look` goes to rich's Table.

    >>> print_wide(terminal_table(["attention", "ms"], [["LLN", 1.5]]))
    <BLANKLINE>
    attention   ms
    ──────────────
    LLN        1.5
    <BLANKLINE>
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)} | look
    said = Text(caption, "table.caption") if caption else None
    made = Table(title=Text(title) if title else None, caption=said, show_header=bool(header), **looks)
    rows = list(rows)
    names = " ".join(row if isinstance(row, str) else str(row[0]) for row in rows).split()
    longest = min(max(map(len, names), default=0), WIDEST_NAME)  # words there are not cut
    for number, (heading, side) in enumerate(zip(header, align.ljust(len(header), align[-1]), strict=False)):
        least = longest if number == 0 else None
        made.add_column(heading, justify="right" if side == "r" else "left", no_wrap=not wrap, min_width=least)
    for row in rows:
        if isinstance(row, str):
            made.add_section()
            made.add_row(Text(row, "bold"))
        else:
            made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def print_wide(*things: RenderableType, narrowest: int = NARROWEST) -> None:
    """To stdout, as wide as the terminal; where there is none, at least `narrowest` columns wide. Strings are printed
    as they are."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(narrowest, console.width))
    for thing in things:
        console.print(thing, markup=False, highlight=False)


def write_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV text: every column that holds single values, in the order in which they first occur.

    >>> print(write_csv([{"length": 512, "ms": 1.5, "all": [1, 2]}, {"length": 1024}]), end="")
    length,ms
    512,1.5
    1024,
    """
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


def escape_markdown(text: str) -> str:
    """Text that is no Markdown and no HTML wherever it stands in a line, and stays in its line: a name that somebody
    chose.

    >>> escape_markdown("my_model [click](x) <b>")
    'my_model \\\\[click\\\\](x) &lt;b&gt;'
    """
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*|\[\]~!#])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", plain)


def show_number(value: float) -> str:
    """Three digits, or all before the point; without an exponent where it is not tiny.

    >>> show_number(0.123456), show_number(12345.6)
    ('0.123', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show_timing(timing: dict[str, Any]) -> str:
    """A stored `timing.Timing` as text: median (low to high).

    >>> show_timing({"median": 2.0, "low": 1.5, "high": 2.25, "repeats": 5})
    '2 (1.5 to 2.25)'
    """
    return f"{show_number(timing['median'])} ({show_number(timing['low'])} to {show_number(timing['high'])})"


def show_duration(seconds: float) -> str:
    """
    >>> show_duration(45), show_duration(600), show_duration(9000)
    ('45 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
