"""docs/benchmarks.md, from benchmarks/results/."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from lln.lab.bench.bench_charts import draw_bench
from lln.lab.bench.kernel_times import derive
from lln.lab.core.tables import markdown_table, show_number

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPU = RESULTS / "2026-11-15-h200"
GIB = 2**30

HEAD = """# Benchmarks

This page has every time that was measured, including the lengths at which softmax attention is faster. In short:
one call of LLN+Diag, forward and backward, is faster on an H200 than torch's fastest attention at every length from
512 tokens on. [Whole models](#whole-models-on-an-h200) are faster from about 2,048 tokens on in batches of 16,000
tokens. For one sequence at a time they are in inference at 4,096 tokens, and in training somewhere above.

Before an attention is timed, it is checked against float64. What is compared takes turns within one run. Times are
medians, with quartiles in brackets.

!!! note "Which LLN attention"
    `LLN` and `LLN+Diag` are attention with the paper's formula. They run in Triton kernels on a GPU. Models that
    `lln convert` made use the [evidence read](conversion.md#the-evidence-read). They are slower, decoders most of all:
    see [The evidence read](#the-evidence-read) and the parts after it.

"""


def program(name: str) -> Any:
    """One of the benchmarks, which import their neighbours as programs do."""
    sys.path.append(str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop()


def load_stored(path: Path) -> Any:
    return json.loads(path.read_text())


def load_bench(folder: Path) -> Any:
    """With floors as they are reckoned now: before, those of LLN+Diag counted what its blocks read a second time."""
    result = load_stored(folder / "bench.json")
    derive(result)
    return result


def describe_origin(result: dict[str, Any]) -> str:
    p = result["provenance"]
    threads = f", {p['threads']} threads" if p["threads"] > 1 else ", 1 thread"
    return f"{p['device']}{'' if 'cuda' in p else threads}, torch {p['torch']}, {p['date'][:10]}, commit {p['commit']}"


def link(path: Path) -> str:
    return f"../{path.relative_to(ROOT).as_posix()}"


def cpu() -> list[str]:
    result = load_stored(RESULTS / "cpu_forward.json")
    lines = [
        "## Forward on a CPU", "", program("cpu_forward").table(result).strip(), "",
        '"Bare products" are `q @ (k^T v)`, the arithmetic that no linear attention can avoid.', "",
        f"Peak extra memory of a call, MiB (`{result['provenance']['command']}`):", "",
    ]  # fmt: skip
    rows = [
        [f"`{name}`" if "@" in name else name, *(show_number(peak / 2**20) for peak in peaks)]
        for name, peaks in result["peak_bytes"].items()
    ]
    return [*lines, *markdown_table(["attention", *(f"{n:,}" for n in result["memory_lengths"])], rows), ""]


def list_cells(r: dict[str, Any]) -> list[str]:
    who = [f"{r['batch']} x {r['length']:,}", r["attention"]]
    if r["error"]:
        return [*who, r["error"], "", "", "", ""]
    ms = r["device_ms"]
    floor = r["percent_of_floor"]
    share = "" if floor is None else f"{floor['forward']:.0f} / {floor['training']:.0f}"
    faster = "" if r["speedup"] is None else f"{r['speedup']['training']:.3g}"
    times = [show_number(ms[part]["median"]) for part in ("forward", "training")]
    return [*who, *times, faster, share, show_number(r["training_bytes"] / 2**20)]


PARTS = {
    "batch1": ("One sequence", "12 heads of 64, bidirectional."),
    "tokens16k": (
        "16,384 tokens a batch",
        "12 heads of 64, bidirectional. The batch size is 16,384 divided by the length. Since this measurement, calls "
        "of up to 2,048 tokens compute the state of the keys again in the backward pass instead of keeping it, as the "
        "next part does.",
    ),
    "dropout": (
        "With dropout",
        "12 heads of 64, bidirectional, 16,384 tokens in a batch. A tenth of the weights is dropped, as in training "
        "RoBERTa.",
    ),
    "million": ("To a million tokens", "12 heads of 64, bidirectional, one sequence."),
    "fla": ("Beside flash-linear-attention, causal", "12 heads of 64."),
    "floors": (
        "Larger shapes",
        "12 heads of 64, and 16 heads of 128 where the batch is 4. Each attention is bidirectional and causal. "
        "`-sample` also measures the spread of the queries and keys of every sample.",
    ),
    "evidence": (
        "The evidence read",
        "For [weights that were trained with softmax](conversion.md#the-evidence-read), beside the paper's read; "
        "`-signed` has the keys and their negatives as channels, `-directions` 256 directions of their own.",
    ),
    "evidence-causal": ("The evidence read, causal", "As above, where no token sees a later one."),
    "evidence-mix": (
        "What each query weighs",
        "LLN+Diag with 256 directions, where each query weighs its block against what the evidence says of the rest "
        '(`mix="evidence"`): what `lln convert --mix evidence` gives an encoder. `-eager` is plain PyTorch.',
    ),
    "evidence-mix-causal": (
        "What each query weighs, causal",
        "As above, with windows that overlap: what `lln convert` gives a causal language model.",
    ),
}


def gpu() -> list[str]:
    lines = ["## On an H200", "", program("gpu").table(GPU).strip(), ""]
    lines += [
        "In the tables below, *forward* and *training* (forward and backward) are milliseconds on the device. *Faster* "
        "says how many times as fast training is as with torch's fastest softmax attention. *Floor* is the time that a "
        "plain copy of the bytes takes which LLN must move, as a share of LLN's time in %, for forward / training. "
        "What the blocks of LLN+Diag read a second time is not counted, since the cache can give it. *MiB* is the peak "
        "of extra memory in training.",
        "",
    ]
    for part, (title, words) in PARTS.items():
        if not (found := sorted(RESULTS.glob(f"*-h200/{part}"))):
            continue
        folder = found[-1]
        result = load_bench(folder)
        lines += [f"### {title}", "", f"{words} {describe_origin(result)}. `{result['provenance']['command']}`", ""]
        for path in sorted(folder.glob("time-*.svg")):
            lines += [f"![Milliseconds against length, {path.stem.removeprefix('time-')}]({link(path)})", ""]
        kinds = sorted({r["causal"] for r in result["rows"]})
        for causal in kinds:
            if len(kinds) > 1:
                lines += ["Causal:" if causal else "Bidirectional:", ""]
            header = ["batch x tokens", "attention", "forward", "training", "faster", "floor", "MiB"]
            rows = [list_cells(r) for r in result["rows"] if r["causal"] == causal]
            lines += [*markdown_table(header, rows, "rlr"), ""]
        for path in sorted(folder.glob("percent-of-floor.svg")):
            lines += [f"![Share of the floor in %]({link(path)})", ""]
        if not result["finished"]:
            lines += ["This part was stopped before its end. The table has what it had measured by then.", ""]
    lines += ["How it is measured: " + load_stored(GPU / "batch1" / "bench.json")["how"], ""]
    return lines


def models() -> list[str]:
    """Of whole models, where they were measured."""
    path = RESULTS / "models.json"
    if not path.exists():
        return []
    return ["## Whole models on an H200", "", program("models").table(load_stored(path)).strip(), ""]


def decoding() -> list[str]:
    result = load_stored(RESULTS / "decoding.json")
    return ["## One step of decoding", "", program("decoding").table(result).strip(), ""]


def instruments() -> list[str]:
    result, record = load_stored(RESULTS / "instruments.json"), load_stored(RESULTS / "record.json")
    rows = [
        [name, case["heads"], f"{case['length']:,}", show_number(case["ms"]["median"] / 1e3),
         f"{case['resident_bytes'] / GIB:.2f}"]
        for name, case in result["cases"].items()
    ]  # fmt: skip
    lines = ["## Instruments", "", *markdown_table(["measured", "heads", "tokens", "s", "process, GiB"], rows)]
    worst = max(result["deviation_at_512"].values())
    lines += [
        "", f"{describe_origin(result)}. The memory of the process includes torch itself. At 512 tokens the results "
        f"were compared with those of the dense matrix; they differ by at most {worst:.0e}.", "",
        program("record").sentence(record).strip(), "",
    ]  # fmt: skip
    return lines


def conversion() -> list[str]:
    """Of `lln convert`, where it was measured."""
    path = RESULTS / "conversion.json"
    if not path.exists():
        return []
    lines = ["## Conversion of MiniLM", "", program("conversion").table(load_stored(path)).strip(), ""]
    others = RESULTS / "real_models.json"
    if others.exists():
        lines += ["## Conversion of other models", "", program("real_models").table(load_stored(others)).strip(), ""]
    stages = RESULTS / "language_model.json"
    if stages.exists():
        lines += ["## A language model, stage by stage", "", program("language_model").table(load_stored(stages)), ""]
    return lines


QUALITY = RESULTS / "conversion_quality"
CHART = QUALITY / "quality-against-speed.svg"


def quality() -> list[str]:
    """Of conversions: seeds, speed and pictures, where they were measured. Long documents are in their tutorial."""
    tables = program("quality_tables")
    parts = tables.load_parts(QUALITY)
    long = parts.pop("long", None)
    lines: list[str] = tables.table(parts, link(CHART))
    if long and tables.speeches(long):
        lines += ["Long documents, fine-tuned: see [their tutorial](tutorial-long-documents.md#what-it-gives).", ""]
    return ["## What conversions keep", "", *lines] if lines else []


def charts() -> dict[Path, str]:
    tables = program("quality_tables")
    part = tables.load_parts(QUALITY).get("speed")
    svg = part and tables.draw(part)
    made = {CHART: svg} if svg else {}
    for path in sorted(RESULTS.glob("*-h200/*/percent-of-floor.svg")):
        made[path] = draw_bench(load_bench(path.parent))["percent-of-floor"]
    return made


def speeches() -> str:
    """What the tutorial of long documents quotes."""
    tables = program("quality_tables")
    part = tables.load_parts(QUALITY).get("long")
    lines = tables.speeches(part) if part else []
    return "\n".join(["", "## What it gives", "", *lines[2:]]) if lines else ""


def layers() -> list[str]:
    """LLN attention in some layers, where it was measured."""
    found = [path for name in ("global_layers", "global_layers_gpu") if (path := RESULTS / f"{name}.json").exists()]
    tables = [line for path in found for line in (program("global_layers").table(load_stored(path)).strip(), "")]
    return ["## In the global layers of ModernBERT", "", *tables] if found else []


def markdown() -> str:
    lines = [*cpu(), *gpu(), *models(), *decoding(), *instruments(), *conversion(), *quality(), *layers()]
    lines += [
        "## Measure it yourself", "", "```sh",
        "make bench  # the tables of the CPU", "make bench-gpu  # on a machine with a GPU",
        "lln bench --quick  # a look", "lln compare --all  # every mechanism on the same inputs", "```", "",
    ]  # fmt: skip
    made = "*This page is made by `make pages` from what is stored in `benchmarks/results/`; a test compares.*"
    return HEAD + "\n".join([*lines, made]).rstrip() + "\n"
