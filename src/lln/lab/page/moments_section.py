"""The section on moment matching: how alpha and beta follow from the spread of q and k, and how well that works."""

import dataclasses
import itertools
import math
import statistics
from typing import Any

import torch

from lln.checks import MATCHINGS
from lln.kernels.common import PAPER_A, PAPER_B
from lln.lab.calibration import lln_entropy, softmax_entropy
from lln.lab.core.charts import Axis
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.page import CPU, Result, Rows, Section, begin_result, chart_lines, pick, tell_section
from lln.lab.core.palette import CURVES, MATCHED
from lln.lab.core.progress import Progress, ignore
from lln.lab.core.seeds import normal
from lln.lab.core.tables import show_number
from lln.lab.core.timing import use_one_thread
from lln.lab.paper.analysis import match_alpha
from lln.matching.curves import interpolate, pchip, read_curves

HEAD_DIMS = (16, 64, 128)  # of the variance curves that are drawn
HEAD_DIM = 64  # of everything else
TOLERANCE = 0.1  # relative: nearer than this, the paper's line holds
LLN_KINDS = (*MATCHINGS, "unmatched")
FINE = tuple(0.25 + 0.05 * i for i in range(46))  # sigmas of the chart of alpha, to 2.5
S2_DRAWN = 0.1  # the smallest; below, no matching leads for the sigmas shown
CONSTANTS = {"head_dims": HEAD_DIMS, "head_dim": HEAD_DIM, "tolerance": 100 * TOLERANCE}  # that its template names


@dataclasses.dataclass(frozen=True)
class MomentsPlan:
    """What is measured of the entropy, on Gaussian queries and keys with sigma_q = sigma_k = sigma."""

    sigmas: tuple[float, ...] = tuple(0.25 * i for i in range(1, 11))
    seeds: int = 32
    rows: int = 128
    keys: int = 512

    def count_steps(self) -> int:
        return self.seeds


FULL = MomentsPlan()
QUICK = MomentsPlan(sigmas=(0.25, 0.5, 1.0, 1.5, 2.0, 2.5), seeds=8, rows=64)


@use_one_thread()
def measure(plan: MomentsPlan, *, seed: int, progress: Progress = ignore) -> Result:
    """Always on the CPU, in float64: these numbers say what the equations do, not what a device does."""
    what = f"moment matching on Gaussian queries and keys, head dim {HEAD_DIM}, sigma_q = sigma_k, float64"
    curves = read_curves()
    return begin_result(what, plan, seed) | {
        "line": {"a": PAPER_A, "b": PAPER_B},
        "curves": {name: curves[name] for name in ("provenance", "settings", "s2")}
        | {"variance": {str(dim): curves["variance"][str(dim)] for dim in HEAD_DIMS}},
        "alpha": [
            {"series": k, "sigma": s, "alpha": match_alpha(k, s, HEAD_DIM, plan.keys)} for k in MATCHINGS for s in FINE
        ],
        "entropy": measure_entropies(plan, seed, progress),
    }


def measure_entropies(plan: MomentsPlan, seed: int, progress: Progress) -> Rows:
    """A row for each attention and sigma, with the mean entropy of P for each set of draws."""
    alphas = {
        (kind, sigma): match_alpha(kind, sigma, HEAD_DIM, plan.keys) for kind in LLN_KINDS for sigma in plan.sigmas
    }
    bits: dict[tuple[str, float], list[float]] = {}
    for run in range(plan.seeds):
        progress(f"entropy, draw {run + 1} of {plan.seeds}")
        # The same draws for every sigma and every attention: their differences are steadier than they are.
        z_q = normal((seed, HEAD_DIM, plan.keys, run), plan.rows, HEAD_DIM, device=CPU)
        z_k = normal((seed, HEAD_DIM, plan.keys, run, 1), plan.keys, HEAD_DIM, device=CPU)
        for sigma in plan.sigmas:
            bits.setdefault(("softmax", sigma), []).append(softmax_entropy(z_q, z_k, sigma**4).item())
        for (kind, sigma), alpha in alphas.items():
            bits.setdefault((kind, sigma), []).append(lln_entropy(z_q, z_k, 2 * (alpha * sigma) ** 2).item())
    return [summarize_entropy(*key, alphas.get(key), values) for key, values in bits.items()]


def summarize_entropy(series: str, sigma: float, alpha: float | None, bits: list[float]) -> dict[str, Any]:
    mean, spread = statistics.fmean(bits), statistics.stdev(bits)
    summary = {"mean": mean, "spread": spread, "low": mean - spread, "high": mean + spread}
    return {"series": series, "sigma": sigma, "alpha": alpha, "bits": bits, **summary}


