"""The points of the measured curves behind `variance` and `entropy` matching, and how they are read, in NumPy.

`data/curves.json` is the output of `lln calibrate`; `lln.matching.curves` says what it holds. All curves are smooth and
close to straight in logarithms, so they are interpolated there. Here nothing needs torch: every framework takes its
points from here. Functions with an argument `xp` are written for NumPy and whatever has its names, as jax.numpy does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from lln.files import read_data
from lln.kernels.paper_line import PAPER_A, PAPER_B

LENGTH = 1024  # of the entropy curves where no other is known


@functools.cache
def read_curves() -> dict[str, Any]:
    """`data/curves.json`, as `lln calibrate` wrote it."""
    curves: dict[str, Any] = read_data("curves")
    return curves


def take_logarithms(values: Any) -> Any:
    return np.log(np.asarray(values, dtype=np.float64))


def pchip(x: Any, y: Any) -> Any:
    """(x, y, slope) [3, n] for `interpolate`, x ascending. Fritsch and Carlson's slopes: the curve rises where the
    points rise and overshoots nowhere."""
    step = np.diff(x)
    secant = np.diff(y) / step
    w1, w2 = 2 * step[1:] + step[:-1], step[1:] + 2 * step[:-1]
    same_sign = secant[1:] * secant[:-1] > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        harmonic = (w1 + w2) / (w1 / secant[:-1] + w2 / secant[1:])
    inner = np.where(same_sign, harmonic, np.zeros_like(harmonic))
    return np.stack([x, y, np.concatenate([secant[:1], inner, secant[-1:]])])


def interpolate(xp: Any, at: Any, x: Any, y: Any, slope: Any) -> Any:
    """y(at) by monotone cubic Hermite interpolation; straight lines beyond the ends. y and slope may be of several
    curves over one x: [*curves, n], and the result is [*curves, *at.shape]. By masks rather than by indices, which
    frameworks have in different ways; there are few points."""
    lead = y.shape[:-1] + (1,) * len(at.shape)
    y, slope = (t.reshape((*lead, t.shape[-1])) for t in (y, slope))
    inside = xp.minimum(xp.maximum(at, x[0]), x[-1])
    chosen = mark_interval(xp, x, inside)  # [*at.shape, n - 1]
    (x0, y0, m0), (x1, y1, m1) = (
        [(t[..., part] * chosen).sum(-1) for t in (x, y, slope)] for part in (slice(None, -1), slice(1, None))
    )
    step, rise = x1 - x0, y1 - y0
    u, m0, m1 = (inside - x0) / step, m0 * step, m1 * step
    found = y0 + u * (m0 + u * (3 * rise - 2 * m0 - m1 + u * (m0 + m1 - 2 * rise)))
    return found + (at - inside) * xp.where(at < x[0], slope[..., 0], slope[..., -1])


def mark_interval(xp: Any, x: Any, at: Any) -> Any:
    """[*at.shape, n - 1]: 1 for the interval x[i] < at <= x[i + 1], 0 for the others. The first begins nowhere."""
    low, at = x[:-1], at[..., None]
    after = xp.minimum((low < at).astype(x.dtype) + (low == x[0]).astype(x.dtype), 1)
    return after * (at <= x[1:]).astype(x.dtype)


def interpolate_dims(per_dim: list[list[float]], head_dim: int) -> Any:
    """The logarithms [n] of values at this head dim, from the values at the measured ones."""
    dims = take_logarithms(read_curves()["head_dims"])
    at = np.asarray(math.log(head_dim))
    return np.stack([interpolate(np, at, *pchip(dims, values)) for values in take_logarithms(per_dim).T])


@functools.cache
def find_points(matching: str, head_dim: int) -> Any:
    """Of "paper" the line's (a, b). Of "variance" the curve log V -> log s2, as `pchip` has it. Of "entropy" for each
    measured length N the curve log t -> log s2, likewise, and a fourth row of log N: [lengths, 4, n]. All are over the
    same t."""
    if matching == "paper":
        return np.asarray([PAPER_A, PAPER_B])
    curves = read_curves()
    dims = curves["head_dims"]
    if not dims[0] <= head_dim <= dims[-1]:
        raise ValueError(
            f"matching={matching!r}: the curves cover head_dim {dims[0]} to {dims[-1]}; got {head_dim}. "
            "Use matching='paper', or match_data on real queries and keys."
        )
    if matching == "variance":
        per_dim = [curves["variance"][str(dim)]["value"] for dim in dims]
        return pchip(interpolate_dims(per_dim, head_dim), take_logarithms(curves["s2"]))
    log_t, log_n = take_logarithms(curves["t"]), take_logarithms(curves["lengths"])
    made = []
    for length in curves["lengths"]:
        per_dim = [curves["entropy"][str(dim)][str(length)]["s2"] for dim in dims]
        made.append(pchip(log_t, interpolate_dims(per_dim, head_dim)))
    lengths = np.broadcast_to(log_n[:, None, None], (len(log_n), 1, len(log_t)))
    return np.concatenate([np.stack(made), lengths], 1)


def find_s2(xp: Any, points: Any, matching: str, t: Any, length: Any) -> Any:
    """s2 of the matching for softmax scores of variance t; `entropy` is that over `length` keys. Beyond the measured
    lengths the nearest one serves. points: of `find_points` as an array of t's dtype; all arrays are `xp`'s."""
    if matching == "paper":
        return (t - points[1]) / points[0]
    if matching == "variance":
        return xp.exp(interpolate(xp, xp.log(t), points[0], points[1], points[2]))
    known = points[:, 3, 0]
    values = interpolate(xp, xp.log(t), points[0, 0], points[:, 1], points[:, 2])  # [lengths, *t.shape]
    at = xp.minimum(xp.maximum(xp.log(length) + 0 * t, known[0]), known[-1])
    chosen = mark_interval(xp, known, at)  # [*t.shape, lengths - 1]
    shorter, longer = ((part * chosen).sum(-1) for part in (known[:-1], known[1:]))
    u = (at - shorter) / (longer - shorter)
    low = high = 0 * t
    for i in range(known.shape[0] - 1):
        low, high = low + values[i] * chosen[..., i], high + values[i + 1] * chosen[..., i]
    return xp.exp(low + u * (high - low))


def match_spreads(
    xp: Any, points: Any, sigma_q: Any, sigma_k: Any, head_dim: int, matching: str, scale: float | None, length: Any
) -> tuple[Any, Any]:
    """(alpha, beta) for queries and keys with these standard deviations, arrays of one dtype and of one shape, as
    length must expand to."""
    t = (sigma_q * sigma_k) ** 2
    if scale is not None:
        t = t * (scale * scale * head_dim)
    half = xp.sqrt(find_s2(xp, points, matching, t, length) / 2)
    return half / sigma_q, half / sigma_k


def match_numbers(
    sigma_q: float, sigma_k: float, head_dim: int, matching: str, scale: float | None, length: float
) -> tuple[float, float]:
    """The same for two numbers.

    >>> alpha, beta = match_numbers(1.0, 1.0, 64, "paper", None, 1024)
    >>> print(f"{alpha:.4f} {beta:.4f}")
    2.1355 2.1355
    """
    q, k = (np.asarray(number, dtype=np.float64) for number in (sigma_q, sigma_k))
    points = find_points(matching, head_dim)
    alpha, beta = match_spreads(np, points, q, k, head_dim, matching, scale, np.asarray(float(length)))
    return float(alpha), float(beta)
