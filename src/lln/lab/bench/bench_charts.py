"""Charts of results of `lln bench` and `lln compare`."""

from typing import Any

from lln.lab.bench.attentions import ATTENTIONS, Shape
from lln.lab.bench.bench_tables import name_direction
from lln.lab.core.charts import Axis, choose_ticks, draw_bars, draw_lines, length_axis, time_point
from lln.lab.core.palette import ATTENTIONS as STYLES
from lln.lab.core.palette import choose_styles

Rows = list[dict[str, Any]]
SIZES = "batch x heads x tokens x dim"
NAMES = {"lln": "LLN", "lln_diag": "LLN+Diag"}  # of attentions in transformers


def draw_bench(result: dict[str, Any]) -> dict[str, str]:
    """SVG texts by the name of their file. Time and speed-up against length where lengths of one size were measured,
    speed-up as bars for other shapes, and the share of the floor as bars."""
    measured = [row for row in result["rows"] if row["device_ms"] is not None]
    # Those with a speed-up to show: softmax attention itself is what it is counted from.
    compared = [row for row in measured if row["speedup"] is not None and not ATTENTIONS[row["attention"]].softmax]
    drawn: dict[str, str] = {}
    for causal in (False, True):
        ways = [row for row in measured if row["causal"] == causal]
        sizes, single = split_by_size(ways, by_batch=result["settings"]["tokens"] is None)
        for size, rows in sizes.items():
            name = name_direction(causal) + (f"-{size}" if len(sizes) > 1 else "")
            points = [time_point(row["attention"], row["length"], row["device_ms"]["training"]) for row in rows]
            values = [point[key] for point in points for key in ("low", "high")]
            drawn[f"time-{name}"] = draw_points(points, "ms", "forward + backward (ms)", values)
            if faster := [row for row in rows if row in compared]:
                values = [row["speedup"]["training"] for row in faster]
                points = [
                    {"series": row["attention"], "length": row["length"], "speedup": value}
                    for row, value in zip(faster, values, strict=True)
                ]
                values.append(1.0)  # above 1 it is faster than softmax
                drawn[f"speedup-{name}"] = draw_points(points, "speedup", "times the fastest softmax", values)
        if faster := [row for row in single if row in compared]:
            values = [make_bar(row, row["speedup"]["training"]) for row in faster]
            title = f"times as fast as the fastest softmax attention, {name_direction(causal)}"
            drawn[f"speedup-shapes-{name_direction(causal)}"] = draw_bars(values, STYLES, title, SIZES)
    if floored := [row for row in measured if row["percent_of_floor"] is not None]:
        values = [make_bar(row, row["percent_of_floor"]["training"]) for row in floored]
        title = "forward + backward: % of the speed of a copy"
        drawn["percent-of-floor"] = draw_bars(values, STYLES, title, SIZES)
    return drawn


def split_by_size(rows: Rows, by_batch: bool) -> tuple[dict[str, Rows], Rows]:
    """Rows that differ in length alone, by their size, and the rows whose length is the only one of its size. With a
    number of tokens a batch, the batch follows from the length and is no size of its own."""
    sizes: dict[str, Rows] = {}
    for row in rows:
        size = (f"batch{row['batch']}-" if by_batch else "") + f"{row['heads']}x{row['dim']}"
        sizes.setdefault(size, []).append(row)
    several = {size: sizes[size] for size in sorted(sizes) if len({row["length"] for row in sizes[size]}) > 1}
    return several, [row for size in sorted(sizes) if size not in several for row in sizes[size]]


def draw_points(points: Rows, field: str, title: str, values: list[float]) -> str:
    axis = Axis(field, title, True, choose_ticks(min(values), max(values)))
    return draw_lines(points, STYLES, length_axis(points), axis, points=True)


def make_bar(row: dict[str, Any], value: float) -> dict[str, Any]:
    return {"series": row["attention"], "group": str(Shape(*(row[key] for key in Shape._fields))), "value": value}


def draw_model(result: dict[str, Any]) -> dict[str, str]:
    """SVG texts by the name of their file: times of each kind and mode, as multiples of torch's."""
    drawn = {}
    for kind in dict.fromkeys(row["kind"] for row in result["rows"]):
        for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
            rows = [row for row in result["rows"] if (row["kind"], row["mode"]) == (kind, mode)]
            bars = [
                {"series": NAMES[name], "group": f"{row['batch']} x {row['length']:,}", "value": 1 / ratio}
                for row in rows
                for name, ratio in row["ratios"].items()
                if name in NAMES
            ]
            if bars:
                title = f"{kind}, {mode}: times as fast as with torch's attention"
                drawn[f"{kind}-{mode}"] = draw_bars(bars, STYLES, title, "batch x tokens")
    return drawn


def draw_compare(result: dict[str, Any]) -> dict[str, str]:
    """SVG texts by the name of their file."""
    look = choose_styles(result["settings"]["names"])
    drawn: dict[str, str] = {}
    timed = [row for row in result["costs"] if row["training_ms"] is not None]
    if len({row["length"] for row in timed}) > 1:
        length = length_axis(timed)
        values = [time_point(row["mechanism"], row["length"], row["training_ms"]) for row in timed]
        drawn["time"] = draw_lines(values, look, length, Axis("ms", "forward + backward (ms)", True), points=True)
        values = [
            {"series": row["mechanism"], "length": row["length"], "MiB": row["training_bytes"] / 2**20}
            for row in timed
            if row["training_bytes"]
        ]
        drawn["memory"] = draw_lines(values, look, length, Axis("MiB", "peak extra memory (MiB)", True), points=True)
    for key, title in (("entropy", "entropy (bits)"), ("gap", "spectral gap"), ("overlap", "overlap with softmax")):
        known = [row for row in result["concentration"] if row[key] is not None]
        if len({row["temperature"] for row in known}) > 1:
            values = [{"series": r["mechanism"], "temperature": r["temperature"], key: r[key]} for r in known]
            axis = Axis("temperature", "temperature", True, tuple(sorted({r["temperature"] for r in known})))
            drawn[key] = draw_lines(values, look, axis, Axis(key, title), points=True)
    return drawn
