"""Stored results of `lln bench` and `lln compare` as tables on the terminal and as Markdown."""

import itertools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lln.lab.bench.attentions import Shape
from lln.lab.bench.kernel_times import locate
from lln.lab.core.documents import write_markdown, write_paragraphs
from lln.lab.core.errors import WrongOption
from lln.lab.core.tables import show_number, show_timing, terminal_table
from lln.peers import mechanisms

MIB = 2**20
HEADER = "attention", "forward ms", "forward + backward ms", "times softmax", "% of floor", "host ms", "extra MiB"
NARROW = {one: "\n".join(one.rsplit(" ", 1)) for one in HEADER}  # in two lines, for the terminal
MODEL_HEADER = "attention", "ms", "times torch's", "extra MiB"
MOST_LENGTHS = 2  # that fit a terminal beside the rest; all are in the JSON and the Markdown
LEFT: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
KEYS = ("entropy", "gap", "overlap")
SHORT = {"out of memory": "OOM", "too slow": "slow", "unsupported": "no"}


def tell(block: str, **facts: Any) -> str:
    """What bench.txt says: of the columns of a table, or of where it was measured."""
    return write_paragraphs("bench.txt", block, **facts)[0]


def read_result(path: Path) -> dict[str, Any]:
    """A stored result, of single calls or of a model. WrongOption for what is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise WrongOption("--render", f"cannot read {path}: {reason}.") from None
    of_calls, of_model = {"rows", "scaling", "checks", "copy_bytes_per_second"}, {"rows", "errors", "settings"}
    if not isinstance(result, dict) or not (of_calls <= result.keys() or of_model <= result.keys()):
        raise WrongOption("--render", f"{path} is not a result of lln bench; name a bench.json that it wrote.")
    return result


def make_bench_table(result: dict[str, Any]) -> Table:
    lines: list[str | list[str | Text]] = []
    for title, rows in group_rows(result):
        lines.append(title)
        for row in rows:
            name, *rest = list_cells(row, quartiles=False)
            error = [(f"\n  {row['error']}", "red")] if row["error"] else []
            lines.append([Text.assemble(name, *error), *rest])
    return terminal_table(
        [NARROW.get(one, one) for one in HEADER],
        lines,
        title=tell("bench_place", **result),
        caption=tell("bench"),
        **LEFT,
    )


def describe_growth(result: dict[str, Any]) -> list[str]:
    """Sentences on how time grows with length, one for all attentions that were measured alike."""
    alike = operator.itemgetter("causal", "batch", "heads", "dim", "lengths")
    groups = [list(group) for _, group in itertools.groupby(sorted(result["scaling"], key=alike), alike)]
    return write_paragraphs("bench.txt", "growth", groups=groups)


def write_bench(result: dict[str, Any]) -> str:
    groups = {}
    for title, rows in group_rows(result):
        groups[title] = [list_cells(row, quartiles=True) for row in rows]
        for row, shown in zip(rows, groups[title], strict=True):
            shown[1] = row["error"] or shown[1]
    given = {"machine": tell("bench_place", **result), "growth": describe_growth(result), "header": HEADER}
    given["errors"] = [error for entry in result["checks"] for error in entry["errors"].values()]
    return write_markdown("bench.md", **result, **given, groups=groups, explained=tell("bench"))


def group_rows(result: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows that compare: one shape, one causality."""
    for _, group in itertools.groupby(result["rows"], locate):
        rows = list(group)
        shape = Shape(*(rows[0][key] for key in Shape._fields))
        yield f"{shape}, {name_direction(rows[0]['causal'])}", rows


def name_direction(causal: bool) -> str:
    return "causal" if causal else "bidirectional"


def list_cells(row: dict[str, Any], *, quartiles: bool) -> list[str]:
    if row["device_ms"] is None:
        return [row["attention"], *[""] * (len(HEADER) - 1)]

    def timing(value: dict[str, Any] | None) -> str:
        if value is None:
            return ""
        return show_timing(value) if quartiles else show_number(value["median"])

    mark = "*" if row["graph"] is False else ""
    percent, faster = row["percent_of_floor"], row["speedup"]
    return [
        row["attention"] + mark,
        timing(row["device_ms"]["forward"]),
        timing(row["device_ms"]["training"]),
        "" if faster is None else show_number(faster["training"]),
        "" if percent is None else f"{percent['forward']:.0f} / {percent['training']:.0f}",
        timing(row["host_ms"]),
        "" if row["training_bytes"] is None else show_number(row["training_bytes"] / MIB),
    ]


