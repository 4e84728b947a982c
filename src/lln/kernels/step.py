"""One token after a state, the step of decoding: the recurrence of `causal` and one row of one block, written out.

    L' = logaddexp(L, beta k)      S' = S + exp(beta k - L') (v - S)      o = softmax_c(alpha q + L') S'

Longer calls cut work into chunks and blocks and keep what a backward needs; for one token that costs several times the
arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype, exponents, is_autocast_enabled, softmax_or_zero, split_heads
from lln.kernels.fold import make_readable, merge


def is_step(call: Call) -> bool:
    """Whether the call is one token after a state, and nobody will ask for gradients."""
    if not call.is_causal or call.query.shape[2] != 1 or call.log_sum is None or call.cu_query is not None:
        return False
    if call.read != "paper":  # which is as short for one token as it is
        return False
    if call.dropout_p or is_autocast_enabled(call.query.device.type):
        return False
    return not (torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in call.arguments()))


def step(call: Call) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(out [B, Hq, 1, E], log_sum [B, H, D], mean_value [B, H, D, E], the rest of the state as carry.open_block)"""
    assert call.log_sum is not None
    assert call.mean_value is not None
    heads, dtype = call.key.shape[1], compute_dtype(call.query.dtype)
    q = call.query.squeeze(2).unflatten(1, (heads, -1))  # [B, H, G, D]
    hidden = None if call.key_mask is None else ~call.key_mask.unsqueeze(-1)  # [B, 1, 1]
    x = exponents(call.key.squeeze(2), call.beta, hidden)  # [B, H, D]
    # One key is a state of its own: L = beta k, S = v in every channel.
    log_sum, mean = merge(call.log_sum, call.mean_value, x.to(call.log_sum.dtype), call.value.to(dtype))
    offset, readable_mean, _ = make_readable(log_sum, mean)
    a = torch.softmax(exponents(q, split_heads(call.alpha, heads)) + offset, -1)
    out = a @ readable_mean  # [B, H, G, E]
    block: dict[str, Tensor] = {}
    if call.lln_weight is not None and call.block_weight is not None:
        diag, block = step_in_block(call, q.to(dtype))
        out = out * split_heads(call.lln_weight, heads) + diag * split_heads(call.block_weight, heads)
    return out.flatten(1, 2).unsqueeze(2).to(call.query.dtype), log_sum, mean, block


def step_in_block(call: Call, q: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(softmax over the open block with the new token in it [B, H, G, E], what is open afterwards)"""
    assert call.block_size is not None
    assert call.count is not None
    assert call.open_key is not None
    assert call.open_value is not None
    assert call.open_mask is not None
    slot = (call.count % call.block_size).unsqueeze(-1)  # [B, 1]
    at = torch.arange(call.block_size, device=q.device)
    here, count = at == slot, call.count + 1
    visible = call.open_mask & (at < slot)
    if call.key_mask is None:
        visible = visible | here
    else:
        visible = visible | (here & call.key_mask)
        # Tokens before the first valid one are in no block.
        count = torch.where((call.count > 0) | call.key_mask[:, 0], count, 0)
    place = here[:, None, :, None]
    key, value = torch.where(place, call.key, call.open_key), torch.where(place, call.value, call.open_value)
    scores = (q * call.scale) @ key.to(q.dtype).transpose(-1, -2)
    p = softmax_or_zero(scores.masked_fill(~visible[:, None, None], -torch.inf))
    mask = visible & (slot + 1 < call.block_size)  # a full block is open no longer
    closed = ~mask[:, None, :, None]
    return p @ value.to(q.dtype), {
        "count": count,
        "block_key": key.masked_fill(closed, 0.0),
        "block_value": value.masked_fill(closed, 0.0),
        "block_mask": mask,
    }
