"""Tables 1, 3 and 5 from the runs that exist: means and spreads beside the paper's numbers, and what differs; as JSON,
and as Markdown."""

import dataclasses
import itertools
import statistics
from typing import Any

from lln.lab.core.documents import write_markdown
from lln.lab.core.tables import show_duration, show_number
from lln.lab.paper.experiments import Asked, Experiment
from lln.lab.paper.jobs import configure, find_recipe, find_shape
from lln.lab.paper.published import ACCURACIES, AVERAGE, PAPER4, TABLES, describe_differences
from lln.lab.paper.run_records import CONTROL, RunRecord, group_by, list_runs, select_alike
from lln.lab.paper.spread import RULE, Difference, find_difference, find_spread

LOSS = "MLM loss"
CARD = "Card of "
TUNINGS = "fine-tunings of one pre-training"
MARK = "†"
BASE, OURS = "softmax", "lln_diag"  # what others are compared with in words


def assemble_table(
    experiment: Experiment, asked: Asked, runs: list[RunRecord], unavailable: dict[str, str]
) -> dict[str, Any]:
    """The table as JSON. Valid at any moment: cells whose runs are not finished are not there."""
    # Fixed alpha = beta is for Fig. 10; here it is shown to those who ask.
    runs = [run for run in runs if ":alpha=" not in run.attention or run.attention in asked.attentions]
    groups, left = group_by_column(experiment, asked, runs)
    used = [run for group in groups.values() for run in group]
    names = order_names(asked, used)
    cells = {
        (name, column): make_cell([run for run in group if run.attention == name])
        for column, group in groups.items()
        for name in names
    }
    columns, judged = list(groups), [column for column in experiment.columns if column != AVERAGE]
    if AVERAGE in experiment.columns and set(judged) <= set(groups):
        averages = {(name, AVERAGE): average_cells([cells[name, column] for column in judged]) for name in names}
        if any(averages.values()):
            columns.append(AVERAGE)
            cells |= averages
    paper = ACCURACIES.get(experiment.name, {})
    return {
        "table": experiment.name,
        "title": experiment.title,
        "scale": asked.scale,
        "columns": columns,
        "rows": [
            {
                "attention": name,
                "cells": {column: cells[name, column] for column in columns if cells[name, column]},
                "paper": {column: paper[name][column] for column in columns if column in paper.get(name, {})},
            }
            for name in names
        ],
        "rule": RULE,
        "differences": compare_cells(names, columns, cells),
        "marks": {column: list_marks(group) for column, group in groups.items() if group},
        "remarks": [*left, *TABLES.get(experiment.name, {}).get("remarks", [])],
        "unavailable": unavailable,
        **list_runs(used),
    }


def order_names(asked: Asked, runs: list[RunRecord]) -> list[str]:
    """The attentions of these runs, those that were asked for first."""
    there = {run.attention for run in runs}
    return [*(a for a in asked.attentions if a in there), *sorted(there - set(asked.attentions))]


def group_by_column(
    experiment: Experiment, asked: Asked, runs: list[RunRecord]
) -> tuple[dict[str, list[RunRecord]], list[str]]:
    """The runs of each column, and sentences about those that do not fit in."""
    runs = [run for run in runs if run.facts["preset"] == asked.scale]
    tasks = {"accuracy": "image"}
    if experiment.task != "image":
        there = {run.column for run in runs if run.facts["task"] == experiment.task} | set(asked.tasks)
        tasks = {LOSS: "mlm"} if experiment.task == "glue" else {}
        tasks |= {column: experiment.task for column in experiment.columns if column in there}
        tasks |= {c + CONTROL: experiment.task for c in experiment.columns if c + CONTROL in there}
    found, left = {}, []
    for column, task in tasks.items():
        part = column.removesuffix(CONTROL) if task in ("glue", "lra") else None
        mine = [run for run in runs if run.facts["task"] == task and (part is None or column == run.column)]
        wanted = find_shape(configure(task, asked.scale, "softmax", 0, asked.changes, name=part).to_dict())
        if column.endswith(CONTROL):
            wanted["model"]["untrained"] = True
        found[column], others = select_alike(mine, wanted)
        left += others
    return found, left


# Cells


