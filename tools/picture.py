"""The picture at the top of the README, from stored results: time against length, entropy against temperature.

Drawn twice, for light pages and for dark ones. Lines carry their names, so nobody has to tell colours apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "results" / "2026-11-15-h200" / "batch1" / "bench.json"
FIG2 = ROOT / "results" / "paper" / "fig2.json"
WIDTH, HEIGHT = 900, 335
LEFT, TOP, PANEL, DEPTH = 58, 66, 310, 230  # of the first panel: its inner corner and size
SECOND = 470  # the left edge of the second panel

Point = tuple[float, float]


class Line(NamedTuple):
    name: str
    points: Sequence[Point]
    colour: str
    label: tuple[int, float, float]  # beside which point, and how far from it
    dash: str = ""


class Theme(NamedTuple):
    ink: str
    faint: str
    grid: str
    softmax: str
    lln: str
    diag: str
    other: str


# Okabe and Ito's colours, which are told apart with any kind of colour vision; lighter on dark pages.
THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d1d9e0", "#d55e00", "#0072b2", "#007a5a", "#6e7781"),
    "dark": Theme("#f0f6fc", "#9198a1", "#3d444d", "#f5a063", "#56b4e9", "#33c79a", "#9198a1"),
}


class Axis(NamedTuple):
    low: float
    high: float
    ticks: dict[float, str]
    log: bool

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        change = math.log10 if self.log else float
        return (change(value) - change(self.low)) / (change(self.high) - change(self.low))


def times() -> dict[str, list[Point]]:
    """Milliseconds of forward and backward by attention and length."""
    found: dict[str, list[Point]] = {}
    for row in json.loads(GPU.read_text())["rows"]:
        found.setdefault(row["attention"], []).append((row["length"], row["device_ms"]["training"]["median"]))
    return found


def entropies() -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for row in json.loads(FIG2.read_text())["rows"]:
        found.setdefault(row["series"], []).append((row["temperature"], row["entropy"]))
    return {name: sorted(points) for name, points in found.items()}


def panel(left: int, title: str, note: str, across: Axis, up: Axis, lines: Sequence[Line], t: Theme) -> list[str]:
    def x(value: float) -> float:
        return left + PANEL * across.place(value)

    def y(value: float) -> float:
        return TOP + DEPTH * (1 - up.place(value))

    bottom = TOP + DEPTH
    parts = [
        f'<text x="{left - 40}" y="22" font-size="16" font-weight="600" fill="{t.ink}">{escape(title)}</text>',
        f'<text x="{left - 40}" y="42" font-size="12.5" fill="{t.faint}">{escape(note)}</text>',
    ]
    for value, text in up.ticks.items():
        parts.append(f'<path d="M{left} {y(value):.1f}h{PANEL}" stroke="{t.grid}" stroke-width="1"/>')
        parts.append(
            f'<text x="{left - 7}" y="{y(value) + 4:.1f}" font-size="12" text-anchor="end" fill="{t.faint}">'
            f"{text}</text>"
        )
    for value, text in across.ticks.items():
        parts.append(
            f'<text x="{x(value):.1f}" y="{bottom + 18}" font-size="12" text-anchor="middle" fill="{t.faint}">'
            f"{text}</text>"
        )
    for line in lines:
        path = "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line.points)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(
            f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5" stroke-linejoin="round"{dash}/>'
        )
        at, right, down = line.label
        a, b = line.points[at]
        parts.append(
            f'<text x="{x(a) + right:.1f}" y="{y(b) + down:.1f}" font-size="13" font-weight="600" '
            f'fill="{line.colour}">{escape(line.name)}</text>'
        )
    return parts


def svg(theme: str) -> str:
    t, ms, bits = THEMES[theme], times(), entropies()
    lengths = [a for a, _ in ms["cudnn"]]
    first = panel(
        LEFT, "Time against length", "ms of forward and backward on an H200, bfloat16, 12 heads of 64",
        Axis(lengths[0], lengths[-1], {512: "512", 2048: "2k", 8192: "8k", 65536: "65k tokens"}, log=True),
        Axis(0.01, 200, {0.01: "0.01", 0.1: "0.1", 1: "1", 10: "10", 100: "100"}, log=True),
        (
            Line("softmax", ms["cudnn"], t.softmax, (-1, 7, 4)),
            Line("LLN+Diag", ms["LLN+Diag"], t.diag, (-1, 7, 2)),
            Line("LLN", ms["LLN"], t.lln, (-1, 7, 9)),
        ),
        t,
    )  # fmt: skip
    second = panel(
        SECOND + LEFT, "Concentration against temperature", "entropy in bits, 1,024 tokens, Gaussian queries and keys",
        Axis(0.25, 4, {0.25: "0.25", 0.5: "0.5", 1: "1", 2: "2", 4: "4"}, log=True),
        Axis(0, 10.4, {0: "0", 2: "2", 4: "4", 6: "6", 8: "8", 10: "10"}, log=False),
        (
            Line("ELU kernel", bits["ELU"], t.other, (0, 2, -7), "2 4"),
            Line("LLN, the paper's matching", bits["paper"], t.lln, (3, 2, 38), "2 3"),
            Line("softmax", bits["softmax"], t.softmax, (0, 8, -86)),
            Line("LLN, entropy matching", bits["entropy"], t.lln, (4, 52, 38), "7 5"),
        ),
        t,
    )  # fmt: skip
    body = "\n".join(first + second)
    told = (
        "Left: the time of softmax attention grows with the square of the length, that of LLN and LLN+Diag linearly. "
        "Right: with entropy matching LLN's entropy follows softmax's at every temperature, with the paper's it is too "
        "low at low ones; that of an ELU kernel does not move."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(told)}</title>\n{body}\n</svg>\n"
    )


def pictures() -> dict[Path, str]:
    return {ROOT / "docs" / "assets" / f"picture-{theme}.svg": svg(theme) for theme in THEMES}


def facts() -> dict[str, Any]:
    """What the picture shows, in numbers, for those who test it."""
    return {"ms": times(), "bits": entropies()}
