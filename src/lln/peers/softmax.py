"""Softmax attention: what everything else is measured against."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.kernels.call import Call
from lln.peers.registry import register


@register("softmax")
def softmax(call: Call) -> Tensor:
    q, k, v = call.query, call.key, call.value
    attend = functools.partial(
        scaled_dot_product_attention, q, k, v, dropout_p=call.dropout_p, scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    if call.key_mask is None:
        return attend(is_causal=call.is_causal)
    mask = call.key_mask[:, None, None, :]  # [B, 1, 1, M]
    if call.is_causal:
        mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    alive = mask.any(-1, keepdim=True)
    return attend(attn_mask=mask | ~alive) * alive  # a row without any key would be NaN in some kernels