def make_cell(runs: list[RunRecord]) -> dict[str, Any] | None:
    """What the runs of one attention in one column say. The unit is what varies most: where several pre-trained models
    were fine-tuned, the mean of each is one value, since fine-tunings of one model are not independent."""
    finished = [run for run in runs if run.score is not None]
    failed = [run.folder for run in runs if run.failure is not None]
    if not finished:
        return {"n": 0, "failed": failed} if failed else None
    by_origin = group_by(finished, lambda run: run.pretraining or "")
    if len(by_origin) > 1:
        unit = "pre-trainings"
        values = {name: statistics.fmean(list_scores(group)) for name, group in by_origin.items()}
    else:
        unit = "seeds" if "" in by_origin else TUNINGS
        values = {f"seed {run.seed}": run.score for run in finished if run.score is not None}
    costs = [run.cost for run in finished]
    seconds = [c["seconds"] for c in costs if c["seconds"] is not None]
    return {
        **dataclasses.asdict(find_spread(list(values.values()))),
        "unit": unit,
        "values": values,
        "runs": len(finished),
        "failed": failed,
        "seconds": statistics.fmean(seconds) if seconds else None,
        "beside": max(c["beside"] for c in costs),
        "bytes": max((c["bytes"] for c in costs if c["bytes"] is not None), default=None),
    }


def list_scores(runs: list[RunRecord]) -> list[float]:
    return [run.score for run in runs if run.score is not None]


