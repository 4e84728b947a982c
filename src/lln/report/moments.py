"""The section on moment matching: how alpha and beta follow from the spread of q and k, and how well that works."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from lln.bench.measure import number, provenance
from lln.calibrate import draw, lln_entropy, normal, softmax_entropy
from lln.curves import pchip, stored
from lln.moments import MATCHINGS, PAPER_A, PAPER_B, Matching, match_moments
from lln.report.charts import Axis, Style, lines, svg
from lln.report.page import Chart, Section

HEAD_DIMS = (16, 64, 128)  # of the variance curves that are drawn
HEAD_DIM = 64  # of everything else
TOLERANCE = 0.1  # relative: nearer than this, the paper's line holds
LLN_KINDS = (*MATCHINGS, "unmatched")
S2_DRAWN = 0.1  # the smallest; below, no matching leads for the sigmas shown

# Okabe and Ito's colours; dashes and shapes say the same once more.
STYLES = {
    "softmax": Style("#D55E00", (1, 0), "circle"),
    "paper": Style("#CC79A7", (8, 3), "square"),
    "variance": Style("#009E73", (2, 2), "triangle-up"),
    "entropy": Style("#0072B2", (10, 3, 2, 3), "diamond"),
    "unmatched": Style("#E69F00", (4, 4), "cross"),
}
CURVE_STYLES = {
    "head dim 16": Style("#56B4E9", (10, 3, 2, 3), "circle"),
    "head dim 64": Style("#009E73", (1, 0), "square"),
    "head dim 128": Style("#E69F00", (2, 2), "triangle-up"),
    "paper's line": Style("#CC79A7", (8, 3), "diamond"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured of the entropy, on Gaussian queries and keys with sigma_q = sigma_k = sigma."""

    sigmas: tuple[float, ...] = tuple(0.25 * i for i in range(1, 11))
    seeds: int = 8
    rows: int = 128
    keys: int = 512


QUICK = Plan(sigmas=(0.25, 0.5, 1.0, 1.5, 2.0, 2.5), seeds=4, rows=64)


