"""The section where a reader moves the temperature and watches what each attention does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.instruments import AttentionMap, entropy, spectral_gap
from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.page import Chart, Section
from lln.lab.core.palette import MATCHED
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import join_words
from lln.lab.core.timing import one_thread
from lln.lab.paper.analysis import CPU, LLN, Draws, Rows, make_maps, summarize
from lln.lab.paper.fig2 import SERIES, STYLES
from lln.peers.simple_kernels import FEATURES

LOW, HIGH, BINS = -8.0, 6.0, 56  # of the histogram of log(N P): 0 is an even share
TEMPERATURES = (0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
START = {"dim": 64, "matching": "paper", "temperature": 1.0}  # what the page shows first


@dataclasses.dataclass(frozen=True)
class Plan:
    length: int = 256
    dims: tuple[int, ...] = (16, 64, 128)
    temperatures: tuple[float, ...] = TEMPERATURES
    seeds: int = 8  # of two, the gap of cold attention is off by more than the attentions differ


QUICK = Plan(length=128, seeds=4)


def steps(plan: Plan) -> int:
    return len(plan.dims) * len(plan.temperatures)


@one_thread()
def measure(plan: Plan, *, seed: int, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    rows: Rows = []
    for dim in plan.dims:
        draws = Draws(plan.length, dim, plan.seeds)
        for temperature in plan.temperatures:
            progress(f"temperature {temperature:g}, head dim {dim}")
            for series in SERIES:
                maps = make_maps(series, temperature**-0.5, draws, seed)
                found = summarize("entropy", [entropy(p).item() for p in maps])
                found |= summarize("gap", [spectral_gap(p).item() for p in maps])
                shape = histogram(torch.cat([entries(p) for p in maps]))
                rows.append({"series": series, "dim": dim, "temperature": temperature, **found, **shape})
    return {
        "what": "entropy, spectral gap and histogram of log(N P) on Gaussian queries and keys, float64",
        "settings": dataclasses.asdict(plan),
        "bins": {"low": LOW, "high": HIGH, "count": BINS},
        "provenance": provenance(seed, CPU),
        "rows": rows,
    }


def entries(p: AttentionMap) -> Tensor:
    dense = p.dense()
    return (dense * dense.shape[-1]).flatten()


def histogram(shares: Tensor) -> dict[str, Any]:
    """Of shares N P: how many of ten thousand lie in each bin of log(N P), and the part that is exactly zero. What
    lies outside of the bins is counted in the outermost."""
    zero = (shares == 0).double().mean().item()
    logs = shares[shares > 0].log().clamp(LOW, HIGH)
    counts = torch.histc(logs, BINS, LOW, HIGH) / len(shares)
    return {"zero": zero, "histogram": [round(1e4 * x) for x in counts.tolist()]}


def section(result: dict[str, Any]) -> Section:
    rows, length, draws = result["rows"], result["settings"]["length"], result["settings"]["seeds"]
    dim = START["dim"]
    shown = [{key: x for key, x in row.items() if key != "histogram"} for row in rows if row["dim"] == dim]
    x = Axis("temperature", "temperature 1 / (sigma_q sigma_k)", True, (0.25, 0.5, 1, 2, 4, 8))
    return Section(
        name="explorer",
        title="Move the temperature",
        lead="The temperature of attention is 1 / (sigma_q sigma_k): the wider queries and keys are spread, the colder "
        "it is, and the more softmax attention concentrates on few tokens. Entropy says over how many tokens a row is "
        "spread: b bits are like an even spread over 2^b tokens. The spectral gap, between 0 and 1, says how fast "
        "information mixes over the whole sequence: near 1, one step is enough and every token gets the same mixture; "
        "near 0, parts of the sequence keep to themselves. ReLU, quadratic and ELU are linear attentions with other "
        "features; the matching is the rule by which LLN sets its two knobs from the spread of queries and keys.",
        sentences=sentences(result),
        charts=[
            Chart(
                "entropy-against-temperature",
                draw_lines(shown, STYLES, x, Axis("entropy", f"entropy (bits), {length} keys"), points=True),
                f"Entropy against the temperature for head dim {dim}; paper, variance, entropy and unmatched are LLN "
                "with that matching. What follows softmax cools down with it; a flat line does not feel the "
                "temperature at all.",
                rows=shown,
            ),
            Chart(
                "gap-against-temperature",
                draw_lines(shown, STYLES, x, Axis("gap", "spectral gap"), points=True),
                said_of_gap(result),
                rows=shown,
            ),
        ],
        header=["temperature", "attention", "entropy, bits", "spectral gap", "exactly zero"],
        table=[
            [
                f"{row['temperature']:g}",
                row["series"],
                f"{row['entropy']:.2f}",
                f"{row['gap']:.3f}",
                f"{100 * row['zero']:.0f} %",
            ]
            for row in shown
        ],
        data=result,
        caption=f"Head dim {dim}, means over {draws} draw{'s' if draws > 1 else ''}; the other head dims and all "
        "standard errors are in explorer.json",
        explorer=for_script(result),
    )


def for_script(result: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws, by head dim and series in the order of the temperatures."""
    plan = result["settings"]
    values: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        of = values.setdefault(str(row["dim"]), {}).setdefault(row["series"], [])
        of.append(
            {"entropy": round(row["entropy"], 3), "gap": round(row["gap"], 4), "zero": round(row["zero"], 3),
             "histogram": row["histogram"]}
        )  # fmt: skip
    looks = [{"name": "softmax", "colour": MATCHED["softmax"].colour, "dash": [1, 0]}]
    looks.append({"name": "LLN", "colour": MATCHED["entropy"].colour, "dash": [1, 0]})
    looks += [{"name": name, "colour": STYLES[name].colour, "dash": list(STYLES[name].dash)} for name in FEATURES]
    return {
        "dims": list(plan["dims"]), "temperatures": list(plan["temperatures"]), "length": plan["length"],
        "matchings": list(LLN), "looks": looks, "bins": result["bins"], "start": START, "values": values,
        "most": math.log2(plan["length"]),
    }  # fmt: skip


