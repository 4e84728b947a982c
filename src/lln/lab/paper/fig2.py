"""Fig. 2: entropy and spectral gap of softmax, LLN and other kernels against the temperature."""

from lln.instruments import entropy, spectral_gap
from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.palette import GREY, MATCHED, OLIVE, SKY, Style
from lln.lab.core.progress import Progress
from lln.lab.paper.analysis import LLN, Draws, Figure, Rows, Verdict, judge, make_maps, read_curve, summarize
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


def judge_all(draws: Draws, rows: Rows) -> list[Verdict]:
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
    numbers = {"follows_from": min(near, default=None), "most_bits": most_bits, "most_gap": most_gap}
    facts = {"series": series, "t_bits": t_bits, "t_gap": t_gap, "near_bits": NEAR_BITS, "near_gap": NEAR_GAP}
    return judge("fig2_following", len(near) == len(bits), numbers, **facts)


def judge_matching(rows: Rows) -> Verdict:
    t, most = find_largest(subtract_softmax(rows, "unmatched", "entropy"))
    t_paper, paper = find_largest(subtract_softmax(rows, "paper", "entropy"))
    numbers = {"unmatched_bits": most, "paper_bits": paper}
    return judge("fig2_matching", abs(most) > abs(paper), numbers, t=t, t_paper=t_paper)


def judge_indifference(rows: Rows, kernel: str) -> Verdict:
    bits, softmax = ([row["entropy"] for row in rows if row["series"] == name] for name in (kernel, "softmax"))
    moved, theirs = (max(values) - min(values) for values in (bits, softmax))
    numbers = {"moved_bits": moved, "entropy": bits[0]}
    return judge("fig2_indifference", moved <= INDIFFERENT_BITS, numbers, kernel=kernel, softmax=theirs)


def draw(draws: Draws, rows: Rows) -> dict[str, str]:
    x = Axis("temperature", "temperature 1 / (sigma_q sigma_k)", True, (0.25, 0.5, 1, 2, 4))
    titles = {"entropy": f"entropy (bits), {draws.length} keys", "gap": "spectral gap"}
    return {f"-{name}": draw_lines(rows, STYLES, x, Axis(name, title), points=True) for name, title in titles.items()}


FIG2 = Figure(
    "fig2", "Entropy and spectral gap against the temperature", len(SIGMAS) * len(SERIES), measure, judge_all, draw
)
