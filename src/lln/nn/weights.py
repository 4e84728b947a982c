"""P as a matrix, for those who want to look at it. Attention itself never forms it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.checks import Inputs, check_packing
from lln.functional import autocast
from lln.nn.attention import LLNAttention
from lln.nn.statistics import Where
from lln.ranks import refuse_ranks

MAX_WEIGHTS = 2**28  # elements: 1 GiB in float32


def check_weights(attention: LLNAttention, query: Tensor, key: Tensor, name: str, remedy: str) -> None:
    """ValueError where P would be too large or does not exist; `name` is the argument that asks for it."""
    refuse_ranks(name, f"P has a column for the keys of every rank; {remedy}")
    check_size(query, key, name, remedy)
    if attention.mix == "scales":
        raise ValueError(f"{name}: every value channel has its own P with mix='scales'; {remedy}.")


def check_size(query: Tensor, key: Tensor, name: str, remedy: str) -> None:
    size = query.shape[:3].numel() * key.shape[2]
    if size > MAX_WEIGHTS:
        limit = f"at most {MAX_WEIGHTS:,} are allowed"
        raise ValueError(f"{name}: P would have {size:,} elements and {limit}; {remedy}.")


def dense_weights(attention: LLNAttention, query: Tensor, key: Tensor, **where: Any) -> Tensor:
    """P [B, H, N, M] of that module, exact, differentiable and without dropout: attention is linear in v, so the
    identity matrix as v gives it. With a convolution it is what the convolved values are multiplied by.

    where: is_causal, key_mask, query_mask and cu_seqlens, as in the module's forward, which has checked them and the
    tensors."""
    alpha, beta = attention.coefficients(query, key, **where)
    query, key = attention.features(query, key, **where)
    is_causal, key_mask, _, cu_seqlens = Where(**where)
    packing = check_packing(cu_seqlens, query, key)

    def attend(identity: Tensor) -> Tensor:
        inputs = Inputs(*autocast(query, key, identity), key_mask, *packing)
        out: Tensor = attention.run_op(inputs, alpha, beta, is_causal=is_causal)
        return out

    return multiply_identity(attend, query, key)


def multiply_identity(attend: Callable[[Tensor], Tensor], query: Tensor, key: Tensor) -> Tensor:
    """P [B, H, N, M] from what attention makes of values [B, key heads, M, E]: the identity matrix shows it."""
    columns = [query.new_empty(*query.shape[:3], 0)]
    at = torch.arange(key.shape[2], device=key.device)
    width = max(64, query.shape[2])  # of a slice of the identity: of few queries and many keys all of it dwarfs P
    for start in range(0, key.shape[2], width):
        columns.append(attend((at[:, None] == at[start : start + width]).to(key.dtype).expand(*key.shape[:2], -1, -1)))
    return torch.cat(columns, -1)
