"""The section on what attention looks like as a distribution: log P of softmax attention and of LLN."""

import dataclasses
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from lln.instruments import entropy, lognormal_fit
from lln.lab.core.charts import Axis
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.page import Result, Rows, Section, begin_result, chart_lines, tell_section
from lln.lab.core.palette import BLUE, INK, ORANGE, SHORT, SOLID, Style
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.timing import use_one_thread
from lln.lab.paper.analysis import Draws, make_maps, match_alpha

SIGMA = 1.0
MATCHING = "entropy"
SERIES = {"softmax": "softmax", "LLN": MATCHING}  # by the names that the page shows
BINS = 60
NEAR = 0.02  # the largest distance of what is called close to log-normal
SHOWN = 3.5  # standard deviations either side: beyond lie a few of a hundred thousand entries
STYLES = {
    "softmax": Style(ORANGE, SOLID, "circle", 3),
    "normal fit to softmax": Style(ORANGE, (4, 3), "circle", 1.5),
    "LLN": Style(BLUE, SOLID, "square", 3),
    "normal fit to LLN": Style(BLUE, (4, 3), "square", 1.5),
    "exactly normal": Style(INK, SHORT, "cross", 1.5),
}


# Of the table: heading and digits by field.
COLUMNS = {
    "mean": ("mean", 2), "deviation": ("deviation", 2), "skewness": ("skewness", 2), "distance": ("KS distance", 3),
    "qq_r2": ("Q-Q R²", 4), "entropy": ("entropy, bits", 2),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DistributionPlan:
    length: int = 512
    dim: int = 64
    seeds: int = 4

    def count_steps(self) -> int:
        return len(SERIES)


FULL = DistributionPlan()
QUICK = DistributionPlan(length=256, seeds=2)


@use_one_thread()
def measure(plan: DistributionPlan, *, seed: int, progress: Progress = ignore) -> Result:
    draws = Draws(plan.length, plan.dim, plan.seeds)
    attentions = {}
    for name, series in SERIES.items():
        progress(f"log P of {name}")
        maps = make_maps(series, SIGMA, draws, seed)
        found = []
        for p in maps:
            fit = lognormal_fit(p)
            values = {"distance": fit.distance, "qq_r2": fit.qq_r2, "skewness": fit.skewness, "entropy": entropy(p)}
            found.append({key: x.item() for key, x in values.items()})
        attentions[name] = summarize(torch.cat([p.dense().log().flatten() for p in maps]), found)
    result = begin_result("log P of attention on Gaussian queries and keys of spread 1, float64", plan, seed)
    alpha = match_alpha(MATCHING, SIGMA, plan.dim, plan.length)
    return result | {"alpha": alpha, "matching": MATCHING, "attentions": attentions}


def summarize(values: Tensor, found: list[dict[str, float]]) -> dict[str, Any]:
    """Moments, histogram and quantiles of all draws together; means of what was found of each."""
    mean, deviation = values.mean().item(), values.std().item()
    edges = torch.linspace(mean - SHOWN * deviation, mean + SHOWN * deviation, BINS + 1, dtype=torch.float64)
    width = (edges[1] - edges[0]).item()
    counts = torch.histogram(values, edges).hist / (len(values) * width)
    at = torch.linspace(-3, 3, 49, dtype=torch.float64)  # normal quantiles
    ordered = values.sort().values
    places = (torch.special.ndtr(at) * len(ordered)).long().clamp_max(len(ordered) - 1)
    return {
        "mean": mean,
        "deviation": deviation,
        **{name: statistics.fmean(x[name] for x in found) for name in found[0]},
        "log_p": ((edges[1:] + edges[:-1]) / 2).tolist(),
        "density": counts.tolist(),
        "normal_quantiles": at.tolist(),
        "quantiles": ((ordered[places] - mean) / deviation).tolist(),
    }


def list_densities(result: Result) -> Rows:
    rows = []
    for name, x in result["attentions"].items():
        for at, density in zip(x["log_p"], x["density"], strict=True):
            rows.append({"series": name, "log_p": at, "density": density})
            scaled = (at - x["mean"]) / x["deviation"]
            normal = math.exp(-scaled * scaled / 2) / (x["deviation"] * math.sqrt(2 * math.pi))
            rows.append({"series": f"normal fit to {name}", "log_p": at, "density": normal})
    return rows


def list_quantiles(result: Result) -> Rows:
    rows = [
        {"series": name, "normal": at, "standardised": value}
        for name, x in result["attentions"].items()
        for at, value in zip(x["normal_quantiles"], x["quantiles"], strict=True)
    ]
    return rows + [{"series": "exactly normal", "normal": at, "standardised": at} for at in (-3.0, 3.0)]


def make_section(result: Result) -> Section:
    softmax, ours, length = result["attentions"]["softmax"], result["attentions"]["LLN"], result["settings"]["length"]
    of_density, of_quantiles = write_paragraphs("distribution.txt", "captions")
    log_p, normal = Axis("log_p", "log P"), Axis("normal", "normal quantile")
    density, quantile = Axis("density", "density"), Axis("standardised", "quantile of log P")
    charts = [
        chart_lines("log-p-histogram", list_densities(result), STYLES, log_p, density, of_density),
        chart_lines("log-p-quantiles", list_quantiles(result), STYLES, normal, quantile, of_quantiles),
    ]
    return Section(
        **tell_section("distribution", result),
        sentences=write_sentences(softmax, ours, length),
        charts=charts,
        header=["attention", *(heading for heading, _ in COLUMNS.values())],
        table=[
            [name, *(f"{x[key]:.{digits}f}" for key, (_, digits) in COLUMNS.items())]
            for name, x in result["attentions"].items()
        ],
        data=result,
    )


def write_sentences(softmax: dict[str, Any], ours: dict[str, Any], length: int) -> list[str]:
    facts = {"softmax": softmax, "ours": ours, "length": length, "even": math.log2(length), "near": NEAR}
    return write_paragraphs("distribution.txt", "sentences", **facts)
