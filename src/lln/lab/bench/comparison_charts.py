"""Charts of a result of `lln compare`."""

from __future__ import annotations

from typing import Any

from lln.lab.core.charts import Axis, lines, svg
from lln.lab.core.palette import AMBER, BLUE, GREEN, GREY, OLIVE, ORANGE, PINK, SKY, Style

# Softmax and LLN keep their colours everywhere; the others take turns with what is left, told apart by dash and shape.
OURS = {
    "softmax": Style(ORANGE, (1, 0), "circle", 4),
    "lln": Style(BLUE, (1, 0), "square", 3),
    "lln_diag": Style(GREEN, (1, 0), "triangle-up", 3),
}
COLOURS = (AMBER, SKY, PINK, GREY, OLIVE)
DASHES = ((8, 3), (2, 2), (10, 3, 2, 3), (4, 4), (12, 4))
SHAPES = ("diamond", "cross", "triangle-down", "triangle-left", "triangle-right")


def styles(names: list[str]) -> dict[str, Style]:
    others = [name for name in names if name not in OURS]
    found = {}
    for i, name in enumerate(others):
        turn = i // len(COLOURS)
        at = (i + turn) % len(DASHES)  # another dash and shape when a colour comes again
        found[name] = Style(COLOURS[i % len(COLOURS)], DASHES[at], SHAPES[at])
    return {name: OURS.get(name) or found[name] for name in names}


def charts_of(result: dict[str, Any]) -> dict[str, str]:
    """SVG texts by the name of their file."""
    look = styles(result["settings"]["names"])
    drawn: dict[str, str] = {}
    timed = [row for row in result["costs"] if row["training_ms"] is not None]
    if len({row["length"] for row in timed}) > 1:
        length = Axis("length", "length (tokens)", True, tuple(sorted({row["length"] for row in timed})))
        values = [
            {
                "series": row["mechanism"], "length": row["length"], "ms": row["training_ms"]["median"],
                "low": row["training_ms"]["low"], "high": row["training_ms"]["high"],
            }
            for row in timed
        ]  # fmt: skip
        drawn["time"] = svg(lines(values, look, length, Axis("ms", "forward + backward (ms)", True), points=True))
        values = [
            {"series": row["mechanism"], "length": row["length"], "MiB": row["training_bytes"] / 2**20}
            for row in timed
            if row["training_bytes"]
        ]
        drawn["memory"] = svg(lines(values, look, length, Axis("MiB", "peak extra memory (MiB)", True), points=True))
    for key, title in (("entropy", "entropy (bits)"), ("gap", "spectral gap"), ("error", "distance from softmax")):
        known = [row for row in result["concentration"] if row[key] is not None]
        if len({row["temperature"] for row in known}) > 1:
            values = [{"series": r["mechanism"], "temperature": r["temperature"], key: r[key]} for r in known]
            axis = Axis("temperature", "temperature", True, tuple(sorted({r["temperature"] for r in known})))
            drawn[key] = svg(lines(values, look, axis, Axis(key, title), points=True))
    return drawn
