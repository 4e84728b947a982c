"""Charts of stored results. One definition gives the SVG in the page and the SVG file."""

import dataclasses
import math
from typing import Any

import altair as alt

from lln.lab.core.palette import ATTENTIONS, INK, Style

WIDTH = 420  # of a drawing: small enough that its text can still be read where two stand side by side


def draw_against_length(rows: list[dict[str, Any]], field: str, title: str) -> str:
    """A quantity of each attention against length, both axes logarithmic. Rows: attention, length, `field`, and
    where they have a spread low and high."""
    names = [name for name in ATTENTIONS if any(row["attention"] == name for row in rows)]
    colours, shapes = ([getattr(ATTENTIONS[name], sign) for name in names] for sign in ("colour", "shape"))
    legend = alt.Legend(title=None)
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "length:Q",
            title="length (tokens)",
            scale=alt.Scale(type="log", nice=False, padding=16),
            axis=alt.Axis(values=sorted({row["length"] for row in rows})),
        ),
        color=alt.Color("attention:N", scale=alt.Scale(domain=names, range=colours), legend=legend),
        shape=alt.Shape("attention:N", scale=alt.Scale(domain=names, range=shapes), legend=legend),
    )
    y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(type="log"))
    drawn = base.mark_line(strokeWidth=2).encode(y=y, shape=alt.value("stroke"))
    chart = drawn + base.mark_point(size=70, filled=True, opacity=1).encode(y=y)
    if all("low" in row for row in rows):
        chart += base.mark_rule().encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), shape=alt.value("stroke"))
    return render_svg(chart)


@dataclasses.dataclass(frozen=True)
class Axis:
    field: str
    title: str
    logarithmic: bool = False
    ticks: tuple[float, ...] | None = None  # None: of a logarithmic axis powers of ten
    from_zero: bool = False  # of a linear axis


