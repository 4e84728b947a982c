"""Figs. 5a, 5b and 7: the moments and the distribution of log P."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.instruments import AttentionMap, lln_map, log_moments, lognormal_fit, softmax_map
from lln.lab.core.charts import Axis, lines, svg
from lln.lab.core.palette import BLUE, GREEN, MATCHED, ORANGE, Style
from lln.lab.paper.analysis import LLN, Figure, Plan, Progress, Rows, Verdict, alpha_of, inputs, summary, value

SIGMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
MODERATE = 1.25  # the largest sigma that Prop. 3.1 is held to
CLOSE = 0.03  # relative: what "matches" is taken to mean; a set of draws has its own 1 %
ROUGHLY = 0.1  # what "approximates" is taken to mean
BINS = 80
SIGMA = 1.0  # of Fig. 7
FAR, STRAIGHT = 0.02, 0.998  # the largest distance and the least Q-Q R² of what is called log-normal
THEORY = {
    "measured": Style(BLUE, (1, 0), "circle"),
    "Prop. 3.1": Style(ORANGE, (8, 3), "square"),
    "t + t²/2d": Style(GREEN, (2, 2), "triangle-up"),
}


def make(series: str, sigma: float, plan: Plan, seed: int, run: int) -> AttentionMap:
    q, k = (sigma * z for z in inputs(plan, seed, run))
    if series == "softmax":
        return softmax_map(q, k)
    alpha = alpha_of(series, sigma, plan)
    return lln_map(q, k, alpha, alpha)


def measure_5a(plan: Plan, seed: int, progress: Progress) -> Rows:
    rows = []
    for sigma in SIGMAS:
        progress(f"softmax, sigma {sigma:g}")
        t, at = sigma**4, {"sigma": sigma, "t": sigma**4}
        found = [log_moments(make("softmax", sigma, plan, seed, run)) for run in range(plan.seeds)]
        measured = summary("variance", [m.variance.item() for m in found]) | summary(
            "mean", [m.mean.item() for m in found]
        )
        rows.append({"series": "measured", **at, **measured})
        for series, predicted in (("Prop. 3.1", t), ("t + t²/2d", t + t * t / (2 * plan.dim))):
            rows.append({"series": series, **at, "variance": predicted, "mean": -math.log(plan.length) - predicted / 2})
    return rows


def judge_5a(plan: Plan, rows: Rows) -> list[Verdict]:
    def off(series: str, name: str) -> dict[float, float]:
        """By sigma: measured over predicted, minus 1."""
        return {
            s: value(rows, "measured", {"sigma": s}, name) / value(rows, series, {"sigma": s}, name) - 1 for s in SIGMAS
        }

    variance, mean, better = off("Prop. 3.1", "variance"), off("Prop. 3.1", "mean"), off("t + t²/2d", "variance")
    moderate = max(abs(d[s]) for d in (variance, mean) for s in SIGMAS if s <= MODERATE)
    last = SIGMAS[-1]
    corrected = max(abs(x) for x in better.values())
    return [
        Verdict(
            claim=f"Prop. 3.1 predicts variance and mean of log P for moderate inputs (sigma up to {MODERATE}).",
            holds=moderate <= CLOSE,
            numbers={"largest_deviation": moderate},
            sentence=f"Up to sigma = {MODERATE} both are within {100 * moderate:.1f} % of the prediction.",
        ),
        Verdict(
            claim="Measurements perfectly match the theoretical estimation.",
            holds=all(abs(x) <= CLOSE for x in variance.values()),
            numbers={"deviation_at_largest_sigma": variance[last], "corrected": corrected},
            sentence=f"At sigma = {last:g} the variance is {100 * variance[last]:+.0f} % off; t + t²/2d is within "
            f"{100 * corrected:.1f} % everywhere.",
        ),
    ]


def charts_5a(plan: Plan, rows: Rows) -> dict[str, str]:
    x = Axis("t", "t = sigma_q² sigma_k²")
    return {
        "-variance": svg(lines(rows, THEORY, x, Axis("variance", "variance of log P"), points=True)),
        "-mean": svg(lines(rows, THEORY, x, Axis("mean", "mean of log P"), points=True)),
    }


def measure_5b(plan: Plan, seed: int, progress: Progress) -> Rows:
    rows = []
    for sigma in SIGMAS:
        for series in ("softmax", *LLN):
            progress(f"{series}, sigma {sigma:g}")
            found = [log_moments(make(series, sigma, plan, seed, run)) for run in range(plan.seeds)]
            measured = summary("variance", [m.variance.item() for m in found])
            measured |= summary("within", [m.within.item() for m in found])
            rows.append({"series": series, "sigma": sigma, **measured})
    return rows


def judge_5b(plan: Plan, rows: Rows) -> list[Verdict]:
    def ratios(series: str) -> dict[float, float]:
        return {
            s: value(rows, series, {"sigma": s}, "variance") / value(rows, "softmax", {"sigma": s}, "variance")
            for s in SIGMAS
        }

    verdicts = []
    for series in ("paper", "variance"):
        found = ratios(series)
        over_t = {s: value(rows, series, {"sigma": s}, "variance") / s**4 for s in SIGMAS}
        verdicts.append(
            Verdict(
                claim=f"With moment matching ({series}) the variance of LLN approximates that of softmax.",
                holds=all(abs(x - 1) <= ROUGHLY for x in found.values()),
                numbers={f"ratio_at_{s:g}": found[s] for s in SIGMAS} | {f"over_t_at_{s:g}": over_t[s] for s in SIGMAS},
                sentence=f"Variance of log P with {series} matching, over softmax's: "
                + ", ".join(f"{found[s]:.2f} at sigma {s:g}" for s in SIGMAS)
                + "; over t = sigma_q² sigma_k²: "
                + ", ".join(f"{over_t[s]:.2f} at {s:g}" for s in (1.0, 1.5, 2.0))
                + ".",
            )
        )
    small = ratios("unmatched")
    return [
        *verdicts,
        Verdict(
            claim="Without moment matching (alpha = beta = 1) the variance of LLN is much smaller than softmax's.",
            holds=all(x < 0.5 for s, x in small.items() if s >= 1),
            numbers={f"ratio_at_{s:g}": small[s] for s in SIGMAS},
            sentence=f"Unmatched, the ratio is {small[1.0]:.2f} at sigma = 1 and {small[SIGMAS[-1]]:.2f} at "
            f"{SIGMAS[-1]:g}; at {SIGMAS[0]:g} it is {small[SIGMAS[0]]:.2f}.",
        ),
    ]


def charts_5b(plan: Plan, rows: Rows) -> dict[str, str]:
    y = Axis("variance", "variance of log P", logarithmic=True)
    return {"": svg(lines(rows, MATCHED, Axis("sigma", "sigma of queries and keys"), y, points=True))}


def log_entries(p: AttentionMap) -> Tensor:
    return p.dense().log().flatten()


def measure_7(plan: Plan, seed: int, progress: Progress) -> Rows:
    entries = {}
    rows: Rows = []
    for series in ("softmax", *LLN):
        progress(f"{series}, sigma {SIGMA:g}")
        maps = [make(series, SIGMA, plan, seed, run) for run in range(plan.seeds)]
        entries[series] = torch.cat([log_entries(p) for p in maps])
        fits = [lognormal_fit(p) for p in maps]
        found = {"mean": entries[series].mean().item(), "variance": entries[series].var().item()}
        for name in ("distance", "qq_r2", "skewness"):
            found |= summary(name, [getattr(fit, name).item() for fit in fits])
        rows.append(
            {"series": series, "kind": "fit", **found, "from_softmax": distance(entries["softmax"], entries[series])}
        )
    low, high = limits(list(entries.values()))
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    for series, values in entries.items():
        density = torch.histogram(values, edges, density=True).hist.tolist()
        centres = ((edges[1:] + edges[:-1]) / 2).tolist()
        rows += [
            {"series": series, "kind": "density", "log_p": x, "density": y}
            for x, y in zip(centres, density, strict=True)
        ]
    return rows


def limits(entries: list[Tensor]) -> tuple[float, float]:
    """Where all but a few entries of any series lie."""
    ordered = [t.sort().values for t in entries]
    cut = len(ordered[0]) // 2000
    return min(t[cut].item() for t in ordered), max(t[-cut - 1].item() for t in ordered)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two distribution functions (two-sample Kolmogorov-Smirnov)."""
    one, other = one.sort().values, other.sort().values
    at = torch.cat([one, other])
    apart = torch.searchsorted(one, at, right=True) / len(one) - torch.searchsorted(other, at, right=True) / len(other)
    return apart.abs().max().item()


