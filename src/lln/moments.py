"""alpha and beta from the spread of queries and keys: eq. (10) of the paper, and better inverses of the same idea.

LLN attention with s2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2, split equally between the two, is to concentrate like
softmax attention whose scores have variance t = (scale sqrt(d))^2 sigma_q^2 sigma_k^2:

    paper      s2 = (t - b) / a: the variance of log P, taken for one straight line in s2
    variance   the same variance, by the curve measured for this head dim
    entropy    the entropy of P in place of the variance of log P
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lln.curves import s2_for_entropy, s2_for_variance
from lln.kernels.common import wide_dtype

Matching = Literal["paper", "variance", "entropy"]
MATCHINGS = ("paper", "variance", "entropy")
# The line sigma_lln^2 = a s2 + b of the authors' released code.
PAPER_A, PAPER_B = 0.14855178144710912, -0.35487039130661086
# A constant input has no spread; this keeps alpha and beta finite.
SIGMA_FLOOR = 1e-6
LENGTH = 1024  # of the entropy curves where no other is known


def match_moments(
    sigma_q: float | Tensor,
    sigma_k: float | Tensor,
    head_dim: int,
    matching: Matching = "paper",
    scale: float | None = None,
    *,
    length: int | Tensor = LENGTH,
) -> tuple[float, float] | tuple[Tensor, Tensor]:
    """(alpha, beta) for queries and keys with these standard deviations.

    Args:
        sigma_q: positive number, or a tensor of any shape; likewise sigma_k, of a shape that broadcasts with it.
        head_dim: 8 to 256 for `variance` and `entropy`, which stand on measured curves.
        matching: "paper", "variance" or "entropy".
        scale: of the softmax attention to imitate, default 1 / sqrt(head_dim).
        length: number of keys; only `entropy` depends on it, a little (under 5 % up to sigma = 1).

    Returns:
        Two numbers for two numbers, otherwise two tensors of the broadcast shape, in float64 (float32 on MPS), made on
        their device without waiting for it. They carry no gradient.

    Raises:
        ValueError for a number that is not positive, an unknown matching, or a head_dim the curves do not cover.
    """
    if matching not in MATCHINGS:
        raise ValueError(f"matching must be 'paper', 'variance' or 'entropy'; got {matching!r}.")
    numbers = not isinstance(sigma_q, Tensor) and not isinstance(sigma_k, Tensor)
    for name, sigma in (("sigma_q", sigma_q), ("sigma_k", sigma_k)):
        if not isinstance(sigma, Tensor) and not (sigma > 0 and math.isfinite(sigma)):
            raise ValueError(f"{name} must be positive and finite; got {sigma}.")
    device = next((s.device for s in (sigma_q, sigma_k) if isinstance(s, Tensor)), torch.device("cpu"))
    dtype = wide_dtype(device)

    def as_tensor(value: float | Tensor) -> Tensor:
        # torch.full rather than torch.tensor: a fill on the device, not a copy to it, so that a CUDA graph can hold it.
        if isinstance(value, Tensor):
            return value.detach().to(device, dtype)
        return torch.full((), value, dtype=dtype, device=device)

    q, k = torch.broadcast_tensors(as_tensor(sigma_q), as_tensor(sigma_k))
    factor = 1.0 if scale is None else scale * scale * head_dim
    s2 = matched_s2(factor * (q * k).square(), head_dim, matching, as_tensor(length))
    half = (s2 / 2).sqrt()
    alpha, beta = half / q, half / k
    return (alpha.item(), beta.item()) if numbers else (alpha, beta)


def matched_s2(t: Tensor, head_dim: int, matching: str, length: Tensor) -> Tensor:
    if matching == "paper":
        return (t - PAPER_B) / PAPER_A
    if matching == "variance":
        return s2_for_variance(t, head_dim)
    return s2_for_entropy(t, head_dim, length)


def sigma(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """The unbiased standard deviation from (count, sum, sum of squares), floored."""
    variance = (squares - total * total / count.clamp_min(1)) / (count - 1).clamp_min(1)
    return variance.clamp_min(SIGMA_FLOOR**2).sqrt()


def moments(t: Tensor, key_heads: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(count, sum, sum of squares) of the elements of t [B, H, N, D] for each sample and key head, [B, key_heads] wide.

    Query heads that share a key head are pooled. mask [B, N]: True = counts. Packed: one row for each sequence.
    """
    dtype = wide_dtype(t.device)
    grouped = (
        t.detach().unflatten(1, (key_heads, -1)).to(torch.promote_types(t.dtype, torch.float32))
    )  # [B, H, G, N, D]
    owner = None
    if cu_seqlens is not None:
        position = torch.arange(t.shape[-2], device=t.device)
        owner = torch.bucketize(position, cu_seqlens[1:].to(torch.int64), right=True)

    def add_up(per_token: Tensor) -> Tensor:
        """[B, H, N] -> [B, H]; where, not *: what is hidden may be anything."""
        per_token = per_token.to(dtype)
        if mask is not None:
            per_token = torch.where(mask[:, None], per_token, 0.0)
        if owner is None or cu_seqlens is None:
            return per_token.sum(-1)
        return per_token.new_zeros(cu_seqlens.numel() - 1, key_heads).index_add(0, owner, per_token[0].T)

    sums = grouped.sum((2, 4))
    count, total = add_up(torch.full_like(sums, grouped.shape[2] * grouped.shape[4])), add_up(sums)
    # Squares around each sample's own mean: a large offset would eat the digits of the spread, and a mean that others
    # share would let them be seen.
    mean = (total / count.clamp_min(1)).to(grouped.dtype)
    centre = mean.unsqueeze(-1) if owner is None else mean[owner].T.unsqueeze(0)  # [B, H, 1 or N]
    squares = add_up((grouped - centre[:, :, None, :, None]).square().sum((2, 4)))
    wide = mean.to(dtype)
    return count, total, squares + 2 * wide * total - count * wide * wide


