"""What several seeds say: a mean, how far they lie apart, and whether two attentions differ by more than that."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

RULE = (
    "A difference exceeds the noise when it is larger than t times its standard error (Welch: sqrt(s1²/n1 + s2²/n2), t "
    "the 97.5 % point of Student's t with Welch's degrees of freedom). With one seed, or one pre-training, on either "
    "side nothing can be said. This is the noise of seeds; which examples a model is validated on comes on top, the "
    "same for all. Of many differences without meaning, one in twenty exceeds the noise all the same."
)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of one quantity over seeds. With one seed there is no deviation."""

    n: int
    mean: float
    deviation: float | None  # standard deviation, n - 1 in the denominator


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ValueError("spread: there must be at least one value.")
    return Spread(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclasses.dataclass(frozen=True)
class Difference:
    """a - b. `beyond`: whether it exceeds the noise; None: one seed, so nobody knows."""

    difference: float
    noise: float | None  # what it must exceed
    beyond: bool | None


def difference(a: Spread, b: Spread) -> Difference:
    between = a.mean - b.mean
    if a.deviation is None or b.deviation is None:
        return Difference(between, None, None)
    parts = a.deviation**2 / a.n, b.deviation**2 / b.n
    error = math.sqrt(sum(parts))
    if error == 0.0:  # all seeds agree to the last digit
        return Difference(between, 0.0, between != 0.0)
    freedom = error**4 / (parts[0] ** 2 / (a.n - 1) + parts[1] ** 2 / (b.n - 1))
    noise = t975(freedom) * error
    return Difference(between, noise, abs(between) > noise)


def t975(freedom: float) -> float:
    """x with P(|T| < x) = 0.95 for Student's T with this many degrees of freedom, whole or not."""
    import scipy.stats  # takes a while, and most that import this module have no two seeds

    return float(scipy.stats.t.ppf(0.975, freedom))