def list_model_rows(result: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """By what was timed: a row for each attention with its time, how many times as long as torch's, and memory."""
    for row in result["rows"]:
        cells = []
        for name in result["settings"]["attentions"]:
            if name in row["times"]:
                ratio = f"{row['ratios'][name]:.2f}" if row["ratios"] else ""
                cells.append([name, show_timing(row["times"][name]), ratio, show_number(row["bytes"][name] / MIB)])
            elif name in row["failed"]:
                cells.append([name, row["failed"][name], "", ""])
        yield f"{row['kind']}, {row['mode']}, {row['batch']} x {row['length']:,}", cells


def make_model_table(result: dict[str, Any]) -> Table:
    lines: list[str | list[str]] = []
    for title, cells in list_model_rows(result):
        lines += [title, *cells]
    return terminal_table(MODEL_HEADER, lines, title=tell("model_place", **result), caption=tell("model"), **LEFT)


def write_model(result: dict[str, Any]) -> str:
    place, groups = tell("model_place", **result), dict(list_model_rows(result))
    return write_markdown(
        "bench_model.md", **result, machine=place, header=MODEL_HEADER, groups=groups, explained=tell("model")
    )


def show_cost(row: dict[str, Any] | None, base: dict[str, Any] | None) -> tuple[str, str, str]:
    """(milliseconds, times as fast as softmax, MiB) of one mechanism at one length."""
    if row is None:
        return "", "", ""
    if row["training_ms"] is None:
        return SHORT.get(row["note"], row["note"]), "", ""
    ms = row["training_ms"]["median"]
    faster = "" if base is None or base["training_ms"] is None else f"{base['training_ms']['median'] / ms:.2g}"
    return show_number(ms), faster, show_number(row["training_bytes"] / MIB)


def list_columns(result: dict[str, Any], lengths: list[int], temperature: float) -> tuple[list[str], list[list[str]]]:
    """(headings, one row of text for each mechanism)"""
    costs = {(row["mechanism"], row["length"]): row for row in result["costs"]}
    spread = {(row["mechanism"], row["temperature"]): row for row in result["concentration"]}
    headings = ["mechanism", *(part for n in lengths for part in (f"ms @{n}", "x", "MiB")), "bits", "gap", "overlap"]
    rows = []
    for name in result["settings"]["names"]:
        row = [name]
        for length in lengths:
            row += show_cost(costs.get((name, length)), costs.get(("softmax", length)))
        here = [spread[name, temperature]] if (name, temperature) in spread else []
        if "recorded" in result:
            here = [one for one in result["recorded"] if one["mechanism"] == name]
        for key in KEYS:
            known = [one[key] for one in here if one[key] is not None]
            mean = sum(known) / len(known) if known else None
            row.append("-" if mean is None else f"{mean:.3g}" if abs(mean) > 1e-6 else "0")
        rows.append(row)
    return headings, rows


def choose_temperature(result: dict[str, Any]) -> float:
    """The temperature that the table shows: the one nearest to 1."""
    return float(min(result["settings"]["temperatures"], key=lambda t: abs(t - 1.0)))


def make_compare_table(result: dict[str, Any]) -> Table:
    lengths, temperature = sorted(result["settings"]["lengths"])[-MOST_LENGTHS:], choose_temperature(result)
    headings, rows = list_columns(result, lengths, temperature)
    title, caption = (tell(block, **result, temperature=temperature) for block in ("compare_place", "compare"))
    caption = " ".join((caption.strip(), *(f"{name}: {reason}" for name, reason in list_reasons(result).items())))
    return terminal_table(headings, rows, title=title, caption=caption, wrap=False, **LEFT)


def list_reasons(result: dict[str, Any]) -> dict[str, str]:
    """Why a mechanism has "no" somewhere, by its title."""
    refused = [row for row in (*result["costs"], *result["concentration"]) if "reason" in row]
    return {mechanisms()[row["mechanism"]].title: row["reason"] for row in refused}


def write_compare(result: dict[str, Any]) -> str:
    s = result["settings"]
    tables = [
        (
            tell("compare_place", **result, temperature=temperature),
            *list_columns(result, sorted(s["lengths"]), temperature),
        )
        for temperature in (s["temperatures"] if "recorded" not in result else [choose_temperature(result)])
    ]
    return write_markdown(
        "compare.md",
        **result,
        tables=tables,
        reasons=list_reasons(result),
        explained=tell("compare", **result, temperature=None),
    )
