"""Fig. 2: entropy and spectral gap of softmax, LLN and other kernels against the temperature."""

from __future__ import annotations

from lln.instruments import AttentionMap, entropy, kernel_map, lln_map, softmax_map, spectral_gap
from lln.lab.core.charts import Axis, lines, svg
from lln.lab.core.palette import GREY, MATCHED, OLIVE, SKY, Style
from lln.lab.paper.analysis import (
    LLN,
    Figure,
    Plan,
    Progress,
    Rows,
    Verdict,
    alpha_of,
    column,
    inputs,
    summary,
    value,
)
from lln.peers.simple_kernels import FEATURES

SIGMAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0)  # temperatures 1 / sigma^2 from 4 to .25
NEAR_BITS, NEAR_GAP = 0.25, 0.025  # within these LLN is said to follow softmax
INDIFFERENT_BITS = 0.05  # a kernel whose entropy moves less than this does not know the temperature
STYLES = MATCHED | {
    "ReLU": Style(SKY, (6, 2), "triangle-down"),
    "quadratic": Style(GREY, (3, 3), "triangle-left"),
    "ELU": Style(OLIVE, (12, 4), "triangle-right"),
}


def make(series: str, sigma: float, plan: Plan, seed: int, run: int) -> AttentionMap:
    q, k = (sigma * z for z in inputs(plan, seed, run))
    if series == "softmax":
        return softmax_map(q, k)
    if series in FEATURES:
        return kernel_map(FEATURES[series](q), FEATURES[series](k))
    alpha = alpha_of(series, sigma, plan)
    return lln_map(q, k, alpha, alpha)


def measure(plan: Plan, seed: int, progress: Progress) -> Rows:
    rows = []
    for sigma in SIGMAS:
        for series in ("softmax", *LLN, *FEATURES):
            progress(f"{series}, sigma {sigma:g}")
            maps = [make(series, sigma, plan, seed, run) for run in range(plan.seeds)]
            found = summary("entropy", [entropy(p).item() for p in maps])
            found |= summary("gap", [spectral_gap(p).item() for p in maps])
            rows.append({"series": series, "sigma": sigma, "temperature": sigma**-2, **found})
    return rows


def steps(plan: Plan) -> int:
    return len(SIGMAS) * (1 + len(LLN) + len(FEATURES))


def judge(plan: Plan, rows: Rows) -> list[Verdict]:
    verdicts = [follows(rows, series) for series in ("paper", "variance", "entropy")]
    verdicts.append(needs_matching(rows))
    return verdicts + [indifferent(rows, kernel) for kernel in FEATURES]


def apart(rows: Rows, series: str, name: str) -> dict[float, float]:
    """By temperature: LLN minus softmax."""
    return {
        t: value(rows, series, {"temperature": t}, name) - value(rows, "softmax", {"temperature": t}, name)
        for t in column(rows, "temperature")
    }


def worst(differences: dict[float, float]) -> tuple[float, float]:
    """(temperature, difference) where it is largest."""
    return max(differences.items(), key=lambda pair: abs(pair[1]))


def follows(rows: Rows, series: str) -> Verdict:
    bits, gaps = apart(rows, series, "entropy"), apart(rows, series, "gap")
    near = [t for t in bits if all(abs(bits[u]) <= NEAR_BITS and abs(gaps[u]) <= NEAR_GAP for u in bits if u >= t)]
    (t_bits, most_bits), (t_gap, most_gap) = worst(bits), worst(gaps)
    from_there = f"for temperatures from {min(near):.2f} up" if near else "at no measured temperature"
    return Verdict(
        claim=f"With moment matching ({series}) the entropy and spectral gap of LLN are similar to those of softmax.",
        holds=len(near) == len(bits),
        numbers={"follows_from": min(near, default=None), "most_bits": most_bits, "most_gap": most_gap},
        sentence=f"LLN with {series} matching is within {NEAR_BITS} bits and {NEAR_GAP} of the gap {from_there}; "
        "the largest differences are "
        f"{most_bits:+.2f} bits at {t_bits:.2f} and {most_gap:+.3f} in the gap at {t_gap:.2f}.",
    )


def needs_matching(rows: Rows) -> Verdict:
    t, most = worst(apart(rows, "unmatched", "entropy"))
    t_paper, paper = worst(apart(rows, "paper", "entropy"))
    return Verdict(
        claim="Moment matching is essential to align LLN with softmax.",
        holds=abs(most) > abs(paper),
        numbers={"unmatched_bits": most, "paper_bits": paper},
        sentence=f"Unmatched LLN is up to {most:+.2f} bits from softmax (at temperature {t:.2f}), "
        f"with paper matching {paper:+.2f} (at {t_paper:.2f}).",
    )


def indifferent(rows: Rows, kernel: str) -> Verdict:
    bits = [row["entropy"] for row in rows if row["series"] == kernel]
    moved = max(bits) - min(bits)
    softmax = [row["entropy"] for row in rows if row["series"] == "softmax"]
    return Verdict(
        claim=f"The {kernel} kernel is indifferent to the temperature.",
        holds=moved <= INDIFFERENT_BITS,
        numbers={"moved_bits": moved, "entropy": bits[0]},
        sentence=f"Over the temperatures measured the entropy of the {kernel} kernel moves by {moved:.2g} bits around "
        f"{bits[0]:.3f}, that of softmax by {max(softmax) - min(softmax):.2f}.",
    )


def charts(plan: Plan, rows: Rows) -> dict[str, str]:
    x = Axis("temperature", "temperature 1 / (sigma_q sigma_k)", True, (0.25, 0.5, 1, 2, 4))
    return {
        "-entropy": svg(lines(rows, STYLES, x, Axis("entropy", f"entropy (bits), {plan.length} keys"), points=True)),
        "-gap": svg(lines(rows, STYLES, x, Axis("gap", "spectral gap"), points=True)),
    }


FIG2 = Figure("fig2", "Entropy and spectral gap against the temperature", steps, measure, judge, charts)
