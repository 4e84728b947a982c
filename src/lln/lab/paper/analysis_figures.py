"""The paper's analysis figures by name: measured, judged, written down."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lln.files import write_result
from lln.lab.core.provenance import provenance
from lln.lab.paper.analysis import CPU, Draws, Figure, Progress
from lln.lab.paper.fig2 import FIG2
from lln.lab.paper.fig5_fig7 import FIG5A, FIG5B, FIG7
from lln.lab.paper.fig6 import FIG6A, FIG6B

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (FIG2, FIG5A, FIG5B, FIG6A, FIG6B, FIG7)}


def measure_figure(figure: Figure, draws: Draws, seed: int, progress: Progress) -> dict[str, Any]:
    """The result, ready for JSON. `progress` hears of figure.steps steps."""
    rows = figure.measure(draws, seed, progress)
    return {
        "figure": figure.name,
        "title": figure.title,
        "verdicts": [dataclasses.asdict(verdict) for verdict in figure.judge(draws, rows)],
        "settings": dataclasses.asdict(draws),
        "provenance": provenance(seed, CPU),
        "rows": rows,
    }


def write_figure(figure: Figure, draws: Draws, result: dict[str, Any], out: Path) -> list[Path]:
    """NAME.json and an SVG file for each chart; returns where they are."""
    charts = {f"{end}.svg": text for end, text in figure.charts(draws, result["rows"]).items()}
    return write_result(out, figure.name, result, charts)
