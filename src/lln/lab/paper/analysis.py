"""What the paper's analysis figures (2, 5, 6, 7) share: draws, attention maps of them, the shape of a verdict."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lln.checks import MATCHINGS, Matching
from lln.instruments import AttentionMap, kernel_map, lln_map, softmax_map
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.progress import Progress
from lln.lab.core.provenance import provenance
from lln.lab.core.seeds import normal
from lln.matching.moments import match_moments
from lln.peers.simple_kernels import FEATURES

CPU = torch.device("cpu")
LLN = ("unmatched", *MATCHINGS)
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Draws:
    """How much is measured: Gaussian queries and keys with sigma_q = sigma_k, in float64."""

    length: int = 1024
    dim: int = 64
    seeds: int = 4
    samples: int = 200_000  # sums of log-normal variables (Fig. 6)


QUICK = Draws(length=256, seeds=2, samples=20_000)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One claim of the paper, whether it holds, and the numbers that say so. None: they do not decide it."""

    claim: str
    holds: bool | None
    numbers: Mapping[str, float | None]
    sentence: str


def judge(claim: str, holds: bool | None, numbers: Mapping[str, float | None], **facts: Any) -> Verdict:
    """A verdict in the words of verdicts.txt, which show the numbers and what else is known."""
    words, sentence = write_paragraphs("verdicts.txt", claim, **{**numbers, **facts})
    return Verdict(words, holds, numbers, sentence)


WORDS: dict[bool | None, str] = {True: "holds", False: "DOES NOT HOLD", None: "not decided"}


def tell_verdicts(title: str, verdicts: Sequence[Mapping[str, Any]], *, quick: bool = False) -> str:
    """Stored verdicts for the reader of a terminal. quick: from so few draws that they are provisional."""
    lines, mark = [title], ""
    if quick:
        full, mark = Draws(), " (provisional)"
        lines.append(
            f"\nA quick look: {QUICK.length} tokens, where the full measurement has {full.length:,}, and fewer draws. "
            "Its verdicts are provisional: leave out --quick to decide."
        )
    return "\n".join([*lines, *(f"\n{WORDS[v['holds']]}{mark}: {v['claim']}\n  {v['sentence']}" for v in verdicts)])


@dataclasses.dataclass(frozen=True)
class Figure:
    name: str
    title: str
    steps: int  # that `measure` tells of
    measure: Callable[[Draws, int, Progress], Rows]
    judge: Callable[[Draws, Rows], list[Verdict]]
    charts: Callable[[Draws, Rows], dict[str, str]]  # SVG texts by the end of the file's name

    def make(self, draws: Draws, seed: int, progress: Progress) -> dict[str, Any]:
        """The result, ready for JSON. `progress` hears of so many steps."""
        rows = self.measure(draws, seed, progress)
        return {
            "figure": self.name,
            "title": self.title,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.judge(draws, rows)],
            "settings": dataclasses.asdict(draws),
            "provenance": provenance(seed, CPU),
            "rows": rows,
        }


def draw_inputs(draws: Draws, seed: int, run: int) -> tuple[Tensor, Tensor]:
    """Standard normal q and k, [1, 1, length, dim]. Every sigma and every attention uses the same draws: their
    differences are steadier than they are."""
    z_q, z_k = (
        normal((seed, draws.dim, draws.length, run, side), draws.length, draws.dim, device=CPU) for side in (0, 1)
    )
    return z_q[None, None], z_k[None, None]


def match_alpha(kind: str, sigma: float, dim: int, length: int) -> float:
    """alpha = beta of LLN for sigma_q = sigma_k = sigma.

    >>> match_alpha("unmatched", 2.0, 64, 1024)
    1.0
    """
    if kind == "unmatched":
        return 1.0
    return float(match_moments(sigma, sigma, dim, cast(Matching, kind), length=length)[0])


def make_maps(series: str, sigma: float, draws: Draws, seed: int) -> list[AttentionMap]:
    """Of each set of draws P of softmax, of a simple kernel, or of LLN with a matching: [1, 1, length, length]."""
    scaled = [[sigma * z for z in draw_inputs(draws, seed, run)] for run in range(draws.seeds)]
    if series == "softmax":
        return [softmax_map(q, k) for q, k in scaled]
    if series in FEATURES:
        return [kernel_map(FEATURES[series](q), FEATURES[series](k)) for q, k in scaled]
    alpha = match_alpha(series, sigma, draws.dim, draws.length)
    return [lln_map(q, k, alpha, alpha) for q, k in scaled]


def summarize(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean over the seeds and, where there are several, its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {name: statistics.fmean(values), f"{name}_error": error}


def read_curve(rows: Rows, series: str, x: str, y: str) -> dict[float, float]:
    """One series of the rows as {x: y}."""
    return {row[x]: row[y] for row in rows if row["series"] == series}
