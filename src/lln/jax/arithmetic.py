"""Sums of exponentials that cannot overflow, and have no NaN among their gradients where nothing is summed.

Layout of all that is computed in this folder. Query heads are grouped by the key head they share:

    q          [B, H, G, N, D]     G query heads for each of the H key heads
    k, v       [B, H, M, D], [B, H, M, E]
    alpha      [B, H, G, N, D]     any size may be 1; beta [B, H, M, D] likewise
    hidden     [B, 1, M, 1]        True where a key is masked out, or None
    L          [B, H, C]           of the state, for C channels; wide: float64 where JAX has it
    S          [B, H, C, E]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def product(formula: str, first: Array, second: Array) -> Array:
    """einsum in the precision of its operands: on accelerators JAX rounds them to fewer bits unless it is told."""
    found: Array = jnp.einsum(formula, first, second, precision=lax.Precision.HIGHEST)
    return found


def compute_dtype(dtype: Any) -> Any:
    """float64 stays; everything narrower is computed in float32."""
    return jnp.dtype("float64") if dtype == jnp.dtype("float64") else jnp.dtype("float32")


def wide_dtype() -> Any:
    """float64 with `jax_enable_x64`, else float32."""
    return jax.dtypes.canonicalize_dtype("float64")


def make_finite(x: Array) -> Array:
    """-inf becomes the lowest finite number, so that subtracting it from an exponent of -inf gives -inf, not NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def exponents(t: Array, factor: Array, hidden: Array | None = None) -> Array:
    """factor * t, -inf where hidden. Kept well inside the finite numbers: differences must be finite, too."""
    limit = float(jnp.finfo(factor.dtype).max) / 8
    x = jnp.clip(t * factor, -limit, limit)
    return x if hidden is None else jnp.where(hidden, -jnp.inf, x)


def add_logs(a: Array, b: Array) -> Array:
    """log(e^a + e^b); two empty sums (-inf) make an empty sum."""
    top = lax.stop_gradient(make_finite(jnp.maximum(a, b)))
    return take_log(jnp.exp(a - top) + jnp.exp(b - top), top)


def take_log(total: Array, top: Array) -> Array:
    """top + log(total), where a total of 0 makes an empty sum."""
    some = total > 0
    return jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def share(part: Array, whole: Array, dtype: Any) -> Array:
    """e^(part - whole), at most 1; 0 for an empty part of an empty whole."""
    return jnp.exp((part - make_finite(whole)).astype(dtype))


def softmax_or_zero(logits: Array) -> Array:
    """Softmax over the last dimension; a row of -inf, which has nothing to attend to, gives zeros."""
    top = lax.stop_gradient(make_finite(logits.max(-1, keepdims=True)))
    weights = jnp.exp(logits - top)
    # The largest weight of a row that has any is exactly 1, so the floor changes empty rows only.
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 0.5)


def sum_by_run(x: Array, runs: Array, largest: bool = False) -> Array:
    """For each row of x [B, H, N, C] the sum, or the largest, over the rows of its run (runs [B, N])."""
    length = x.shape[2]
    reduce = jax.ops.segment_max if largest else jax.ops.segment_sum

    def of_head(rows: Array, numbers: Array) -> Array:
        found: Array = reduce(rows, numbers, num_segments=length, indices_are_sorted=True)
        return found[numbers]

    found: Array = jax.vmap(jax.vmap(of_head, (0, None)))(x, runs)
    return found


def vary_as(tree: Any, *like: Array) -> Any:
    """What a scan begins with, told to differ between devices as its inputs do: inside jax.shard_map a scan that begins
    with a constant is refused. The values stay as they are."""
    firsts = [t[(0,) * t.ndim] for t in like if t.size]
    if not firsts:
        return tree
    total = lax.stop_gradient(jnp.stack([first.astype(firsts[0].dtype) for first in firsts]).sum())
    nothing = total != total  # whatever it is, nothing is chosen by it
    return jax.tree.map(lambda t: jnp.where(nothing, t, t), tree)
