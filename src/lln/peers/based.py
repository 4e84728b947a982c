"""Based: the Taylor expansion exp(s) = 1 + s + s^2 / 2 of the scores s = scale q.k, as features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.pieces import feature_attention
from lln.peers.registry import register


@register("based")
def based(call: Call) -> Tensor:
    root, dim = math.sqrt(call.scale), call.query.shape[3]
    first, second = torch.triu_indices(dim, dim, device=call.query.device)
    # (q.k)^2 / 2 = sum_a q_a^2 k_a^2 / 2 + sum_{a<b} q_a q_b k_a k_b
    weight = torch.ones(len(first), dtype=compute_dtype(call.query.dtype), device=call.query.device)
    weight = weight.masked_fill(first == second, math.sqrt(0.5))

    def phi(x: Tensor) -> Tensor:
        x = x * root
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., first] * x[..., second] * weight], -1)

    return feature_attention(call, phi)
