"""Charts of stored results. One definition gives the SVG in the page and the SVG file."""

from __future__ import annotations

import dataclasses
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
    return framed(chart)


@dataclasses.dataclass(frozen=True)
class Style:
    """How one series looks: three signs that each tell it from the others."""

    colour: str
    dash: tuple[int, ...]  # lengths of stroke and gap
    shape: str


@dataclasses.dataclass(frozen=True)
class Axis:
    field: str
    title: str
    logarithmic: bool = False


def lines(
    rows: list[dict[str, Any]],
    styles: dict[str, Style],
    x: Axis,
    y: Axis,
    *,
    points: bool = False,
    shaded: list[tuple[float, float]] | None = None,
) -> alt.LayerChart:
    """A line for each series. Rows: series, the two fields, and where they have a spread low and high. `points` marks
    the rows themselves; `shaded` lists ranges of x."""
    names = [name for name in styles if any(row["series"] == name for row in rows)]
    chosen = [styles[name] for name in names]
    # Above the drawing, since these curves leave no corner free; one legend for all signs, as they share a domain.
    legend = alt.Legend(title=None, orient="top", columns=5, symbolStrokeWidth=2.5, symbolSize=250)

    def signs(values: list[Any]) -> dict[str, Any]:
        return {"scale": alt.Scale(domain=names, range=values), "legend": legend}

    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(f"{x.field}:Q", **axis_options(x)), color=alt.Color("series:N", **signs([s.colour for s in chosen]))
    )
    vertical = alt.Y(f"{y.field}:Q", **axis_options(y))
    dashes = alt.StrokeDash("series:N", **signs([list(s.dash) for s in chosen]))
    marks = [base.mark_line(strokeWidth=2).encode(y=vertical, strokeDash=dashes)]
    if points:
        shapes = alt.Shape("series:N", **signs([s.shape for s in chosen]))
        marks.append(base.mark_point(size=60, filled=True, opacity=1).encode(y=vertical, shape=shapes))
    if all("low" in row for row in rows):
        marks.append(base.mark_rule().encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q")))
    if shaded:
        ranges = alt.Chart(alt.Data(values=[{"from": low, "to": high} for low, high in shaded]))
        marks.insert(0, ranges.mark_rect(color=INK, opacity=0.25).encode(x=alt.X("from:Q"), x2=alt.X2("to:Q")))
    return framed(alt.layer(*marks))


def axis_options(axis: Axis) -> dict[str, Any]:
    if axis.logarithmic:
        # Powers of ten only: the labels between them run into each other.
        scale, ticks = (
            alt.Scale(type="log", nice=False),
            alt.Axis(labelExpr="log(datum.value) / LN10 % 1 ? '' : datum.label"),
        )
    else:
        scale, ticks = alt.Scale(zero=False), alt.Axis()
    return {"title": axis.title, "scale": scale, "axis": ticks}


def framed(chart: alt.LayerChart) -> alt.LayerChart:
    """The size and look that all charts share."""
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
