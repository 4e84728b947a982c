"""The map of the house in CONTRIBUTING.md: every room and file, with the first sentence that it says about itself."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from lln.files import put_between

ROOT = Path(__file__).parents[1]
MARKS = "<!-- the map: make pages -->\n", "<!-- end of the map -->"
INDENT, NAMES, WIDTH = 2, 30, 120
# From the ground up: each may import what stands before it.
ORDER = ("kernels", "matching", "nn", "peers", "hf", "instruments", "lab")
LAB = ("core", "data", "train", "recipes", "inspect", "convert", "bench", "paper", "page", "cli")


def read_sentence(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^qgs][.?])\s(?=[A-Z`])", text)[0].removesuffix(".")  # not after eq., Fig. and Figs.


def make_lines(name: str, sentence: str, depth: int) -> list[str]:
    head = " " * (4 + INDENT * depth) + name
    first = head.ljust(4 + NAMES) + " " if len(head) < 4 + NAMES else head + "  "
    return textwrap.wrap(sentence, WIDTH, initial_indent=first, subsequent_indent=" " * (5 + NAMES)) or [head]


def list_room(folder: Path, depth: int) -> list[str]:
    lines = []
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("__init__"):
            lines += make_lines(path.name, read_sentence(path), depth)
    rooms = [path for path in folder.iterdir() if (path / "__init__.py").exists()]
    order = {name: place for place, name in enumerate((*ORDER, *LAB))}
    for room in sorted(rooms, key=lambda room: order.get(room.name, len(order))):
        lines += make_lines(f"{room.name}/", read_sentence(room / "__init__.py"), depth)
        lines += list_room(room, depth + 1)
    return lines


def pages() -> dict[Path, str]:
    path = ROOT / "CONTRIBUTING.md"
    drawn = "\n".join(["", "    src/lln/", *list_room(ROOT / "src" / "lln", 1), "", ""])
    return {path: put_between(path.read_text(encoding="utf-8"), MARKS, drawn)}
