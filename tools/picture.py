"""The picture at the top of the README, from stored results: time against length, entropy against temperature.

Drawn for light pages and for dark ones, and for each with its two panels side by side and, for phones, one below the
other. Lines carry their names, so nobody has to tell colours apart.
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
WIDTH, HEIGHT = 450, 312  # of a panel with all that is around it
LEFT, TOP, PANEL, DEPTH = 62, 62, 290, 200  # its inner corner and size

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
    title: str
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


def panel(title: str, note: str, across: Axis, up: Axis, lines: Sequence[Line], t: Theme) -> list[str]:
    def x(value: float) -> float:
        return LEFT + PANEL * across.place(value)

    def y(value: float) -> float:
        return TOP + DEPTH * (1 - up.place(value))

    def text(at: tuple[float, float], words: str, more: str) -> str:
        return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" {more}>{escape(words)}</text>'

    bottom, middle = TOP + DEPTH, TOP + DEPTH / 2
    faint = f'font-size="12.5" fill="{t.faint}"'
    parts = [
        text((14, 22), title, f'font-size="16.5" font-weight="600" fill="{t.ink}"'),
        text((14, 43), note, faint),
        text((LEFT + PANEL / 2, bottom + 40), across.title, f'{faint} text-anchor="middle"'),
        text((14, middle), up.title, f'{faint} text-anchor="middle" transform="rotate(-90 14 {middle:.1f})" dy="6"'),
    ]
    for value, words in up.ticks.items():
        parts.append(f'<path d="M{LEFT} {y(value):.1f}h{PANEL}" stroke="{t.grid}" stroke-width="1"/>')
        parts.append(text((LEFT - 7, y(value) + 4), words, f'{faint} text-anchor="end"'))
    for value, words in across.ticks.items():
        parts.append(text((x(value), bottom + 19), words, f'{faint} text-anchor="middle"'))
    for line in lines:
        path = "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line.points)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(
            f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5" stroke-linejoin="round"{dash}/>'
        )
        at, right, down = line.label
        a, b = line.points[at]
        parts.append(
            text((x(a) + right, y(b) + down), line.name, f'font-size="13.5" font-weight="600" fill="{line.colour}"')
        )
    return parts


def svg(theme: str, *, stacked: bool) -> str:
    t, ms, bits = THEMES[theme], times(), entropies()
    lengths = [a for a, _ in ms["cudnn"]]
    first = panel(
        "Time against length", "forward and backward on an H200, bfloat16, 12 heads of 64",
        Axis("tokens", lengths[0], lengths[-1], {512: "512", 2048: "2k", 8192: "8k", 65536: "65k"}, log=True),
        Axis("milliseconds", 0.01, 200, {0.01: "0.01", 0.1: "0.1", 1: "1", 10: "10", 100: "100"}, log=True),
        (
            Line("softmax", ms["cudnn"], t.softmax, (-1, 7, -2)),
            Line("(cuDNN)", ms["cudnn"], t.softmax, (-1, 7, 15)),
            Line("LLN+Diag", ms["LLN+Diag"], t.diag, (-1, 7, 2)),
            Line("LLN", ms["LLN"], t.lln, (-1, 7, 12)),
        ),
        t,
    )  # fmt: skip
    second = panel(
        "Concentration against temperature", "1,024 tokens, Gaussian queries and keys",
        Axis("temperature of the softmax", 0.25, 4, {0.25: "0.25", 0.5: "0.5", 1: "1", 2: "2", 4: "4"}, log=True),
        Axis("entropy, bits", 0, 10.4, {0: "0", 2: "2", 4: "4", 6: "6", 8: "8", 10: "10"}, log=False),
        (
            Line("ELU kernel", bits["ELU"], t.other, (0, 2, -7), "2 4"),
            Line("LLN, the paper's matching", bits["paper"], t.lln, (3, 4, 34), "2 3"),
            Line("softmax", bits["softmax"], t.softmax, (0, 8, -76)),
            Line("LLN, entropy matching", bits["entropy"], t.lln, (4, 46, 34), "7 5"),
        ),
        t,
    )  # fmt: skip
    place = (0, HEIGHT + 12) if stacked else (WIDTH + 6, 0)
    size = (WIDTH, 2 * HEIGHT + 12) if stacked else (2 * WIDTH, HEIGHT)
    panels = "\n".join([*first, f'<g transform="translate({place[0]} {place[1]})">', *second, "</g>"])
    told = (
        f"{'Above' if stacked else 'Left'}: the time of softmax attention grows with the square of the length, that of "
        f"LLN and LLN+Diag linearly. {'Below' if stacked else 'Right'}: with entropy matching LLN's entropy follows "
        "softmax's at every temperature, with the paper's it is too low at low ones; that of an ELU kernel does not "
        "move."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(told)}</title>\n{panels}\n</svg>\n"
    )


def pictures() -> dict[Path, str]:
    folder = ROOT / "docs" / "assets"
    kinds = {"picture": False, "picture-narrow": True}
    return {
        folder / f"{name}-{theme}.svg": svg(theme, stacked=stacked)
        for name, stacked in kinds.items()
        for theme in THEMES
    }


def facts() -> dict[str, Any]:
    """What the picture shows, in numbers, for those who test it."""
    return {"ms": times(), "bits": entropies()}
