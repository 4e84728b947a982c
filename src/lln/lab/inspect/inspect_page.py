"""The table and the page of `lln inspect`."""

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lln.files import write_json, write_text
from lln.lab.core.documents import write_document
from lln.lab.core.page import Chart
from lln.lab.core.tables import terminal_table
from lln.lab.inspect.heatmap import draw_heatmap

Rows = list[dict[str, Any]]
NAME = "inspect"
# Field, title, digits in a cell. What each says stands in the template.
QUANTITIES = (
    ("temperature", "Temperature", 1),
    ("entropy", "Entropy (bits)", 1),
    ("spectral_gap", "Spectral gap", 2),
    ("lognormality", "Distance from log-normal", 2),
)
DIFFERENCES = (("entropy", "LLN minus softmax: entropy (bits)", 1), ("spectral_gap", "LLN minus softmax: gap", 2))


def list_matchings(result: dict[str, Any]) -> list[str]:
    """The matchings that a result compares with softmax, in its order."""
    return list(result["layers"][0]["lln"])


def format_number(value: float | None, digits: int = 2) -> str:
    """For a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def tabulate_layers(result: dict[str, Any]) -> Table:
    """For the terminal: means over the heads of each layer."""
    kinds = list_matchings(result)
    own = ("temperature", "entropy", "max_entropy", "spectral_gap", "lognormality")

    def compare(numbers: dict[str, Any]) -> str:
        return "/".join(format_number(numbers[f"{name}_difference"]).removeprefix("0") for name, *_ in DIFFERENCES)

    table = terminal_table(
        ("layer", "temp.", "bits", "of", "gap", "KS", *kinds),
        [
            [
                layer["label"],
                *(format_number(layer[name]) for name in own),
                *(compare(layer["lln"][kind]) for kind in kinds),
            ]
            for layer in result["layers"]
        ],
        title=f"{result['model']}: means over heads and {count_shown(result)}",
        caption=f"{', '.join(kinds)}: how far LLN is from softmax, bits of entropy/gap",
        wrap=False,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.columns[0].no_wrap = False
    return table


def write(result: dict[str, Any], out: Path) -> Path:
    """inspect.json, an SVG file for each chart, and the page, whose path is returned."""
    own, others = draw_charts(result["rows"]), draw_compared(result)
    kinds = list_matchings(result)
    page = write_document(
        "inspect.html", result=result, count_things=count_things, shown=count_shown(result), charts=own,
        compared=others, matchings=kinds, number=format_number, provenance=result["provenance"],
        differences={kind: list_differences(result["rows"], kind) for kind in kinds},
    )  # fmt: skip
    write_json(out / f"{NAME}.json", result)
    for chart in (*own, *(chart for group in others for chart in group)):
        write_text(out / f"{chart.name}.svg", chart.svg)
    write_text(out / "index.html", page)
    return out / "index.html"


def make_cells(rows: Rows, values: list[float | None]) -> Rows:
    """What a heat map takes."""
    return [{"layer": r["label"], "head": r["head"], "value": value} for r, value in zip(rows, values, strict=True)]


def draw_charts(rows: Rows) -> list[Chart]:
    """A heat map of layers and heads for each quantity that some head has."""
    drawn = []
    for field, title, digits in QUANTITIES:
        values = make_cells(rows, [row[field] for row in rows])
        there = sorted(cell["value"] for cell in values if cell["value"] is not None)
        if there:
            # A few heads that spread their weight evenly have a temperature far above all others'.
            top = there[int(0.95 * (len(there) - 1))] if field == "temperature" else there[-1]
            limits = (min(0.0, there[0]) if field != "entropy" else 0.0, max(top, there[0] + 1e-6))
            drawn.append(Chart(f"{NAME}-{field}", draw_heatmap(values, digits=digits, limits=limits), title))
    return drawn


def draw_compared(result: dict[str, Any]) -> list[list[Chart]]:
    """A list for each matching, in it a chart for each quantity. All matchings share the scale of a quantity."""
    rows, groups = result["rows"], dict[str, list[Chart]]()
    for field, title, digits in DIFFERENCES:
        maps = {kind: make_cells(rows, read_differences(rows, kind, field)) for kind in list_matchings(result)}
        sizes = [abs(cell["value"]) for values in maps.values() for cell in values if cell["value"] is not None]
        limit = max([*sizes, 1e-3])
        for matching, values in maps.items():
            if any(cell["value"] is not None for cell in values):
                drawn = draw_heatmap(values, digits=digits, limits=(-limit, limit), differences=True)
                chart = Chart(f"{NAME}-{matching}-{field}", drawn, f"{matching.capitalize()} matching. {title}")
                groups.setdefault(matching, []).append(chart)
    return list(groups.values())


def count_things(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def count_shown(result: dict[str, Any]) -> str:
    """What the model was shown, as a number of things."""
    return count_things(len(result["texts"]), result.get("called", "text"))


def read_differences(rows: Rows, matching: str, field: str) -> list[float | None]:
    """Of LLN from softmax; None: nothing was measured."""
    return [row["lln"][matching][f"{field}_difference"] for row in rows]


def list_differences(rows: Rows, matching: str) -> list[list[float]]:
    """In entropy and in gap, from the smallest on."""
    found = (read_differences(rows, matching, field) for field, *_ in DIFFERENCES)
    return [sorted((value for value in values if value is not None), key=abs) for values in found]
