"""alpha and beta from the spread of queries and keys: eq. (10) of the paper, and better inverses of the same idea.

LLN attention with s2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2, split equally between the two, is to concentrate like
softmax attention whose scores have variance t = (scale sqrt(d))^2 sigma_q^2 sigma_k^2:

    paper      s2 = (t - b) / a: the variance of log P, taken for one straight line in s2
    variance   the same variance, by the curve measured for this head dim
    entropy    the entropy of P in place of the variance of log P
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.checks import MATCHINGS, Matching
from lln.kernels.carry import owners
from lln.kernels.common import PAPER_A, PAPER_B, SIGMA_FLOOR, can_look, compute_dtype, spans, wide_dtype
from lln.kernels.triton import support
from lln.kernels.triton.support import explain_refusal
from lln.matching.curves import s2_for_entropy, s2_for_variance
from lln.points import LENGTH as LENGTH
from lln.ranks import find_ranks, share
from lln.values import check_choice, check_count, describe

# query, key, number of key heads, mask of the queries, of the keys, offsets of packed queries, of packed keys
Data = tuple[Tensor, Tensor, int, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def match_moments(
    sigma_q: float | Tensor,
    sigma_k: float | Tensor,
    head_dim: int,
    matching: Matching = "paper",
    scale: float | None = None,
    *,
    length: int | Tensor = LENGTH,
) -> tuple[float, float] | tuple[Tensor, Tensor]:
    """Compute (alpha, beta), with which LLN attention is as concentrated as softmax attention, from the standard
    deviations of queries and keys.

    Args:
        sigma_q: standard deviation of the queries: a positive number, or a tensor of any shape.
        sigma_k: standard deviation of the keys, of a shape that broadcasts with sigma_q.
        head_dim: dimension of queries and keys; 8 to 256 for "variance" and "entropy", which use measured curves.
        matching: "paper", eq. (10); "entropy", recommended for new models: it follows softmax over the widest range;
            or "variance". Default "paper".
        scale: factor of the scores of the softmax attention to imitate, default 1 / sqrt(head_dim).
        length: number of keys, or a tensor that expands to the shape of sigma; only `entropy` depends on it, a little
            (under 5 % up to sigma = 1). Its curves span 8 to 16,384 keys; beyond, the nearest serves.

    Returns:
        Two numbers for two numbers, otherwise two tensors of the broadcast shape, in float64 (float32 on MPS), made on
        their device without waiting for it. They carry no gradient.

    Raises:
        ValueError: for a number that is not positive, an unknown matching, or a head_dim the curves do not cover.

    Examples:
        >>> import lln, torch
        >>> alpha, beta = lln.match_moments(1.0, 1.0, head_dim=64)
        >>> print(f"{alpha:.4f} {beta:.4f}")
        2.1355 2.1355
        >>> sigma = torch.tensor([0.5, 1.0, 2.0])
        >>> alpha, beta = lln.match_moments(sigma, sigma, head_dim=64, matching="entropy", length=256)
        >>> alpha.shape
        torch.Size([3])
    """
    check_choice("matching", matching, *MATCHINGS)
    check_count("head_dim", head_dim)
    if not isinstance(length, Tensor) and length < 1:
        raise ValueError(f"length must be at least 1; got {length}.")
    for name, number in (("scale", scale), ("sigma_q", sigma_q), ("sigma_k", sigma_k)):
        # Not math.isfinite: in torch.compile(dynamic=True) the number may be a symbol.
        if number is not None and not isinstance(number, Tensor) and not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {number}.")
        if isinstance(number, Tensor) and can_look(number) and bool((number < 0).any()):  # queries in their place
            raise ValueError(
                f"{name} must be standard deviations, like q.std(), and none is negative; got {describe(number)}."
            )
    devices = [sigma.device for sigma in (sigma_q, sigma_k) if isinstance(sigma, Tensor)]
    device = devices[-1] if devices else torch.device("cpu")
    dtype = wide_dtype(device)

    def make_tensor(value: float | Tensor) -> Tensor:
        # torch.full rather than torch.tensor: a fill on the device, not a copy to it, so that a CUDA graph can hold it.
        if isinstance(value, Tensor):
            return value.detach().to(device, dtype)
        return torch.full((), value, dtype=dtype, device=device)

    q, k = make_tensor(sigma_q), make_tensor(sigma_k)
    t = (q * k).square()
    if scale is not None:
        t *= score_factor(scale, head_dim)
    # Half of s2 each; a division by 2 is exact wherever it comes.
    if matching == "paper":
        half = t.sub_(PAPER_B).div_(2 * PAPER_A).sqrt_()
    elif matching == "variance":
        half = s2_for_variance(t, head_dim).div_(2).sqrt_()
    else:
        half = s2_for_entropy(t, head_dim, make_tensor(length)).div_(2).sqrt_()
    alpha, beta = half / q, half / k
    return (alpha, beta) if devices else (alpha.item(), beta.item())


def score_factor(scale: float | None, head_dim: int) -> float:
    """t / (sigma_q sigma_k)^2"""
    return 1.0 if scale is None else scale * scale * head_dim


def sigma(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """The unbiased standard deviation from (count, sum, sum of squares), floored."""
    variance = (squares - total * total / count.clamp_min(1)) / (count - 1).clamp_min(1)
    return variance.clamp_min(SIGMA_FLOOR**2).sqrt()


def has_kernels(query: Tensor, key: Tensor, backend: str) -> bool:
    """Whether the GPU kernels take the statistics. `backend` "triton" lets their interpreter serve tensors on the CPU;
    where they cannot run, the statistics are plain torch."""
    if backend == "eager" or (backend == "auto" and not query.is_cuda):
        return False
    # A compiler traces an op, whatever the tensors are.
    return explain_refusal(query) is None if torch.compiler.is_compiling() else support.has_kernels(query, key)


def find_kernel(name: str) -> Callable[..., Any]:
    """A function of kernels/triton/moments.py; for torch.compile the op of that name, which eager calls can spare."""
    from lln.kernels.triton import moments as gpu  # on demand: `import lln` does without triton

    found: Callable[..., Any] = getattr(torch.ops.lln if torch.compiler.is_compiling() else gpu, name)
    return found


def match_samples(data: Data, matching: Matching, scale: float | None, backend: str) -> tuple[Tensor, Tensor]:
    """alpha [B, heads, 1] and beta [B, key heads, 1] of each sample (packed: each sequence) and key head for itself, in
    the dtype that attention of these queries computes in."""
    query, key = data[:2]
    head_dim = query.shape[-1]
    if matching == "paper" and find_ranks() is None and has_kernels(query, key, backend):  # eq. (10) in the same kernel
        alpha, beta = find_kernel("paper_coefficients")(*data, score_factor(scale, head_dim))
        return alpha, beta
    found = both_moments(*data, backend)
    length = found[1, 0] / head_dim if matching == "entropy" else LENGTH
    sigma_q, sigma_k = sigma(*found.unbind(1)).unbind()
    return expand_heads(match_moments(sigma_q, sigma_k, head_dim, matching, scale, length=length), query)


def expand_heads(found: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """(alpha, beta) as `match_moments` gives them for each key head, [B, key heads], or for all together, [], in the
    shapes and the dtype of the op."""
    alpha, beta = (one.to(compute_dtype(query.dtype)) for one in found)
    if alpha.ndim == 2:
        if query.shape[1] != alpha.shape[1]:
            alpha = alpha.repeat_interleave(query.shape[1] // alpha.shape[1], 1)
        alpha, beta = alpha.unsqueeze(-1), beta.unsqueeze(-1)
    return alpha, beta


def both_moments(
    query: Tensor,
    key: Tensor,
    key_heads: int,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_query: Tensor | None = None,
    cu_key: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The `moments` of queries and of keys: [2, 3, samples, key heads], on a GPU in one pass over both.

    Neither may require grad. Where sequences lie on several ranks, those of all their rows."""
    if (ranks := find_ranks()) is not None:
        cu_query, cu_key = (ranks.cut_offsets(one, t.shape[2]) for one, t in ((cu_query, query), (cu_key, key)))
        with share(None):
            own = both_moments(query, key, key_heads, query_mask, key_mask, cu_query, cu_key, backend)
        return ranks.add_up(own)
    if has_kernels(query, key, backend):
        found: Tensor = find_kernel("both_moments")(query, key, key_heads, query_mask, key_mask, cu_query, cu_key)
        return found
    of_query, of_key = moments(query, key_heads, query_mask, cu_query), moments(key, key_heads, key_mask, cu_key)
    return torch.stack([torch.stack(of_query), torch.stack(of_key)])


