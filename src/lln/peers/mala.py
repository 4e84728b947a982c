"""MALA: linear attention whose weights grow more unequal with the size of the query (arXiv 2507.00698).

    P_ij = beta_i s_ij - gamma_i      s_ij = scale f(q_i) . f(k_j) / n      f(x) = 1 + elu(x)
    beta_i = 1 + 1 / S_i              gamma_i = S_i / n                     S_i = sum_j s_ij, of the n keys that i sees

the paper's definitions of beta and gamma, with which rows sum to one whatever s is; the factor scale / n of s is that
of the released code. Weights may be negative. With linear attention's output a_i and the plain mean of the values it is

    out_i = a_i + S_i (a_i - mean v)

The paper's rotary positions, gate and convolution of the values belong to the block around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype
from lln.peers.pieces import feature_attention
from lln.peers.registry import register
from lln.peers.simple_kernels import elu_plus_one


@register("mala")
def mala(call: Call) -> Tensor:
    linear = feature_attention(call, elu_plus_one)
    ones = torch.ones_like(call.value[..., :1])
    total = feature_attention(call.change(value=ones, dropout=None), elu_plus_one, normalise=False)  # [B, Hq, N, 1]
    mean, count = average_values(call)
    strength = call.scale * total / count
    return linear + strength * (linear - mean.repeat_interleave(call.query.shape[1] // mean.shape[1], 1))


def average_values(call: Call) -> tuple[Tensor, Tensor]:
    """The plain mean of the values that a query sees [B, key heads, N or 1, E], and how many these are, at least 1."""
    value = call.value.to(compute_dtype(call.value.dtype))
    seen = torch.ones_like(value[:, :1, :, :1]) if call.key_mask is None else call.key_mask[:, None, :, None].to(value)
    shown = value if call.key_mask is None else value.masked_fill(~call.key_mask[:, None, :, None], 0.0)
    if call.is_causal:
        count = seen.cumsum(2).clamp_min(1.0)
        return shown.cumsum(2) / count, count
    count = seen.sum(2, keepdim=True).clamp_min(1.0)
    return shown.sum(2, keepdim=True) / count, count
