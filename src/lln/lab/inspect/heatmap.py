"""A chart with a cell for each layer and head."""

from typing import Any

import altair as alt

from lln.lab.core.charts import render_svg

WIDTH = 336  # of a map with few heads; a phone shows it unscaled
LEAST_WIDTH, LEAST_HEIGHT = 9, 10  # of a cell
NUMBERS_FROM = 25  # the width of a cell that a number fits into


def draw_heatmap(
    values: list[dict[str, Any]], *, digits: int, limits: tuple[float, float], differences: bool = False
) -> str:
    """Values: layer, head, value (None: an empty cell). Colours run from one of the limits to the other; of
    differences they are light at 0, and the limits lie evenly around it. Large cells hold the number."""
    layers = list(dict.fromkeys(row["layer"] for row in values))
    heads = len({row["head"] for row in values})
    cell = max(LEAST_WIDTH, min(WIDTH // heads, 40))
    height = max(LEAST_HEIGHT, min(28, 420 // len(layers)))
    low, high = limits

    def is_dark(value: float) -> bool:
        """Whether its colour needs white letters."""
        place = (value - low) / (high - low) if high > low else 0.5
        return abs(place - 0.5) > 0.33 if differences else place < 0.62

    rows = [
        {**row, "text": show_value(row["value"], digits, differences), "dark": is_dark(row["value"])}
        for row in values
        if row["value"] is not None
    ]
    every = max(1, round(24 / cell))  # heads whose number is written below the map
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "head:O",
            title="head",
            scale=alt.Scale(domain=list(range(heads)), paddingInner=0.04),
            axis=alt.Axis(labelAngle=0, values=list(range(0, heads, every)), ticks=False, domain=False),
        ),
        y=alt.Y(
            "layer:N",
            title="layer",
            sort=layers,
            scale=alt.Scale(domain=layers, paddingInner=0.04),
            axis=alt.Axis(ticks=False, domain=False, labelLimit=110),
        ),
    )
    colours = alt.Color(
        "value:Q",
        scale=alt.Scale(scheme="blueorange" if differences else "viridis", domain=list(limits), clamp=True),
        legend=alt.Legend(
            title=None, orient="bottom", direction="horizontal", gradientLength=min(200, cell * heads),
            gradientThickness=9, tickCount=4, labelFontSize=11,
        ),
    )  # fmt: skip
    chart = base.mark_rect(cornerRadius=2).encode(color=colours)
    if cell >= NUMBERS_FROM and height >= 14:
        ink = alt.condition("datum.dark", alt.value("white"), alt.value("black"))
        chart += base.mark_text(fontSize=9.5).encode(text="text:N", color=ink)
    else:
        chart += base.mark_point(opacity=0)
    return render_svg(chart, height * len(layers), cell * heads)


def show_value(value: float, digits: int, sign: bool) -> str:
    """As short as it can be: .05 rather than 0.05."""
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    if float(text) == 0:
        return "0"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text
