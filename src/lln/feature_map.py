"""A learned map of queries and keys that changes what LLN attention sees and leaves softmax attention as it is.

    q' = q exp(G)        k' = k exp(-G^T) + b        with G [D, D] and b [D] for each key head

q' . k' = q . k + q' . b: the scores are the same but for one number a row, which a softmax does not notice. So the
blocks of LLN+Diag, and every softmax that LLN is compared with, may be given q' and k' as well, and a state keeps its
size. LLN itself is not invariant: the map chooses the directions that its exponentials are taken along, and b weighs
them. At G = 0 and b = 0 it is the identity, to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def map_features(query: Tensor, key: Tensor, generator: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """(q', k') in the dtypes that came.

    query [B, H, N, D], key [B, key heads, M, D], generator [key heads, D, D], offset [key heads, D]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    g = generator.to(wide)
    grouped = query.unflatten(1, (key.shape[1], -1)).to(wide)  # [B, key heads, G, N, D]
    mapped = grouped @ torch.matrix_exp(g).unsqueeze(1)
    keys = key.to(wide) @ torch.matrix_exp(-g.mT) + offset.to(wide).unsqueeze(1)
    return mapped.flatten(1, 2).to(query.dtype), keys.to(key.dtype)