def measure(plan: Plan, *, seed: int, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """The result, ready for JSON. `progress` hears of plan.seeds steps. Always on the CPU, in float64: these numbers say
    what the equations do, not how fast a device is."""
    cpu = torch.device("cpu")

    def alpha(kind: str, sigma: float) -> float:
        if kind == "unmatched":
            return 1.0
        return float(match_moments(sigma, sigma, HEAD_DIM, cast(Matching, kind), length=plan.keys)[0])

    bits: dict[tuple[str, float], list[float]] = {}
    for run in range(plan.seeds):
        progress(f"entropy, draw {run + 1} of {plan.seeds}")
        # The same draws for every sigma and every attention: their differences are steadier than they are.
        z_q = normal(draw(seed, HEAD_DIM, plan.keys, run), plan.rows, HEAD_DIM, device=cpu)
        z_k = normal(draw(seed, HEAD_DIM, plan.keys, run, 1), plan.keys, HEAD_DIM, device=cpu)
        for sigma in plan.sigmas:
            bits.setdefault(("softmax", sigma), []).append(softmax_entropy(z_q, z_k, sigma**4).item())
            for kind in LLN_KINDS:
                s2 = 2 * (alpha(kind, sigma) * sigma) ** 2
                bits.setdefault((kind, sigma), []).append(lln_entropy(z_q, z_k, s2).item())
    fine = [0.25 + 0.05 * i for i in range(46)]  # to 2.5
    return {
        "what": f"moment matching on Gaussian queries and keys, head dim {HEAD_DIM}, sigma_q = sigma_k, float64",
        "provenance": provenance(seed, cpu),
        "settings": dataclasses.asdict(plan),
        "line": {"a": PAPER_A, "b": PAPER_B},
        "curves": {
            "provenance": stored()["provenance"],
            "settings": stored()["settings"],
            "s2": stored()["s2"],
            "variance": {str(dim): stored()["variance"][str(dim)] for dim in HEAD_DIMS},
        },
        "alpha": [{"series": kind, "sigma": s, "alpha": alpha(kind, s)} for kind in MATCHINGS for s in fine],
        "entropy": [
            entropy_row(kind, sigma, None if kind == "softmax" else alpha(kind, sigma), values)
            for (kind, sigma), values in bits.items()
        ],
    }


def entropy_row(series: str, sigma: float, alpha: float | None, bits: list[float]) -> dict[str, Any]:
    mean, spread = statistics.fmean(bits), statistics.stdev(bits)
    summary = {"mean": mean, "spread": spread, "low": mean - spread, "high": mean + spread}
    return {"series": series, "sigma": sigma, "alpha": alpha, "bits": bits, **summary}


def section(result: dict[str, Any]) -> Section:
    holds = where_the_line_holds(result)
    points = variance_points(result)
    error = max(e / v for c in result["curves"]["variance"].values() for v, e in zip(c["value"], c["se"], strict=True))
    keys, seeds = result["settings"]["keys"], result["settings"]["seeds"]
    s2, sigma = Axis("s2", "s2", logarithmic=True), Axis("sigma", "sigma of queries and keys")
    alpha, entropy = Axis("alpha", "alpha = beta"), Axis("mean", f"entropy of a row (bits), {keys} keys")
    shaded = [(low, high) for low, high in holds if high > S2_DRAWN]
    variance = lines(points, CURVE_STYLES, s2, Axis("value", "variance of log P in a row", True), shaded=shaded)
    charts = [
        Chart(
            "variance-curve",
            svg(variance),
            f"Variance of log P within a row of LLN attention against s2, measured for head dims {listed(HEAD_DIMS)} "
            f"(standard errors of at most {100 * error:.1g} % are thinner than the curves), and the paper's straight "
            f"line, shaded where it is within {TOLERANCE:.0%} of the curve for head dim {HEAD_DIM}.",
        ),
        Chart(
            "alpha-against-sigma",
            svg(lines(result["alpha"], STYLES, sigma, alpha)),
            f"Alpha, equal to beta here, against the standard deviation sigma of queries and keys, as set by paper, "
            f"variance and entropy matching for head dim {HEAD_DIM} and {keys} keys.",
        ),
        Chart(
            "entropy-against-sigma",
            svg(lines(result["entropy"], STYLES, sigma, entropy, points=True)),
            "Mean entropy of the rows of P against sigma, for softmax attention and for LLN with each matching and with "
            f"none (alpha = beta = 1); bars span a standard deviation either side over {seeds} sets of draws.",
        ),
    ]
    sigmas = sorted({row["sigma"] for row in result["entropy"]})
    header = ["sigma", "softmax", "unmatched", *(f"{kind}{what}" for kind in MATCHINGS for what in ("", ", alpha"))]
    return Section(
        name="moments",
        title="How alpha and beta are set: moment matching",
        sentences=sentences(result, holds),
        charts=charts,
        header=header,
        table=[table_row(result, sigma) for sigma in sigmas],
        data={**result, "line_holds": holds},
        caption="Mean entropy of a row in bits ± its standard deviation over the sets of draws, and alpha (= beta)",
    )


def table_row(result: dict[str, Any], sigma: float) -> list[str]:
    def cell(series: str) -> str:
        row = entropy_of(result, series, sigma)
        return f"{row['mean']:.3f} ± {row['spread']:.3f}"

    matched = [(cell(kind), f"{entropy_of(result, kind, sigma)['alpha']:.2f}") for kind in MATCHINGS]
    return [f"{sigma:g}", cell("softmax"), cell("unmatched"), *(text for pair in matched for text in pair)]


def entropy_of(result: dict[str, Any], series: str, sigma: float) -> dict[str, Any]:
    row: dict[str, Any] = next(r for r in result["entropy"] if (r["series"], r["sigma"]) == (series, sigma))
    return row


def line_at(result: dict[str, Any], s2: float) -> float:
    return float(result["line"]["a"] * s2 + result["line"]["b"])


def measured_variance(result: dict[str, Any], dim: int, s2: list[float]) -> list[float]:
    """The stored curve between its points, read as `variance` matching reads it."""
    at, x, y = (
        torch.tensor(v, dtype=torch.float64).log()
        for v in (s2, result["curves"]["s2"], result["curves"]["variance"][str(dim)]["value"])
    )
    values: list[float] = pchip(x, y)(at).exp().tolist()
    return values


def spaced(low: float, high: float, count: int) -> list[float]:
    """Evenly in logarithms."""
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def variance_points(result: dict[str, Any]) -> list[dict[str, Any]]:
    s2 = [x for x in result["curves"]["s2"] if x >= S2_DRAWN]
    points = [
        {"series": f"head dim {dim}", "s2": x, "value": v}
        for dim in HEAD_DIMS
        for x, v in zip(s2, measured_variance(result, dim, s2), strict=True)
    ]
    # In logarithms the line falls off a cliff where it reaches zero: from there to the lowest curve, evenly in value.
    lowest, a, b = min(p["value"] for p in points), result["line"]["a"], result["line"]["b"]
    for value in spaced(lowest, line_at(result, s2[-1]), 200):
        points.append({"series": "paper's line", "s2": (value - b) / a, "value": value})
    return points


def where_the_line_holds(result: dict[str, Any]) -> list[tuple[float, float]]:
    """The ranges of s2 over which the line is within TOLERANCE of the curve for HEAD_DIM."""
    s2 = spaced(result["curves"]["s2"][0], result["curves"]["s2"][-1], 4001)
    ranges: list[tuple[float, float]] = []
    open_since: float | None = None
    last = s2[0]
    for x, v in zip(s2, measured_variance(result, HEAD_DIM, s2), strict=True):
        if abs(line_at(result, x) / v - 1) <= TOLERANCE:
            open_since, last = x if open_since is None else open_since, x
        elif open_since is not None:
            ranges.append((open_since, last))
            open_since = None
    return ranges if open_since is None else [*ranges, (open_since, last)]


def listed(parts: Sequence[object]) -> str:
    *most, last = (str(part) for part in parts)
    return f"{', '.join(most)} and {last}" if most else last


def sentences(result: dict[str, Any], holds: list[tuple[float, float]]) -> list[str]:
    return [
        "LLN attention has two knobs, alpha and beta: query i weighs key j by the sum of exp(alpha q_ic + beta k_jc) over "
        "the channels c, so larger knobs concentrate P, the matrix of weights, on fewer keys. How concentrated softmax "
        "attention is follows from the spread of queries and keys, their standard deviations sigma_q and sigma_k; moment "
        "matching sets alpha and beta from the same spread, so that LLN concentrates as softmax attention would.",
        "All that matters is s2 = alpha² sigma_q² + beta² sigma_k². Paper matching gives log P the variance that it has in "
        "softmax attention, taking it for a straight line in s2; variance matching does so by a curve measured for the "
        "head dim; entropy matching gives P the entropy instead. The curves came with the package, measured on "
        f"{result['curves']['provenance']['device']} on {result['curves']['provenance']['date'][:10]}; the entropies "
        "were measured here.",
        said_of_line(result, holds),
        said_of_floor(result),
        said_of_gaps(result),
        "All of this is for independent Gaussian queries and keys. Those of a trained model are not, and there a matching "
        "can be further off; lln.moments.match_data matches on the queries and keys themselves.",
    ]


def said_of_line(result: dict[str, Any], holds: list[tuple[float, float]]) -> str:
    def rounded(value: float) -> str:
        return number(float(f"{value:.2g}"))

    texts = []
    for ends in holds:
        # Softmax attention with this sigma has scores of that variance, sigma^4.
        low, high = (v**0.25 for v in measured_variance(result, HEAD_DIM, list(ends)))
        texts.append(f"{rounded(ends[0])} to {rounded(ends[1])} (right for sigma {rounded(low)} to {rounded(high)})")
    where = f"for s2 of {listed(texts)}" if texts else "nowhere"
    s2 = (1 - result["line"]["b"]) / result["line"]["a"]  # of sigma = 1
    values = [f"{measured_variance(result, dim, [s2])[0]:.2f} for head dim {dim}" for dim in HEAD_DIMS]
    return (
        f"The line is within {TOLERANCE:.0%} of the curve for head dim {HEAD_DIM} {where}. It is one line for all head "
        f"dims, and they differ: where it promises a variance of 1, at s2 = {number(s2)}, the curves have {listed(values)}."
    )


def said_of_floor(result: dict[str, Any]) -> str:
    floor, sigma = -result["line"]["b"] / result["line"]["a"], min(row["sigma"] for row in result["entropy"])
    flat = math.log2(result["settings"]["keys"])
    paper, softmax = (flat - entropy_of(result, kind, sigma)["mean"] for kind in ("paper", "softmax"))
    verdict = f": {number(paper / softmax)} times as concentrated" if paper > softmax > 0 else ""
    return (
        f"By the line, s2 never drops below -b/a = {number(floor)}, however small sigma is. At sigma = {sigma:g}, paper "
        f"matching is {number(paper)} bits short of an even spread over all keys, softmax attention {number(softmax)}"
        f"{verdict}."
    )


def largest_gap(result: dict[str, Any], kind: str) -> tuple[float, float, float]:
    """(sigma, bits, standard error) where the entropy of LLN is furthest from that of softmax on the same draws."""

    def gap(sigma: float) -> tuple[float, float, float]:
        pairs = zip(*(entropy_of(result, k, sigma)["bits"] for k in (kind, "softmax")), strict=True)
        differences = [lln - softmax for lln, softmax in pairs]
        return sigma, statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))

    return max((gap(r["sigma"]) for r in result["entropy"] if r["series"] == kind), key=lambda g: abs(g[1]))


def said_of_gaps(result: dict[str, Any]) -> str:
    gaps = sorted(((kind, *largest_gap(result, kind)) for kind in LLN_KINDS), key=lambda g: -abs(g[2]))
    texts = [
        f"{'no' if kind == 'unmatched' else kind} matching {abs(bits):.2f} ± {error:.2f} bits "
        f"(too {'concentrated' if bits < 0 else 'even'}, at sigma = {sigma:g})"
        for kind, sigma, bits, error in gaps
    ]
    return f"Furthest from the entropy of softmax attention, over all sigmas measured, are {listed(texts)}."