def draw_lines(
    rows: list[dict[str, Any]],
    styles: dict[str, Style],
    x: Axis,
    y: Axis,
    *,
    points: bool = False,
    shaded: list[tuple[float, float]] | None = None,
) -> str:
    """A line for each series. Rows: series, the two fields, and where they have a spread low and high. `points` marks
    the rows themselves; `shaded` lists ranges of x.

    >>> from lln.lab.core.palette import choose_styles
    >>> rows = [{"series": "LLN", "length": n, "ms": n / 100} for n in (512, 1024)]
    >>> svg = draw_lines(rows, choose_styles(["LLN"]), length_axis(rows), Axis("ms", "milliseconds"))
    >>> svg.startswith("<svg"), ">milliseconds</text>" in svg
    (True, True)
    """
    names = [name for name in styles if any(row["series"] == name for row in rows)]
    chosen = [styles[name] for name in names]
    # Drawn in this order: the first, often the broadest line, lies under the others.
    order = {name: number for number, name in enumerate(styles)}
    rows = sorted(rows, key=lambda row: order.get(row["series"], len(order)))

    # Above the drawing, since these curves leave no corner free. It shows the shapes of points, else the dashes of
    # lines: both at once make neither plain.
    look: dict[str, Any] = {"symbolSize": 120} if points else {"symbolSize": 250, "symbolStrokeWidth": 2.5}
    # Room between columns: where a page has broader letters, names would touch the next sign.
    legend = alt.Legend(title=None, orient="top", columns=count_columns(names), columnPadding=18, **look)

    def signs(values: list[Any], legend: alt.Legend | None = legend) -> dict[str, Any]:
        return {"scale": alt.Scale(type="ordinal", domain=names, range=values), "legend": legend}

    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(f"{x.field}:Q", **axis_options(x, rows)),
        color=alt.Color("series:N", **signs([s.colour for s in chosen])),
    )
    vertical = alt.Y(f"{y.field}:Q", **axis_options(y, rows))
    dashes = alt.StrokeDash("series:N", **signs([list(s.dash) for s in chosen], None if points else legend))
    widths = alt.StrokeWidth("series:N", **signs([s.width for s in chosen], None))
    marks = [base.mark_line().encode(y=vertical, strokeDash=dashes, strokeWidth=widths)]
    if points:
        shapes = alt.Shape("series:N", **signs([s.shape for s in chosen]))
        marks.append(base.mark_point(size=60, filled=True, opacity=1).encode(y=vertical, shape=shapes))
    if all("low" in row for row in rows):
        marks.append(base.mark_rule().encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q")))
    if shaded:
        ranges = alt.Chart(alt.Data(values=[{"from": low, "to": high} for low, high in shaded]))
        marks.insert(0, ranges.mark_rect(color=INK, opacity=0.25).encode(x=alt.X("from:Q"), x2=alt.X2("to:Q")))
    chart = alt.LayerChart(layer=marks)
    if points:  # else the legend draws the points in the dashes of the lines
        chart = chart.resolve_legend(strokeDash="independent", strokeWidth="independent")
    return render_svg(chart)


def count_columns(names: list[str]) -> int:
    """Of a legend, so that it is no wider than the drawing: else all of the chart shrinks. Rows are equally full.

    >>> count_columns(["softmax", "LLN", "LLN+Diag"]), count_columns(["a long name of a series"] * 3)
    (3, 2)
    """
    fits = max(1, min(5, WIDTH // (7 * max(map(len, names)) + 32)))
    return math.ceil(len(names) / math.ceil(len(names) / fits))


def draw_bars(rows: list[dict[str, Any]], styles: dict[str, Style], title: str, groups_title: str) -> str:
    """A bar with its value for each series of each group. Rows: series, group, value. groups_title: what a group is.

    >>> from lln.lab.core.palette import choose_styles
    >>> rows = [{"series": "LLN", "group": "1 x 512", "value": 2.0}]
    >>> svg = draw_bars(rows, choose_styles(["LLN"]), "times as fast", "batch x tokens")
    >>> ">times as fast</text>" in svg, ">batch x tokens</text>" in svg
    (True, True)
    """
    names = [name for name in styles if any(row["series"] == name for row in rows)]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    colours = alt.Scale(domain=names, range=[styles[name].colour for name in names])
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("group:N", title=groups_title, sort=groups, axis=alt.Axis(labelLimit=220, titlePadding=26)),
        yOffset=alt.YOffset("series:N", sort=names, scale=alt.Scale(paddingInner=0.15)),
        x=alt.X("value:Q", title=title),
    )
    marks = base.mark_bar().encode(color=alt.Color("series:N", scale=colours, legend=None))
    # The name stands at the bar: members of a family share a colour.
    label = "datum.series + '  ' + format(datum.value, '.3~g')"
    texts = base.transform_calculate(label=label).mark_text(align="left", dx=4, color=INK).encode(text="label:N")
    room = {"left": 5, "top": 5, "right": 30, "bottom": 5}  # for the names at the bars, in broad letters
    return render_svg((marks + texts).properties(padding=room), height=max(120, 18 * len(rows) + 12 * len(groups)))


def choose_ticks(low: float, high: float) -> tuple[float, ...]:
    """Of a logarithmic axis: powers of ten, and where there are few of them also their 2 and 5 times.

    >>> choose_ticks(0.8, 30)
    (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    """
    factors = (1, 2, 5) if high / low < 1000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = (factor * 10.0**power for power in powers for factor in factors)
    return tuple(tick for tick in ticks if low / 2 < tick < high * 2)


def length_axis(rows: list[dict[str, Any]]) -> Axis:
    """Logarithmic, with a tick at every length that was measured.

    >>> length_axis([{"length": 1024}, {"length": 512}]).ticks
    (512, 1024)
    """
    return Axis("length", "length (tokens)", True, tuple(sorted({row["length"] for row in rows})))


def time_point(series: str, length: int, timing: dict[str, Any]) -> dict[str, Any]:
    """A row for `draw_lines` of a stored `timing.Timing` in milliseconds, with its quartiles.

    >>> time_point("LLN", 512, {"median": 2.0, "low": 1.5, "high": 2.25, "repeats": 5})
    {'series': 'LLN', 'length': 512, 'ms': 2.0, 'low': 1.5, 'high': 2.25}
    """
    return {"series": series, "length": length, "ms": timing["median"], "low": timing["low"], "high": timing["high"]}


def axis_options(axis: Axis, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if axis.from_zero:
        # Few ticks, whose labels do not run together.
        return {"title": axis.title, "scale": alt.Scale(zero=True, nice=False), "axis": alt.Axis(tickCount=6)}
    if not axis.logarithmic:
        marks = {} if axis.ticks is None else {"axis": alt.Axis(values=list(axis.ticks))}
        return {"title": axis.title, "scale": alt.Scale(zero=False, padding=10), **marks}
    if axis.ticks is not None:
        # The axis ends at the outermost tick or value, whichever is farther out.
        values = [*axis.ticks, *(row[axis.field] for row in rows)]
        scale = alt.Scale(type="log", nice=False, domain=[min(values), max(values)], padding=10)
        return {"title": axis.title, "scale": scale, "axis": alt.Axis(values=list(axis.ticks))}
    low, high = (math.log10(end(row[axis.field] for row in rows)) for end in (min, max))
    # Powers of ten only: the labels between them run into each other.
    ticks = alt.Axis(values=[10.0**power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)])
    return {"title": axis.title, "scale": alt.Scale(type="log", nice=False), "axis": ticks}


def render_svg(chart: alt.LayerChart, height: int = 270, width: int = WIDTH) -> str:
    """The chart as SVG text, in the look that all charts share."""
    import vl_convert

    axis: dict[str, Any] = {f"{part}Color": INK for part in ("label", "title", "grid", "domain", "tick")}
    # Room between labels and titles: a browser's letters may be broader than those that were reckoned with here.
    beside = alt.AxisConfig(titlePadding=10)
    config = alt.Config(
        background="transparent",
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(**axis, gridOpacity=0.2, labelFontSize=12, titleFontSize=13),
        axisY=beside,
        legend=alt.LegendConfig(labelColor=INK, labelFontSize=13, symbolSize=120, orient="top-left"),
    )
    return vl_convert.vegalite_to_svg(chart.properties(width=width, height=height, config=config).to_json())
