"""The section on the GPU kernels, from a result of `lln bench`."""

from __future__ import annotations

from typing import Any

from lln.lab.bench.kernel_charts import draw_charts
from lln.lab.bench.kernel_tables import growth
from lln.lab.core.page import Chart, Section

CAPTIONS = {
    "time": "Time of forward and backward against length, as a CUDA graph.",
    "speedup": "How many times as fast as the fastest softmax attention of torch.",
    "percent": "Share of the time that a copy of the same bytes takes: the limit of the memory is 100 %.",
}


def section(result: dict[str, Any]) -> Section:
    made = result["provenance"]
    rows = [row for row in result["rows"] if row["device_ms"] is not None]
    return Section(
        name="kernels",
        title="The kernels on this GPU",
        lead="On a GPU, LLN attention is fused kernels that keep nothing for the backward pass but q, k, v and one "
        "state for each head.",
        sentences=sentences(result, rows),
        charts=[
            Chart(name, drawn, CAPTIONS[name.split("-")[0]], rows=[flat(row) for row in rows])
            for name, drawn in draw_charts(result).items()
        ],
        header=[
            "shape",
            "attention",
            "forward ms",
            "forward + backward ms",
            "times softmax",
            "% of floor",
            "extra MiB",
        ],
        table=[table_row(row) for row in rows],
        data=result,
        caption=f"{made['device']}, torch {made['torch']}; medians",
    )


def flat(row: dict[str, Any]) -> dict[str, Any]:
    both = {f"{part}_ms": row["device_ms"][part]["median"] for part in ("forward", "training")}
    return {
        key: row[key] for key in ("attention", "causal", "batch", "heads", "length", "dim", "training_bytes")
    } | both


def shape(row: dict[str, Any]) -> str:
    text = " x ".join(f"{row[key]:,}" for key in ("batch", "heads", "length", "dim"))
    return f"{text}, causal" if row["causal"] else text


def table_row(row: dict[str, Any]) -> list[str]:
    speedup, floor, memory = row["speedup"], row["percent_of_floor"], row["training_bytes"]
    return [
        shape(row),
        row["attention"],
        *(f"{row['device_ms'][part]['median']:.3g}" for part in ("forward", "training")),
        "" if speedup is None else f"{speedup['training']:.3g}",
        "" if floor is None else f"{floor['training']:.0f}",
        "" if memory is None else f"{memory / 2**20:,.0f}",
    ]


def sentences(result: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    said = []
    for name in ("LLN", "LLN+Diag"):
        mine = [r for r in rows if r["attention"] == name and r["speedup"] is not None and not r["causal"]]
        if not mine:
            continue
        best = max(mine, key=lambda r: r["length"])
        slower = [r["length"] for r in mine if r["speedup"]["training"] < 1]
        times = f"{best['speedup']['training']:.3g} times as fast as torch's attention"
        text = f"{name} is {times} at {best['length']:,} tokens"
        said.append(f"{text}, and slower at {', '.join(f'{n:,}' for n in slower)}." if slower else f"{text}.")
    return [*said, *growth(result)]
