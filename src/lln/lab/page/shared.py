"""What the sections of the page share: how a result begins, how a chart is made of rows, how a row is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.page import Chart
from lln.lab.core.palette import Style
from lln.lab.core.provenance import provenance

CPU = torch.device("cpu")
MIB = 2**20
Result = dict[str, Any]
Rows = list[dict[str, Any]]


def begin_result(what: str, plan: Any, seed: int) -> Result:
    """What stands first in a result that was measured on the CPU; `plan` is a dataclass."""
    return {"what": what, "settings": dataclasses.asdict(plan), "provenance": provenance(seed, CPU)}


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
