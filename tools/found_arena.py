"""The section of docs/found.md about Long Range Arena; as in found_runs, asserts say what its sentences rest on."""

from __future__ import annotations

from found_runs import RESULTS, describe_beyond, grid, load
from lln.lab.paper.run_tables import show_cell


def arena() -> list[str]:
    table, steps = load(RESULTS / "mini" / "table5.json"), load(RESULTS / "paper" / "table4.json")
    columns, marks = [column for column in table["columns"] if column != "average"], table["marks"]
    guess = {run["column"]: 100 * run["guess"]["accuracy"] for run in table["runs"]}
    assert {cell["n"] for row in table["rows"] for cell in row["cells"].values()} == {1}
    assert all(abs(row["cells"]["retrieval"]["mean"] - guess["retrieval"]) < 4 for row in table["rows"])
    paths = [row["cells"]["pathfinder"]["mean"] for row in table["rows"] if "pathfinder" in row["cells"]]
    assert {abs(path - guess["pathfinder"]) < 0.5 for path in paths} == {True}
    measured = {(row["attention"], row["column"]): row for row in steps["rows"] if row["ms"]}
    tasks = list(dict.fromkeys(task for _, task in measured))
    ms = {place: row["ms"]["median"] for place, row in measured.items()}
    ratio = [f"{ms['softmax', task] / ms['lln_diag', task]:.2f} ({task})" for task in tasks]
    for task in tasks:
        assert abs(measured["lln_diag", task]["bytes"] / measured["softmax", task]["bytes"] - 1) < 0.01
    assert abs(ms["lln_diag", "text"] / ms["lln_diag", "listops"] - 1) < 0.05
    others = sorted({name for name, _ in measured} - {"softmax", "lln_diag"})
    least = [f"{name} {min(ms[name, task] / ms['lln_diag', task] for task in tasks):.2f}" for name in others]
    return [
        "## How does it do on Long Range Arena?", "",
        "Accuracy in %, **one seed**: nothing can be said about differences.", "",
        *grid(["attention", *columns], [
            *([row["attention"], *(show_cell(row["cells"].get(c), 1) for c in columns)] for row in table["rows"]),
            ["a guess", *(f"{guess[c]:.1f}" for c in columns)],
        ]),
        *(f"- {c}: {' '.join((*marks[c]['budget'], *marks[c]['data']))}" for c in columns), "",
        "No attention learns Retrieval, whose question here is whether one author wrote two short passages. Of "
        "Pathfinder two were tried, and neither learns it. The images of Image were compressed once more, as their "
        "card says.", "",
        *small_arena(),
        f"Time of training steps at the paper's sizes (Table 4, {steps['provenance']['device']}): torch's softmax "
        f"takes these multiples of LLN+Diag's: {', '.join(ratio)}. LLN+Diag, in models this small, takes as long for "
        f"2,000 tokens (listops, {ms['lln_diag', 'listops']:.1f} ms) as for 4,000 (text, "
        f"{ms['lln_diag', 'text']:.1f} ms), as if the host that launches kernels decided there, and not attention. The "
        f"others take at least these multiples: {', '.join(least)}; they compute in float32 within. Memory is that of "
        "torch's softmax.", "",
    ]  # fmt: skip


def small_arena() -> list[str]:
    """Tasks so small that they are learned within minutes on a CPU."""
    table = load(RESULTS / "tiny" / "table5.json")
    columns = [column for column in table["columns"] if column != "average"]
    guesses: dict[str, set[float]] = {}  # the examples of generated tasks differ from seed to seed
    for run in table["runs"]:
        guesses.setdefault(run["column"], set()).add(100 * run["guess"]["accuracy"])
    guess = {column: max(found) for column, found in guesses.items()}
    for row in table["rows"]:
        assert set(columns) <= row["cells"].keys()
        assert all(cell["mean"] > guess[name] + 5 for name, cell in row["cells"].items() if name != "average")
    return [
        "At scale tiny, with smaller images, shorter expressions and texts that come with Python, every attention "
        "learns every task, in %, mean ± standard deviation (seeds):", "",
        *grid(["attention", *columns], [
            *([row["attention"], *(show_cell(row["cells"].get(c), 1) for c in columns)] for row in table["rows"]),
            ["a guess", *(" or ".join(f"{value:.1f}" for value in sorted(guesses[c])) for c in columns)],
        ]),
        *describe_beyond(table),
    ]  # fmt: skip
