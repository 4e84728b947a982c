"""Charts of stored results: what runs recorded while they trained, and what training steps cost (Table 2)."""

from typing import Any

import numpy as np

from lln.lab.core import palette
from lln.lab.core.charts import Axis, choose_ticks, draw_lines, length_axis, time_point

Rows = list[dict[str, Any]]
FIXED = {
    "matched": palette.Style(palette.ORANGE, palette.LONG, "circle"),
    "alpha = beta = 2": palette.Style(palette.BLUE, palette.SOLID, "square"),
    "alpha = beta = 4": palette.Style(palette.AMBER, palette.SHORT, "triangle-up"),
}
ACCURACY = [
    palette.Style(palette.BLUE, palette.SOLID, "square"),
    palette.Style(palette.ORANGE, palette.LONG, "circle"),
    palette.Style(palette.GREEN, palette.SOLID, "triangle-up"),
    palette.Style(palette.AMBER, palette.LONG, "diamond"),
    *palette.OTHERS,
]
PERCENT = (0, 20, 40, 60, 80, 100)  # not beyond, though the axis has some room
TITLES = {"entropy": "entropy (bits)", "spectral_gap": "spectral gap"}


def draw_figure(result: dict[str, Any]) -> dict[str, str]:
    """SVG texts by the end of the file's name."""
    rows: Rows = result["rows"]
    drawn = {}
    for chart in dict.fromkeys(row["chart"] for row in rows):
        mine = [row for row in rows if row["chart"] == chart]
        # A line needs two points.
        if len({row.get("step", row.get("alpha", row.get("length"))) for row in mine}) > 1:
            drawn[f"-{chart}".replace(":", "-").replace("=", "-")] = draw_chart(chart, mine)
    return drawn


def draw_chart(chart: str, rows: Rows) -> str:
    names = list(dict.fromkeys(row["series"] for row in rows))
    x, y = Axis("step", "step", from_zero=True), Axis("value", "accuracy (%)")
    if chart == "a-accuracy":
        styles = dict(zip(names, ACCURACY, strict=False))
        return draw_lines(rows, styles, Axis("alpha", "alpha = beta"), y, points=True)
    if chart == "accuracy-against-length":
        y = Axis("value", "accuracy (%)", ticks=PERCENT)
        return draw_lines(rows, palette.choose_styles(names), length_axis(rows), y, points=True)
    if chart.startswith("b-loss-scale"):
        y = Axis("power", "1 / loss scale, as a power of 2")
        return draw_lines(rows, palette.choose_styles(names, palette.ATTENTIONS | FIXED), x, y)
    if chart.startswith("a-"):
        return draw_lines(rows, palette.choose_styles(names), x, Axis("value", f"{chart.removeprefix('a-')} loss"))
    quantity, values = chart.partition("-")[0], [row["value"] for row in rows]
    y = Axis("value", TITLES.get(quantity, quantity))
    if quantity == "temperature" and min(values) > 0:  # it falls by orders of magnitude
        y = Axis("value", quantity, True, choose_ticks(min(values), max(values)))
    return draw_lines(rows, shade_layers(names), x, y)


def shade_layers(names: list[str]) -> dict[str, palette.Style]:
    """From the first layer to the last; each reads on white and on black."""
    found = sorted(names, key=lambda name: int(name.split()[-1]))
    dashes = (palette.SOLID, palette.LONG, palette.SHORT, palette.MIXED)
    return {
        name: palette.Style(mix_colour(i / max(len(found) - 1, 1)), dashes[i % len(dashes)], "circle")
        for i, name in enumerate(found)
    }


def mix_colour(share: float) -> str:
    """The colour of the ramp that far from its first to its last."""
    stops = range(len(palette.RAMP))
    channels = ([int(colour[j : j + 2], 16) for colour in palette.RAMP] for j in (1, 3, 5))
    return "#" + "".join(f"{round(np.interp(share * stops[-1], stops, channel)):02X}" for channel in channels)


def draw_costs(result: dict[str, Any]) -> dict[str, str]:
    """Time and memory against length, as SVG texts by the end of the file's name; cells that did not fit are not
    drawn."""
    found = [row for row in result["rows"] if row["ms"] is not None]
    if result["table"] != "table2" or not found:
        return {}
    times = [time_point(row["attention"], row["length"], row["ms"]) for row in found]
    memory = [{"series": r["attention"], "length": r["length"], "MiB": r["bytes"] / 2**20} for r in found]
    drawn = {}
    for end, rows, name, title in (
        ("-time", times, "ms", "a training step (ms)"),
        ("-memory", memory, "MiB", "peak memory (MiB)"),
    ):
        low, high = (pick(row[name] for row in rows) for pick in (min, max))
        ticks = tuple(tick for tick in choose_ticks(low, high) if low <= tick <= high)
        styles = palette.choose_styles(row["attention"] for row in found)
        drawn[end] = draw_lines(rows, styles, length_axis(found), Axis(name, title, True, ticks), points=True)
    return drawn
