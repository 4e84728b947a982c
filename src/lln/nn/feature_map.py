"""A learned linear map of queries and keys, before anything attends with them.

    q' = q + q A        k' = k + k B + b        A [D, D] for each head, B [D, D] and b [D] for each key head

LLN attention takes exponentials along the channels, so the map chooses along which directions, and b weighs them. The
blocks of LLN+Diag use q' and k' as well. At A = B = 0 and b = 0 it is the identity, to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def map_features(query: Tensor, key: Tensor, map_q: Tensor, map_k: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """(q', k') in the dtypes that came.

    query [B, H, N, D], key [B, key heads, M, D], map_q [H, D, D], map_k [key heads, D, D], offset [key heads, D]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k = query.to(wide), key.to(wide)
    mapped = k + k @ map_k.to(wide) + offset.to(wide).unsqueeze(1)
    return (q + q @ map_q.to(wide)).to(query.dtype), mapped.to(key.dtype)
