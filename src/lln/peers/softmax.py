"""Softmax attention: what everything else is measured against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.kernels.call import Call
from lln.peers.registry import register


def softmax(call: Call) -> Tensor:
    q, k, v = call.query, call.key, call.value
    n, m = q.shape[2], k.shape[2]
    mask = None
    if call.key_mask is not None:
        mask = call.key_mask[:, None, None, :]  # [B, 1, 1, M]
        if call.is_causal:
            mask = mask & torch.ones(n, m, dtype=torch.bool, device=q.device).tril()
    alive = None if mask is None else mask.any(-1, keepdim=True)
    if mask is not None and alive is not None:
        mask = mask | ~alive  # a row without any key would be NaN in some kernels; it is zeroed below
    out = scaled_dot_product_attention(
        q, k, v, mask, call.dropout_p, is_causal=call.is_causal and mask is None, scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out if alive is None else out * alive


register(
    "softmax",
    "Softmax",
    paper="Vaswani et al. 2017, arXiv 1706.03762",
    cost="N M (D + E)",
    function=softmax,
    note="torch.nn.functional.scaled_dot_product_attention",
)
