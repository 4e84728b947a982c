"""The section on the GPU kernels, from a result of `lln bench`."""

from typing import Any

from lln.lab.bench.attentions import Shape
from lln.lab.bench.bench_charts import draw_bench
from lln.lab.bench.bench_tables import HEADER, describe_growth
from lln.lab.bench.calls import OURS, PARTS
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.page import MIB, Chart, Result, Rows, Section, tell_section

CAPTIONS = {
    "time": "Time of forward and backward against length, as a CUDA graph.",
    "speedup": "How many times as fast as the fastest softmax attention of torch.",
    "percent": "Share of the time that a copy of the same bytes takes: the limit of the memory is 100 %.",
}


def make_section(result: Result) -> Section:
    rows = [row for row in result["rows"] if row["device_ms"] is not None]
    return Section(
        **tell_section("kernels", result),
        sentences=write_sentences(result, rows),
        charts=[
            Chart(name, drawn, CAPTIONS[name.split("-")[0]], rows=[flatten(row) for row in rows])
            for name, drawn in draw_bench(result).items()
        ],
        header=["shape", *HEADER[:-2], HEADER[-1]],  # all but host ms
        table=[list_cells(row) for row in rows],
        data=result,
    )


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    both = {f"{part}_ms": row["device_ms"][part]["median"] for part in PARTS}
    return {key: row[key] for key in ("attention", "causal", *Shape._fields, "training_bytes")} | both


def list_cells(row: dict[str, Any]) -> list[str]:
    speedup, floor, memory = row["speedup"], row["percent_of_floor"], row["training_bytes"]
    return [
        " x ".join(f"{row[key]:,}" for key in Shape._fields) + (", causal" if row["causal"] else ""),
        row["attention"],
        *(f"{row['device_ms'][part]['median']:.3g}" for part in PARTS),
        "" if speedup is None else f"{speedup['training']:.3g}",
        "" if floor is None else f"{floor['training']:.0f}",
        "" if memory is None else f"{memory / MIB:,.0f}",
    ]


def write_sentences(result: Result, rows: Rows) -> list[str]:
    found = {}
    for name in OURS:
        if mine := [r for r in rows if r["attention"] == name and r["speedup"] is not None and not r["causal"]]:
            slower = [r["length"] for r in mine if r["speedup"]["training"] < 1]
            found[name] = max(mine, key=lambda r: r["length"]), slower
    return [*write_paragraphs("kernels.txt", "sentences", found=found), *describe_growth(result)]
