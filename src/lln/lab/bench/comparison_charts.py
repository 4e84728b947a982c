"""Charts of a result of `lln compare`."""

from __future__ import annotations

from typing import Any

from lln.lab.core.charts import Axis, draw_lines, length_axis, time_point
from lln.lab.core.palette import choose_styles


def draw_charts(result: dict[str, Any]) -> dict[str, str]:
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
    for key, title in (("entropy", "entropy (bits)"), ("gap", "spectral gap"), ("error", "distance from softmax")):
        known = [row for row in result["concentration"] if row[key] is not None]
        if len({row["temperature"] for row in known}) > 1:
            values = [{"series": r["mechanism"], "temperature": r["temperature"], key: r[key]} for r in known]
            axis = Axis("temperature", "temperature", True, tuple(sorted({r["temperature"] for r in known})))
            drawn[key] = draw_lines(values, look, axis, Axis(key, title), points=True)
    return drawn
