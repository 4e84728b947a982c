"""Figs. 6a and 6b: the variance of the logarithm of a sum of d log-normal variables."""

import math

import torch

from lln.lab.calibration import within_row_variance
from lln.lab.core.charts import Axis, draw_lines
from lln.lab.core.palette import AMBER, GREEN, SKY, SOLID, Style
from lln.lab.core.progress import Progress
from lln.lab.core.seeds import normal
from lln.lab.paper.analysis import CPU, Draws, Figure, Rows, Verdict, judge, read_curve

DIMS = (32, 64, 128)
MODERATE = tuple(0.1 * i for i in range(2, 13))  # s2 of Fig. 6a
BROAD = tuple(float(i) for i in range(1, 31))  # s2 of Fig. 6b
LARGE = 9.0  # from here on "sufficiently large"
CLOSE = 0.1  # relative: as near as a chart shows
STRAIGHT = 0.1  # slopes of two halves that differ by less belong to one line
COLOURS = {32: SKY, 64: GREEN, 128: AMBER}
STYLES = {f"d = {dim}": Style(COLOURS[dim], SOLID, "circle") for dim in DIMS} | {
    f"d = {dim}, {what}": Style(COLOURS[dim], (6, 4), "square") for dim in DIMS for what in ("Fenton", "line")
}


def fenton(s2: float, dim: int) -> float:
    """Eq. (28)."""
    return math.log((math.exp(s2) - 1) / dim + 1)


def shared_row(s2: float, dim: int) -> float:
    """The same for the entries of one row of LLN, which share their query: half of s2 is common to all of them."""
    return math.log(1 + (math.exp(s2) - math.exp(s2 / 2)) / dim)


def measure_variances(s2s: tuple[float, ...], draws: Draws, seed: int, progress: Progress) -> Rows:
    """Of ln sum_c exp(sqrt(s2) z_c) with d independent z."""
    rows = []
    for dim in DIMS:
        z = normal((seed, dim, draws.samples), draws.samples, dim, device=CPU)
        for s2 in s2s:
            progress(f"d = {dim}, s2 = {s2:g}")
            found = torch.cat([(math.sqrt(s2) * part).logsumexp(1) for part in z.split(2**14)])
            spread = found.var().item()
            error = math.sqrt(((found - found.mean()).pow(4).mean().item() - spread**2) / len(found))
            rows.append({"series": f"d = {dim}", "dim": dim, "s2": s2, "variance": spread, "variance_error": error})
    return rows


def measure_6a(draws: Draws, seed: int, progress: Progress) -> Rows:
    rows = measure_variances(MODERATE, draws, seed, progress)
    rows += [
        {"series": f"d = {dim}, Fenton", "dim": dim, "s2": s2, "variance": fenton(s2, dim)}
        for dim in DIMS
        for s2 in MODERATE
    ]
    progress("rows of LLN")
    z_q, z_k = (normal((seed, draws.dim, draws.length, side), draws.length, draws.dim, device=CPU) for side in (0, 1))
    for s2 in MODERATE:
        measured = within_row_variance(z_q, z_k, s2).item()
        rows.append({"series": "row of LLN", "dim": draws.dim, "s2": s2, "variance": measured})
    return rows


def judge_6a(draws: Draws, rows: Rows) -> list[Verdict]:
    curves = {dim: read_curve(rows, f"d = {dim}", "s2", "variance") for dim in DIMS}
    off = {dim: max(abs(x / fenton(s2, dim) - 1) for s2, x in curve.items()) for dim, curve in curves.items()}
    in_row = read_curve(rows, "row of LLN", "s2", "variance")
    paper, ours = (max(abs(in_row[s2] / form(s2, draws.dim) - 1) for s2 in MODERATE) for form in (fenton, shared_row))
    deviations = {f"deviation_d{dim}": off[dim] for dim in DIMS}
    return [
        judge("fig6a_independent", max(off.values()) <= CLOSE, deviations, off=off),
        judge("fig6a_shared", paper <= CLOSE, {"eq_28": paper, "shared_query": ours}, dim=draws.dim),
    ]


def fit_line(rows: Rows, dim: int, low: float, high: float) -> tuple[float, float, float]:
    """(slope, intercept, R^2) of the least-squares line over a range of s2."""
    import scipy.stats  # takes a while, and most that import this module fit nothing

    curve = read_curve(rows, f"d = {dim}", "s2", "variance")
    x = [s2 for s2 in BROAD if low <= s2 <= high]
    found = scipy.stats.linregress(x, [curve[s2] for s2 in x])
    return float(found.slope), float(found.intercept), float(found.rvalue) ** 2


def measure_6b(draws: Draws, seed: int, progress: Progress) -> Rows:
    rows = measure_variances(BROAD, draws, seed, progress)
    for dim in DIMS:
        slope, intercept, _ = fit_line(rows, dim, LARGE, BROAD[-1])
        rows += [
            {"series": f"d = {dim}, line", "dim": dim, "s2": s2, "variance": slope * s2 + intercept}
            for s2 in BROAD
            if s2 >= LARGE
        ]
    return rows


def judge_6b(draws: Draws, rows: Rows) -> list[Verdict]:
    verdicts = []
    middle = (LARGE + BROAD[-1]) / 2
    for dim in DIMS:
        slope, intercept, r2 = fit_line(rows, dim, LARGE, BROAD[-1])
        first, second = fit_line(rows, dim, LARGE, middle)[0], fit_line(rows, dim, middle, BROAD[-1])[0]
        numbers = {"slope": slope, "intercept": intercept, "r2": r2, "first_half": first, "second_half": second}
        ends = {"low": LARGE, "middle": middle, "high": BROAD[-1]}
        verdicts.append(judge("fig6b", abs(second / first - 1) <= STRAIGHT, numbers, dim=dim, **ends))
    return verdicts


def draw(draws: Draws, rows: Rows) -> dict[str, str]:
    """Of Fig. 6a without the rows of LLN, which have no style."""
    drawn = [row for row in rows if row["series"] in STYLES]
    y = Axis("variance", "variance of ln of the sum", from_zero=True)
    return {"": draw_lines(drawn, STYLES, Axis("s2", "s2 of each variable", from_zero=True), y)}


FIG6A = Figure(
    "fig6a", "Sums of log-normal variables, moderate spread", len(DIMS) * len(MODERATE) + 1, measure_6a, judge_6a, draw
)
FIG6B = Figure(
    "fig6b", "Sums of log-normal variables, broad spread", len(DIMS) * len(BROAD), measure_6b, judge_6b, draw
)
