"""The temperature of attention: eq. (5) for softmax, and what eq. (11) stands for in any other map."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from lln.instruments.concentration import log_moments
from lln.instruments.maps import AttentionMap, SoftmaxMap, lln_map, softmax_map
from lln.instruments.scores import score_moments


@overload
def temperature(q: AttentionMap, /, *, rows: int | None = ..., seed: int = ...) -> Tensor: ...
@overload
def temperature(
    q: Tensor, k: Tensor, alpha: float | Tensor | None = ..., beta: float | Tensor | None = ..., *,
    rows: int | None = ..., seed: int = ..., **options: Any,
) -> Tensor: ...  # fmt: skip
@torch.no_grad()
def temperature(
    q: Tensor | AttentionMap,
    k: Tensor | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    *,
    rows: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """How widely attention spreads, [batch, heads]: high where all keys weigh alike, low where few keys take all.

        temperature(q, k)                of softmax attention, eq. (5): 1 / sqrt(var(a_ij)), a_ij = scale q_i . k_j,
                                         exactly and in time linear in the length (streamed when causal)
        temperature(q, k, alpha, beta)   of LLN attention: 1 / sqrt(var(log P_ij)), as measured. Eq. (11) puts the line
                                         a s2 + b for the variance, which is negative for s2 < 2.389
        temperature(p)                   of a map: eq. (5) for softmax, the measured variance of log P for others

    Args:
        rows, seed: measure log P on a random sample of so many rows; see log_moments.
        options: of softmax_map or lln_map: key_mask, query_mask, is_causal, scale, block_size, mix.

    Raises:
        ValueError or TypeError: it names the argument.
    """
    if isinstance(q, AttentionMap):
        if k is not None or alpha is not None or beta is not None or options:
            raise TypeError("temperature of a map takes no k, alpha, beta or options: they are in the map already.")
        p = q
    elif k is None:
        raise TypeError("temperature takes a map, or q and k; got q alone.")
    elif (alpha is None) != (beta is None):
        raise TypeError(f"alpha and beta go together; got alpha={alpha} and beta={beta}.")
    else:
        p = softmax_map(q, k, **options) if alpha is None or beta is None else lln_map(q, k, alpha, beta, **options)
    if isinstance(p, SoftmaxMap):
        return score_moments(p)[1].rsqrt()
    return log_moments(p, rows=rows, seed=seed).variance.rsqrt()
