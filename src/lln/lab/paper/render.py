"""A table of runs as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lln.files import write_json, write_text
from lln.lab.core.provenance import without_places
from lln.lab.core.tables import show_number
from lln.lab.paper.costs import PAPER4
from lln.lab.paper.estimate import minutes
from lln.lab.paper.run_tables import LOSS, TUNINGS

MARK = "†"
BASE, OURS = "softmax", "lln_diag"  # what others are compared with in words


def markdown(result: dict[str, Any]) -> str:
    p = result["provenance"]
    head = [
        f"# {heading(result)}", "",
        f"Scale {result['scale']}, {p['date'][:10]}, commit {p['commit']}, `{without_places(p['command'])}`; runs on "
        f"{', '.join(machines(result)) or 'no machine yet'}. Mean ± standard deviation (number of values).", "",
    ]  # fmt: skip
    parts = [head, main_table(result), differs(result), noise(result)]
    if result["table"] == "table5":
        parts.insert(2, costs(result))
    return "\n".join(line for part in [*parts, troubles(result), run_list(result)] for line in part)


def heading(result: dict[str, Any]) -> str:
    number = result["table"].removeprefix("table")
    return f"Table {number}: {result['title']}" if number.isdigit() else result["title"]


def machines(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(run["provenance"]["device"] for run in result["runs"]))


def main_table(result: dict[str, Any]) -> list[str]:
    columns = result["columns"]
    marked = {c: f"{c} {MARK}" if result["marks"].get(c, {}).get("data") else c for c in columns}
    own = [c for c in columns if any(c in row["paper"] for row in result["rows"])]
    titles = [t for c in columns for t in ([marked[c], "paper"] if c in own else [marked[c]])]
    lines = ["| attention | " + " | ".join(titles) + " |", "|---" + "|---:" * len(titles) + "|"]
    for row in result["rows"]:
        texts = []
        for c in columns:
            texts.append(shown(row["cells"].get(c), 3 if c == LOSS else 1))
            if c in own:
                texts.append(published(row["paper"].get(c)))
        lines.append(f"| {row['attention']} | " + " | ".join(texts) + " |")
    if not result["rows"]:
        lines.append("| no run is finished yet |" + " |" * len(titles))
    return [*lines, ""]


def shown(cell: dict[str, Any] | None, digits: int) -> str:
    if cell is None:
        return ""
    if not cell["n"]:
        return "failed"
    text = f"{cell['mean']:.{digits}f}"
    text += f" ({cell['n']})" if cell["deviation"] is None else f" ± {cell['deviation']:.{digits}f} ({cell['n']})"
    return text + (f", {len(cell['failed'])} failed" if cell["failed"] else "")


def published(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def differs(result: dict[str, Any]) -> list[str]:
    """What stands between these numbers and the paper's, column by column; what all share once."""
    lines = ["## What differs from the paper", ""]
    said: dict[str, list[str]] = {}
    for column, marks in result["marks"].items():
        for sentence in [*marks["model"], *marks["budget"], *marks["data"]]:
            said.setdefault(sentence, []).append(column)
    for sentence, where in said.items():
        lines.append(f"- {', '.join(where)}: {sentence}")
    if any(marks["data"] for marks in result["marks"].values()):
        lines += ["", f"{MARK} Other data than the paper's: not to be set beside its numbers without saying so."]
    elif not said:
        lines.append("Nothing that is known of.")
    cards = list(dict.fromkeys(card for marks in result["marks"].values() for card in marks["cards"]))
    if cards:
        lines += ["", "What the data's own cards say:"]
        lines += [line for card in cards for line in ("", *(f"> {text}".rstrip() for text in card.splitlines()))]
    inner = [f"{row['attention']} ({', '.join(once)})" for row in result["rows"] if (once := tuned_once(row))]
    if inner:
        lines += ["", f"The spread of {', '.join(inner)} is over fine-tunings of one pre-trained model only."]
    return [*lines, *(f"\n{remark}" for remark in result["remarks"]), ""]


def tuned_once(row: dict[str, Any]) -> list[str]:
    """Columns whose spread is that of fine-tunings of one pre-trained model."""
    return [column for column, cell in row["cells"].items() if cell.get("unit") == TUNINGS and cell["n"] > 1]


