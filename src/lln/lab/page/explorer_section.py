"""The section where a reader moves the temperature and watches what each attention does."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from lln.instruments import entropy, spectral_gap
from lln.lab.core.charts import Axis
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.page import Result, Rows, Section, begin_result, chart_lines, tell_section
from lln.lab.core.palette import ATTENTIONS, SOLID
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.timing import use_one_thread
from lln.lab.page.sentence_maps import SENTENCE, measure_sentence
from lln.lab.paper.analysis import LLN, Draws, make_maps, read_curve, summarize
from lln.lab.paper.fig2 import SERIES, STYLES
from lln.peers.simple_kernels import FEATURES

LOW, HIGH, BINS = -8.0, 6.0, 56  # of the histogram of log(N P): 0 is an even share
TEMPERATURES = (0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
PAPER = "LLN, paper matching"
START = {"dim": 64, "matching": "entropy", "temperature": 0.5}  # what the page shows first: the recommended matching


@dataclasses.dataclass(frozen=True)
class ExplorerPlan:
    length: int = 256
    dims: tuple[int, ...] = (16, 64, 128)
    temperatures: tuple[float, ...] = TEMPERATURES
    seeds: int = 8  # of two, the gap of cold attention is off by more than the attentions differ
    sentence: str = SENTENCE

    def count_steps(self) -> int:
        return len(self.dims) * len(self.temperatures)


FULL = ExplorerPlan()
QUICK = ExplorerPlan(length=128, seeds=4)


@use_one_thread()
def measure(plan: ExplorerPlan, *, seed: int, progress: Progress = ignore) -> Result:
    rows: Rows = []
    for dim in plan.dims:
        draws = Draws(plan.length, dim, plan.seeds)
        for temperature in plan.temperatures:
            progress(f"temperature {temperature:g}, head dim {dim}")
            for series in SERIES:
                maps = make_maps(series, temperature**-0.5, draws, seed)
                found = summarize("entropy", [entropy(p).item() for p in maps])
                found |= summarize("gap", [spectral_gap(p).item() for p in maps])
                shape = count_shares(torch.cat([(plan.length * p.dense()).flatten() for p in maps]))
                rows.append({"series": series, "dim": dim, "temperature": temperature, **found, **shape})
    what = "entropy, spectral gap and histogram of log(N P) on Gaussian queries and keys, float64"
    bins = {"low": LOW, "high": HIGH, "count": BINS}
    sentence = measure_sentence(plan.temperatures, seed)
    return begin_result(what, plan, seed) | {"bins": bins, "rows": rows, "sentence": sentence}


def count_shares(shares: Tensor) -> dict[str, Any]:
    """Of shares N P: how many of ten thousand lie in each bin of log(N P), and the part that is exactly zero. What
    lies outside of the bins is counted in the outermost."""
    zero = (shares == 0).double().mean().item()
    logs = shares[shares > 0].log().clamp(LOW, HIGH)
    counts = torch.histc(logs, BINS, LOW, HIGH) / len(shares)
    return {"zero": zero, "histogram": [round(1e4 * x) for x in counts.tolist()]}


def make_section(result: Result) -> Section:
    rows, length, dim = result["rows"], result["settings"]["length"], START["dim"]
    shown = [{key: x for key, x in row.items() if key != "histogram"} for row in rows if row["dim"] == dim]
    x = Axis("temperature", "temperature 1 / (sigma_q sigma_k)", True, (0.25, 0.5, 1, 2, 4, 8))
    bits, gap = Axis("entropy", f"entropy (bits), {length} keys"), Axis("gap", "spectral gap")
    of_entropy, of_gap = write_captions(result)
    charts = [
        chart_lines("entropy-against-temperature", shown, STYLES, x, bits, of_entropy, points=True),
        chart_lines("gap-against-temperature", shown, STYLES, x, gap, of_gap, points=True),
    ]
    table = [
        [f"{r['temperature']:g}", r["series"], f"{r['entropy']:.2f}", f"{r['gap']:.3f}", f"{100 * r['zero']:.0f} %"]
        for r in shown
    ]
    return Section(
        **tell_section("explorer", result, dim=dim),
        sentences=write_sentences(result),
        charts=charts,
        header=["temperature", "attention", "entropy, bits", "spectral gap", "exactly zero"],
        table=table,
        data=result,
        explorer=list_for_script(result),
    )


def list_for_script(result: Result) -> dict[str, Any]:
    """What the page's script draws, by head dim and series in the order of the temperatures."""
    plan = result["settings"]
    values: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        rounded = {name: round(row[name], digits) for name, digits in (("entropy", 3), ("gap", 4), ("zero", 3))}
        series = values.setdefault(str(row["dim"]), {}).setdefault(row["series"], [])
        series.append(rounded | {"histogram": row["histogram"]})
    looks = [{"name": name, "colour": ATTENTIONS[name].colour, "dash": list(SOLID)} for name in ("softmax", "LLN")]
    beside = STYLES["paper"]  # always, to compare with the matching that is chosen
    looks.append({"name": PAPER, "colour": beside.colour, "dash": list(beside.dash), "series": "paper"})
    looks += [{"name": name, "colour": STYLES[name].colour, "dash": list(STYLES[name].dash)} for name in FEATURES]
    return {
        "dims": list(plan["dims"]), "temperatures": list(plan["temperatures"]), "length": plan["length"],
        "matchings": list(LLN), "looks": looks, "bins": result["bins"], "start": START, "values": values,
        "most": math.log2(plan["length"]), "sentence": result["sentence"],
    }  # fmt: skip


def write_captions(result: Result) -> list[str]:
    rows = [row for row in result["rows"] if row["dim"] == START["dim"]]
    cold = min(row["temperature"] for row in rows)
    gaps = {row["series"]: row["gap"] for row in rows if row["temperature"] == cold}
    titles = {"softmax": "softmax", "paper": "LLN and paper matching", "entropy": "entropy matching"}
    return write_paragraphs(
        "explorer.txt", "captions", dim=START["dim"], cold=cold, draws=result["settings"]["seeds"],
        error=max(row["gap_error"] for row in rows),
        gaps=[f"{gaps[name]:.2f} with {titles.get(name, name)}" for name in (*titles, *FEATURES)],
    )  # fmt: skip


def write_sentences(result: Result) -> list[str]:
    rows = [row for row in result["rows"] if row["dim"] == START["dim"]]
    bits = {series: read_curve(rows, series, "temperature", "entropy") for series in SERIES}
    temperatures = sorted(bits["softmax"])
    cold, hot = temperatures[0], temperatures[-1]
    moved = {name: abs(bits[name][cold] - bits[name][hot]) for name in FEATURES}
    follows = {
        kind: [t for t in temperatures if abs(bits[kind][t] - bits["softmax"][t]) <= 0.25]
        for kind in ("paper", "entropy")
    }
    flat = [name for name, by in moved.items() if by < 0.05]
    facts = {"bits": bits, "cold": cold, "hot": hot, "moved": moved, "flat": flat, "follows": follows}
    return write_paragraphs("explorer.txt", "sentences", **facts)
