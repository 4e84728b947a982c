"""docs/found.md: what the stored results say about the paper's claims, and what to use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.reproduce.render import differences

ROOT = Path(__file__).parents[1]
RESULTS, BENCH = ROOT / "results" / "paper", ROOT / "benchmarks" / "results"

HEAD = """# What we found

Made by `make pages` from stored results; a test compares. Every number here is in a file under `results/` or
`benchmarks/results/`, with its command, commit, machine and seeds, and [Reproducing the paper](paper.md) shows the
tables and figures themselves.

"""

MISSING = """## What is missing

What has not been measured at a scale that separates mechanisms: cosFormer, Nystromformer and Hedgehog in Table 1, a
second pre-training of ELU, ELU+Diag and Performer, QNLI and QQP; second seeds of most ways of matching; the loss scale
under float16; Pathfinder, Image and second seeds of Long Range Arena, and two attentions on its Text; second seeds of
the needles; what a convolution brings beyond the tiny scale; a training step under torch.compile, with all attentions
and lengths.
"""


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def verdicts(title: str, *names: str) -> list[str]:
    """The claims of these figures, and what the numbers say."""
    lines = [f"## {title}", "", "| Fig. | the paper's claim | holds | the numbers |", "|---|---|---|---|"]
    for name in names:
        for v in load(RESULTS / f"{name}.json")["verdicts"]:
            figure = name.split("/")[-1].removeprefix("fig")
            lines.append(f"| {figure} | {v['claim']} | {'yes' if v['holds'] else '**no**'} | {v['sentence']} |")
    return [*lines, ""]


def step_times(name: str) -> dict[tuple[str, int], float]:
    rows = load(RESULTS / "paper" / f"{name}.json")["rows"]
    return {(row["attention"], row["length"]): row["ms"]["median"] for row in rows if row["ms"]}


def wins(ms: dict[tuple[str, int], float]) -> int:
    """From which length on LLN+Diag is not slower than torch's attention."""
    lengths = sorted({length for _, length in ms})
    return next(n for i, n in enumerate(lengths) if all(ms["lln_diag", m] <= ms["torch", m] for m in lengths[i:]))


def use() -> list[str]:
    many, one = (wins(step_times(name)) for name in ("table2-16384-tokens", "table2"))
    return [
        "## What to use", "",
        "- **LLN+Diag, not LLN alone.** Its blocks draw the local patterns that a matrix of low rank cannot.",
        f"- **From {many:,} tokens on**, if batches are large, in batches of one from {one:,} on; below, torch's "
        "softmax attention is as fast or faster, and exact.",
        '- **`matching="entropy"`** where LLN is to be as concentrated as softmax is. In training from scratch no way '
        'of finding alpha and beta is ahead beyond the noise so far, so the paper\'s, `"paper"`, stays the default.',
        "- **`convolution=5`** is worth a try where a model is trained from scratch: of all options it lowers the loss "
        "of pre-training most, softmax's as well. That is known at the tiny scale alone, and fine-tuned models were no "
        "better for it.",
        "- **A pretrained softmax model**: `lln convert` with distillation. Matching alone is not enough.", "",
    ]  # fmt: skip


def speed() -> list[str]:
    device = load(RESULTS / "paper" / "table2-16384-tokens.json")["provenance"]["device"]
    ms, alone = step_times("table2-16384-tokens"), step_times("table2")
    ratio = {n: ms["torch", n] / ms["lln_diag", n] for n in sorted({length for _, length in ms})}
    largest = max(length for name, length in ms if name == "softmax")
    return [
        "## Speed and memory", "",
        f"- **Linear time holds.** A training step of RoBERTa-base with LLN+Diag on an {device} with 16k tokens a "
        f"batch is not slower than with torch's attention from {wins(ms):,} tokens on, and "
        + ", ".join(f"{value:.1f} times as fast at {n:,}" for n, value in ratio.items() if value > 2)
        + f". In a batch of one it is slower below {wins(alone):,} tokens.",
        "- **Memory is no reason any more.** The paper's softmax keeps its matrix, and runs out of memory here above "
        f"{largest:,} tokens with batches of 16k; torch's attention does not keep it, and needs as much as LLN+Diag.",
        "- How near the kernels are to the memory limit, and where they are not: [Benchmarks](benchmarks.md).", "",
        "![time of a training step against length](../results/paper/paper/table2-16384-tokens-time.svg)", "",
    ]  # fmt: skip


