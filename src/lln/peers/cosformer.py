"""cosFormer: ReLU features, reweighted by cos(pi/2 (i - j) / M) = cos a_i cos a_j + sin a_i sin a_j."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.pieces import feature_attention, positions
from lln.peers.registry import register
from lln.values import check_count


@register("cosformer")
def cosformer(call: Call, *, max_length: int | None = None) -> Tensor:
    """max_length: M; default each sequence's own length, from its first to its last valid token."""
    dtype = compute_dtype(call.query.dtype)
    query, key, length = positions(call)
    if max_length is not None:
        if max(call.query.shape[2], call.key.shape[2]) > check_count("max_length", max_length):
            raise ValueError(f"max_length={max_length} is less than the length, {max(query.shape[1], key.shape[1])}.")
        length = torch.full_like(length, max_length)
    length = length.clamp_min(1).unsqueeze(-1)

    def add_angle(t: Tensor, position: Tensor) -> Tensor:
        """The angle rides along as a channel; padding, which may stand outside, counts as an end."""
        angle = position.clamp_min(0).minimum(length).to(dtype) / length * (math.pi / 2)
        return torch.cat([t.to(dtype), angle[:, None, :, None].expand(*t.shape[:3], 1)], -1)

    def phi(x: Tensor) -> Tensor:
        positive, angle = functional.relu(x[..., :-1]), x[..., -1:]
        return torch.cat([positive * angle.cos(), positive * angle.sin()], -1)

    call = call.change(query=add_angle(call.query, query), key=add_angle(call.key, key))
    return feature_attention(call, phi)
