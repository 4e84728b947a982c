"""alpha and beta from the spread of queries and keys, in JAX, on the curves that PyTorch's matching reads."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from lln.jax.arguments import check_mask
from lln.jax.arithmetic import compute_dtype, sum_by_run, wide_dtype
from lln.jax.segments import number_runs
from lln.kernels.paper_line import SIGMA_FLOOR
from lln.points import LENGTH, find_points, match_numbers, match_spreads
from lln.rules import check_choice, check_count

MATCHINGS = ("paper", "variance", "entropy")


def match_moments(
    sigma_q: Any, sigma_k: Any, head_dim: int, matching: str = "paper", scale: float | None = None, *,
    length: Any = LENGTH,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute (alpha, beta) from the standard deviations of queries and keys: `lln.match_moments` in JAX.

    Args:
        sigma_q: standard deviation of the queries: a positive number, or an array of any shape.
        sigma_k: standard deviation of the keys, of a shape that broadcasts with sigma_q.
        head_dim: dimension of queries and keys; 8 to 256 for "variance" and "entropy", which use measured curves.
        matching: "paper" (eq. 10), "variance" or "entropy".
        scale: factor of the scores of the softmax attention to imitate, default 1 / sqrt(head_dim).
        length: number of keys, or an array that broadcasts with sigma; only `entropy` depends on it, a little.

    Returns:
        Two numbers for two numbers, otherwise two arrays. They carry no gradient.

    Examples:
        >>> from lln.jax import match_moments
        >>> alpha, beta = match_moments(1.0, 1.0, head_dim=64)
        >>> print(f"{alpha:.4f} {beta:.4f}")
        2.1355 2.1355
    """
    check_choice("matching", matching, *MATCHINGS)
    check_count("head_dim", head_dim)
    numbers = isinstance(sigma_q, (int, float)) and isinstance(sigma_k, (int, float))
    for name, number in (("scale", scale), ("sigma_q", sigma_q), ("sigma_k", sigma_k)):
        if isinstance(number, (int, float)) and not (number > 0 and math.isfinite(number)):
            raise ValueError(
                f"{name} must be a number that is positive and finite; got {number}. sigma_q and sigma_k are standard "
                "deviations, and scale is 1/sqrt(head_dim) where it is left out."
            )
    if numbers and isinstance(length, (int, float)):
        return match_numbers(sigma_q, sigma_k, head_dim, matching, scale, length)
    wide = wide_dtype()
    q, k = jnp.broadcast_arrays(*(lax.stop_gradient(jnp.asarray(s, wide)) for s in (sigma_q, sigma_k)))
    points = jnp.asarray(find_points(matching, head_dim), wide)
    return match_spreads(jnp, points, q, k, head_dim, matching, scale, jnp.asarray(length, wide))


def moments(t: Array, key_heads: int, mask: Array | None, runs: Array | None) -> tuple[Array, Array, Array]:
    """(count, mean, sum of squares around it) of the elements of t [B, H, N, D] for each key head, [B, key heads, 1 or
    N, 1]: of the sample or, for each token, of its run. Query heads that share a key head are pooled."""
    t = lax.stop_gradient(t).astype(compute_dtype(t.dtype))
    grouped = t.reshape(t.shape[0], key_heads, -1, *t.shape[2:])
    shown = jnp.ones((1, t.shape[2]), bool) if mask is None else mask
    shown = shown[:, None, None, :, None]

    def add_up(x: Array) -> Array:
        x = jnp.where(shown, x, 0.0).sum((2, 4))[..., None].astype(wide_dtype())  # [B, key heads, N, 1]
        return x.sum(2, keepdims=True) if runs is None else sum_by_run(x, runs)

    count = add_up(jnp.ones_like(grouped))
    mean = add_up(grouped) / jnp.maximum(count, 1)
    # Around each sample's own mean: a large offset would eat the digits of the spread.
    squares = add_up((grouped - mean.astype(t.dtype)[:, :, None]) ** 2)
    return count, mean, squares


def deviation(count: Array, squares: Array) -> Array:
    """The unbiased standard deviation, floored."""
    return jnp.sqrt(jnp.maximum(squares / jnp.maximum(count - 1, 1), SIGMA_FLOOR**2))


def match_samples(
    query: Array, key: Array, matching: str = "paper", scale: float | None = None, *, key_mask: Array | None = None,
    query_mask: Array | None = None, segment_ids: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute (alpha [batch, heads, 1], beta [batch, key heads, 1]) for `lln_attention` from the spread of each
    sample's own queries and keys, as statistics="sample" does in PyTorch. Do not use it for causal attention, whose
    outputs would depend on later tokens.

    Args:
        query: [batch, heads, length, dim]; key: [batch, key heads, key length, dim].
        matching, scale: as in `match_moments`.
        key_mask: [batch, key length] bool: keys that count.
        query_mask: [batch, length] bool, default key_mask where the lengths agree.
        segment_ids: [batch, length]: each packed sequence by itself; alpha and beta are then [batch, heads, length, 1].

    Examples:
        >>> import jax
        >>> from lln.jax import lln_attention, match_samples
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 50, 16))
        >>> attend = jax.jit(lambda q, k, v: lln_attention(q, k, v, *match_samples(q, k, "entropy")))
        >>> attend(q, k, v).shape
        (2, 4, 50, 16)
    """
    check_mask("key_mask", key_mask, key)
    check_mask("query_mask", query_mask, query)
    check_mask("segment_ids", segment_ids, key, "integers")
    key_heads, dim = key.shape[1], key.shape[3]
    if query_mask is None and query.shape[2] == key.shape[2]:
        query_mask = key_mask
    runs = None if segment_ids is None else number_runs(segment_ids)
    count_q, _, squares_q = moments(query, key_heads, query_mask, runs)
    count_k, _, squares_k = moments(key, key_heads, key_mask, runs)
    spreads = deviation(count_q, squares_q), deviation(count_k, squares_k)
    alpha, beta = match_moments(*spreads, dim, matching, scale, length=jnp.maximum(count_k / dim, 1))
    dtype = compute_dtype(query.dtype)
    alpha, beta = alpha.astype(dtype).repeat(query.shape[1] // key_heads, 1), beta.astype(dtype)
    return (alpha, beta) if runs is not None else (alpha[:, :, 0], beta[:, :, 0])
