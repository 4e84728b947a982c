"""The table of the long campaigns in docs/hardening.md, from results/hardening/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.lab.core.tables import markdown_table

STORED = Path(__file__).parents[1] / "results" / "hardening"
# File, what it tries, and how many the project asks of it.
CAMPAIGNS = {
    "fuzz-op": ("generated calls of the op", 50_000),
    "fuzz-kernels": ("generated calls of the kernels, in Triton's interpreter", 2_000),
    "fuzz-compiled": ("generated calls of the kernels, compiled", 20_000),
    "fuzz-states": ("states cut and merged", None),
    "fuzz-modules": ("modules", None),
    "fuzz-plugin": ("models of transformers", None),
    "bad-inputs": ("bad inputs of commands", 400),
    "kill-train": ("`lln train`, killed", None),
    "kill-convert": ("`lln convert`, killed", None),
    "kill-reproduce": ("`lln reproduce`, killed", None),
    "mutants": ("mutants", 100),
}


def campaigns(folder: Path = STORED) -> str:
    """What each found, of those that are stored; and what of the figures that are asked for is not there yet."""
    stored = {name: json.loads((folder / f"{name}.json").read_text()) for name in CAMPAIGNS if exists(folder, name)}
    rows = [describe(name, held) for name, held in stored.items()]
    header = ["tried", "how many", "wrong", "time", "seed", "commit", "machine"]
    lines = [*markdown_table(header, rows, "l"), ""] if rows else []
    wanting = [
        f"{name} ({stored[name]['done'] if name in stored else 0:,} of {asked:,})"
        for name, (_, asked) in CAMPAIGNS.items()
        if asked is not None and (name not in stored or stored[name]["done"] < asked)
    ]
    if any(held["faults"] for name, held in stored.items() if name != "mutants"):
        lines += ["`results/README.md` says what was wrong.", ""]
    kills = sum(count_kills(held) for name, held in stored.items() if name.startswith("kill-"))
    wanting += [f"kills ({kills} of 200)"] if kills < 200 else []
    if wanting:
        lines += [f"These campaigns have not reached their planned number of cases yet: {', '.join(wanting)}.", ""]
    return "\n".join(lines)


def exists(folder: Path, name: str) -> bool:
    return (folder / f"{name}.json").exists()


def count_kills(held: dict[str, Any]) -> int:
    return sum(int(word.split()[0]) * count for word, count in held["counts"].items())


def describe(name: str, held: dict[str, Any]) -> list[str]:
    p, tried, wrong = held["provenance"], f"{held['done']:,}", f"{len(held['faults']):,}"
    if name.startswith("kill-"):
        tried = f"{count_kills(held):,} kills of {tried} runs"
    elif name == "mutants":
        equivalent = held["counts"].get("equivalent", 0)
        wrong = f"{wrong} survive" + (f", {equivalent} equivalent" if equivalent else "")
    elif "variants" in held:
        tried += f" in {held['variants']} variants"
    minutes = f"{held['seconds'] / 60:,.0f} min"
    return [CAMPAIGNS[name][0], tried, wrong, minutes, str(held["request"]["seed"]), p["commit"], p["device"]]
