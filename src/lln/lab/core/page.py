"""Sections, what they are made of, and the one self-contained page they make."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lln
from lln.files import write_json, write_text
from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.documents import write_document, write_paragraphs
from lln.lab.core.palette import Style
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import write_csv

CPU = torch.device("cpu")
MIB = 2**20
Result = dict[str, Any]
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Chart:
    name: str  # of the SVG file
    svg: str
    caption: str  # also what a screen reader says
    rows: Sequence[dict[str, Any]] = ()  # what it shows, for the CSV file

    @property
    def title(self) -> str:
        """
        >>> Chart("gap-against-temperature", "<svg/>", "").title
        'Gap against temperature'
        >>> Chart("log-p-histogram", "<svg/>", "").title
        'Log P histogram'
        """
        words = self.name.replace("-", " ").replace("_", " ").capitalize()
        return words.replace("lln diag", "LLN+Diag").replace("lln", "LLN").replace("Log p ", "Log P ")


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the page: what it is about, the sentences that its data supports, charts, a table."""

    name: str  # of the JSON file that holds `data`
    title: str
    sentences: list[str]
    charts: list[Chart]
    header: list[str]
    table: list[list[str]]
    data: dict[str, Any]
    caption: str = "The numbers behind the charts: medians, quartiles in brackets"  # of the table
    lead: str = ""  # what a reader must know first, no measurement
    explorer: dict[str, Any] | None = None  # what the page's script shows, before the charts


def begin_result(what: str, plan: Any, seed: int) -> Result:
    """What stands first in a result that was measured on the CPU; `plan` is a dataclass."""
    return {"what": what, "settings": dataclasses.asdict(plan), "provenance": provenance(seed, CPU)}


def tell_section(name: str, result: Result, **facts: Any) -> dict[str, Any]:
    """The fields of a `Section` that are words of its template: NAME.txt, which shows what the result holds."""
    blocks = ("title", "lead", "caption")
    return {"name": name} | {b: " ".join(write_paragraphs(f"{name}.txt", b, **result, **facts)) for b in blocks}


def chart_lines(
    name: str, rows: Rows, styles: dict[str, Style], x: Axis, y: Axis, caption: str, **options: Any
) -> Chart:
    """A chart with the rows that it shows; options are those of `draw_lines`."""
    return Chart(name, draw_lines(rows, styles, x, y, **options), caption, rows=rows)


def pick(rows: Rows, **values: Any) -> dict[str, Any]:
    """The first row with these values.

    >>> pick([{"a": 1}, {"a": 2, "b": 3}], a=2)
    {'a': 2, 'b': 3}
    """
    return next(row for row in rows if all(row[name] == value for name, value in values.items()))


def write_page(
    out: Path, sections: list[Section], made: dict[str, Any], *, summary: Sequence[str] = (),
    left_out: Sequence[str] = (), doubts: Sequence[str] = (), provisional: bool = False,
) -> Path:  # fmt: skip
    """Writes index.html, an SVG file for each chart with its data as CSV, and a JSON file for each section."""
    page = write_document(
        "page.html", sections=sections, provenance=made, summary=summary, left_out=left_out, doubts=doubts,
        provisional=provisional, version=lln.__version__,
    )  # fmt: skip
    for section in sections:
        write_json(out / f"{section.name}.json", section.data)
        for chart in section.charts:
            write_text(out / f"{chart.name}.svg", chart.svg)
            if chart.rows:
                write_text(out / f"{chart.name}.csv", write_csv(chart.rows))
    path = out / "index.html"
    write_text(path, page)
    return path
