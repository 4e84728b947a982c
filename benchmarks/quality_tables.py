"""What `conversion_quality.py` has stored, as Markdown and as a chart."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from lln.lab.core.tables import markdown_table, show_number

Part = dict[str, Any]
NAMES = {
    "softmax": "softmax",
    "softmax, cut": "softmax, the first 512 tokens",
    "blocks": "blocks alone",
    "blocks_distilled": "blocks alone, distilled",
    "mean_distilled": "blocks and the plain mean, distilled",
    "hedgehog": "Hedgehog and blocks, distilled",
    "lln_distilled": "LLN alone, distilled",
    "distilled": "LLN+Diag, distilled",
    "weighed_distilled": 'LLN+Diag, `mix="evidence"`, distilled',
}
DRAWN = {
    "distilled": "LLN+Diag",
    "weighed_distilled": "LLN+Diag, evidence mix",
    "lln_distilled": "LLN",
    "blocks_distilled": "blocks alone",
    "hedgehog": "Hedgehog",
}
TEXTS = ("Wikipedia", "Python's documentation")
BARS = {"Wikipedia": 0.985, "Python's documentation": 0.97}
MIB = 2**20


def load_parts(folder: Path) -> dict[str, Part]:
    """Those that are stored."""
    return (
        {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))} if folder.exists() else {}
    )


def describe(part: Part) -> str:
    made = part["provenance"]
    return (
        f"{made['device']}, torch {made['torch']}, transformers {made['transformers']}, {made['date'][:10]}, commit "
        f"{made['commit']}; `benchmarks/conversion_quality.py --parts {part['part']}`."
    )


def split(part: Part, name: str) -> dict[tuple[str, ...], Part]:
    """The rows of a kind of jobs, by what they were given."""
    rows = ((tuple(label.split("/")), row) for label, row in part["rows"].items())
    return {label[1:]: row for label, row in rows if label[0] == name}


def gather_seeds(part: Part) -> dict[tuple[str, int], dict[str, Any]]:
    """By row and block size: of each text the values of the seeds at the better rate, and that rate."""
    rows = split(part, "seeds")
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row, size in sorted({(row, int(size)) for row, size, *_ in rows}):
        first = [(rate, one) for (r, s, seed, rate), one in rows.items() if (r, s, seed) == (row, str(size), "0")]
        if len(first) < len(part["how"]["rates"]):
            continue
        rate = max(first, key=lambda pair: statistics.mean(v for n, v in pair[1].items() if n.startswith("chosen")))[0]
        seeds = [one for (r, s, _, at), one in rows.items() if (r, s, at) == (row, str(size), rate)]
        found[row, size] = {"rate": rate, **{text: [one[text] for one in seeds] for text in TEXTS}}
    return found


def seeds(part: Part) -> list[str]:
    found, how = gather_seeds(part), part["how"]
    sizes = sorted({size for _, size in found}, reverse=True)
    cells = []
    for row in [name for name in NAMES if any(held == name for held, _ in found)]:
        line = [NAMES[row]]
        for size in sizes:
            held = found.get((row, size))
            line += [show_spread(held[text]) if held else "" for text in TEXTS]
        cells.append(line)
    header = ["MiniLM with", *(f"{text}, blocks of {size}" for size in sizes for text in TEXTS)]
    lines = ["### Seeds", "", *markdown_table(header, cells), ""]
    count = max(len(held[TEXTS[0]]) for held in found.values())
    lines += [
        f"Spearman correlation with the softmax MiniLM, passages of {how['length']} tokens: mean and, in brackets, "
        f"lowest and highest of up to {count} seeds, which change the fit and the order of the batches. Each row "
        f"learned {how['distill']} steps of three passages of Wikipedia and one of Python's documentation, with the "
        f"better of the rates {' and '.join(map(str, how['rates']))}, chosen on other passages. LLN alone has no "
        "blocks. The "
        f"weights of MiniLM were rounded to half precision before. {describe(part)}",
        "", *(judge_seeds(found, size) for size in sizes), "",
    ]  # fmt: skip
    return lines


def show_spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def judge_seeds(found: dict[tuple[str, int], Part], size: int) -> str:
    """Whether LLN+Diag is above what was distilled without a linear part, whatever the seed."""
    said = []
    for row in ("distilled", "weighed_distilled"):
        if (row, size) not in found or ("blocks_distilled", size) not in found:
            continue
        for text in TEXTS:
            ours, blocks = found[row, size][text], found["blocks_distilled", size][text]
            spread = max(max(values) - min(values) for values in (ours, blocks))
            apart = statistics.mean(ours) - statistics.mean(blocks)
            verdict = "more" if apart > spread else "no more"
            bar = "reaches" if statistics.mean(ours) >= BARS[text] else "misses"
            said.append(
                f"{NAMES[row].removesuffix(', distilled')} is {apart:+.3f} from distilled blocks on {text}, {verdict} "
                f"than the spread of seeds ({spread:.3f}), and {bar} {BARS[text]}"
            )
    return f"- Blocks of {size}: {'; '.join(said)}." if said else ""


def speeches(part: Part) -> list[str]:
    how, cells = part["how"], []
    folds, probes, adapted = split(part, "fold"), split(part, "probe"), split(part, "adapt")
    costs = next(iter(split(part, "cost").values()), None)
    kinds = [name for name in ("softmax, cut", "softmax", "blocks_distilled", "distilled") if (name,) in probes]
    counts = []
    for kind in kinds:
        ours = [100 * one["right"] / one["of"] for (held, *_), one in folds.items() if held == kind]
        counts.append(len(ours))
        frozen = [probes[kind,][what] for what in ("speeches", "presidents")]
        cells.append([
            NAMES[kind],
            f"{adapted[kind,]['spearman']:.3f}" if (kind,) in adapted else "",
            show_error(ours),
            *(f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}" for values in frozen),
            *(show_cost(costs, what, kind) for what in ("training", "forward")),
        ])  # fmt: skip
    if not cells:
        return []
    majority = 100 * next(iter(probes.values()))["majority"]
    header = [
        "attention", "correlation", "fine-tuned, %", "frozen, %", "frozen, new presidents, %",
        "training step, ms (MiB)", "call, ms (MiB)",
    ]  # fmt: skip
    batch = f" of a batch of {costs['batch']}, each" if costs else ""
    return [
        "### Long documents", "", *markdown_table(header, cells), "",
        "Which of two parties the president of a State of the Union address belongs to: MiniLM with places for "
        f"{how['speech_length']:,} tokens, cut there, and as it is with the first {how['length']}. *Correlation*: "
        "with the extended softmax model, on Wikipedia passages of that length, after distillation on others. "
        f"*Fine-tuned*: accuracy of {how['folds']}-fold cross-validation, mean ± standard error over {min(counts)} "
        f"to {max(counts)} folds, {how['epochs']} epochs at a rate of {how['speech_rate']:g}, the same for all; "
        "addresses of one president are on both sides. *Frozen*: a linear classifier on embeddings as they are, "
        "mean ± standard deviation over repetitions; in the last of these columns no president is on both sides. "
        f"The more frequent party alone would give {majority:.1f} %. Times{batch} of the full length in bfloat16, "
        "medians of calls in turns; memory at its peak beyond the weights. Distilled blocks are computed by the "
        f"kernels of LLN+Diag, so their time is no bound. {describe(part)}", "",
    ]  # fmt: skip


def show_error(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def show_cost(costs: Part | None, what: str, kind: str) -> str:
    if costs is None:
        return ""
    return f"{show_number(costs[what][kind]['median'])} ({show_number(costs[f'{what}_bytes'][kind] / MIB)})"


def gather_speed(part: Part) -> list[dict[str, Any]]:
    """A row for each length and kind that was both timed and taught."""
    quality = {(row, int(length)): one["spearman"] for (row, length), one in split(part, "quality").items()}
    found = []
    for (length, _), times in sorted(split(part, "speed").items(), key=lambda pair: int(pair[0][0])):
        for kind in DRAWN:
            if (value := quality.get((kind, int(length)))) is None or kind not in times["attention"]:
                continue
            faster = {
                what: times[what]["softmax"]["median"] / times[what][kind]["median"] for what in ("attention", "model")
            }
            found.append({"kind": kind, "length": int(length), "quality": value, **faster, "batch": times["batch"]})
    return found


def speed(part: Part, chart: str) -> list[str]:
    rows, how = gather_speed(part), part["how"]
    if not rows:
        return []
    at = {(row["kind"], row["length"]): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    cells = [
        [DRAWN[kind], *(show_point(at.get((kind, n))) for n in lengths)]
        for kind in DRAWN if any((kind, n) in at for n in lengths)
    ]  # fmt: skip
    rounded = {int(n): one["spearman"] for (kind, n), one in split(part, "quality").items() if kind == "softmax"}
    if rounded:
        cells.append(["softmax in bfloat16", *(f"{rounded[n]:.3f}" if n in rounded else "" for n in lengths)])
    longest = part["how"]["length"]
    return [
        "### Quality against speed", "", f"![Rank correlation against speed-up over torch's attention]({chart})", "",
        *markdown_table(["attention", *(f"{n:,}" for n in lengths)], cells), "",
        "Each cell: the rank correlation that is kept, times as fast as torch's attention, and in brackets times "
        f"as fast as a whole. The points of a line are the lengths, {lengths[0]:,} to {lengths[-1]:,} tokens. Above "
        f"{longest} tokens the softmax model that all are compared with has its positions repeated "
        "(`lln.hf.extend_positions`); its own correlation with itself in float32 is the last row. At each length a "
        f"model was taught {how['long_distill']} steps of about {how['tokens']:,} tokens of Wikipedia, one seed, "
        f"and judged on {how['long_judged']} other passages at most. Calls without gradients in bfloat16, "
        f"{how['speed_tokens']:,} tokens a batch, medians of calls in turns. {describe(part)}", "",
    ]  # fmt: skip


def show_point(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['quality']:.3f}, {row['attention']:.2g}x ({row['model']:.2g}x)"


def draw(part: Part) -> str | None:
    """The chart, as SVG."""
    from lln.lab.core.charts import Axis, choose_ticks, draw_lines
    from lln.lab.core.palette import ATTENTIONS, OTHERS

    rows = gather_speed(part)
    if not rows:
        return None
    points = [
        {"series": DRAWN[row["kind"]], "speedup": row["attention"], "quality": row["quality"], "length": row["length"]}
        for row in rows
    ]
    signs = [*(ATTENTIONS[name] for name in ("LLN+Diag", "evidence+Diag", "LLN")), OTHERS[3], OTHERS[2]]
    styles = dict(zip(DRAWN.values(), signs, strict=True))
    values = [point["speedup"] for point in points]
    across = Axis("speedup", "times as fast as torch's attention", True, choose_ticks(min(values), max(values)))
    return draw_lines(points, styles, across, Axis("quality", "rank correlation that is kept"), points=True)


def pictures(part: Part) -> list[str]:
    rows, how = split(part, "image"), part["how"]
    if ("softmax", "0") not in rows:
        return []
    softmax = rows["softmax", "0"]
    cells = [["softmax", f"{softmax['accuracy']:.2f}", "", ""]]
    for kind in ("blocks", "blocks_distilled", "lln_distilled", "distilled"):
        found = [one for (held, _), one in rows.items() if held == kind]
        if found:
            accuracy = [one["accuracy"] for one in found]
            lost = statistics.mean(accuracy) - softmax["accuracy"]
            same = statistics.mean(one["same_class"] for one in found)
            shown = f"{statistics.mean(accuracy):.2f}"
            shown += f" ({min(accuracy):.2f} to {max(accuracy):.2f})" if len(found) > 1 else ""
            cells.append([NAMES[kind], shown, f"{lost:+.2f}", f"{same:.1f}"])
    return [
        "### Pictures", "",
        *markdown_table(["attention", "accuracy, %", "against softmax", "same class, %"], cells), "",
        "A vision transformer that `lln train image --attention softmax` trained on CIFAR-10, on "
        f"{softmax['pictures']:,} test pictures; tiles of {how['tile']} x {how['tile']} patches, "
        f"{how['picture_distill']} steps of distillation on training pictures without their labels. Mean and, in "
        f"brackets, lowest and highest of the seeds of the conversion. {describe(part)}", "",
    ]  # fmt: skip


def table(parts: dict[str, Part], chart: str) -> list[str]:
    """All that is stored, as Markdown. chart: where the picture of `draw` is."""
    lines: list[str] = []
    makers = {"seeds": seeds, "long": speeches, "speed": lambda part: speed(part, chart), "image": pictures}
    for name, make in makers.items():
        if name in parts and parts[name]["rows"]:
            lines += make(parts[name])
    return lines