def judge_7(plan: Plan, rows: Rows) -> list[Verdict]:
    fits = {row["series"]: row for row in rows if row["kind"] == "fit"}
    softmax, paper, unmatched = fits["softmax"], fits["paper"], fits["unmatched"]
    return [
        Verdict(
            claim="The distribution of LLN closely follows that of softmax after moment matching.",
            holds=paper["from_softmax"] < ROUGHLY,
            numbers={f"{name}_distance": fits[name]["from_softmax"] for name in LLN},
            sentence="Largest difference of the distribution functions of log P from softmax's: "
            + ", ".join(f"{name} {fits[name]['from_softmax']:.3f}" for name in LLN)
            + f". Skewness: softmax {softmax['skewness']:.2f}, LLN {paper['skewness']:.2f}.",
        ),
        Verdict(
            claim="The means differ slightly, because only variances are matched.",
            holds=abs(paper["mean"] - softmax["mean"]) < 0.2 < abs(unmatched["mean"] - softmax["mean"]),
            numbers={"paper_mean": paper["mean"], "softmax_mean": softmax["mean"], "unmatched_mean": unmatched["mean"]},
            sentence=f"Mean of log P: softmax {softmax['mean']:.2f}, LLN with paper matching {paper['mean']:.2f}, "
            f"unmatched {unmatched['mean']:.2f}.",
        ),
        Verdict(
            claim="Softmax attention is log-normal (Prop. 3.1).",
            holds=softmax["distance"] <= FAR and softmax["qq_r2"] >= STRAIGHT,
            numbers={"distance": softmax["distance"], "qq_r2": softmax["qq_r2"], "skewness": softmax["skewness"]},
            sentence=f"Kolmogorov-Smirnov distance {softmax['distance']:.3f}, Q-Q R² {softmax['qq_r2']:.4f}.",
        ),
        Verdict(
            claim="LLN attention is log-normal (Prop. 4.1).",
            holds=paper["distance"] <= FAR and paper["qq_r2"] >= STRAIGHT,
            numbers={"distance": paper["distance"], "qq_r2": paper["qq_r2"], "skewness": paper["skewness"]},
            sentence=f"Distance {paper['distance']:.3f}, Q-Q R² {paper['qq_r2']:.4f}, "
            f"skewness {paper['skewness']:.2f}, with paper matching.",
        ),
    ]


def charts_7(plan: Plan, rows: Rows) -> dict[str, str]:
    drawn = [row for row in rows if row["kind"] == "density"]
    return {"": svg(lines(drawn, MATCHED, Axis("log_p", "log P"), Axis("density", "density")))}


FIG5A = Figure(
    "fig5a",
    "Variance and mean of log P, softmax",
    lambda plan: len(SIGMAS),
    measure_5a,
    judge_5a,
    charts_5a,
)
FIG5B = Figure(
    "fig5b", "Variance of log P before and after moment matching", lambda plan: len(SIGMAS) * (1 + len(LLN)),
    measure_5b, judge_5b, charts_5b,
)  # fmt: skip
FIG7 = Figure("fig7", "Histogram of log P", lambda plan: 1 + len(LLN), measure_7, judge_7, charts_7)
