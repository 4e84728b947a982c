"""One colour and one sign for one thing, in every chart.

The colours are Okabe and Ito's, told apart by colour-blind readers; dashes and shapes say the same once more.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

ORANGE, BLUE, GREEN, PINK = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
AMBER, SKY, GREY, OLIVE = "#E69F00", "#56B4E9", "#999999", "#B79F00"
INK = "#808080"  # of axes and words: reads on white and on black
RAMP = ("#3B82D6", "#A35BC0", "#D9518A", "#E8871E")  # for what has an order

# Dashes: lengths of stroke and gap.
SOLID, LONG, SHORT, MIXED, EVEN = (1, 0), (8, 3), (2, 2), (10, 3, 2, 3), (4, 4)


@dataclasses.dataclass(frozen=True)
class Style:
    """How one series looks: three signs that each tell it from the others."""

    colour: str
    dash: tuple[int, ...]
    shape: str
    width: float = 2


# What is compared with softmax may lie on it, and it must show below.
SOFTMAX, LLN, DIAG = Style(ORANGE, SOLID, "circle", 3), Style(BLUE, LONG, "square"), Style(GREEN, SHORT, "triangle-up")
# By the names of mechanisms and those that tables show. A hue for a family, dashes and shapes for its members.
ATTENTIONS = {
    "softmax": SOFTMAX,
    "flash": Style(ORANGE, SOLID, "circle"),
    "cudnn": Style(ORANGE, LONG, "diamond"),
    "efficient": Style(ORANGE, EVEN, "triangle-down"),
    "math": Style(ORANGE, SHORT, "cross"),
    "usual": Style(PINK, LONG, "cross"),
    "lln": LLN,
    "LLN": LLN,
    "LLN-sample": Style(BLUE, MIXED, "diamond"),
    "LLN-eager": Style(BLUE, EVEN, "triangle-down"),
    "lln_diag": DIAG,
    "LLN+Diag": DIAG,
    "LLN+Diag-sample": Style(GREEN, MIXED, "diamond"),
    "LLN+Diag-eager": Style(GREEN, EVEN, "triangle-down"),
    "torch": Style(PINK, SOLID, "diamond"),
    "nystromformer": Style(AMBER, MIXED, "cross"),
    "fla-linear": Style(AMBER, SOLID, "circle"),
    "fla-gla": Style(AMBER, EVEN, "square"),
}
MATCHED = {
    "softmax": dataclasses.replace(SOFTMAX, width=5),
    "paper": Style(PINK, LONG, "square"),
    "variance": Style(GREEN, SHORT, "triangle-up"),
    "entropy": Style(BLUE, MIXED, "diamond"),
    "unmatched": Style(AMBER, EVEN, "cross"),
}
CURVES = {
    "head dim 16": Style(SKY, MIXED, "circle"),
    "head dim 64": Style(GREEN, SOLID, "square"),
    "head dim 128": Style(AMBER, SHORT, "triangle-up"),
    "paper's line": Style(PINK, LONG, "diamond"),
}
# For what has no sign of its own: every colour in turn, then every colour with another dash and shape.
SPARE = (AMBER, SKY, PINK, GREY, OLIVE)
SIGNS: tuple[tuple[tuple[int, ...], str], ...] = (
    (LONG, "diamond"), (SHORT, "cross"), (MIXED, "triangle-down"), (EVEN, "triangle-left"), ((12, 4), "triangle-right"),
)  # fmt: skip
OTHERS = [Style(colour, *SIGNS[(i + turn) % 5]) for turn in range(5) for i, colour in enumerate(SPARE)]


def choose_styles(names: Iterable[str], known: Mapping[str, Style] = ATTENTIONS) -> dict[str, Style]:
    """A style for each name: the known ones first, so that their broad lines lie below, then one of OTHERS for each.

    >>> choose_styles(["elu", "softmax"])["softmax"] == SOFTMAX
    True
    >>> list(choose_styles(["elu", "softmax"]))
    ['softmax', 'elu']
    """
    names = list(dict.fromkeys(names))
    others = zip((name for name in names if name not in known), itertools.cycle(OTHERS), strict=False)
    return {name: known[name] for name in known if name in names} | dict(others)
