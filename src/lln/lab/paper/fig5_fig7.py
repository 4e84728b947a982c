"""Figs. 5a, 5b and 7: the moments and the distribution of log P."""

import math

import torch
from torch import Tensor

from lln.instruments import log_moments, lognormal_fit
from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.palette import BLUE, GREEN, LONG, MATCHED, ORANGE, SHORT, SOLID, Style
from lln.lab.core.progress import Progress
from lln.lab.paper.analysis import LLN, Draws, Figure, Rows, Verdict, judge, make_maps, read_curve, summarize

SIGMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
MODERATE = 1.25  # the largest sigma that Prop. 3.1 is held to
CLOSE = 0.03  # relative: what "matches" is taken to mean; a set of draws has its own 1 %
ROUGHLY = 0.1  # what "approximates" is taken to mean
BINS = 80
SIGMA = 1.0  # of Fig. 7
FAR, STRAIGHT = 0.02, 0.998  # the largest distance and the least Q-Q R² of what is called log-normal
THEORY = {
    "measured": Style(BLUE, SOLID, "circle"),
    "Prop. 3.1": Style(ORANGE, LONG, "square"),
    "t + t²/2d": Style(GREEN, SHORT, "triangle-up"),
}


def measure_5a(draws: Draws, seed: int, progress: Progress) -> Rows:
    rows = []
    for sigma in SIGMAS:
        progress(f"softmax, sigma {sigma:g}")
        t, at = sigma**4, {"sigma": sigma, "t": sigma**4}
        found = [log_moments(p) for p in make_maps("softmax", sigma, draws, seed)]
        measured = summarize("variance", [m.variance.item() for m in found])
        measured |= summarize("mean", [m.mean.item() for m in found])
        rows.append({"series": "measured", **at, **measured})
        for series, predicted in (("Prop. 3.1", t), ("t + t²/2d", t + t * t / (2 * draws.dim))):
            mean = -math.log(draws.length) - predicted / 2
            rows.append({"series": series, **at, "variance": predicted, "mean": mean})
    return rows


def divide(rows: Rows, series: str, by: str, name: str = "variance") -> dict[float, float]:
    """By sigma: a quantity of one series over that of another."""
    over, under = (read_curve(rows, which, "sigma", name) for which in (series, by))
    return {sigma: over[sigma] / under[sigma] for sigma in over}


def judge_5a(draws: Draws, rows: Rows) -> list[Verdict]:
    pairs = (("Prop. 3.1", "variance"), ("Prop. 3.1", "mean"), ("t + t²/2d", "variance"))
    off = [{s: x - 1 for s, x in divide(rows, "measured", series, name).items()} for series, name in pairs]
    variance, mean, better = off
    moderate = max(abs(d[s]) for d in (variance, mean) for s in SIGMAS if s <= MODERATE)
    last, corrected = SIGMAS[-1], max(abs(x) for x in better.values())
    everywhere = {"deviation_at_largest_sigma": variance[last], "corrected": corrected}
    matches = all(abs(x) <= CLOSE for x in variance.values())
    return [
        judge("fig5a_moderate", moderate <= CLOSE, {"largest_deviation": moderate}, sigma=MODERATE),
        judge("fig5a_everywhere", matches, everywhere, sigma=last),
    ]


def draw_5a(draws: Draws, rows: Rows) -> dict[str, str]:
    x = Axis("t", "t = sigma_q² sigma_k²")
    return {
        f"-{name}": draw_lines(rows, THEORY, x, Axis(name, f"{name} of log P"), points=True)
        for name in ("variance", "mean")
    }


def measure_5b(draws: Draws, seed: int, progress: Progress) -> Rows:
    rows = []
    for sigma in SIGMAS:
        for series in ("softmax", *LLN):
            progress(f"{series}, sigma {sigma:g}")
            found = [log_moments(p) for p in make_maps(series, sigma, draws, seed)]
            measured = summarize("variance", [m.variance.item() for m in found])
            measured |= summarize("within", [m.within.item() for m in found])
            rows.append({"series": series, "sigma": sigma, **measured})
    return rows


