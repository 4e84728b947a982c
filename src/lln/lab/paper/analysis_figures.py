"""The paper's analysis figures by name."""

from lln.lab.paper.analysis import Figure
from lln.lab.paper.fig2 import FIG2
from lln.lab.paper.fig5_fig7 import FIG5A, FIG5B, FIG7
from lln.lab.paper.fig6 import FIG6A, FIG6B

FIGURES: dict[str, Figure] = {figure.name: figure for figure in (FIG2, FIG5A, FIG5B, FIG6A, FIG6B, FIG7)}
