"""What mechanisms share: linear attention by feature maps, masked softmax, positions.

Shapes are those of `lln.kernels.common`: q [B, H, G, N, D] with G query heads for each of the H key heads, k and v
[B, H, 1, M, D | E].
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.backend import choose
from lln.kernels.call import Call
from lln.kernels.carry import first_valid
from lln.kernels.common import Dropout, compute_dtype, drop, softmax_or_zero
from lln.kernels.features import FeatureAttention, FeatureMap, Maps


def group_heads(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the layout and the dtype of computation."""
    dtype = compute_dtype(call.query.dtype)
    q = call.query.to(dtype).unflatten(1, (call.key.shape[1], -1))
    return q, call.key.to(dtype).unsqueeze(2), call.value.to(dtype).unsqueeze(2)


def hidden_keys(call: Call) -> Tensor | None:
    """[B, 1, 1, M, 1], True where a key is masked out."""
    return None if call.key_mask is None else ~call.key_mask[:, None, None, :, None]


def feature_attention(
    call: Call, query_map: FeatureMap, key_map: FeatureMap | None = None, *, normalise: bool = True,
    floor: float = 1e-30, log_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Linear attention with these feature maps; the gate [B, H, M] is for causal attention."""
    q = call.query.unflatten(1, (call.key.shape[1], -1))
    maps = Maps(query_map, key_map or query_map, normalise, floor)
    gate = None if log_gate is None else log_gate[:, :, None, :, None]
    out: Tensor = FeatureAttention.apply(
        q, call.key.unsqueeze(2), call.value.unsqueeze(2), hidden_keys(call), gate, maps, call.is_causal,
        compute_dtype(q.dtype), call.dropout,
    )  # fmt: skip
    return out.flatten(1, 2)


def exponential_attention(call: Call, query_logs: Tensor, key_logs: Tensor) -> Tensor:
    """Linear attention whose features are the exponentials of these logarithms: LLN's own fold, which cannot overflow.

    query_logs [B, Hq, N, F], key_logs [B, Hk, M, F]."""
    one = torch.ones(1, 1, 1, dtype=compute_dtype(call.query.dtype), device=call.query.device)
    linear = call.change(
        query=query_logs, key=key_logs, value=call.value.to(query_logs.dtype), alpha=one, beta=one,
        block_size=None, lln_weight=None, block_weight=None, start=None,
    )  # fmt: skip
    return choose("auto", linear)(linear)[0]


def scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """scale q k^T, -inf where the key is hidden [..., M, 1]."""
    found = (q * scale) @ k.transpose(-1, -2)
    return found if hidden is None else found.masked_fill(hidden.transpose(-1, -2), -torch.inf)


def average(logits: Tensor, v: Tensor, dropout: Dropout | None = None, *place: int) -> Tensor:
    """softmax(logits) v; zeros for a row that is all -inf."""
    return drop(softmax_or_zero(logits), dropout, *place)[0] @ v


def positions(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of queries [B, N] and keys [B, M] from their sequence's first valid key, and the number of positions
    [B] from there to the last valid key (of the queries, where these are another and longer sequence)."""
    n, m, device = call.query.shape[2], call.key.shape[2], call.key.device
    first = first_valid(call.key, call.key_mask, None).unsqueeze(-1)  # [B, 1]
    key = torch.arange(m, device=device) - first
    query = key if n == m else torch.arange(n, device=device).expand(len(first), n)
    if call.key_mask is None:
        length = torch.full_like(first[:, 0], m)
    else:
        length = (key + 1).masked_fill(~call.key_mask, 0).amax(-1) if m else first[:, 0]
    return query, key, length if n == m else length.clamp_min(n)


def find_valid(call: Call) -> tuple[Tensor, Tensor]:
    """Which queries [B, N] and keys [B, M] are tokens; in self attention both are what key_mask says."""
    batch, n, m, device = call.key.shape[0], call.query.shape[2], call.key.shape[2], call.key.device
    keys = torch.ones(batch, m, dtype=torch.bool, device=device) if call.key_mask is None else call.key_mask
    return keys if n == m else torch.ones(batch, n, dtype=torch.bool, device=device), keys


def iterative_inverse(a: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse of matrices [..., m, m] by a third-order iteration (Razavi et al. 2014): products only.

    Each matrix starts from its own norms, where released codes take the largest of the whole batch."""
    norms = a.abs().sum(-1).amax(-1) * a.abs().sum(-2).amax(-1)
    z = a.transpose(-1, -2) / norms.clamp_min(torch.finfo(a.dtype).tiny)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z
