"""One colour and one sign for one thing, in every chart.

The colours (data/palette.json) are Okabe and Ito's, told apart by colour-blind readers; dashes and shapes say the same
once more: a hue for a family, dashes and shapes for its members.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from lln.files import read_data

TABLES = read_data("palette")
ORANGE, BLUE, GREEN, PINK, AMBER, SKY, GREY, OLIVE = TABLES["colours"].values()
INK = "#808080"  # of axes and words: reads on white and on black
RAMP = ("#3B82D6", "#A35BC0", "#D9518A", "#E8871E")  # for what has an order
SOLID, LONG, SHORT, MIXED, EVEN = map(tuple, TABLES["dashes"].values())  # lengths of stroke and gap


@dataclasses.dataclass(frozen=True)
class Style:
    """How one series looks: three signs that each tell it from the others."""

    colour: str
    dash: tuple[int, ...]
    shape: str
    width: float = 2


def read_styles(table: str) -> dict[str, Style]:
    colours, dashes = TABLES["colours"], TABLES["dashes"]
    rows = TABLES[table].items()
    return {name: Style(colours[colour], tuple(dashes[dash]), *signs) for name, (colour, dash, *signs) in rows}


# By the names of mechanisms and those that tables show. Softmax is broad: what is compared with it may lie on it.
ATTENTIONS, MATCHED, CURVES = map(read_styles, ("attentions", "matched", "curves"))
# For what has no sign of its own: every colour in turn, then every colour with another dash and shape.
SPARE = (AMBER, SKY, PINK, GREY, OLIVE)
SIGNS: tuple[tuple[tuple[int, ...], str], ...] = (
    (LONG, "diamond"), (SHORT, "cross"), (MIXED, "triangle-down"), (EVEN, "triangle-left"), ((12, 4), "triangle-right"),
)  # fmt: skip
OTHERS = [Style(colour, *SIGNS[(i + turn) % 5]) for turn in range(5) for i, colour in enumerate(SPARE)]


def choose_styles(names: Iterable[str], known: Mapping[str, Style] = ATTENTIONS) -> dict[str, Style]:
    """A style for each name: the known ones first, so that their broad lines lie below, then one of OTHERS for each.

    >>> choose_styles(["elu", "softmax"])["softmax"] == ATTENTIONS["softmax"]
    True
    >>> list(choose_styles(["elu", "softmax"]))
    ['softmax', 'elu']
    """
    names = list(dict.fromkeys(names))
    others = zip((name for name in names if name not in known), itertools.cycle(OTHERS), strict=False)
    return {name: known[name] for name in known if name in names} | dict(others)