def judge_5b(draws: Draws, rows: Rows) -> list[Verdict]:
    verdicts = []
    for series in ("paper", "variance"):
        found = divide(rows, series, "softmax")
        over_t = {s: variance / s**4 for s, variance in read_curve(rows, series, "sigma", "variance").items()}
        numbers = {f"ratio_at_{s:g}": found[s] for s in SIGMAS} | {f"over_t_at_{s:g}": over_t[s] for s in SIGMAS}
        near = all(abs(x - 1) <= ROUGHLY for x in found.values())
        verdicts.append(judge("fig5b_matched", near, numbers, series=series, ratios=found, over_t=over_t))
    small = divide(rows, "unmatched", "softmax")
    numbers = {f"ratio_at_{s:g}": small[s] for s in SIGMAS}
    far = all(x < 0.5 for s, x in small.items() if s >= 1)
    return [*verdicts, judge("fig5b_unmatched", far, numbers, ratios=small, first=SIGMAS[0], last=SIGMAS[-1])]


def draw_5b(draws: Draws, rows: Rows) -> dict[str, str]:
    y = Axis("variance", "variance of log P", logarithmic=True)
    return {"": draw_lines(rows, MATCHED, Axis("sigma", "sigma of queries and keys"), y, points=True)}


def measure_7(draws: Draws, seed: int, progress: Progress) -> Rows:
    entries = {}
    rows: Rows = []
    for series in ("softmax", *LLN):
        progress(f"{series}, sigma {SIGMA:g}")
        maps = make_maps(series, SIGMA, draws, seed)
        entries[series] = torch.cat([p.dense().log().flatten() for p in maps])
        fits = [lognormal_fit(p) for p in maps]
        found = {"mean": entries[series].mean().item(), "variance": entries[series].var().item()}
        for name in ("distance", "qq_r2", "skewness"):
            found |= summarize(name, [getattr(fit, name).item() for fit in fits])
        apart = find_distance(entries["softmax"], entries[series])
        rows.append({"series": series, "kind": "fit", **found, "from_softmax": apart})
    ordered = [values.sort().values for values in entries.values()]
    cut = len(ordered[0]) // 2000  # all but a few entries of any series lie between the edges
    low, high = min(values[cut].item() for values in ordered), max(values[-cut - 1].item() for values in ordered)
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    for series, values in entries.items():
        density = torch.histogram(values, edges, density=True).hist.tolist()
        centres = ((edges[1:] + edges[:-1]) / 2).tolist()
        rows += [
            {"series": series, "kind": "density", "log_p": x, "density": y}
            for x, y in zip(centres, density, strict=True)
        ]
    return rows


def find_distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two distribution functions (two-sample Kolmogorov-Smirnov)."""
    import scipy.stats  # takes a while, and most that import this module measure nothing

    return float(scipy.stats.ks_2samp(one.numpy(), other.numpy(), method="asymp").statistic)


def judge_7(draws: Draws, rows: Rows) -> list[Verdict]:
    fits = {row["series"]: row for row in rows if row["kind"] == "fit"}
    softmax, paper, unmatched = fits["softmax"], fits["paper"], fits["unmatched"]
    distances = {f"{name}_distance": fits[name]["from_softmax"] for name in LLN}
    means = {f"{name}_mean": fits[name]["mean"] for name in ("paper", "softmax", "unmatched")}
    slightly = abs(paper["mean"] - softmax["mean"]) < 0.2 < abs(unmatched["mean"] - softmax["mean"])
    verdicts = [
        judge("fig7_follows", paper["from_softmax"] < ROUGHLY, distances, names=LLN, fits=fits),
        judge("fig7_means", slightly, means),
    ]
    for claim, fit in (("fig7_softmax", softmax), ("fig7_lln", paper)):
        numbers = {name: fit[name] for name in ("distance", "qq_r2", "skewness")}
        verdicts.append(judge(claim, fit["distance"] <= FAR and fit["qq_r2"] >= STRAIGHT, numbers))
    return verdicts


def draw_7(draws: Draws, rows: Rows) -> dict[str, str]:
    drawn = [row for row in rows if row["kind"] == "density"]
    return {"": draw_lines(drawn, MATCHED, Axis("log_p", "log P"), Axis("density", "density", from_zero=True))}


FIG5A = Figure("fig5a", "Variance and mean of log P, softmax", len(SIGMAS), measure_5a, judge_5a, draw_5a)
FIG5B = Figure(
    "fig5b", "Variance of log P before and after moment matching", len(SIGMAS) * (1 + len(LLN)), measure_5b, judge_5b,
    draw_5b,
)  # fmt: skip
FIG7 = Figure("fig7", "Histogram of log P", 1 + len(LLN), measure_7, judge_7, draw_7)
