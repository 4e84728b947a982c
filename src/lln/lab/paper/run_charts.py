"""Charts of what runs recorded while they trained, drawn from the rows of a stored figure."""

from __future__ import annotations

import itertools
from typing import Any

from lln.lab.core.charts import Axis, choose_ticks, draw_lines
from lln.lab.core.palette import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, RAMP, SKY, Style

Rows = list[dict[str, Any]]
KNOWN = {
    "softmax": Style(ORANGE, (1, 0), "circle", 3),
    "lln": Style(BLUE, (8, 3), "square"),
    "lln_diag": Style(GREEN, (2, 2), "triangle-up"),
    "matched": Style(ORANGE, (8, 3), "circle"),
    "alpha = beta = 2": Style(BLUE, (1, 0), "square"),
    "alpha = beta = 4": Style(AMBER, (2, 2), "triangle-up"),
}
OTHERS = [
    Style(colour, dash, shape)
    for dash, (colour, shape) in itertools.product(
        ((10, 3, 2, 3), (4, 4), (6, 2), (3, 3)),
        ((PINK, "diamond"), (AMBER, "cross"), (SKY, "triangle-down"), (GREY, "triangle-left")),
    )
]
# From the first layer to the last; each reads on white and on black.
DASHES = ((1, 0), (8, 3), (2, 2), (10, 3, 2, 3))
PERCENT = (0, 20, 40, 60, 80, 100)  # not beyond, though the axis has some room
TITLES = {
    "temperature": "temperature", "entropy": "entropy (bits)", "spectral_gap": "spectral gap", "alpha": "alpha",
    "beta": "beta",
}  # fmt: skip


def charts_of(result: dict[str, Any]) -> dict[str, str]:
    """SVG texts by the end of the file's name."""
    rows: Rows = result["rows"]
    drawn = {}
    for chart in dict.fromkeys(row["chart"] for row in rows):
        mine = [row for row in rows if row["chart"] == chart]
        # A line needs two points.
        if len({row.get("step", row.get("alpha", row.get("length"))) for row in mine}) > 1:
            drawn[f"-{chart}".replace(":", "-").replace("=", "-")] = draw(chart, mine)
    return drawn


def draw(chart: str, rows: Rows) -> str:
    step = Axis("step", "step", from_zero=True)
    if chart == "a-accuracy":
        return draw_lines(
            rows, accuracy_styles(rows), Axis("alpha", "alpha = beta"), Axis("value", "accuracy (%)"), points=True
        )
    if chart == "accuracy-against-length":
        x = Axis("length", "length (tokens)", True, tuple(sorted({row["length"] for row in rows})))
        return draw_lines(rows, styles(rows), x, Axis("value", "accuracy (%)", ticks=PERCENT), points=True)
    if chart.startswith("b-loss-scale"):
        return draw_lines(rows, styles(rows), step, Axis("power", "1 / loss scale, as a power of 2"))
    if chart.startswith("a-"):
        return draw_lines(rows, styles(rows), step, Axis("value", f"{chart.removeprefix('a-')} loss"))
    quantity = chart.partition("-")[0]
    y = Axis("value", TITLES[quantity])
    values = [row["value"] for row in rows]
    if quantity == "temperature" and min(values) > 0:  # it falls by orders of magnitude
        y = Axis("value", TITLES[quantity], True, choose_ticks(min(values), max(values)))
    return draw_lines(rows, layer_styles(rows), step, y)


def names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["series"] for row in rows))


def styles(rows: Rows) -> dict[str, Style]:
    found, spare = {}, iter(OTHERS)
    for name in [*(k for k in KNOWN if k in names(rows)), *(n for n in names(rows) if n not in KNOWN)]:
        found[name] = KNOWN.get(name) or next(spare)
    return found


def accuracy_styles(rows: Rows) -> dict[str, Style]:
    signs = [
        Style(BLUE, (1, 0), "square"), Style(ORANGE, (8, 3), "circle"), Style(GREEN, (1, 0), "triangle-up"),
        Style(AMBER, (8, 3), "diamond"), *OTHERS,
    ]  # fmt: skip
    return dict(zip(names(rows), signs, strict=False))


def layer_styles(rows: Rows) -> dict[str, Style]:
    found = sorted(names(rows), key=lambda name: int(name.split()[-1]))
    return {
        name: Style(ramp(i / max(len(found) - 1, 1)), DASHES[i % len(DASHES)], "circle") for i, name in enumerate(found)
    }


def ramp(share: float) -> str:
    """The colour that far from the first to the last."""
    at = share * (len(RAMP) - 1)
    i = min(int(at), len(RAMP) - 2)
    ends = [[int(c[j : j + 2], 16) for j in (1, 3, 5)] for c in (RAMP[i], RAMP[i + 1])]
    mixed = [round(a + (at - i) * (b - a)) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{value:02X}" for value in mixed)
