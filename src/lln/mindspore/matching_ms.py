"""alpha and beta from the spread of queries and keys in MindSpore, on the curves that PyTorch's matching reads."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import ops

from lln.kernels.paper_line import SIGMA_FLOOR
from lln.points import LENGTH, find_points, match_numbers, match_spreads
from lln.rules import check_choice, check_count

MATCHINGS = ("paper", "variance", "entropy")


def match_moments(
    sigma_q: Any, sigma_k: Any, head_dim: int, matching: str = "paper", scale: float | None = None, *,
    length: Any = LENGTH,
) -> tuple[Any, Any]:  # fmt: skip
    """(alpha, beta) for queries and keys with these standard deviations: `lln.match_moments` in MindSpore.

    Args:
        sigma_q: positive number, or a tensor; likewise sigma_k, of the same shape.
        head_dim: 8 to 256 for `variance` and `entropy`, which stand on measured curves.
        matching: "paper" (eq. 10), "variance" or "entropy".
        scale: of the softmax attention to imitate, default 1 / sqrt(head_dim).
        length: number of keys; only `entropy` depends on it, a little.

    Returns:
        Two numbers for two numbers, otherwise two tensors. They carry no gradient.

    Examples:
        >>> from lln.mindspore import match_moments
        >>> alpha, beta = match_moments(1.0, 1.0, head_dim=64)
        >>> print(f"{alpha:.4f} {beta:.4f}")
        2.1355 2.1355
    """
    points = load_points(matching, head_dim, getattr(sigma_q, "dtype", ms.float32))
    if isinstance(sigma_q, (int, float)) and isinstance(sigma_k, (int, float)):
        return match_numbers(sigma_q, sigma_k, head_dim, matching, scale, length)
    q, k = ops.stop_gradient(sigma_q), ops.stop_gradient(sigma_k)
    count = ops.full((1,), length, dtype=q.dtype) if isinstance(length, (int, float)) else length
    return match_spreads(ops, points, q, k, head_dim, matching, scale, count)


def load_points(matching: str, head_dim: int, dtype: Any) -> Any:
    """The curves as a tensor. Not inside a graph: a Cell does it when it is built."""
    check_choice("matching", matching, *MATCHINGS)
    check_count("head_dim", head_dim)
    return ms.Tensor(find_points(matching, head_dim), dtype)


def match_samples(
    query: Any, key: Any, points: Any, matching: str, scale: float | None, key_mask: Any, query_mask: Any
) -> tuple[Any, Any]:
    """(alpha [B, heads, 1], beta [B, key heads, 1]) by the spread of each sample's own queries and keys, [B, heads, N,
    D], of the tokens that the masks [B, N] show. points: of `load_points`, in the dtype of the queries."""
    key_heads, dim = key.shape[1], key.shape[3]
    sigma_q, _ = measure_spread(query, key_heads, query_mask)
    sigma_k, count = measure_spread(key, key_heads, key_mask)
    length = ops.clamp(count / dim, min=1)
    alpha, beta = match_spreads(ops, points, sigma_q, sigma_k, dim, matching, scale, length)
    return alpha.repeat_interleave(query.shape[1] // key_heads, 1).expand_dims(2), beta.expand_dims(2)


def measure_spread(t: Any, key_heads: int, mask: Any) -> tuple[Any, Any]:
    """(sigma, count) [B, key heads] of the elements of t, query heads that share a key head together."""
    batch, _, length, dim = t.shape
    t = ops.stop_gradient(t).reshape(batch, key_heads, -1, length, dim)
    shown = ops.ones_like(t)
    if mask is not None:
        shown = shown * mask[:, None, None, :, None].astype(t.dtype)
    count = shown.sum((2, 3, 4))
    mean = (t * shown).sum((2, 3, 4)) / ops.clamp(count, min=1)
    around = (t - mean[:, :, None, None, None]) * shown
    variance = (around * around).sum((2, 3, 4)) / ops.clamp(count - 1, min=1)
    return ops.sqrt(ops.clamp(variance, min=SIGMA_FLOOR**2)), count
