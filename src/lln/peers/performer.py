"""Performer (FAVOR+): exp(q.k) as a mean over random directions w of exp(w.q - |q|^2/2) exp(w.k - |k|^2/2)."""

from __future__ import annotations

import math

from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.draws import RandomFeatures, gaussian
from lln.peers.pieces import exponential_attention
from lln.peers.registry import register
from lln.values import check_count


def default_features(head_dim: int) -> int:
    """D ln D as the paper says, to a multiple of 16: 256 for heads of 64, which the GPU kernels take."""
    return max(16, int(head_dim * math.log(head_dim)) // 16 * 16)


def performer(
    call: Call, *, features: int | None = None, seed: int = 0, orthogonal: bool = True, projection: Tensor | None = None
) -> Tensor:
    dim, dtype = call.query.shape[3], compute_dtype(call.query.dtype)
    q, k = (t.to(dtype) * math.sqrt(call.scale) for t in (call.query, call.key))
    if projection is None:
        count = default_features(dim) if features is None else check_count("features", features)
        projection = gaussian(count, dim, seed, orthogonal, device=q.device, dtype=dtype)
    w = projection.to(q.device, dtype)
    # |q|^2 is the same for all keys of a row, so it drops out.
    return exponential_attention(call, q @ w.T, k @ w.T - k.square().sum(-1, keepdim=True) / 2)


@register("performer", function=performer)
class Performer(RandomFeatures):
    """Performer as a module: its random directions are a buffer, drawn anew as it trains.

    Args:
        features: random directions, default D ln D to a multiple of 16.
        seed: they are a function of it and of how often they were drawn.
        orthogonal: directions at right angles in each square block, which lowers the variance.
        redraw_every: training calls after which they are drawn anew; None: drawn once.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("performer", num_heads=4, head_dim=16, features=32)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    usual_features = staticmethod(default_features)

    def attend(self, call: Call) -> Tensor:
        return performer(call, projection=self.current_projection())
