"""Hedgehog: features [softmax(W x), softmax(-W x)], W learned for each head and side so as to imitate softmax."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.modules import AttentionModule
from lln.peers.pieces import exponential_attention
from lln.peers.registry import register
from lln.values import check_choice


@register("hedgehog")
class Hedgehog(AttentionModule):
    """Hedgehog as a module: it learns a map of queries and one of keys for each head.

    Args:
        activation: "softmax" over the channels as released, or "exp" as in the paper's formula; the exponentials
            themselves are taken inside LLN's fold.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("hedgehog", num_heads=4, head_dim=16)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, *sizes: Any, activation: Literal["softmax", "exp"] = "softmax", **common: Any) -> None:
        super().__init__(*sizes, **common)
        check_choice("activation", activation, "softmax", "exp")
        self.activation = activation
        # The identity to start with, as in the paper.
        self.query_map = nn.Parameter(torch.eye(self.head_dim).repeat(self.num_heads, 1, 1))
        self.key_map = nn.Parameter(torch.eye(self.head_dim).repeat(self.num_key_heads, 1, 1))

    def attend(self, call: Call) -> Tensor:
        query, key = self.feature_logs(call.query, self.query_map), self.feature_logs(call.key, self.key_map)
        return exponential_attention(call, query, key)

    def feature_logs(self, t: Tensor, weight: Tensor) -> Tensor:
        """Logarithms of the features of t [B, H, N, D]: [B, H, N, 2 D]."""
        dtype = compute_dtype(t.dtype)
        x = t.to(dtype) @ weight.to(dtype).transpose(-1, -2)
        if self.activation == "softmax":
            return torch.cat([x.log_softmax(-1), (-x).log_softmax(-1)], -1)
        return torch.cat([x, -x], -1)
