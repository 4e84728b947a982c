"""Fig. 2: entropy and spectral gap of softmax, LLN and other kernels against the temperature."""

from lln.instruments import entropy, spectral_gap
from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.palette import GREY, MATCHED, OLIVE, SKY, Style
from lln.lab.paper.analysis import LLN, Draws, Figure, Progress, Rows, Verdict, make_maps, read_curve, summarize
from lln.peers.simple_kernels import FEATURES

SIGMAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0)  # temperatures 1 / sigma^2 from 4 to .25
SERIES = ("softmax", *LLN, *FEATURES)
NEAR_BITS, NEAR_GAP = 0.25, 0.025  # within these LLN is said to follow softmax
INDIFFERENT_BITS = 0.05  # a kernel whose entropy moves less than this does not know the temperature
STYLES = MATCHED | {
    "ReLU": Style(SKY, (6, 2), "triangle-down"),
    "quadratic": Style(GREY, (3, 3), "triangle-left"),
    "ELU": Style(OLIVE, (12, 4), "triangle-right"),
}


def measure(draws: Draws, seed: int, progress: Progress) -> Rows:
    rows = []
    for sigma in SIGMAS:
        for series in SERIES:
            progress(f"{series}, sigma {sigma:g}")
            maps = make_maps(series, sigma, draws, seed)
            found = summarize("entropy", [entropy(p).item() for p in maps])
            found |= summarize("gap", [spectral_gap(p).item() for p in maps])
            rows.append({"series": series, "sigma": sigma, "temperature": sigma**-2, **found})
    return rows


def judge(draws: Draws, rows: Rows) -> list[Verdict]:
    return [
        *(judge_following(rows, series) for series in ("paper", "variance", "entropy")),
        judge_matching(rows),
        *(judge_indifference(rows, kernel) for kernel in FEATURES),
    ]


def subtract_softmax(rows: Rows, series: str, name: str) -> dict[float, float]:
    """By temperature, from the lowest: LLN minus softmax."""
    ours, theirs = (read_curve(rows, which, "temperature", name) for which in (series, "softmax"))
    return {t: ours[t] - theirs[t] for t in sorted(ours)}


def find_largest(differences: dict[float, float]) -> tuple[float, float]:
    """(temperature, difference) where it is largest."""
    return max(differences.items(), key=lambda pair: abs(pair[1]))


def judge_following(rows: Rows, series: str) -> Verdict:
    bits, gaps = (subtract_softmax(rows, series, name) for name in ("entropy", "gap"))
    near = [t for t in bits if all(abs(bits[u]) <= NEAR_BITS and abs(gaps[u]) <= NEAR_GAP for u in bits if u >= t)]
    (t_bits, most_bits), (t_gap, most_gap) = find_largest(bits), find_largest(gaps)
    from_there = f"for temperatures from {min(near):.2f} up" if near else "at no measured temperature"
    return Verdict(
        claim=f"With moment matching ({series}) the entropy and spectral gap of LLN are similar to those of softmax.",
        holds=len(near) == len(bits),
        numbers={"follows_from": min(near, default=None), "most_bits": most_bits, "most_gap": most_gap},
        sentence=f"LLN with {series} matching is within {NEAR_BITS} bits and {NEAR_GAP} of the gap {from_there}; "
        "the largest differences are "
        f"{most_bits:+.2f} bits at {t_bits:.2f} and {most_gap:+.3f} in the gap at {t_gap:.2f}.",
    )


def judge_matching(rows: Rows) -> Verdict:
    t, most = find_largest(subtract_softmax(rows, "unmatched", "entropy"))
    t_paper, paper = find_largest(subtract_softmax(rows, "paper", "entropy"))
    return Verdict(
        claim="Moment matching is essential to align LLN with softmax.",
        holds=abs(most) > abs(paper),
        numbers={"unmatched_bits": most, "paper_bits": paper},
        sentence=f"Unmatched LLN is up to {most:+.2f} bits from softmax (at temperature {t:.2f}), "
        f"with paper matching {paper:+.2f} (at {t_paper:.2f}).",
    )


def judge_indifference(rows: Rows, kernel: str) -> Verdict:
    bits, softmax = ([row["entropy"] for row in rows if row["series"] == name] for name in (kernel, "softmax"))
    moved = max(bits) - min(bits)
    return Verdict(
        claim=f"The {kernel} kernel is indifferent to the temperature.",
        holds=moved <= INDIFFERENT_BITS,
        numbers={"moved_bits": moved, "entropy": bits[0]},
        sentence=f"Over the temperatures measured the entropy of the {kernel} kernel moves by {moved:.2g} bits around "
        f"{bits[0]:.3f}, that of softmax by {max(softmax) - min(softmax):.2f}.",
    )


def draw(draws: Draws, rows: Rows) -> dict[str, str]:
    x = Axis("temperature", "temperature 1 / (sigma_q sigma_k)", True, (0.25, 0.5, 1, 2, 4))
    titles = {"entropy": f"entropy (bits), {draws.length} keys", "gap": "spectral gap"}
    return {f"-{name}": draw_lines(rows, STYLES, x, Axis(name, title), points=True) for name, title in titles.items()}


FIG2 = Figure(
    "fig2", "Entropy and spectral gap against the temperature", len(SIGMAS) * len(SERIES), measure, judge, draw
)
