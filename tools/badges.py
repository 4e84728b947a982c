"""The README's badges, from what pyproject.toml says: nothing that a server would have to answer for."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LETTER = 6.4  # width of one at this size, roughly


def badge(what: str, text: str) -> str:
    left, right = (round(LETTER * len(part)) + 12 for part in (what, text))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{what}: {text}" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#fff">'
        f'<rect width="{left + right}" height="20" rx="3" fill="#2f5fa8"/>'
        f'<path d="M3 0h{left - 3}v20h-{left - 3}a3 3 0 0 1-3-3v-14a3 3 0 0 1 3-3z" fill="#4a4f57"/>'
        f'<text x="{left / 2:g}" y="14" text-anchor="middle">{what}</text>'
        f'<text x="{left + right / 2:g}" y="14" text-anchor="middle">{text}</text></svg>\n'
    )


def pictures() -> dict[Path, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = "Programming Language :: Python :: "
    versions = [text.removeprefix(start) for text in project["classifiers"] if text.startswith(start)]
    folder = ROOT / "docs" / "assets"
    return {
        folder / "badge-licence.svg": badge("licence", project["license"]),
        folder / "badge-python.svg": badge("python", f"{versions[0]} to {versions[-1]}"),
    }
