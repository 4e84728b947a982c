"""Transformer-LS: a window, and the whole sequence through r rows made by a projection that depends on the keys.

P = softmax over positions of (k W)     K~ = LN(P^T LN(k))     V~ = LN(P^T LN(v))      one softmax over [window, K~]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lln.kernels.call import Call
from lln.kernels.common import softmax_or_zero
from lln.peers.modules import AttentionModule
from lln.peers.pieces import group_heads, scores
from lln.peers.registry import register
from lln.peers.windows import align, cut_blocks, joint_attention, neighbours, visible_blocks
from lln.values import check_count


@register("transformer_ls")
class TransformerLS(AttentionModule):
    """Transformer-LS as a module: it learns the projection of the keys and two norms.

    Args:
        window: tokens of a segment, which sees itself and half a segment to each side.
        rank: rows that the sequence is projected to, r.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key, value: [batch, num_key_heads, length, head_dim]
        - output: [batch, num_heads, length, head_dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("transformer_ls", num_heads=4, head_dim=16, window=16, rank=8)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, *sizes: Any, window: int = 128, rank: int = 32, **common: Any) -> None:
        super().__init__(*sizes, **common)
        self.window = check_count("window", window)
        width = self.num_key_heads * self.head_dim
        self.projection = nn.Parameter(torch.empty(self.num_key_heads, self.head_dim, check_count("rank", rank)))
        nn.init.normal_(self.projection, std=self.head_dim**-0.5)
        self.local_norm, self.global_norm = nn.LayerNorm(width), nn.LayerNorm(width)  # the paper's DualLN

    def attend(self, call: Call) -> Tensor:
        if call.value.shape[3] != self.head_dim:
            raise ValueError(
                f"transformer_ls normalises keys and values alike, so value dim must be {self.head_dim}; "
                f"got {call.value.shape[3]}."
            )
        return align(call, self.attend_long_short)

    def attend_long_short(self, call: Call, mask: Tensor) -> Tensor:
        q, k, v = group_heads(call)
        weight = softmax_or_zero(
            (k @ self.projection.to(k.dtype).unsqueeze(1))
            .masked_fill(~mask[:, None, None, :, None], -torch.inf)
            .transpose(-1, -2)
        )  # [B, H, 1, r, N]
        k, v = normalise_heads(k, self.local_norm), normalise_heads(v, self.local_norm)
        far_k, far_v = (normalise_heads(weight @ t, self.global_norm) for t in (k, v))
        alive = mask.any(-1)[:, None, None, None, None]
        size, beyond = self.window, max(self.window // 2, 1)
        visible = neighbours(visible_blocks(mask, size), beyond, beyond)
        near = scores(cut_blocks(q, size), neighbours(cut_blocks(k, size), beyond, beyond), call.scale, ~visible)
        far = cut_blocks(scores(q, far_k, call.scale, ~alive.expand(-1, 1, 1, far_k.shape[-2], 1)), size)
        parts = [(near, neighbours(cut_blocks(v, size), beyond, beyond)), (far, far_v.unsqueeze(3))]
        out = joint_attention(parts, call.dropout).flatten(-3, -2)[..., : q.shape[-2], :]
        return out.flatten(1, 2)


def normalise_heads(t: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over all heads' channels of t [B, H, 1, N, D]."""
    weight, bias = (p.to(t.dtype).view(t.shape[1], 1, 1, t.shape[4]) for p in (norm.weight, norm.bias))
    variance, mean = torch.var_mean(t, (1, 4), correction=0, keepdim=True)
    found: Tensor = (t - mean) * (variance + norm.eps).rsqrt() * weight + bias
    return found
