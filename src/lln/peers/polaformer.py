"""PolaFormer: queries and keys in their positive and their negative parts, of which like meets like in one half of the
values and unlike in the other (Meng et al. 2025, arXiv 2501.15061).

    x+ = relu(x)^p      x- = relu(-x)^p      p = 1 + span sigmoid(w)       of each channel, w learned
    first half          [q+, q-] . [k+, k-]  same signs
    second half         [q-, q+] . [k+, k-]  opposite signs

each normalised by the sum of its own weights. Queries and keys are divided by softplus(u) before, u learned for each
channel, as in the released code. The gate that multiplies the halves comes from the hidden state and belongs to the
block around it; the convolution of the values is `value_convolution`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.modules import AttentionModule
from lln.peers.pieces import feature_attention
from lln.peers.rala import take
from lln.peers.registry import register
from lln.values import check_positive


@register("polaformer")
class PolaFormer(AttentionModule):
    """PolaFormer as a module: it learns the power and the scale of each channel.

    Args:
        span: by how much the power of a channel can exceed 1; the paper's alpha.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("polaformer", num_heads=4, head_dim=16)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, *sizes: Any, span: float = 4.0, **common: Any) -> None:
        super().__init__(*sizes, **common)
        check_positive("span", span)
        self.span = span
        # Of the key heads, since queries and keys must agree.
        self.power = nn.Parameter(torch.zeros(self.num_key_heads, self.head_dim))
        self.channel_scale = nn.Parameter(torch.zeros(self.num_key_heads, self.head_dim))

    def attend(self, call: Call) -> Tensor:
        (query_up, query_down), (key_up, key_down) = self.split(call.query), self.split(call.key)
        key = torch.cat([key_up, key_down], -1)
        same, opposite = torch.cat([query_up, query_down], -1), torch.cat([query_down, query_up], -1)
        first = (call.value.shape[3] + 1) // 2
        halves = ((same, call.value[..., :first]), (opposite, call.value[..., first:]))
        return torch.cat([self.read(call, query, key, value) for query, value in halves], -1)

    def read(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # A row's features may have any common factor: this one keeps high powers of small numbers from vanishing.
        size = query.detach().amax(-1, keepdim=True)
        query = query / torch.where(size > 0, size, 1.0)
        return feature_attention(call.change(query=query, key=key, value=value), take)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The positive and the negative part of queries or keys [B, heads, N, D], scaled and to their powers."""
        dtype, group = compute_dtype(x.dtype), x.shape[1] // self.num_key_heads
        scale, power = functional.softplus(self.channel_scale), 1.0 + self.span * torch.sigmoid(self.power)
        scale, power = (t.to(dtype).repeat_interleave(group, 0).unsqueeze(1) for t in (scale, power))  # [heads, 1, D]
        x = x.to(dtype) / scale
        return functional.relu(x).pow(power), functional.relu(-x).pow(power)
