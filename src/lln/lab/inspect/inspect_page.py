"""The table and the page of `lln inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from lln.files import write_json, write_text
from lln.lab.core.page import Chart

Rows = list[dict[str, Any]]
NAME = "inspect"
# Field, title, digits in a cell, what it says.
QUANTITIES = (
    (
        "temperature",
        "Temperature",
        1,
        "How widely scores spread, turned round: 1 over their standard deviation (eq. 5). Low: few keys take all the "
        "weight. High: all keys weigh alike.",
    ),
    (
        "entropy",
        "Entropy (bits)",
        1,
        "Of a row of attention weights, on average. 0 bits: one key has all the weight; each bit more doubles the "
        "number of keys that it is spread over.",
    ),
    (
        "spectral_gap",
        "Spectral gap",
        2,
        "1 minus the second largest eigenvalue. Near 1: one step mixes the whole sequence into much the same value "
        "everywhere. Near 0: parts of it stay apart.",
    ),
    (
        "lognormality",
        "Distance from log-normal",
        2,
        "Kolmogorov-Smirnov distance of the logarithms of the weights from a Gaussian. Below .05 the log-normal "
        "picture of the paper fits well; above .1 it does not.",
    ),
)
DIFFERENCES = (("entropy", "LLN minus softmax: entropy (bits)", 1), ("spectral_gap", "LLN minus softmax: gap", 2))


def matchings(result: dict[str, Any]) -> list[str]:
    return list(result["layers"][0]["lln"])


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    return number(value).removeprefix("0")


def layer_table(result: dict[str, Any]) -> Table:
    """For the terminal: means over the heads of each layer."""
    title = escape(f"{result['model']}: means over heads and {count_things(len(result['tokens']), 'text')}")
    kinds = matchings(result)
    caption = f"{', '.join(kinds)}: how far LLN is from softmax, bits of entropy/gap"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("layer", "temp.", "bits", "of", "gap", "KS", *kinds):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=name != "layer")
    for layer in result["layers"]:
        own = [number(layer[name]) for name in ("temperature", "entropy", "max_entropy", "spectral_gap")]
        table.add_row(
            escape(layer["label"]), *own, number(layer["lognormality"]),
            *(
                "/".join(short(layer["lln"][matching][f"{name}_difference"]) for name, *_ in DIFFERENCES)
                for matching in kinds
            ),
        )  # fmt: skip
    return table


def write(result: dict[str, Any], out: Path) -> Path:
    """inspect.json, an SVG file for each chart, and the page, whose path is returned."""
    from lln.lab.core.page import load_template

    own, others = charts(result["rows"]), compared_charts(result)
    page = load_template("inspect.html").render(
        result=result,
        facts=facts(result),
        sentences=sentences(result),
        charts=own,
        said_of_lln=describe_lln(result),
        compared=others,
        matchings=matchings(result),
        number=number,
        provenance=result["provenance"],
    )
    write_json(out / f"{NAME}.json", result)
    for chart in (*own, *(chart for group in others for chart in group)):
        write_text(out / f"{chart.name}.svg", chart.svg)
    write_text(out / "index.html", page)
    return out / "index.html"


def cells(rows: Rows, path: tuple[str, ...]) -> Rows:
    """What a heat map takes."""
    found = []
    for row in rows:
        value: Any = row
        for part in path:
            value = value[part]
        found.append({"layer": row["label"], "head": row["head"], "value": value})
    return found


def charts(rows: Rows) -> list[Chart]:
    from lln.lab.inspect.heatmap import heatmap

    drawn = []
    for field, title, digits, says in QUANTITIES:
        values = cells(rows, (field,))
        there = sorted(cell["value"] for cell in values if cell["value"] is not None)
        if there:
            # A few heads that spread their weight evenly have a temperature far above all others'.
            top = there[int(0.95 * (len(there) - 1))] if field == "temperature" else there[-1]
            limits = (min(0.0, there[0]) if field != "entropy" else 0.0, max(top, there[0] + 1e-6))
            drawn.append(Chart(f"{NAME}-{field}", heatmap(values, digits=digits, limits=limits), title, says))
    return drawn


def compared_charts(result: dict[str, Any]) -> list[list[Chart]]:
    """A list for each matching, in it a chart for each quantity. All matchings share the scale of a quantity."""
    from lln.lab.inspect.heatmap import heatmap

    rows, groups = result["rows"], dict[str, list[Chart]]()
    for field, title, digits in DIFFERENCES:
        maps = {matching: cells(rows, ("lln", matching, f"{field}_difference")) for matching in matchings(result)}
        sizes = [abs(cell["value"]) for values in maps.values() for cell in values if cell["value"] is not None]
        limit = max([*sizes, 1e-3])
        for matching, values in maps.items():
            if any(cell["value"] is not None for cell in values):
                drawn = heatmap(values, digits=digits, limits=(-limit, limit), differences=True)
                chart = Chart(f"{NAME}-{matching}-{field}", drawn, f"{matching.capitalize()} matching. {title}")
                groups.setdefault(matching, []).append(chart)
    return list(groups.values())


def count_things(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def facts(result: dict[str, Any]) -> str:
    layers, tokens = result["layers"], result["tokens"]
    kinds = {"softmax": "softmax", "lln": "LLN", "lln_diag": "LLN+Diag"}
    attention = " and ".join(kinds[kind] for kind in dict.fromkeys(layer["attention"] for layer in layers))
    return (
        f"{result['class']} with {attention} attention: {count_things(len(layers), 'attention layer')}, "
        f"{count_things(len(result['rows']), 'head')} in all, measured on {count_things(len(tokens), 'text')} of "
        f"{count_things(sum(tokens), 'token')} together."
    )


def place(row: dict[str, Any]) -> str:
    return f"head {row['head']} of layer {row['label']}"


def extremes(rows: Rows, field: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    there = [row for row in rows if row[field] is not None]
    return (min(there, key=lambda r: r[field]), max(there, key=lambda r: r[field])) if there else None


def sentences(result: dict[str, Any]) -> list[str]:
    rows: Rows = result["rows"]
    said = []
    if found := extremes([row for row in rows if row["max_entropy"]], "entropy"):
        low, high = found
        said.append(
            f"The most concentrated is {place(low)}: its rows have {number(low['entropy'])} bits of the "
            f"{number(low['max_entropy'])} that an even spread would have, as if they read {2 ** low['entropy']:.1f} "
            f"keys. The most even is {place(high)}, with {number(high['entropy'])} of {number(high['max_entropy'])} "
            "bits."
        )
    if found := extremes(rows, "spectral_gap"):
        low, high = found
        said.append(
            f"The spectral gap runs from {number(low['spectral_gap'])} ({place(low)}) to "
            f"{number(high['spectral_gap'])} ({place(high)})."
        )
    distances = [row["lognormality"] for row in rows if row["lognormality"] is not None]
    if distances:
        near = sum(d < 0.05 for d in distances)
        said.append(
            f"Weights are log-normal to within a distance of .05 in {near} of {count_things(len(distances), 'head')}; "
            f"the furthest is {number(max(distances))} away."
        )
    return said


def describe_lln(result: dict[str, Any]) -> list[str]:
    rows: Rows = result["rows"]
    said: list[str] = []
    apart: dict[tuple[str, str], list[float]] = {}
    for matching in matchings(result):
        for field, *_ in DIFFERENCES:
            values = [row["lln"][matching][f"{field}_difference"] for row in rows]
            apart[matching, field] = sorted((value for value in values if value is not None), key=abs)
    if not apart["paper", "entropy"]:
        return ["This model masks or biases single query-key pairs, and so LLN attention could not stand in for it."]
    for matching in matchings(result):
        entropies, gaps = apart[matching, "entropy"], apart[matching, "spectral_gap"]
        if entropies:
            even = sum(value > 0 for value in entropies)
            gap = f"; in spectral gap by {number(sum(map(abs, gaps)) / len(gaps))}" if gaps else ""
            said.append(
                f"With {matching} matching LLN differs from softmax in entropy by "
                f"{number(sum(map(abs, entropies)) / len(entropies))} bits on average (half of the heads by at most "
                f"{number(abs(entropies[(len(entropies) - 1) // 2]))}, the worst by {number(abs(entropies[-1]))}) and "
                f"is the more even of the two in {even} of {count_things(len(entropies), 'head')}{gap}."
            )
        else:
            said.append(f"The curves of {matching} matching do not cover this model's head dim.")
    if len(apart["paper", "entropy"]) < len(rows):
        said.append("Empty cells: layers that mask or bias single query-key pairs, where LLN cannot stand in.")
    return said
