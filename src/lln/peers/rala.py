"""RALA: linear attention whose keys count as much as the mean query likes them (arXiv 2411.07635).

    out_i = f(q_i) sum_j a_j f(k_j) v_j / f(q_i) sum_j a_j f(k_j)      f(x) = 1 + elu(x)
    a_j = n softmax_j(scale g . f(k_j))                                g = mean_i f(q_i)

that is the paper's augmentation of the rank of the key-value buffer, with f inside g as in released code; n cancels.
Its other half multiplies the output of each token with a linear map of the hidden state, which a function of q, k and v
does not see, and a convolution of the values is `value_convolution`: both belong to the block around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype, softmax_or_zero
from lln.peers.pieces import feature_attention, find_valid
from lln.peers.registry import register
from lln.peers.simple_kernels import elu_plus_one


@register("rala")
def rala(call: Call) -> Tensor:
    dtype, group = compute_dtype(call.query.dtype), call.query.shape[1] // call.key.shape[1]
    query, key = (elu_plus_one(t.to(dtype)) for t in (call.query, call.key))
    # The weights of the keys are those of a query head.
    key, value = (t.repeat_interleave(group, 1) for t in (key, call.value))
    rows, _ = find_valid(call)
    counts = rows[:, None, :, None].to(dtype)  # [B, 1, N, 1]
    mean = (query * counts).sum(2, keepdim=True) / counts.sum(2, keepdim=True).clamp_min(1.0)
    liked = call.scale * (key @ mean.transpose(-1, -2))  # [B, Hq, M, 1]
    if call.key_mask is not None:
        liked = liked.masked_fill(~call.key_mask[:, None, :, None], -torch.inf)
    weights = softmax_or_zero(liked.transpose(-1, -2)).transpose(-1, -2)
    return feature_attention(call.change(query=query, key=weights * key, value=value), take)


def take(features: Tensor) -> Tensor:
    """Of rows that are features already."""
    return features
