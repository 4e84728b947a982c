"""One colour and one sign for one thing, in every chart.

The colours are Okabe and Ito's, told apart by colour-blind readers; dashes and shapes say the same once more.
"""

from __future__ import annotations

import dataclasses

ORANGE, BLUE, GREEN, PINK = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
AMBER, SKY, GREY, OLIVE = "#E69F00", "#56B4E9", "#999999", "#B79F00"
INK = "#808080"  # of axes and words: reads on white and on black
OTHERS = (AMBER, SKY, PINK, GREY, OLIVE)  # for what has no colour of its own
RAMP = ("#3B82D6", "#A35BC0", "#D9518A", "#E8871E")  # for what has an order

SOLID, LONG, SHORT, MIXED = (1, 0), (8, 3), (2, 2), (10, 3, 2, 3)  # dashes: lengths of stroke and gap


@dataclasses.dataclass(frozen=True)
class Style:
    """How one series looks: three signs that each tell it from the others."""

    colour: str
    dash: tuple[int, ...]
    shape: str
    width: float = 2


SOFTMAX, LLN, DIAG = ORANGE, BLUE, GREEN
COLOURS = {"softmax": SOFTMAX, "LLN": LLN, "LLN+Diag": DIAG}
SHAPES = {"softmax": "circle", "LLN": "square", "LLN+Diag": "triangle-up"}
MATCHED = {
    "softmax": Style(SOFTMAX, SOLID, "circle", 5),  # what matches it well lies on it, and it must show below
    "paper": Style(PINK, LONG, "square"),
    "variance": Style(GREEN, SHORT, "triangle-up"),
    "entropy": Style(BLUE, MIXED, "diamond"),
    "unmatched": Style(AMBER, (4, 4), "cross"),
}
CURVES = {
    "head dim 16": Style(SKY, MIXED, "circle"),
    "head dim 64": Style(GREEN, SOLID, "square"),
    "head dim 128": Style(AMBER, SHORT, "triangle-up"),
    "paper's line": Style(PINK, LONG, "diamond"),
}
