"""Random feature attention: a Gaussian kernel between unit vectors, by random cosines and sines; optionally gated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.draws import RandomFeatures, gaussian
from lln.peers.pieces import feature_attention
from lln.peers.registry import register
from lln.values import check_count, check_positive, describe


def rfa(
    call: Call, *, features: int | None = None, seed: int = 0, sigma: float = 1.0, gate: Tensor | None = None,
    projection: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """P_ij = exp(cos(q_i, k_j) / sigma^2), approximately. gate [B, key heads, M] in (0, 1): how much of the past each
    token keeps, S_t = g_t S_{t-1} + (1 - g_t) f(k_t) v_t^T."""
    dim, dtype, device = call.query.shape[3], compute_dtype(call.query.dtype), call.query.device
    check_positive("sigma", sigma)
    if projection is None:
        count = dim if features is None else check_count("features", features)
        projection = gaussian(count, dim, seed, device=device, dtype=dtype)
    w = projection.to(device, dtype).T / sigma  # [D, F]

    def phi(x: Tensor) -> Tensor:
        angle = x * (x.square().sum(-1, keepdim=True) + 1e-12).rsqrt() @ w
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(w.shape[1])

    # Features have both signs, so a row's weights may sum to almost nothing.
    if gate is None:
        return feature_attention(call, phi, floor=1e-6)
    if not call.is_causal:
        raise ValueError("gate decays what came before a token, so it needs is_causal=True.")
    if list(gate.shape) != [call.key.shape[0], *call.key.shape[1:3]]:
        raise ValueError(f"gate must be [batch, key heads, length] = {list(call.key.shape[:3])}; got {describe(gate)}.")
    gate = gate.to(dtype)
    if call.key_mask is not None:
        gate = gate.masked_fill(~call.key_mask[:, None], 1.0)
    key = torch.cat([call.key.to(dtype), 1.0 - gate.unsqueeze(-1)], -1)  # its weight rides along as a channel
    call = call.change(key=key)
    return feature_attention(call, phi, lambda x: phi(x[..., :-1]) * x[..., -1:], floor=1e-6, log_gate=gate.log())


@register("rfa", function=rfa)
class RFA(RandomFeatures):
    """Random feature attention as a module: its random directions are a buffer, and a gate is learned.

    Args:
        features: random directions, default one for each channel.
        seed: they are a function of it and of how often they were drawn.
        sigma: width of the Gaussian kernel.
        gated: g_t = sigmoid(w . k_t + b) for each key head, learned (the paper's gate reads the token's hidden state;
            on q, k, v the key is what there is of it). Causal attention only.
        redraw_every: training calls after which directions are drawn anew; None: drawn once.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("rfa", num_heads=4, head_dim=16, gated=True)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    usual_features = staticmethod(int)  # one for each channel

    def __init__(
        self, *sizes: Any, features: int | None = None, seed: int = 0, sigma: float = 1.0, gated: bool = False,
        redraw_every: int | None = None, **common: Any,
    ) -> None:  # fmt: skip
        common |= {"features": features, "seed": seed, "orthogonal": False, "redraw_every": redraw_every}
        super().__init__(*sizes, **common)
        self.sigma, self.gated = sigma, gated
        if gated:
            self.gate_weight = nn.Parameter(torch.zeros(self.num_key_heads, self.head_dim))
            self.gate_bias = nn.Parameter(torch.full((self.num_key_heads,), 3.0))  # starts with a long memory

    def attend(self, call: Call) -> Tensor:
        gate = None
        if self.gated:
            gate = torch.einsum("bhnd,hd->bhn", call.key.to(self.gate_weight.dtype), self.gate_weight)
            gate = functional.sigmoid(gate + self.gate_bias[:, None])
        return rfa(call, sigma=self.sigma, gate=gate, projection=self.current_projection())