def accuracy() -> list[str]:
    table = load(RESULTS / "mini" / "table1.json")
    rows, marks = {row["attention"]: row["cells"] for row in table["rows"]}, table["marks"]["MLM loss"]
    loss = {name: cells["MLM loss"]["mean"] for name, cells in rows.items()}
    columns = {"MLM loss": 3, "sst2": 1, "mnli": 1}
    return [
        "## Accuracy in miniature", "",
        f"Masked language modelling on Wikipedia text, then fine-tuning. {' '.join(marks['model'] + marks['budget'])} "
        "Mean ± standard deviation (number) over pre-trainings, each with up to three fine-tunings; where there is one "
        "pre-training, over its fine-tunings. SST-2 and MNLI in %; MNLI is a part of the original.", "",
        "| attention | MLM loss | SST-2 | MNLI |", "|---|---:|---:|---:|",
        *(f"| {name} | {' | '.join(told(cells.get(c), d) for c, d in columns.items())} |"
          for name, cells in rows.items()), "",
        *beyond(table),
        f"LLN+Diag comes within {loss['lln_diag'] - loss['softmax']:.2f} of softmax's loss, its blocks alone within "
        f"{loss['block_diagonal'] - loss['softmax']:.2f}: in sequences of four blocks the linear part has little to "
        f"add. LLN alone stays {loss['lln'] - loss['softmax']:.1f} behind: it leaves late the plateau on which masked "
        "language modelling sits before attention starts to work (Fig. 8). ELU and Performer alone end near it, and "
        "blocks help ELU as they help LLN.", "",
    ]  # fmt: skip


def beyond(table: dict[str, Any]) -> list[str]:
    """What can be said of two attentions in spite of the noise."""
    said = differences(table)[True]
    return ["Beyond the noise of seeds:" if said else "No difference exceeds the noise of seeds.", "",
            *(f"- {text}" for text in said), *([""] if said else [])]  # fmt: skip


def vision() -> list[str]:
    table, fixed = (load(RESULTS / "mini" / f"{name}.json") for name in ("table3", "fig10"))
    marks = table["marks"]["accuracy"]
    return [
        "## Images", "",
        f"Dogs vs Cats (Table 3), a part of it. {' '.join(marks['model'] + marks['budget'] + marks['data'])} "
        "Accuracy in %, mean ± standard deviation (seeds):", "",
        "| attention | accuracy |", "|---|---:|",
        *(f"| {row['attention']} | {told(row['cells']['accuracy'], 1)} |" for row in table["rows"]), "",
        *beyond(table),
        "Few images and no pre-training: all overfit. Fixed alpha and beta (Fig. 10a, LLN):", "",
        *(f"- {'Holds' if v['holds'] else '**Does not hold**'}: {v['claim']} {v['sentence']}"
          for v in fixed["verdicts"]), "",
    ]  # fmt: skip


def arena() -> list[str]:
    table, steps = load(RESULTS / "mini" / "table5.json"), load(RESULTS / "paper" / "table4.json")
    columns = table["columns"]
    guess = {run["column"]: 100 * run["guess"]["accuracy"] for run in table["runs"]}
    ms = {(row["attention"], row["column"]): row["ms"]["median"] for row in steps["rows"] if row["ms"]}
    tasks = list(dict.fromkeys(task for _, task in ms))
    faster = [task for task in tasks if ms["lln_diag", task] < ms["softmax", task]]
    slower = [task for task in tasks if task not in faster]
    others = sorted({name for name, _ in ms} - {"softmax", "lln_diag"})
    beats = [name for name in others if all(ms["lln_diag", task] < ms[name, task] for task in tasks)]
    return [
        "## Long Range Arena", "",
        f"{' '.join(table['marks'][columns[0]]['budget'])} **One seed**; accuracy in %.", "",
        "| attention | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|",
        *(f"| {row['attention']} | "
          + " | ".join(f"{row['cells'][c]['mean']:.1f}" if c in row["cells"] else "" for c in columns) + " |"
          for row in table["rows"]),
        "| a guess | " + " | ".join(f"{guess[c]:.1f}" for c in columns) + " |", "",
        "Nothing separates the attentions here: on ListOps and Text they lie together, and retrieval by the author of "
        "two short passages none of them learns.", "",
        f"Time (Table 4, single steps at the paper's sizes, {steps['provenance']['device']}): LLN+Diag is faster than "
        f"{' and '.join(beats)} on every task, and than torch's softmax on {' and '.join(faster)}, where sequences are "
        f"long or batches large; on {', '.join(slower)} torch's softmax is faster. Memory is that of torch's softmax.",
        "",
    ]  # fmt: skip


