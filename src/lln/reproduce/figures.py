"""All figures by name."""

from __future__ import annotations

from lln.reproduce.concentration import FIG2
from lln.reproduce.distribution import FIG5A, FIG5B, FIG7
from lln.reproduce.figure import Figure
from lln.reproduce.sums import FIG6A, FIG6B

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (FIG2, FIG5A, FIG5B, FIG6A, FIG6B, FIG7)}
