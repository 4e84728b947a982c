"""Charts of stored results. One definition gives the SVG in the page and the SVG file."""

from __future__ import annotations

from typing import Any

import altair as alt

# Okabe and Ito's colours, told apart by colour-blind readers; shapes say the same once more.
COLOURS = {"softmax": "#D55E00", "LLN": "#0072B2", "LLN+Diag": "#009E73"}
SHAPES = {"softmax": "circle", "LLN": "square", "LLN+Diag": "triangle-up"}
INK = "#808080"  # reads on white and on black


def against_length(rows: list[dict[str, Any]], field: str, title: str) -> alt.LayerChart:
    """A quantity of each attention against length, both axes logarithmic. Rows: attention, length, `field`, and
    where they have a spread low and high."""
    names = [name for name in COLOURS if any(row["attention"] == name for row in rows)]
    legend = alt.Legend(title=None)
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "length:Q",
            title="length (tokens)",
            scale=alt.Scale(type="log", nice=False, padding=16),
            axis=alt.Axis(values=sorted({row["length"] for row in rows})),
        ),
        color=alt.Color("attention:N", scale=alt.Scale(domain=names, range=[COLOURS[n] for n in names]), legend=legend),
        shape=alt.Shape("attention:N", scale=alt.Scale(domain=names, range=[SHAPES[n] for n in names]), legend=legend),
    )
    y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(type="log"))
    lines = base.mark_line(strokeWidth=2).encode(y=y, shape=alt.value("stroke"))
    chart = lines + base.mark_point(size=70, filled=True, opacity=1).encode(y=y)
    if all("low" in row for row in rows):
        chart += base.mark_rule().encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), shape=alt.value("stroke"))
    chart = chart.properties(width=520, height=300)
    axis: dict[str, Any] = {f"{part}Color": INK for part in ("label", "title", "grid", "domain", "tick")}
    config = alt.Config(
        background="transparent",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(**axis, gridOpacity=0.2, labelFontSize=12, titleFontSize=13),
        legend=alt.LegendConfig(labelColor=INK, labelFontSize=13, symbolSize=120, orient="top-left"),
    )
    configured: alt.LayerChart = chart.properties(config=config)
    return configured


def svg(chart: alt.LayerChart) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart.to_json())
