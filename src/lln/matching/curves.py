"""The measured curves behind `variance` and `entropy` matching, and how they are read between their points.

`data/curves.json` is the output of `lln calibrate`. It holds, for independent Gaussian queries and keys,

    variance   V_d(s2): the variance of log P_LLN within a row, where s2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2
    entropy    s2_{d,N}(t): the s2 at which LLN has the entropy of softmax with score variance t, over N keys

All are smooth and close to straight in logarithms, so they are interpolate there: monotone cubic (PCHIP) along a curve
and across d, linear across log N.
"""

from __future__ import annotations

from operator import index  # of a size that torch.compile(dynamic=True) holds as a symbol the number that curves need

import torch
from torch import Tensor

from lln import points
from lln.kernels.common import make_once, trace_as_constant, wide_dtype
from lln.points import read_curves as read_curves


def interpolate(at: Tensor, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """y(at) by monotone cubic Hermite interpolation; straight lines beyond the ends. y and slope may be of several
    curves over one x: [*curves, n], and the result is [*curves, *at.shape]."""

    low, high = take_ends(x, at)
    inside = torch.minimum(torch.maximum(at, low), high)
    i = find_interval(x, inside)
    (x0, y0, m0), (x1, y1, m1) = ([pick(t, j) for t in (x, y, slope)] for j in (i, i + 1))
    step, rise = x1 - x0, y1 - y0
    u, m0, m1 = (inside - x0) / step, m0 * step, m1 * step
    found = y0 + u * (m0 + u * (3 * rise - 2 * m0 - m1 + u * (m0 + m1 - 2 * rise)))
    first, last = take_ends(slope, at)
    return found + (at - inside) * torch.where(at < low, first, last)


def find_interval(x: Tensor, at: Tensor) -> Tensor:
    """i with x[i] < at <= x[i + 1]; beyond the ends the first or the last. Counted, since torch.bucketize, compiled for
    a GPU, takes no part of a constant (torch 2.11)."""
    return (x[1:-1] < at.unsqueeze(-1)).sum(-1)


def pick(t: Tensor, i: Tensor) -> Tensor:
    """Not t[..., i]: an index of no dimensions would be read on the host, which waits for the device."""
    return t.index_select(-1, i.flatten()).reshape(t.shape[:-1] + i.shape)


def take_ends(t: Tensor, at: Tensor) -> list[Tensor]:
    """The first and the last along the last dimension of t, ready to meet `at`. Slices: of a constant, torch.compile
    cannot take a single element."""
    return [part.reshape(t.shape[:-1] + (1,) * at.ndim) for part in (t[..., :1], t[..., -1:])]


def pchip(x: Tensor, y: Tensor) -> Tensor:
    """(x, y, slope) [3, n] for `interpolate`, x ascending, as `lln.points.pchip` makes them."""
    return torch.from_numpy(points.pchip(x.cpu().numpy(), y.cpu().numpy())).to(x.device)


# By (matching, head_dim, device). Tensors, not curves: objects that torch.compile had made itself while tracing it
# could not always keep (torch 2.11 on a GPU).
MADE: dict[tuple[str, int, str], Tensor] = {}


@trace_as_constant
def find_curves(matching: str, head_dim: int, device: torch.device) -> Tensor:
    """Of "variance" the curve log V -> log s2, as `pchip` has it. Of "entropy" for each measured length N the curve
    log t -> log s2, likewise, and a fourth row of log N: [lengths, 4, n]. All are over the same t."""

    def make() -> Tensor:
        points_of = torch.from_numpy(points.find_points(matching, head_dim)).to(wide_dtype(device))
        # What torch._dynamo.mark_static does, without importing the compiler: no symbols even with dynamic=True.
        points_of._dynamo_static_indices = set(range(points_of.ndim))  # type: ignore[attr-defined]
        return points_of

    return make_once(MADE, (matching, head_dim, str(device)), make, device)


def take(curves: Tensor, t: Tensor) -> Tensor:
    """The curves as a part of the graph that torch.compile makes: with dynamic=True it computes parts of a constant
    while it traces, makes symbols of their sizes, and cannot say where these come from."""
    return curves + t.new_zeros((), dtype=curves.dtype) if torch.compiler.is_compiling() else curves


def s2_for_variance(t: Tensor, head_dim: int) -> Tensor:
    """s2 at which the variance of log P_LLN within a row is t."""
    return interpolate(t.log(), *take(find_curves("variance", index(head_dim), t.device), t).unbind()).exp()


def s2_for_entropy(t: Tensor, head_dim: int, length: Tensor) -> Tensor:
    """s2 at which LLN over `length` keys has the entropy of softmax with score variance t. Beyond the measured lengths
    the nearest one serves."""
    curves = take(find_curves("entropy", index(head_dim), t.device), t)
    known = curves[:, 3, 0].contiguous()
    values = interpolate(t.log(), curves[0, 0], curves[:, 1], curves[:, 2])  # [lengths, *t.shape]
    at = length.to(values.dtype).log().expand(t.shape)
    shortest, longest = take_ends(known, at)
    at = torch.minimum(torch.maximum(at, shortest), longest)
    i = find_interval(known, at)
    shorter, longer = pick(known, i), pick(known, i + 1)
    u = (at - shorter) / (longer - shorter)
    low, high = (values.gather(0, j.unsqueeze(0)).squeeze(0) for j in (i, i + 1))
    return (low + u * (high - low)).exp()
