"""The measured curves behind `variance` and `entropy` matching, and how they are read between their points.

`data/curves.json` is the output of `lln calibrate`. It holds, for independent Gaussian queries and keys,

    variance   V_d(s2): the variance of log P_LLN within a row, where s2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2
    entropy    s2_{d,N}(t): the s2 at which LLN has the entropy of softmax with score variance t, over N keys

All are smooth and close to straight in logarithms, so they are interpolated there: monotone cubic (PCHIP) along a curve
and across d, linear across log N.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import Any

import torch
from torch import Tensor

from lln.kernels.common import wide_dtype


@dataclasses.dataclass(frozen=True)
class Curve:
    """y(x) by monotone cubic Hermite interpolation; straight lines beyond the ends."""

    x: Tensor  # [n] ascending
    y: Tensor  # [n]
    slope: Tensor  # [n]

    def __call__(self, at: Tensor) -> Tensor:
        low, high = self.x[0], self.x[-1]
        inside = torch.minimum(torch.maximum(at, low), high)
        i = torch.bucketize(inside, self.x[1:-1])
        # take, not []: an index of no dimensions would be read on the host, which waits for the device.
        (x0, y0, m0), (x1, y1, m1) = ([t.take(j) for t in (self.x, self.y, self.slope)] for j in (i, i + 1))
        step, rise = x1 - x0, y1 - y0
        u, m0, m1 = (inside - x0) / step, m0 * step, m1 * step
        y = y0 + u * (m0 + u * (3 * rise - 2 * m0 - m1 + u * (m0 + m1 - 2 * rise)))
        return y + (at - inside) * torch.where(at < low, self.slope[0], self.slope[-1])

    def to(self, device: torch.device) -> Curve:
        dtype = wide_dtype(device)
        return Curve(*(t.to(device, dtype) for t in (self.x, self.y, self.slope)))


def pchip(x: Tensor, y: Tensor) -> Curve:
    """Fritsch and Carlson's slopes: the curve rises where the points rise and overshoots nowhere."""
    step, secant = x.diff(), y.diff() / x.diff()
    w1, w2 = 2 * step[1:] + step[:-1], step[1:] + 2 * step[:-1]
    same_sign = secant[1:] * secant[:-1] > 0
    harmonic = (w1 + w2) / (w1 / secant[:-1] + w2 / secant[1:])
    inner = torch.where(same_sign, harmonic, torch.zeros_like(harmonic))
    return Curve(x, y, torch.cat([secant[:1], inner, secant[-1:]]))


@functools.cache
def stored() -> dict[str, Any]:
    text = importlib.resources.files("lln").joinpath("data/curves.json").read_text(encoding="utf-8")
    curves: dict[str, Any] = json.loads(text)
    return curves


def check_head_dim(head_dim: int, matching: str) -> None:
    dims = stored()["head_dims"]
    if not dims[0] <= head_dim <= dims[-1]:
        raise ValueError(
            f"matching={matching!r}: the curves cover head_dim {dims[0]} to {dims[-1]}; got {head_dim}. "
            "Use matching='paper', or match_data on real queries and keys."
        )


def across_dims(per_dim: list[Tensor], head_dim: int) -> Tensor:
    """Values [n] at this head dim, from those at the measured ones."""
    dims = torch.tensor(stored()["head_dims"], dtype=torch.float64, device="cpu").log()
    at = torch.tensor([math.log(head_dim)], dtype=torch.float64, device="cpu")
    return torch.cat([pchip(dims, values)(at) for values in torch.stack(per_dim, -1)])


# Curves by (head_dim, device). Plain dictionaries: torch.compile does not look into functools.cache.
VARIANCE_INVERSES: dict[tuple[int, str], Curve] = {}
ENTROPY_CURVES: dict[tuple[int, str], tuple[Tensor, list[Curve]]] = {}


def variance_inverse(head_dim: int, device: torch.device) -> Curve:
    """log V -> log s2."""
    key = head_dim, str(device)
    if key not in VARIANCE_INVERSES:
        VARIANCE_INVERSES[key] = make_variance_inverse(head_dim, device)
    return VARIANCE_INVERSES[key]


def entropy_curves(head_dim: int, device: torch.device) -> tuple[Tensor, list[Curve]]:
    """The measured log N, and for each the curve log t -> log s2."""
    key = head_dim, str(device)
    if key not in ENTROPY_CURVES:
        ENTROPY_CURVES[key] = make_entropy_curves(head_dim, device)
    return ENTROPY_CURVES[key]


def make_variance_inverse(head_dim: int, device: torch.device) -> Curve:
    check_head_dim(head_dim, "variance")
    curves = stored()["variance"]
    per_dim = [
        torch.tensor(curves[str(dim)]["value"], dtype=torch.float64, device="cpu").log()
        for dim in stored()["head_dims"]
    ]
    log_s2 = torch.tensor(stored()["s2"], dtype=torch.float64, device="cpu").log()
    return pchip(across_dims(per_dim, head_dim), log_s2).to(device)


def make_entropy_curves(head_dim: int, device: torch.device) -> tuple[Tensor, list[Curve]]:
    check_head_dim(head_dim, "entropy")
    curves, lengths = stored()["entropy"], stored()["lengths"]
    log_t = torch.tensor(stored()["t"], dtype=torch.float64, device="cpu").log()

    def curve(length: int) -> Curve:
        per_dim = [
            torch.tensor(curves[str(dim)][str(length)]["s2"], dtype=torch.float64, device="cpu").log()
            for dim in stored()["head_dims"]
        ]
        return pchip(log_t, across_dims(per_dim, head_dim)).to(device)

    log_lengths = torch.tensor(lengths, dtype=torch.float64, device="cpu").log().to(device, wide_dtype(device))
    return log_lengths, [curve(length) for length in lengths]


def s2_for_variance(t: Tensor, head_dim: int) -> Tensor:
    """s2 at which the variance of log P_LLN within a row is t."""
    return variance_inverse(head_dim, t.device)(t.log()).exp()


def s2_for_entropy(t: Tensor, head_dim: int, length: Tensor) -> Tensor:
    """s2 at which LLN over `length` keys has the entropy of softmax with score variance t. Beyond the measured lengths
    the nearest one serves."""
    log_lengths, curves = entropy_curves(head_dim, t.device)
    values = torch.stack([curve(t.log()) for curve in curves], -1)
    at = length.to(values.dtype).log().expand(t.shape)
    at = torch.minimum(torch.maximum(at, log_lengths[0]), log_lengths[-1])
    i = torch.bucketize(at, log_lengths[1:-1])
    shorter, longer = log_lengths.take(i), log_lengths.take(i + 1)
    u = (at - shorter) / (longer - shorter)
    low, high = (values.gather(-1, j.unsqueeze(-1)).squeeze(-1) for j in (i, i + 1))
    return (low + u * (high - low)).exp()
