"""What several seeds say: a mean, how far they lie apart, and whether two attentions differ by more than that."""

import dataclasses
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from lln.lab.core.documents import write_paragraphs

RULE = write_paragraphs("spread.txt", "rule")[0]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of one quantity over seeds. With one seed there is no deviation."""

    n: int
    mean: float
    deviation: float | None  # standard deviation, n - 1 in the denominator

    def to_row(self) -> dict[str, Any]:
        """For a chart, which marks spreads as soon as all of its points have one."""
        row: dict[str, Any] = {"value": self.mean, "seeds": self.n}
        if self.deviation is not None:
            row |= {"low": self.mean - self.deviation, "high": self.mean + self.deviation}
        return row


def find_spread(values: Sequence[float]) -> Spread:
    """
    >>> find_spread([80.0, 82.0, 84.0])
    Spread(n=3, mean=82.0, deviation=2.0)
    """
    if not values:
        raise ValueError("find_spread: there must be at least one value.")
    return Spread(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclasses.dataclass(frozen=True)
class Difference:
    """a - b. `beyond`: whether it exceeds the noise; None: one seed, so nobody knows."""

    difference: float
    noise: float | None  # what it must exceed
    beyond: bool | None


def find_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Of the means of two lists of values, by Welch's test at 5 % (see RULE).

    >>> find_difference([1.0, 1.1], [3.0, 3.1]).beyond
    True
    """
    between = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return Difference(between, None, None)
    if len(set(a)) == len(set(b)) == 1:  # all seeds agree to the last digit
        return Difference(between, 0.0, between != 0.0)
    import scipy.stats  # takes a while, and most that import this module have no two seeds

    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # where values of one side all but agree
        low, high = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    noise = float(high - low) / 2
    return Difference(between, noise, abs(between) > noise)
