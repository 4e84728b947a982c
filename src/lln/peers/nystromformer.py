"""Nystromformer: softmax attention through m landmarks, means over segments of queries and of keys.

P = softmax(q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ k^T)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.common import drop, softmax_or_zero
from lln.peers.modules import AttentionModule
from lln.peers.pieces import average, find_valid, group_heads, iterative_inverse, scores
from lln.peers.registry import register
from lln.values import check_count


def segment_means(t: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means of t [B, H, G, N, D] over `count` equal segments of each sample's valid tokens, and which are empty
    [B, 1, 1, count, 1] (where there are fewer tokens than segments)."""
    rank = mask.cumsum(-1) - 1
    segment = rank * count // mask.sum(-1, keepdim=True).clamp_min(1)
    member = (segment.unsqueeze(-1) == torch.arange(count, device=t.device)) & mask.unsqueeze(-1)  # [B, N, count]
    total = member.sum(1)
    share = member.to(t.dtype) / total.clamp_min(1).unsqueeze(1)
    return share.transpose(-1, -2)[:, None, None] @ t, (total == 0)[:, None, None, :, None]


def nystromformer(call: Call, *, landmarks: int = 64, iterations: int = 6) -> Tensor:
    check_count("landmarks", landmarks)
    check_count("iterations", iterations)
    q, k, v = group_heads(call)
    query_mask, key_mask = find_valid(call)
    q_means, no_query = segment_means(q, query_mask, landmarks)
    k_means, no_key = segment_means(k, key_mask, landmarks)
    middle = softmax_or_zero(scores(q_means, k_means, call.scale, no_key)).masked_fill(no_query, 0.0)
    last = scores(q_means, k, call.scale, ~key_mask[:, None, None, :, None])
    read = average(last, v, call.dropout, 1).masked_fill(no_query, 0.0)
    first = softmax_or_zero(scores(q, k_means, call.scale, no_key))
    weights = drop(first @ iterative_inverse(middle, iterations), call.dropout, 2)[0]
    return (weights @ read).flatten(1, 2)


@register("nystromformer", function=nystromformer)
class Nystromformer(AttentionModule):
    """Nystromformer as a module. It learns nothing but the convolution, where there is one.

    Args:
        landmarks: m, segments of the queries and of the keys.
        iterations: of the inverse.
        conv_kernel: adds a learned depthwise convolution of so many values, an odd number (the paper: 33).
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("nystromformer", num_heads=4, head_dim=16, landmarks=8, conv_kernel=5)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(
        self, *sizes: Any, landmarks: int = 64, iterations: int = 6, conv_kernel: int | None = None, **common: Any
    ) -> None:
        super().__init__(*sizes, **common)
        heads = self.num_heads
        self.landmarks, self.iterations = landmarks, iterations
        self.conv: nn.Conv2d | None = None
        if conv_kernel is not None:
            if check_count("conv_kernel", conv_kernel) % 2 == 0:
                raise ValueError(f"conv_kernel must be odd, to have a middle; got {conv_kernel}.")
            self.conv = nn.Conv2d(
                heads, heads, (conv_kernel, 1), padding=(conv_kernel // 2, 0), groups=heads, bias=False
            )

    def attend(self, call: Call) -> Tensor:
        out = nystromformer(call, landmarks=self.landmarks, iterations=self.iterations)
        if self.conv is None:
            return out
        if call.query.shape[2] != call.key.shape[2]:
            raise ValueError("nystromformer's convolution needs query and key of one sequence; use conv_kernel=None.")
        values = call.value.to(out.dtype)
        if call.key_mask is not None:
            values = values.masked_fill(~call.key_mask[:, None, :, None], 0.0)
        values = values.repeat_interleave(self.num_heads // self.num_key_heads, 1)
        weight = self.conv.weight.to(out.dtype)
        return out + functional.conv2d(values, weight, padding=self.conv.padding, groups=self.num_heads)