def said_of_gap(result: dict[str, Any]) -> str:
    dim = START["dim"]
    rows = [row for row in result["rows"] if row["dim"] == dim]
    cold = min(row["temperature"] for row in rows)
    gaps = {row["series"]: row["gap"] for row in rows if row["temperature"] == cold}
    texts = [f"{gaps['softmax']:.2f} with softmax", f"{gaps['paper']:.2f} with LLN and paper matching"]
    texts.append(f"{gaps['entropy']:.2f} with entropy matching")
    texts += [f"{gaps[name]:.2f} with {name}" for name in FEATURES]
    draws = result["settings"]["seeds"]
    error = max(row["gap_error"] for row in rows)
    spread = f"means over {draws} draws, standard errors up to {error:.2f}" if draws > 1 else "of one draw"
    return (
        f"Spectral gap against the temperature for head dim {dim}: at {cold:g}, the coldest, it is {join_words(texts)} "
        f"({spread})."
    )


def sentences(result: dict[str, Any]) -> list[str]:
    dim = START["dim"]
    rows = [row for row in result["rows"] if row["dim"] == dim]
    cold, hot = min(row["temperature"] for row in rows), max(row["temperature"] for row in rows)

    def bits(series: str, temperature: float) -> float:
        return next(float(r["entropy"]) for r in rows if (r["series"], r["temperature"]) == (series, temperature))

    flat = [name for name in FEATURES if abs(bits(name, cold) - bits(name, hot)) < 0.05]
    moved = [name for name in FEATURES if name not in flat]
    said = [
        f"From temperature {hot:g} down to {cold:g}, the entropy of softmax attention falls from "
        f"{bits('softmax', hot):.2f} to {bits('softmax', cold):.2f} bits, that of LLN with paper matching from "
        f"{bits('paper', hot):.2f} to {bits('paper', cold):.2f}."
    ]
    if flat:
        do = "does" if len(flat) == 1 else "do"
        said.append(f"{join_words(flat)} {do} not feel the temperature: attention stays as broad when it is cold.")
    for name in moved:
        said.append(f"{name} moves by {abs(bits(name, cold) - bits(name, hot)):.2f} bits over the same range.")
    temperatures = sorted({r["temperature"] for r in rows})
    for kind in ("paper", "entropy"):
        near = [t for t in temperatures if abs(bits(kind, t) - bits("softmax", t)) <= 0.25]
        which = "all" if near == temperatures else ", ".join(f"{t:g}" for t in near) or "none"
        said.append(
            f"LLN with {kind} matching is within a quarter of a bit of softmax at {len(near)} of {len(temperatures)} "
            f"temperatures ({which})."
        )
    return said
