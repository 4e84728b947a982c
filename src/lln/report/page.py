"""Sections and the one self-contained page they make."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from lln.files import write_json, write_text


@dataclasses.dataclass(frozen=True)
class Chart:
    name: str  # of the SVG file
    svg: str
    caption: str  # also what a screen reader says
    note: str = ""  # a second sentence


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the page: a question, the sentences that its data supports, charts, a table."""

    name: str  # of the JSON file that holds `data`
    title: str
    sentences: list[str]
    charts: list[Chart]
    header: list[str]
    table: list[list[str]]
    data: dict[str, Any]
    caption: str = "The numbers behind the charts: medians, quartiles in brackets"  # of the table


def template(name: str) -> jinja2.Template:
    """One of the templates; all text in it is escaped but for charts, which are drawn here from numbers."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lln.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["drawn"] = lambda chart: markupsafe.Markup(chart.svg)
    return environment.get_template(name)


def write_page(out: Path, sections: list[Section], provenance: dict[str, Any]) -> Path:
    """Writes index.html, an SVG file for each chart and a JSON file for each section into `out`."""
    page = template("page.html").render(sections=sections, provenance=provenance)
    for section in sections:
        write_json(out / f"{section.name}.json", section.data)
        for chart in section.charts:
            write_text(out / f"{chart.name}.svg", chart.svg)
    path = out / "index.html"
    write_text(path, page)
    return path