def match_data(
    query: Tensor,
    key: Tensor,
    *,
    target: Literal["entropy", "variance"] = "entropy",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rows: int = 256,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """(alpha [B, H], beta [B, key heads]) at which LLN attention on these very queries and keys concentrates like
    softmax attention, by bisection on s2. For converting pretrained models, and for checking the other matchings.

    Args:
        query: [B, H, N, D]; key: [B, key heads, M, D].
        target: what is made equal, as a mean over sampled query rows against all keys: the "entropy" of the rows of P,
            or the "variance" of log P within a row (for softmax exactly tr(M_q Sigma_k) scale^2, over all rows).
        key_mask: [B, M] bool, True = attend. Rows of hidden positions are not sampled in self attention.
        is_causal: rows attend their own and earlier positions.
        scale: of the softmax, default 1 / sqrt(D).
        rows: how many query rows are sampled (all of them if there are fewer).
        seed: of the sample.

    Raises:
        ValueError for an unknown target.
    """
    if target not in ("entropy", "variance"):
        raise ValueError(f"target must be 'entropy' or 'variance'; got {target!r}.")
    batch, heads, length, dim = query.shape
    key_heads, dtype = key.shape[1], wide_dtype(query.device)
    scale = dim**-0.5 if scale is None else scale
    q = query.detach().to(dtype).unflatten(1, (key_heads, -1))  # [B, Hk, G, N, D]
    k = key.detach().to(dtype).unsqueeze(2)
    query_mask = key_mask if length == key.shape[2] else None
    sigmas = [
        sigma(*moments(t, key_heads, mask, None))[:, :, None, None, None]
        for t, mask in ((query, query_mask), (key, key_mask))
    ]
    chosen = sample_rows(batch, length, query_mask, rows, seed, query.device)  # [B, R]
    index = chosen[:, None, None, :, None].expand(*q.shape[:3], -1, dim)
    seen = torch.ones(batch, 1, 1, 1, key.shape[2], dtype=torch.bool, device=query.device)
    if key_mask is not None:
        seen = seen & key_mask[:, None, None, None]
    if is_causal:
        seen = seen & (torch.arange(key.shape[2], device=query.device) <= chosen[:, None, None, :, None])
    sampled = q.gather(3, index)

    def concentration(scores: Tensor) -> Tensor:
        """Larger where attention is more concentrated; [B, Hk, 1, 1, 1]."""
        count = seen.sum(-1).clamp_min(2)
        if target == "variance":
            mean = torch.where(seen, scores, 0.0).sum(-1, keepdim=True) / count.unsqueeze(-1)
            spread = torch.where(seen, (scores - mean).square(), 0.0).sum(-1) / (count - 1)
            return spread.mean((2, 3), keepdim=True).unsqueeze(-1)
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        entropy: Tensor = torch.special.entr(p).sum(-1)
        return -entropy.mean((2, 3), keepdim=True).unsqueeze(-1)

    if target == "variance" and not is_causal:
        wanted = exact_score_variance(q, k, query_mask, key_mask, scale)
    else:
        wanted = concentration(scale * sampled @ k.transpose(-1, -2))
    low, high = torch.full_like(wanted, math.log(1e-4)), torch.full_like(wanted, math.log(1e4))
    for _ in range(40):
        middle = (low + high) / 2
        factor = (middle / 2).exp() * math.sqrt(0.5)
        a, x = sampled * (factor / sigmas[0]), k * (factor / sigmas[1])
        a_top, x_top = a.amax(-1, keepdim=True), x.amax(-1, keepdim=True)
        scores = ((a - a_top).exp() @ (x - x_top).exp().transpose(-1, -2)).log()  # log n_ij
        scores = (scores + a_top + x_top.transpose(-1, -2)).clamp_min(-1e30)
        too_much = concentration(scores) > wanted
        low, high = torch.where(too_much, low, middle), torch.where(too_much, middle, high)
    factor = ((low + high) / 4).exp() * math.sqrt(0.5)
    alpha, beta = ((factor / s).reshape(batch, key_heads) for s in sigmas)
    return alpha.repeat_interleave(heads // key_heads, 1), beta


def sample_rows(batch: int, length: int, mask: Tensor | None, rows: int, seed: int, device: torch.device) -> Tensor:
    """[B, R] positions of valid rows, without repetition where there are enough."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, length, generator=generator).to(device)
    if mask is not None:
        order = order + (~mask).to(order.dtype)  # hidden rows come last
    chosen = order.argsort(-1)[:, : min(rows, length)]
    if mask is None:
        return chosen
    valid = mask.sum(-1, keepdim=True).clamp_min(1)
    return chosen.gather(1, torch.arange(chosen.shape[1], device=device).unsqueeze(0) % valid)


def exact_score_variance(
    q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, scale: float
) -> Tensor:
    """Mean over all rows of the variance of the scores within a row, tr(M_q Sigma_k) scale^2, in O(N D^2)."""

    def weights(t: Tensor, mask: Tensor | None) -> Tensor:
        return torch.ones_like(t[..., :1]) if mask is None else mask[:, None, None, :, None].to(t.dtype)

    w_q, w_k = weights(q, query_mask), weights(k, key_mask)
    count = w_k.sum(-2, keepdim=True)
    second = (q * w_q).transpose(-1, -2) @ q / w_q.sum(-2, keepdim=True).clamp_min(1)  # M_q
    centred = (k - (k * w_k).sum(-2, keepdim=True) / count.clamp_min(1)) * w_k
    covariance = centred.transpose(-1, -2) @ centred / (count - 1).clamp_min(1)  # Sigma_k
    trace: Tensor = (second * covariance).sum((-2, -1), keepdim=True)
    return scale * scale * trace.mean(2, keepdim=True)
