"""Attention of queries that see a whole state, by the paper's read and by the evidence read; the channels' exponents.

o_i = sum_c softmax_c(alpha q_ic + L_c) S_c            o_i = sum_c softmax_c(scale q_i . K_c + H_c) S_c
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from lln.jax.arithmetic import exponents, make_finite, product, softmax_or_zero
from lln.jax.holding import LLNState

SIGNED = "signed"


def channel_exponents(k: Array, beta: Array, directions: Array | str | None, hidden: Array | None) -> Array:
    """x [B, H, M, C] of keys [B, H, M, D]: beta times the keys, or their products with the directions [H, C, D]."""
    if directions is not None and not isinstance(directions, str):
        return exponents(product("bhmd,hcd->bhmc", k, directions.astype(k.dtype)), beta, hidden)
    x = exponents(k, beta)
    x = jnp.concatenate([x, -x], -1) if directions == SIGNED else x
    return x if hidden is None else jnp.where(hidden, -jnp.inf, x)


def read_paper(q: Array, alpha: Array, log_sum: Array) -> Array:
    """The weights [B, H, G, N, C] of a state's channels; log_sum [B, H, C], or [B, H, N, C] where each query has its
    own. 0 where there is no key at all."""
    # Relative to the largest channel: a softmax does not see it, and small exponents round less.
    offset = log_sum - lax.stop_gradient(make_finite(log_sum.max(-1, keepdims=True)))
    offset = offset[:, :, None] if log_sum.ndim == 4 else offset[:, :, None, None]
    return softmax_or_zero(exponents(q, alpha) + offset.astype(alpha.dtype))


def read_evidence(q: Array, state: LLNState, scale: float) -> Array:
    """Likewise, by the centres of the keys in the channels."""
    assert state.mean_key is not None
    assert state.entropy is not None
    # A vector that all keys share changes no output, and without it products are smaller and round less.
    key = state.mean_key - lax.stop_gradient(state.mean_key.mean(-2, keepdims=True))
    logits = product("bhgnd,bhcd->bhgnc", scale * q, key) + state.entropy.astype(q.dtype)[:, :, None, None]
    return softmax_or_zero(hide_empty(logits, state.log_sum[:, :, None, None]))


def hide_empty(logits: Array, log_sum: Array) -> Array:
    """A channel without keys has no evidence."""
    return jnp.where(log_sum == -jnp.inf, -jnp.inf, logits)


def read_state(q: Array, alpha: Array, state: LLNState, scale: float) -> Array:
    """o [B, H, G, N, E] of queries that see all of the state; zeros where it holds no key."""
    a = read_paper(q, alpha, state.log_sum) if state.mean_key is None else read_evidence(q, state, scale)
    return product("bhgnc,bhce->bhgne", a, state.mean_value)
