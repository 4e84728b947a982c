"""The table of cards in docs/gpu.md, from results/cards.json."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from lln.lab.core.tables import markdown_table

ROOT = Path(__file__).parents[1]
RAN = "90"  # the one target whose kernels have run
KINDS = list(itertools.product((64, 128), ("LLN+Diag", "LLN+Diag, causal")))


def show_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    both = {row[part]["runs"] for part in ("forward", "backward")}
    return "kernels" if both == {"kernels"} else "PyTorch"


def cards() -> str:
    """Of training with LLN+Diag: what runs it on each card, by precision and head dimension."""
    stored = json.loads((ROOT / "results" / "cards.json").read_text())
    known: dict[tuple[int, str], tuple[str, int]] = {}
    found = {}
    for row in stored["rows"]:
        number = int(row["target"]) if row["target"].isdigit() else 10**6
        known[number, row["target"]] = row["card"], row["shared"]
        found[row["target"], row["dtype"], row["dim"], row["mode"]] = row
    rows = []
    for place, target in sorted(known):
        card, shared = known[place, target]
        for dtype in ("bfloat16", "float16", "float32"):
            cells = [show_cell(found.get((target, dtype, *kind))) for kind in KINDS]
            if any(cells):
                rows.append([f"{card}{' (ran)' if target == RAN else ''}", f"{shared / 1024:.0f}", dtype, *cells])
    header = ["card", "shared KiB", "precision", *(f"{mode.removeprefix('LLN+Diag, ')}, {dim}" for dim, mode in KINDS)]
    p = stored["provenance"]
    triton = stored["rows"][0]["triton"]
    made = f"Made by `tools/compile_cards.py` with Triton {triton}, {p['date'][:10]}, commit {p['commit']}."
    return "\n".join([*markdown_table(header, rows, "l"), "", made, ""])
