"""Charts of Table 2: time and memory of a training step against length."""

from __future__ import annotations

from typing import Any

from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.palette import AMBER, BLUE, GREEN, ORANGE, PINK, Style

STYLES = {
    "softmax": Style(ORANGE, (8, 3), "circle"),
    "torch": Style(PINK, (1, 0), "square"),
    "nystromformer": Style(AMBER, (2, 2), "diamond"),
    "lln": Style(BLUE, (10, 3, 2, 3), "triangle-up"),
    "lln_diag": Style(GREEN, (1, 0), "triangle-down"),
}
MIB = 2**20


def charts_of(result: dict[str, Any]) -> dict[str, str]:
    """{end of the file's name: SVG}; cells that did not fit are not drawn."""
    found = [row for row in result["rows"] if row["ms"] is not None]
    if result["table"] != "table2" or not found:
        return {}
    lengths = tuple(sorted({float(row["length"]) for row in found}))
    x = Axis("length", "length (tokens)", logarithmic=True, ticks=lengths)
    times = [
        {"series": row["attention"], "length": row["length"], "ms": row["ms"]["median"]}
        | {"low": row["ms"]["low"], "high": row["ms"]["high"]}
        for row in found
    ]
    memory = [{"series": row["attention"], "length": row["length"], "MiB": row["bytes"] / MIB} for row in found]
    return {
        "-time": draw_lines(times, STYLES, x, axis("ms", "a training step (ms)", times), points=True),
        "-memory": draw_lines(memory, STYLES, x, axis("MiB", "peak memory (MiB)", memory), points=True),
    }


def axis(field: str, title: str, rows: list[dict[str, Any]]) -> Axis:
    """With ticks at 1, 2, 5, 10, ... between the least and the largest value."""
    low, high = (end(row[field] for row in rows) for end in (min, max))
    ticks = [digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)]
    return Axis(field, title, logarithmic=True, ticks=tuple(t for t in ticks if low <= t <= high))
