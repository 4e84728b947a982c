"""What a model's attention is to give: eq. (8) and (10) once more, of the tensors that reached it."""

import math
from typing import Any

import torch
from torch import Tensor

from helpers.untyped import naive_attention
from lln.kernels.common import PAPER_A, PAPER_B

SIGMA_ONE = math.sqrt((1 - PAPER_B) / (2 * PAPER_A))  # alpha = beta of eq. (10) at sigma = 1


def eq_10(t: Tensor, of: Tensor) -> Tensor:
    """alpha [B, H] from the spread of q alone and of q and k together, written out once more."""
    return ((t - PAPER_B) / (2 * PAPER_A)).sqrt() / of


def compute_expected(call: Any, causal: bool, statistics: str, block_size: int | None) -> Tensor:
    """Eq. (8) and (10) in float64 from the q, k, v that reached the attention: [B, N, H, E]."""
    q, k, v = call.q, call.k, call.v
    batch, keys = k.shape[0], k.shape[2]
    mask = torch.ones(batch, keys, dtype=torch.bool)
    if isinstance(call.mask, Tensor) and call.mask.shape[-1]:
        mask = call.mask.bool()
    if statistics == "fixed":
        alpha: Any = SIGMA_ONE
        beta: Any = SIGMA_ONE
    else:
        spread = [
            torch.stack([torch.stack([head[valid].std() for head in t[b]]) for b, valid in enumerate(mask)])
            for t in (q, k)
        ]
        product = (spread[0] * spread[1]) ** 2
        alpha, beta = (eq_10(product, s).unsqueeze(-1) for s in spread)
    return naive_attention(q, k, v, alpha, beta, is_causal=causal, key_mask=mask, block_size=block_size).out.transpose(
        1, 2
    )