def make_section(result: Result) -> Section:
    holds = find_where_line_holds(result)
    error = max(e / v for c in result["curves"]["variance"].values() for v, e in zip(c["value"], c["se"], strict=True))
    s2 = Axis("s2", "s2 = alpha² sigma_q² + beta² sigma_k²", logarithmic=True)
    variance = Axis("value", "variance of log P in a row", logarithmic=True)
    sigma, alpha = Axis("sigma", "sigma of queries and keys"), Axis("alpha", "alpha = beta")
    entropy = Axis("mean", f"entropy of a row (bits), {result['settings']['keys']} keys")
    of_curve, of_alpha, of_entropy = write_paragraphs(
        "moments.txt", "captions", **CONSTANTS, **result["settings"], error=100 * error
    )
    charts = [
        chart_lines("variance-curve", list_variances(result), CURVES, s2, variance, of_curve, shaded=holds),
        chart_lines("alpha-against-sigma", result["alpha"], MATCHED, sigma, alpha, of_alpha),
        chart_lines("entropy-against-sigma", result["entropy"], MATCHED, sigma, entropy, of_entropy, points=True),
    ]
    return Section(
        **tell_section("moments", result),
        sentences=write_sentences(result, holds),
        charts=charts,
        header=["sigma", "softmax", "unmatched", *(f"{kind}{what}" for kind in MATCHINGS for what in ("", ", alpha"))],
        table=[list_cells(result, sigma) for sigma in sorted({row["sigma"] for row in result["entropy"]})],
        data={**result, "line_holds": holds},
    )


def list_cells(result: Result, sigma: float) -> list[str]:
    cells = [f"{sigma:g}"]
    for series in ("softmax", "unmatched", *MATCHINGS):
        row = pick(result["entropy"], series=series, sigma=sigma)
        cells += [f"{row['mean']:.2f} ± {row['spread']:.2f}", *([f"{row['alpha']:.2f}"] if series in MATCHINGS else [])]
    return cells


def read_variance(result: Result, dim: int, s2: list[float]) -> list[float]:
    """The stored curve between its points, read as `variance` matching reads it."""
    series = (s2, result["curves"]["s2"], result["curves"]["variance"][str(dim)]["value"])
    at, x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in series)
    return list(interpolate(at, *pchip(x, y)).exp().tolist())


def space_evenly(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def list_variances(result: Result) -> Rows:
    s2 = [x for x in result["curves"]["s2"] if x >= S2_DRAWN]
    points = [
        {"series": f"head dim {dim}", "s2": x, "value": v}
        for dim in HEAD_DIMS
        for x, v in zip(s2, read_variance(result, dim, s2), strict=True)
    ]
    # In logarithms the line falls off a cliff towards zero: it is drawn from the lowest curve up, evenly in its value.
    lowest, a, b = min(p["value"] for p in points), result["line"]["a"], result["line"]["b"]
    on_line = space_evenly(lowest, a * s2[-1] + b, 200)
    return points + [{"series": "paper's line", "s2": (value - b) / a, "value": value} for value in on_line]


def find_where_line_holds(result: Result) -> list[tuple[float, float]]:
    """The ranges of s2 over which the line is within TOLERANCE of the curve for HEAD_DIM."""
    s2 = space_evenly(result["curves"]["s2"][0], result["curves"]["s2"][-1], 20001)  # three digits of each end
    a, b, curve = result["line"]["a"], result["line"]["b"], read_variance(result, HEAD_DIM, s2)
    near = [abs((a * x + b) / v - 1) <= TOLERANCE for x, v in zip(s2, curve, strict=True)]
    runs = [list(run) for holds, run in itertools.groupby(range(len(s2)), near.__getitem__) if holds]
    return [(s2[run[0]], s2[run[-1]]) for run in runs]


def write_sentences(result: Result, holds: list[tuple[float, float]]) -> list[str]:
    line, entropy = result["line"], result["entropy"]
    ranges = []
    for ends in holds:
        # The s2 wanted for this sigma: softmax attention has scores of variance sigma^4.
        low, high = (show_number(v**0.25) for v in read_variance(result, HEAD_DIM, list(ends)))
        ranges.append(f"{show_number(ends[0])} to {show_number(ends[1])} (wanted at sigma {low} to {high})")
    promised = (1 - line["b"]) / line["a"]
    sigma, even = min(row["sigma"] for row in entropy), math.log2(result["settings"]["keys"])
    below = {kind: even - pick(entropy, series=kind, sigma=sigma)["mean"] for kind in ("paper", "softmax")}
    return write_paragraphs(
        "moments.txt", "sentences", **CONSTANTS, **below, made=result["curves"]["provenance"], line=line, sigma=sigma,
        ranges=ranges, promised=promised, gaps=describe_gaps(result),
        variances=[f"{read_variance(result, dim, [promised])[0]:.2f} for head dim {dim}" for dim in HEAD_DIMS],
    )  # fmt: skip


def find_largest_gap(result: Result, kind: str) -> tuple[float, float, float]:
    """(bits, standard error, sigma) where the entropy of LLN is furthest from that of softmax on the same draws."""
    gaps = []
    for row in (row for row in result["entropy"] if row["series"] == kind):
        softmax = pick(result["entropy"], series="softmax", sigma=row["sigma"])["bits"]
        apart = [x - y for x, y in zip(row["bits"], softmax, strict=True)]
        gaps.append((statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart)), row["sigma"]))
    return max(gaps, key=lambda gap: abs(gap[0]))


def describe_gaps(result: Result) -> list[str]:
    """Of each matching, from the worst on."""
    texts = []
    for kind in sorted(LLN_KINDS, key=lambda kind: -abs(find_largest_gap(result, kind)[0])):
        bits, error, sigma = find_largest_gap(result, kind)
        verdict = "no more than chance" if abs(bits) <= 2 * error else f"too {'concentrated' if bits < 0 else 'even'}"
        name = kind.replace("unmatched", "no")
        texts.append(f"{abs(bits):.2f} ± {error:.2f} bits with {name} matching (at sigma = {sigma:g}, {verdict})")
    return texts