def average_cells(cells: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Over the columns, for the seeds that all of them have."""
    there = [cell for cell in cells if cell is not None and cell["n"]]
    if len(there) < len(cells) or len({cell["unit"] for cell in there}) > 1:
        return None
    names = [name for name in there[0]["values"] if all(name in cell["values"] for cell in there)]
    if not names:
        return None
    values = {name: statistics.fmean(cell["values"][name] for cell in there) for name in names}
    spread = dataclasses.asdict(find_spread(list(values.values())))
    return {**spread, "unit": there[0]["unit"], "values": values, "failed": []}


def compare_cells(names: list[str], columns: list[str], cells: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
    """Every two attentions in every column. Fine-tunings of one pre-trained model say nothing of others."""
    found = []
    for column, (a, b) in itertools.product(columns, itertools.combinations(names, 2)):
        first, second = cells[a, column], cells[b, column]
        if first and second and first["n"] and second["n"]:
            said = find_difference(list(first["values"].values()), list(second["values"].values()))
            if TUNINGS in (first["unit"], second["unit"]):
                said = Difference(said.difference, None, None)
            found.append({"column": column, "a": a, "b": b, **dataclasses.asdict(said)})
    return found


def list_marks(runs: list[RunRecord]) -> dict[str, Any]:
    """In what these runs differ from the paper's, as sentences: its data, its model, its budget."""
    task = runs[0].facts["task"]
    paper = find_recipe(task, "paper", runs[0].part if task in ("glue", "lra") else None)
    found = describe_differences(runs[0].config, paper.to_dict())
    notes = list(dict.fromkeys(note for run in runs if run.result for note in run.result["notes"]))
    return {
        "data": [*found.pop("data"), *(note for note in notes if not note.startswith(CARD))],
        "cards": [note for note in notes if note.startswith(CARD)],
        **found,
    }


# Markdown


def write_table(result: dict[str, Any]) -> str:
    return write_markdown("table.md", **prepare_table(result))


def prepare_table(result: dict[str, Any]) -> dict[str, Any]:
    """What its template takes."""
    number, title = result["table"].removeprefix("table"), result["title"]
    header, cells = list_cells(result)
    sentences: dict[str, list[str]] = {}  # and the columns that each is about
    for column, marks in result["marks"].items():
        for sentence in (*marks["model"], *marks["budget"], *marks["data"]):
            sentences.setdefault(sentence, []).append(column)
    tuned_once = {
        row["attention"]: [c for c, cell in row["cells"].items() if cell.get("unit") == TUNINGS and cell["n"] > 1]
        for row in result["rows"]
    }
    return result | {
        "title": f"Table {number}: {title}" if number.isdigit() else title,
        "header": header,
        "cells": cells or [["no run is finished yet", *[""] * (len(header) - 1)]],
        "costs": list_costs(result) if result["table"] == "table5" else [],
        "sentences": sentences,
        "tuned_once": [f"{name} ({', '.join(columns)})" for name, columns in tuned_once.items() if columns],
        "noise": tell_differences(result),
        "times": [list_time(run) for run in result["runs"]],
    }


def list_cells(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table itself."""
    header, rows = ["attention"], [[row["attention"]] for row in result["rows"]]
    own = {c for row in result["rows"] for c in row["paper"]}
    for c in result["columns"]:
        header += [f"{c} {MARK}" if result["marks"].get(c, {}).get("data") else c, *(["paper"] if c in own else [])]
        for texts, row in zip(rows, result["rows"], strict=True):
            texts.append(show_cell(row["cells"].get(c), find_digits(c)))
            if c in own:
                texts.append(show_published(row["paper"].get(c)))
    return header, rows


def find_digits(column: str) -> int:
    return 3 if column.startswith(LOSS) else 1


def show_cell(cell: dict[str, Any] | None, digits: int) -> str:
    """
    >>> show_cell({"n": 3, "mean": 80.04, "deviation": 0.51, "failed": []}, 1)
    '80.0 ± 0.5 (3)'
    """
    if cell is None:
        return ""
    if not cell["n"]:
        return "failed"
    apart = "" if cell["deviation"] is None else f" ± {cell['deviation']:.{digits}f}"
    failed = f", {len(cell['failed'])} failed" if cell.get("failed") else ""
    return f"{cell['mean']:.{digits}f}{apart} ({cell['n']}){failed}"


def show_published(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def tell_differences(result: dict[str, Any]) -> dict[bool | None, list[str]]:
    """As sentences, by whether they exceed the noise; None: one seed."""
    groups: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for d in result["differences"]:
        second = find_reference(d["a"], d["b"])
        if second is None:
            continue
        first, sign = (d["a"], 1) if d["b"] == second else (d["b"], -1)
        digits = find_digits(d["column"])
        between = round(sign * d["difference"], digits) + 0.0  # no -0.0
        bound = "" if d["noise"] is None else f" (noise {d['noise']:.{digits}f})"
        groups[d["beyond"]].append(f"{d['column']}: {first} - {second} = {between:+.{digits}f}{bound}")
    return groups


def find_reference(a: str, b: str) -> str | None:
    """Which of two attentions the other is compared with in words, if they are compared at all: a variant with what it
    is a variant of."""
    plain = {a.split(":")[0], b.split(":")[0]}
    return next((name for name in (plain if len(plain) == 1 else (BASE, OURS)) if name in (a, b)), None)


def list_costs(result: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Time (of runs that had the device to themselves) and memory (on a GPU) of whole runs, beside the paper's Table 4,
    as headers and rows; `lln reproduce table4` measures single steps."""
    columns = [c for c in result["columns"] if c in PAPER4["softmax"]["s"]]
    found = []
    kinds = ("seconds", "s", "seconds a run", 1.0), ("bytes", "MB", "MB of the GPU at most", 1e6)
    for what, unit, title, size in kinds:
        rows = []
        for row in result["rows"]:
            theirs = PAPER4.get(row["attention"], {}).get(unit, {})
            texts = [row["attention"]]
            for c in columns:
                cell = row["cells"].get(c, {})
                known = cell.get(what) and not (what == "seconds" and cell.get("beside"))
                texts.append(show_number(cell[what] / size) if known else "")
                texts.append(f"{theirs[c]:g}" if c in theirs else "-")
            rows.append(texts)
        if any(text for texts in rows for text in texts[1::2]):
            found.append(([title, *(t for c in columns for t in (c, "paper"))], rows))
    return found


def list_time(run: dict[str, Any]) -> list[str]:
    """What a run came to, how long it took, and where."""
    took = "" if run["seconds"] is None else show_duration(run["seconds"])
    if took and not run["all_times_known"]:
        took = f"> {took}"
    if beside := run.get("beside"):
        took += f" beside {beside} other{'s' if beside > 1 else ''}"
    return [run["folder"], f"{run['score']:.4g}", took, run["provenance"]["device"], run["provenance"]["commit"]]


def tell_row(result: dict[str, Any], attention: str) -> str:
    """The row of one attention, to be said while others still run."""
    row = next(row for row in result["rows"] if row["attention"] == attention)
    texts = [f"{c} {show_cell(row['cells'][c], find_digits(c))}" for c in result["columns"] if row["cells"].get(c)]
    return f"{attention}: {', '.join(texts)}"
