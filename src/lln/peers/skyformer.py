"""Skyformer: the Gaussian kernel exp(-|q - k|^2 / 2) (scaled, not normalised) by Nystrom's method on landmarks Z drawn
from queries and keys:  P = kappa(q, Z) (kappa(Z, Z) + gamma I)^-1 kappa(Z, k)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import drop
from lln.peers.draws import uniform
from lln.peers.pieces import find_valid, group_heads, hidden_keys, iterative_inverse, positions
from lln.peers.registry import register
from lln.values import check_count, check_positive


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_i - y_j|^2 / 2); the exponent is at most 0 but for rounding."""
    square = x.square().sum(-1, keepdim=True) + y.square().sum(-1).unsqueeze(-2) - 2 * x @ y.transpose(-1, -2)
    return (square.clamp_min(0.0) / -2).exp()


def sample(t: Tensor, position: Tensor, mask: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` of each sample's valid rows of t, drawn without replacement, and which are none [B, 1, 1, count, 1]. The
    draw goes by position, so that padding does not change it."""
    order = uniform(t.shape[-2], seed, device=t.device)[position.clamp_min(0)].masked_fill(~mask, 2.0)  # [B, N]
    chosen = order.argsort(-1)[:, :count]
    missing = ~mask.gather(1, chosen)
    index = chosen[:, None, None, :, None].expand(*t.shape[:3], chosen.shape[1], t.shape[4])
    return t.gather(-2, index), missing[:, None, None, :, None]


@register("skyformer")
def skyformer(
    call: Call, *, landmarks: int = 128, gamma: float = 0.1, iterations: int | None = 6, seed: int = 0
) -> Tensor:
    """landmarks: half of them queries, half keys. iterations: None solves exactly."""
    check_count("landmarks", landmarks, 2)
    check_positive("gamma", gamma)
    q, k, v = (t * factor for t, factor in zip(group_heads(call), (*[math.sqrt(call.scale)] * 2, 1.0), strict=True))
    query_mask, key_mask = find_valid(call)
    query_position, key_position, _ = positions(call)
    k = k.expand(*q.shape[:3], *k.shape[3:])  # each query head has landmarks of its own
    parts = (
        sample(q, query_position, query_mask, landmarks // 2, seed),
        sample(k, key_position, key_mask, landmarks - landmarks // 2, seed + 1),
    )
    z, missing = (torch.cat(both, -2) for both in zip(*parts, strict=True))
    middle = gaussian_kernel(z, z).masked_fill(missing, 0.0).masked_fill(missing.transpose(-1, -2), 0.0)
    middle = middle + gamma * torch.eye(z.shape[-2], dtype=z.dtype, device=z.device)
    keys = gaussian_kernel(z, k).masked_fill(missing, 0.0)  # [B, H, G, m, M]
    hidden = hidden_keys(call)
    if hidden is not None:
        keys = keys.masked_fill(hidden.transpose(-1, -2), 0.0)
    read = keys @ v
    if iterations is None:
        read = torch.linalg.solve(middle, read)
    else:
        # Scaled by its row sums the matrix is better conditioned, and the iteration converges sooner.
        root = middle.sum(-1, keepdim=True).rsqrt()
        check_count("iterations", iterations)
        inverse = iterative_inverse(root * middle * root.transpose(-1, -2), iterations)
        read = root * (inverse @ (root * read))
    queries = gaussian_kernel(q, z).masked_fill(missing.transpose(-1, -2), 0.0)
    return (drop(queries, call.dropout)[0] @ read).flatten(1, 2)
