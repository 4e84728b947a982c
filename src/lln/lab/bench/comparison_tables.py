"""A comparison as a table for the terminal and as Markdown."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from lln.lab.core.tables import markdown_table, show_number, terminal_table
from lln.peers import mechanisms

MOST_LENGTHS = 3  # that fit a terminal beside the rest; all are in the JSON and the Markdown
KEYS = ("entropy", "gap", "error")
SHORT = {"out of memory": "OOM", "too slow": "slow", "unsupported": "no"}
EXPLAINED = (
    "ms, MiB: forward + backward and peak extra memory at each length; x: how many times as fast as softmax. "
    "bits, gap: entropy and spectral gap of P on Gaussian q and k, or a model's; error: of the output, relative "
    "to softmax's. OOM: out of memory; no: this mechanism cannot; -: nothing to measure (learned, no matrix, rows "
    "that are no distribution)."
)


def show_cost(row: dict[str, Any] | None, base: dict[str, Any] | None) -> tuple[str, str, str]:
    """(milliseconds, times as fast as softmax, MiB) of one mechanism at one length."""
    if row is None:
        return "", "", ""
    if row["training_ms"] is None:
        return SHORT.get(row["note"], row["note"]), "", ""
    ms = row["training_ms"]["median"]
    faster = "" if base is None or base["training_ms"] is None else f"{base['training_ms']['median'] / ms:.2g}"
    return show_number(ms), faster, show_number(row["training_bytes"] / 2**20)


def list_columns(result: dict[str, Any], lengths: list[int], temperature: float) -> tuple[list[str], list[list[str]]]:
    """(headings, one row of text for each mechanism)"""
    costs = {(row["mechanism"], row["length"]): row for row in result["costs"]}
    spread = {(row["mechanism"], row["temperature"]): row for row in result["concentration"]}
    headings = ["mechanism"]
    for length in lengths:
        headings += [f"ms @{length}", "x", "MiB"]
    headings += ["bits", "gap", "error"]
    rows = []
    for name in result["settings"]["names"]:
        row = [name]
        for length in lengths:
            row += show_cost(costs.get((name, length)), costs.get(("softmax", length)))
        found = spread.get((name, temperature), {})
        values = (found.get(key) for key in KEYS)
        if "recorded" in result:
            here = [one for one in result["recorded"] if one["mechanism"] == name]
            values = (average([one[key] for one in here]) for key in KEYS)
        row += ["-" if value is None else f"{value:.3g}" if abs(value) > 1e-6 else "0" for value in values]
        rows.append(row)
    return headings, rows


def average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def choose_temperature(result: dict[str, Any]) -> float:
    """The temperature that the table shows: the one nearest to 1."""
    return float(min(result["settings"]["temperatures"], key=lambda t: abs(t - 1.0)))


def make_table(result: dict[str, Any]) -> Table:
    lengths, temperature = sorted(result["settings"]["lengths"])[-MOST_LENGTHS:], choose_temperature(result)
    headings, rows = list_columns(result, lengths, temperature)
    return terminal_table(
        headings, rows, title=describe_head(result, temperature), caption=EXPLAINED, wrap=False, title_justify="left",
        caption_justify="left",
    )  # fmt: skip


def describe_head(result: dict[str, Any], temperature: float) -> str:
    s = result["settings"]
    way = "causal" if s["causal"] else "bidirectional"
    where = f"at {s['matrix_length']} tokens and temperature {temperature:g}"
    if "recorded" in result:
        where = f"on the queries and keys of {result['model']}, means over layers and texts"
    return (
        f"{result['provenance']['device']}, {s['dtype']}, batch {s['batch']}, {s['heads']} heads of {s['dim']}, {way}; "
        f"concentration {where}"
    )


def write_markdown(result: dict[str, Any]) -> str:
    s, p = result["settings"], result["provenance"]
    parts = ["# Attention mechanisms side by side", "", f"{p['date'][:10]}, commit {p['commit']}, `{p['command']}`", ""]
    for temperature in s["temperatures"] if "recorded" not in result else [choose_temperature(result)]:
        made = markdown_table(*list_columns(result, sorted(s["lengths"]), temperature))
        parts += [describe_head(result, temperature), "", *made, ""]
    reasons = {
        row["mechanism"]: row["reason"] for row in (*result["costs"], *result["concentration"]) if "reason" in row
    }
    parts += [f"- {mechanisms()[name].title}: {reason}" for name, reason in reasons.items()]
    return "\n".join([*parts, "", EXPLAINED, ""])
