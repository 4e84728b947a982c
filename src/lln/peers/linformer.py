"""Linformer: keys and values projected along the length to `rank` rows, by learned matrices; then softmax attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lln.kernels.call import Call
from lln.peers.modules import AttentionModule
from lln.peers.pieces import average, group_heads, positions, scores
from lln.peers.registry import register
from lln.values import check_count


@register("linformer")
class Linformer(AttentionModule):
    """Linformer as a module: it learns the projections, which have a row for each of `max_length` positions.

    Args:
        rank: rows that the keys are projected to.
        share: one projection for keys and values.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("linformer", num_heads=4, head_dim=16, max_length=64, rank=8)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, *sizes: Any, rank: int = 256, share: bool = False, **common: Any) -> None:
        super().__init__(*sizes, **common)
        max_length = self.max_length
        if max_length is None:
            raise ValueError("linformer needs max_length: its projections have one row for each position.")
        bound = 1 / math.sqrt(check_count("rank", rank))
        self.key_projection = nn.Parameter(torch.empty(max_length, rank).uniform_(-bound, bound))
        self.value_projection = self.key_projection
        if not share:
            self.value_projection = nn.Parameter(torch.empty(max_length, rank).uniform_(-bound, bound))

    def attend(self, call: Call) -> Tensor:
        q, k, v = group_heads(call)
        if k.shape[-2] > len(self.key_projection):
            raise ValueError(f"linformer was built for max_length={len(self.key_projection)}; got {k.shape[-2]} keys.")
        projections = []
        for parameter in (self.key_projection, self.value_projection):
            projection = parameter[: k.shape[-2]].to(q.dtype)  # [M, rank]
            if call.key_mask is not None:  # row 0 for each sequence's first valid token, nothing for the hidden ones
                place = positions(call)[1].clamp_min(0)
                projection = parameter.to(q.dtype)[place] * call.key_mask.unsqueeze(-1)
                projection = projection[:, None, None]  # [B, 1, 1, M, rank]
            projections.append(projection.transpose(-1, -2))
        out = average(scores(q, projections[0] @ k, call.scale), projections[1] @ v, call.dropout)
        return out.flatten(1, 2)