def told(cell: dict[str, Any] | None, digits: int) -> str:
    if not cell:
        return ""
    spread = "" if cell["deviation"] is None else f" ± {cell['deviation']:.{digits}f}"
    return f"{cell['mean']:.{digits}f}{spread} ({cell['n']})"


def matching() -> list[str]:
    table = load(ROOT / "results" / "matching" / "mini" / "matching.json")
    rows = {row["attention"]: row["cells"] for row in table["rows"]}
    loss = {name: cells["MLM loss"]["mean"] for name, cells in rows.items()}
    ways = list(dict.fromkeys(name.partition(":")[2] for name in loss))
    lines = [
        "## Which matching, which statistics?", "",
        f"The same pre-training with fewer steps. {' '.join(table['marks']['MLM loss']['budget'])} Loss on held-out "
        "text, mean ± standard deviation (seeds), and accuracy on SST-2 of one fine-tuning. The plain row is paper "
        "matching with statistics of the batch, as in the paper's code; alpha is fixed, and beta with it, in the rows "
        "that name it.", "",
        "| | LLN+Diag | SST-2 | LLN | SST-2 |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for way in ways:
        both = [rows.get(":".join(filter(None, (name, way))), {}) for name in ("lln_diag", "lln")]
        texts = [told(cells.get(c), d) for cells in both for c, d in (("MLM loss", 3), ("sst2", 1))]
        lines.append(f"| {way or 'plain'} | {' | '.join(texts)} |")
    best = {
        kind: min((n for n in loss if n.split(":")[0] == kind), key=loss.__getitem__) for kind in ("lln_diag", "lln")
    }
    high = [f"{loss['lln_diag:alpha=4']:.2f}", f"{loss['lln:alpha=4']:.2f}"]
    return [
        *lines, "",
        f"The lowest loss has {best['lln_diag']} ({loss[best['lln_diag']]:.2f}) and {best['lln']} "
        f"({loss[best['lln']]:.2f}): a small fixed alpha does as well as any matching, and 4 is the worst "
        f"({' and '.join(high)}). Entropy matching is ahead of the paper's with either seed of LLN. Statistics of a "
        "sample alone do no worse than those of the batch, and do not let one sequence see another. "
        f"{len(within(table))} of the {len(known(table))} differences between two ways for one attention that have a "
        "noise to be compared with are within it, so the default stays the paper's.", "",
        *small_matching(),
    ]  # fmt: skip


def known(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Differences between two ways for one attention, with more than one seed each."""
    found: list[dict[str, Any]] = table["differences"]
    return [d for d in found if d["noise"] is not None and d["a"].split(":")[0] == d["b"].split(":")[0]]


def within(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [d for d in known(table) if not d["beyond"]]


def small_matching() -> list[str]:
    """The same with several seeds, where they are cheap."""
    table = load(ROOT / "results" / "matching" / "tiny" / "matching.json")
    said = "; ".join(f"{d['a']} and {d['b']} ({d['column']})" for d in known(table) if d["beyond"]) or "none"
    return [
        f"With several seeds, at scale tiny. {' '.join(table['marks']['MLM loss']['budget'])} Loss, mean ± standard "
        "deviation (seeds):", "",
        "| attention | MLM loss |", "|---|---:|",
        *(f"| {row['attention']} | {told(row['cells']['MLM loss'], 3)} |" for row in table["rows"]), "",
        f"Of two ways for one attention these differ beyond the noise: {said}.", "",
    ]  # fmt: skip


def variants() -> list[str]:
    table = load(ROOT / "results" / "variants" / "tiny" / "variants.json")
    cells = {row["attention"]: row["cells"]["MLM loss"] for row in table["rows"]}
    loss = {name: cell["mean"] for name, cell in cells.items()}
    tuned = {row["attention"]: row["cells"]["sst2"] for row in table["rows"]}
    learned = min(loss[name] for name in loss if name.startswith("lln:") and "convolution" not in name)
    return [
        "## What closes the gap of LLN alone?", "",
        f"At scale tiny. {' '.join(table['marks']['MLM loss']['budget'])} Loss on held-out text, mean ± standard "
        "deviation (seeds):", "",
        "| attention | MLM loss |", "|---|---:|",
        *(f"| {name} | {told(cell, 3)} |" for name, cell in sorted(cells.items(), key=lambda item: item[1]["mean"])),
        "",
        "**A short convolution** over queries, keys and values that starts at zero (`convolution=5`): LLN alone goes "
        f"from {loss['lln']:.2f} to {loss['lln:convolution=5']:.2f}, below softmax without it ({loss['softmax']:.2f}). "
        f"It helps softmax as much ({loss['softmax:convolution=5']:.2f}) and LLN+Diag, too "
        f"({loss['lln_diag:convolution=5']:.2f}): it draws the local patterns that these models otherwise learn late. "
        f"Learned alpha and beta and a learned feature map change little (the best {learned:.2f}), and so do "
        "overlapping windows in place of blocks. Two layers and a small text: whether it lasts in larger models is "
        "open, and fine-tuned on a stand-in for SST-2 such models are no better "
        f"(LLN {told(tuned['lln'], 1)} % without, "
        f"{told(tuned['lln:convolution=5'], 1)} % with it).", "",
    ]  # fmt: skip


def needles() -> list[str]:
    lines = [
        "## Does the linear part earn its keep?", "",
        "Needles in text: a question names a key, and its value stands somewhere in the sequence. Accuracy in %.", "",
    ]  # fmt: skip
    for scale in ("mini", "tiny"):
        folder = ROOT / "results" / "lengths" / scale
        result = load(folder / "lengths.json")
        lengths, found = result["lengths"], {(c["attention"], c["length"]): c["accuracy"] for c in result["cells"]}
        lines += ["| tokens | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" + "|---:" * len(lengths) + "|"]
        for name in result["attentions"]:
            lines.append(f"| {name} | " + " | ".join(f"{found[name, n]['mean']:.1f}" for n in lengths) + " |")
        p, seeds = result["runs"][0]["provenance"], found["lln_diag", lengths[0]]["n"]
        guesses = [f"{result['guess'][str(n)]:.1f}" for n in lengths]
        lines += [
            f"| a guess | {' | '.join(guesses)} |", "",
            f"`lln reproduce lengths --scale {scale}`, {seeds} seed{'s' if seeds > 1 else ''}, {p['device']}, commit "
            f"{p['commit']}.", "",
        ]  # fmt: skip
    chart = ROOT / "results" / "lengths" / "mini" / "lengths-accuracy-against-length.svg"
    return [
        *lines,
        "It does: beyond their own block, blocks alone find nothing, and LLN+Diag nearly everything, much as LLN alone "
        "does. Softmax finds all of it, at a cost that grows.", "",
        f"![accuracy against length](../{chart.relative_to(ROOT).as_posix()})", "",
    ]  # fmt: skip


def conversion() -> list[str]:
    lines = ["## Pretrained models", ""]
    for name, one in load(BENCH / "conversion.json")["sets"].items():
        found = one["spearman"]["lln_diag"]
        lines.append(
            f"- MiniLM converted to LLN+Diag keeps the order of similarities of passages of {one['how']['length']} "
            f"tokens ({name}) with a Spearman correlation of {found['data']:.2f} after data matching and "
            f"**{found['distilled']:.3f}** after distilling its attention; LLN alone: "
            f"{one['spearman']['lln']['data']:.2f} and {one['spearman']['lln']['distilled']:.3f}."
        )
    return [*lines, ""]


def markdown() -> str:
    parts = [
        use(), speed(), needles(), accuracy(), vision(), arena(), matching(), variants(), conversion(),
        verdicts("While a model trains", "mini/fig1", "mini/fig8", "mini/fig9"),
        verdicts("The analysis", "fig2", "fig5a", "fig5b", "fig6a", "fig6b", "fig7"),
    ]  # fmt: skip
    return HEAD + "\n".join(line for part in parts for line in part) + "\n" + MISSING