def moments(t: Tensor, key_heads: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(count, sum, sum of squares) of the elements of t [B, H, N, D] for each sample and key head, [B, key_heads] wide.

    Query heads that share a key head are pooled. mask [B, N]: True = counts. Packed: one row for each sequence.
    """
    dtype = wide_dtype(t.device)
    grouped = t.detach().unflatten(1, (key_heads, -1))  # [B, H, G, N, D]
    owner = None if cu_seqlens is None else owners(torch.arange(t.shape[-2], device=t.device), cu_seqlens)

    def add_up(per_token: Tensor) -> Tensor:
        """[B, H, N] -> [B, H]; where, not *: what is hidden may be anything."""
        per_token = per_token.to(dtype)
        if mask is not None:
            per_token = torch.where(mask[:, None], per_token, 0.0)
        if owner is None or cu_seqlens is None:
            return per_token.sum(-1)
        return per_token.new_zeros(cu_seqlens.numel() - 1, key_heads).index_add(0, owner, per_token[0].T)

    def token_sums(centre: Tensor | None) -> Tensor:
        """Sums over a token's elements, or of their squares around `centre` [B, H, 1 or N]: [B, H, N]."""
        wide = torch.promote_types(t.dtype, torch.float32)
        sums: list[Tensor] = []
        for rows in spans(grouped):
            part = grouped[..., rows, :].to(wide)
            if centre is not None:
                around = centre if owner is None else centre[..., rows]
                part = (part - around[:, :, None, :, None]).square()
            sums.append(part.sum((2, 4)))
        if not sums:
            return t.new_zeros(t.shape[0], key_heads, 0, dtype=wide)
        return sums[0] if len(sums) == 1 else torch.cat(sums, -1)

    sums = token_sums(None)
    count, total = add_up(torch.full_like(sums, grouped.shape[2] * grouped.shape[4])), add_up(sums)
    # Squares around each sample's own mean: a large offset would eat the digits of the spread, and a mean that others
    # share would let them be seen.
    mean = (total / count.clamp_min(1)).to(sums.dtype)
    squares = add_up(token_sums(mean.unsqueeze(-1) if owner is None else mean[owner].T.unsqueeze(0)))
    wide = mean.to(dtype)
    return count, total, squares + 2 * wide * total - count * wide * wide
