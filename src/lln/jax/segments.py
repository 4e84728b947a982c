"""Packed sequences, told apart by segment ids [B, N] as in other attention for JAX: tokens that follow each other with
one id are a sequence, here a *run*. How many there are need not be known.

What all tokens of a run share (L, H) is summed by run. A product with the keys of a row's own run,

    sum over j in the run of i of (a_i . b_j) v_j

takes chunks of rows: pairs inside the chunk, and on both sides what the runs at its ends have beyond it, carried by two
scans. Nothing is as large as runs times channels times values.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lln.jax.arithmetic import make_finite, product, share, softmax_or_zero, sum_by_run, take_log, vary_as, wide_dtype
from lln.jax.reading import hide_empty, read_paper

CHUNK = 64


def number_runs(segment_ids: Array) -> Array:
    """[B, N]: 0 for the first sequence of a row, 1 for the next, and so on."""
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(begins, 1, dtype=jnp.int32), ((0, 0), (1, 0)))


def find_first(runs: Array, key_mask: Array | None) -> Array:
    """[B, N]: for every row the place of the first valid one of its run; beyond all of them where there is none."""
    length = runs.shape[1]
    place = jnp.broadcast_to(jnp.arange(length), runs.shape)
    place = place if key_mask is None else jnp.where(key_mask, place, length)
    return -sum_by_run(-place[:, None, :, None], runs, largest=True)[:, 0, :, 0]


def multiply_in_runs(a: Array, b: Array, v: Array, runs: Array) -> Array:
    """[B, H, G, N, E] for a [B, H, G, N, C], b [B, H, N, C], v [B, H, N, E]."""
    length = runs.shape[1]
    size = min(CHUNK, length)
    missing = -length % size

    def lay(t: Array, axis: int, mode: str = "constant") -> Array:
        """[..., N, ...] -> [N / size, ..., size, ...]"""
        t = jnp.pad(t, [(0, missing if at == axis else 0) for at in range(t.ndim)], mode=mode)
        return jnp.moveaxis(t.reshape(*t.shape[:axis], -1, size, *t.shape[axis + 1 :]), axis, 0)

    rows = lay(a, 3), lay(b, 2), lay(v, 2), lay(runs, 1, "edge")

    def body(carried: tuple[Array, Array], part: Any, backwards: bool) -> Any:
        """carried: the products b v of the run at this end of the chunk, and its number."""
        beyond, number = carried
        a, b, v, runs = part
        inside = (runs == number)[:, None, None, :, None]
        out = product("bhgnc,bhce->bhgne", jnp.where(inside, a, 0.0), beyond)
        if not backwards:
            same = (runs[:, :, None] == runs[:, None, :])[:, None, None]
            scores = jnp.where(same, product("bhgnc,bhmc->bhgnm", a, b), 0.0)
            out += product("bhgnm,bhme->bhgne", scores, v)
        new = runs[:, :1] if backwards else runs[:, -1:]
        own = jnp.where((runs == new)[:, None, :, None], b, 0.0)
        stays = (number == new)[:, None, :, None]
        return (jnp.where(stays, beyond, 0.0) + product("bhmc,bhme->bhce", own, v), new), out

    start = jnp.zeros((*b.shape[:2], b.shape[-1], v.shape[-1]), v.dtype), jnp.full((runs.shape[0], 1), -1, runs.dtype)
    start = vary_as(start, a, b, v)
    ways = [
        lax.scan(jax.checkpoint(functools.partial(body, backwards=backwards)), start, rows, reverse=backwards)[1]
        for backwards in (False, True)
    ]
    out = jnp.moveaxis(ways[0] + ways[1], 0, 3)
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length]


def attend_in_runs(
    q: Array, k: Array, v: Array, x: Array, alpha: Array, scale: float, runs: Array, is_evidence: bool
) -> Array:
    """o [B, H, G, N, E] of queries that see all keys of their own run, earlier and later."""
    wide = x.astype(wide_dtype())
    top = lax.stop_gradient(make_finite(sum_by_run(lax.stop_gradient(wide), runs, largest=True)))
    weights = jnp.exp(wide - top)
    log_sum = take_log(sum_by_run(weights, runs), top)  # [B, H, N, C]
    b = share(wide, log_sum, v.dtype)
    if not is_evidence:
        return multiply_in_runs(read_paper(q, alpha, log_sum), b, v, runs)
    below = log_sum - jnp.where(wide == -jnp.inf, log_sum, wide)  # >= 0, and 0 ln 0 = 0
    below = jnp.where(log_sum == -jnp.inf, 0.0, below)
    entropy = sum_by_run(b * below.astype(b.dtype), runs)
    logits = multiply_in_runs(scale * q, k, b, runs) + entropy[:, :, None]
    return multiply_in_runs(softmax_or_zero(hide_empty(logits, log_sum[:, :, None])), b, v, runs)