def differences(result: dict[str, Any]) -> dict[bool | None, list[str]]:
    """As sentences, by whether they exceed the noise; None: one seed."""
    groups: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for d in result["differences"]:
        second = reference(d["a"], d["b"])
        if second is None:
            continue
        first, sign = (d["a"], 1) if d["b"] == second else (d["b"], -1)
        digits = 3 if d["column"] == LOSS else 1
        between = round(sign * d["difference"], digits) + 0.0  # no -0.0
        bound = "" if d["noise"] is None else f" (noise {d['noise']:.{digits}f})"
        groups[d["beyond"]].append(f"{d['column']}: {first} - {second} = {between:+.{digits}f}{bound}")
    return groups


def noise(result: dict[str, Any]) -> list[str]:
    lines, groups = ["## Which differences exceed the noise", "", result["rule"], ""], differences(result)
    titles = {True: "Beyond the noise", False: "Within the noise", None: "One seed or pre-training, nothing to say"}
    for known, title in titles.items():
        if groups[known]:
            lines += [f"{title}:", "", *(f"- {text}" for text in groups[known]), ""]
    return lines if any(groups.values()) else [*lines[:2], "There are no two attentions to compare yet.", ""]


def reference(a: str, b: str) -> str | None:
    """Which of two attentions the other is compared with in words, if they are compared at all: a variant with what it
    is a variant of."""
    plain = {a.split(":")[0], b.split(":")[0]}
    if len(plain) == 1:
        return next((name for name in plain if name in (a, b)), None)
    return next((name for name in (BASE, OURS) if name in (a, b)), None)


def costs(result: dict[str, Any]) -> list[str]:
    """Time (of runs that had the device to themselves) and memory (on a GPU) of whole runs, beside the paper's Table 4;
    `lln reproduce table4` measures single steps."""
    columns = [c for c in result["columns"] if c in PAPER4["softmax"]["s"]]
    lines = []
    for what, unit, title in (("seconds", "s", "seconds a run"), ("bytes", "MB", "MB of the GPU at most")):
        found = {
            (row["attention"], c): cell[what] / (1e6 if what == "bytes" else 1)
            for row in result["rows"]
            for c in columns
            if (cell := row["cells"].get(c)) and cell.get(what) and not (what == "seconds" and cell.get("beside"))
        }
        if not found:
            continue
        titles = [t for c in columns for t in (c, "paper")]
        lines += [f"| {title} | " + " | ".join(titles) + " |", "|---" + "|---:" * len(titles) + "|"]
        for name in (row["attention"] for row in result["rows"]):
            texts = []
            for c in columns:
                texts.append(show_number(found[name, c]) if (name, c) in found else "")
                theirs = PAPER4.get(name, {}).get(unit, {}).get(c)
                texts.append("-" if theirs is None else f"{theirs:g}")
            lines.append(f"| {name} | " + " | ".join(texts) + " |")
        lines.append("")
    said = "The paper's times and memory are those of its Table 4, on its own GPU."
    return [*lines, said, ""] if lines else []


def troubles(result: dict[str, Any]) -> list[str]:
    lines = [f"- {name} was not run: {reason}." for name, reason in result["unavailable"].items()]
    reasons: dict[str, list[str]] = {}
    for failed in result["failed"]:
        reasons.setdefault(failed["sentence"], []).append(failed["folder"])
    lines += [f"- {', '.join(folders)} failed: {sentence}" for sentence, folders in reasons.items()]
    lines += [f"- {folder} is not finished." for folder in result["unfinished"]]
    return ["## What is missing", "", *lines, ""] if lines else []


def run_list(result: dict[str, Any]) -> list[str]:
    if not result["runs"]:
        return []
    lines = ["## Runs", "", "| run | score | time | machine | commit |", "|---|---:|---:|---|---|"]
    for run in result["runs"]:
        took = "" if run["seconds"] is None else ("" if run["all_times_known"] else "> ") + minutes(run["seconds"])
        if beside := run.get("beside"):
            took += f" beside {beside} other{'s' if beside > 1 else ''}"
        p = run["provenance"]
        lines.append(f"| {run['folder']} | {run['score']:.4g} | {took} | {p['device']} | {p['commit']} |")
    return [*lines, ""]


def write(result: dict[str, Any], out: Path) -> list[Path]:
    paths = [out / f"{result['table']}.json", out / f"{result['table']}.md"]
    write_json(paths[0], result)
    write_text(paths[1], markdown(result))
    return paths


def row_line(result: dict[str, Any], attention: str) -> str:
    """The row of one attention, to be said while others still run."""
    row = next(row for row in result["rows"] if row["attention"] == attention)
    texts = [f"{c} {shown(row['cells'][c], 3 if c == LOSS else 1)}" for c in result["columns"] if row["cells"].get(c)]
    return f"{attention}: {', '.join(texts)}"
