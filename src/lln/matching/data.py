"""alpha and beta from queries and keys themselves, rather than from their spread alone: bisection on s2."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lln.checks import check_masks, check_tensors
from lln.kernels.common import PAPER_A, PAPER_B, SIGMA_FLOOR, wide_dtype
from lln.matching.moments import both_moments, score_factor, sigma
from lln.values import check_choice, check_count

MAX_SCORES = 2**20  # that are looked at together


def match_data(
    query: Tensor,
    key: Tensor,
    *,
    target: Literal["entropy", "variance"] = "entropy",
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: int = 256,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Find (alpha [B, H], beta [B, key heads]) with which LLN attention on these queries and keys is as concentrated as
    softmax attention, by bisection on s2. It serves to convert pretrained models and to check `lln.match_moments`.

    Args:
        query: [B, H, N, D]; key: [B, key heads, M, D].
        target: what is made equal, as a mean over sampled query rows against all keys: the "entropy" of the rows of P,
            or the "variance" of log P within a row (for softmax exactly tr(M_q Sigma_k) scale^2, over all rows).
        key_mask: [B, M] bool, True = attend.
        query_mask: [B, N] bool, rows that may be sampled; default key_mask where N = M.
        is_causal: rows attend to their own and earlier positions.
        scale: factor of the scores of softmax attention, default 1 / sqrt(D).
        rows: how many query rows are sampled (all of them if there are fewer).
        seed: seed of the sample.

    It reads values on the host, so do not call it in a training step. If there is nothing to compare (fewer than two
    keys, no spread), it uses eq. (10).

    Raises:
        ValueError or TypeError: the message names the argument.

    Examples:
        >>> import lln, torch
        >>> _ = torch.manual_seed(0)
        >>> query, key = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16)
        >>> alpha, beta = lln.match_data(query, key)
        >>> alpha.shape, beta.shape
        (torch.Size([1, 4]), torch.Size([1, 2]))
        >>> lln.lln_attention(query, key, key, alpha.float(), beta.float()).shape
        torch.Size([1, 4, 100, 16])
    """
    check_choice("target", target, "entropy", "variance")
    check_tensors(query, key, key)
    check_masks(query, key, key_mask, query_mask, is_causal)
    _, heads, length, dim = query.shape
    key_heads, key_length, dtype = key.shape[1], key.shape[2], wide_dtype(query.device)
    check_count("rows", rows)
    if query_mask is None and length == key_length:
        query_mask = key_mask
    scale = dim**-0.5 if scale is None else scale
    query, key = query.detach(), key.detach()
    sigma_q, sigma_k = sigma(*both_moments(query, key, key_heads, query_mask, key_mask).unbind(1)).unbind()
    # Where there is nothing to compare, eq. (10) has to do.
    s2 = (score_factor(scale, dim) * (sigma_q * sigma_k).square() - PAPER_B) / PAPER_A  # [B, Hk]
    order = torch.rand(length, generator=torch.Generator().manual_seed(seed)).to(query.device)  # one for all samples
    valid_queries = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool) if query_mask is None else query_mask
    valid_keys = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    for sample, (valid_q, valid_k) in enumerate(zip(valid_queries, valid_keys, strict=True)):
        chosen = (order + (~valid_q).to(order.dtype)).argsort()[: min(rows, int(valid_q.sum()))]
        if not len(chosen) or int(valid_k.sum()) < 2:
            continue
        q = query[sample].unflatten(0, (key_heads, -1))  # [Hk, G, N, D]
        k = key[sample][:, valid_k]  # [Hk, M, D]
        seen = None
        if is_causal:
            position = torch.arange(key_length, device=query.device)[valid_k]
            seen = position <= chosen.unsqueeze(-1)
        # As many heads at a time as keep rows x keys numbers few.
        together = max(1, MAX_SCORES // (q.shape[1] * len(chosen) * k.shape[1]))
        for first in range(0, key_heads, together):
            some = slice(first, first + together)
            spreads = sigma_q[sample, some], sigma_k[sample, some]
            wide_q, wide_k = q[some].to(dtype), k[some].to(dtype)
            wanted = None
            if target == "variance" and seen is None:
                wanted = exact_score_variance(wide_q[:, :, valid_q], wide_k, scale)
            solved = bisect_s2(wide_q[:, :, chosen], wide_k, *spreads, target, seen, scale, wanted)
            spread = torch.minimum(*spreads) > SIGMA_FLOOR
            s2[sample, some] = torch.where(solved.isfinite() & spread, solved, s2[sample, some])
    half = (s2 / 2).sqrt()
    return (half / sigma_q).repeat_interleave(heads // key_heads, 1), half / sigma_k


def bisect_s2(
    q: Tensor, k: Tensor, sigma_q: Tensor, sigma_k: Tensor, target: str, seen: Tensor | None, scale: float,
    wanted: Tensor | None,
) -> Tensor:  # fmt: skip
    """[H] s2 at which the rows q [H, G, R, D] of LLN over the keys k [H, M, D] are as concentrated as softmax's; NaN
    where none is. `seen` [R, M]: which keys a row attends to. `wanted`: softmax's values where they are known."""
    shown = torch.ones((), dtype=torch.bool, device=q.device) if seen is None else seen

    def concentration(scores: Tensor) -> Tensor:
        """[H], larger where attention is more concentrated, a mean over the rows."""
        if target == "variance":
            count = shown.expand(scores.shape[2:]).sum(-1).clamp_min(2)
            mean = torch.where(shown, scores, 0.0).sum(-1, keepdim=True) / count.unsqueeze(-1)
            spread: Tensor = torch.where(shown, (scores - mean).square(), 0.0).sum(-1) / (count - 1)
            return spread.mean((1, 2))
        log_sum = scores.masked_fill(~shown, -torch.inf).logsumexp(-1, keepdim=True)
        log_p = scores - log_sum
        entropy: Tensor = -torch.where(shown, log_p.exp() * log_p, 0.0).sum(-1)
        return -entropy.mean((1, 2))

    k = k.unsqueeze(1)  # [H, 1, M, D]
    sigma_q, sigma_k = sigma_q[:, None, None, None], sigma_k[:, None, None, None]
    if wanted is None:
        wanted = concentration(scale * q @ k.mT)
    ends = math.log(1e-4), math.log(1e4)
    low, high = (torch.full_like(wanted, end) for end in ends)
    for _ in range(32):  # to 4e-9 of s2
        middle = (low + high) / 2
        factor = ((middle / 2).exp() * math.sqrt(0.5))[:, None, None, None]
        a, x = q * (factor / sigma_q), k * (factor / sigma_k)
        a_top, x_top = a.amax(-1, keepdim=True), x.amax(-1, keepdim=True)
        log_n = ((a - a_top).exp() @ (x - x_top).exp().mT).log().clamp_min(-1e30) + a_top + x_top.mT
        too_much = concentration(log_n) > wanted
        low, high = torch.where(too_much, low, middle), torch.where(too_much, middle, high)
    middle = (low + high) / 2
    inside = (middle > ends[0] + 1e-6) & (middle < ends[1] - 1e-6)
    return torch.where(inside, middle.exp(), torch.nan)


def exact_score_variance(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[H] mean over the rows q [H, G, N, D] of the variance of their scores with k [H, M, D]: tr(M_q Sigma_k) scale^2,
    in O((N + M) D^2)."""
    flat = q.flatten(1, 2)
    second = flat.mT @ flat / flat.shape[1]  # M_q
    centred = k - k.mean(1, keepdim=True)
    covariance = centred.mT @ centred / max(1, k.shape[1] - 1)
    return scale * scale * (second * covariance).sum((1, 2))
