"""Causal LLN attention: the same state, carried from prefix to prefix, chunk by chunk in one lax.scan.

    L_t = logaddexp(L_{t-1}, x_t)     A_t = softmax_c(alpha q_t + L_t)     P_tj = sum_c A_tc e^(x_jc - L_tc)

Every exponent is <= 0. Inside a chunk P is never built from one reference: a key that is large in some channel would
wipe out what came before it. Instead the right half of each block of 2b rows meets its left half at the edge e between
them, P_tj = sum_c [A_tc e^(L_e - L_t)] [e^(x_j - L_e)], for b = CHUNK / 2 down to SMALL; inside blocks of SMALL rows
each pair has its own exponents. Packed sequences: a row sees its own run alone, so L_t begins anew with each.

The chunk is computed again in the backward pass, so that memory is linear in the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lln.jax.arithmetic import product, share, softmax_or_zero, vary_as
from lln.jax.holding import LLNState, fold, join_logs, merge
from lln.jax.reading import hide_empty, read_paper

CHUNK = 64
SMALL = 8


class Level(NamedTuple):
    half: int
    keys: Array  # [B, H, n / 2b, b, C]  e^(x_j - L_e)
    decay: Array  # [B, H, n / 2b, b, C]  e^(L_e - L_t)


class Chunk(NamedTuple):
    """n rows, n a power of two."""

    log_sums: Array  # [B, H, n, C] wide  L_t of every row
    entropies: Array | None  # H_t likewise, of the evidence read
    past: Array  # [B, H, n, C]  e^(L_b - L_t) for the edge b at the chunk's start
    levels: tuple[Level, ...]
    near: Array  # [B, H, n / SMALL, SMALL, SMALL, C]  e^(x_j - L_t) of a block's rows t and j <= t


def cut(t: Array, size: int) -> Array:
    """[..., n, C] -> [..., n / size, size, C]"""
    return t.reshape(*t.shape[:-2], -1, size, t.shape[-1])


def cut_pairs(t: Array, half: int) -> tuple[Array, Array]:
    """The left and the right halves [..., n / 2b, b, C] of the blocks of 2b rows, b = half."""
    halves = t.reshape(*t.shape[:-2], -1, 2, half, t.shape[-1])
    return halves[..., 0, :, :], halves[..., 1, :, :]


def join_pairs(left: Array, right: Array) -> Array:
    """The inverse."""
    joined = jnp.stack([left, right], -3)
    return joined.reshape(*joined.shape[:-4], -1, joined.shape[-1])


def add_right(t: Array, right: Array) -> Array:
    """t [..., n, C] with something added to the right halves."""
    return t + join_pairs(jnp.zeros_like(right), right)


def keep(x: Array, wanted: Array | None) -> Array:
    """Exponents where wanted, -inf elsewhere. wanted: None for everywhere."""
    return x if wanted is None else jnp.where(wanted, x, -jnp.inf)


def is_same(runs: Array | None, others: Array | None) -> Array | None:
    return None if runs is None or others is None else runs == others


def make_chunk(x: Array, state: LLNState, runs: Array | None, last: Array | None, dtype: Any) -> Chunk:
    """x [B, H, n, C] wide, -inf where hidden. runs [B, 1, n, 1] are the rows' sequences, last [B, 1, 1, 1] the
    state's."""
    half, sums = 1, x
    entropies = None if state.entropy is None else jnp.zeros_like(x)
    while half < x.shape[-2]:
        left, right = cut_pairs(sums, half)
        left_runs, right_runs = (None, None) if runs is None else cut_pairs(runs, half)
        ends = None if left_runs is None else left_runs[..., -1:, :]
        held_left, held_right = (None, None) if entropies is None else cut_pairs(entropies, half)
        # A row that another sequence is before of sees nothing of it.
        before = keep(left[..., -1:, :], is_same(right_runs, ends))
        joined, held = join_logs(before, None if held_left is None else held_left[..., -1:, :], right, held_right)
        sums = join_pairs(left, joined)
        if held is not None and held_left is not None:
            entropies = join_pairs(held_left, held)
        half *= 2
    before = keep(state.log_sum[:, :, None], is_same(runs, last))
    entropy = None if state.entropy is None else state.entropy[:, :, None]
    log_sums, entropies = join_logs(before, entropy, sums, entropies)
    levels = tuple(list_levels(x, log_sums, runs, dtype))
    return Chunk(log_sums, entropies, share(before, log_sums, dtype), levels, weigh_near(x, log_sums, runs, dtype))


def list_levels(x: Array, log_sums: Array, runs: Array | None, dtype: Any) -> Iterator[Level]:
    half = x.shape[-2] // 2
    while half >= SMALL:
        left, right = cut_pairs(log_sums, half)
        left_runs, right_runs = (None, None) if runs is None else cut_pairs(runs, half)
        edge, ends = left[..., -1:, :], None if left_runs is None else left_runs[..., -1:, :]
        keys = share(keep(cut_pairs(x, half)[0], is_same(left_runs, ends)), edge, dtype)
        yield Level(half, keys, share(keep(edge, is_same(right_runs, ends)), right, dtype))
        half //= 2


def weigh_near(x: Array, log_sums: Array, runs: Array | None, dtype: Any) -> Array:
    keys, rows = cut(x, SMALL)[..., None, :, :], cut(log_sums, SMALL)[..., :, None, :]
    seen = jnp.tril(jnp.ones((SMALL, SMALL), bool))[..., None]
    if runs is not None:
        numbers = cut(runs, SMALL)
        seen = seen & (numbers[..., :, None, :] == numbers[..., None, :, :])
    return share(jnp.where(seen, keys, -jnp.inf), rows, dtype)


def weigh_values(chunk: Chunk, a: Array, v: Array, mean_value: Array) -> Array:
    """o_t [B, H, G, n, E] for the weights a [B, H, G, n, C] of the channels; mean_value is S at the chunk's start."""
    out = product("bhgnc,bhce->bhgne", a * chunk.past[:, :, None], mean_value)
    weights = jnp.einsum("bhgmtc,bhmtjc->bhgmtj", cut(a, SMALL), chunk.near)
    near = product("bhgmtj,bhmje->bhgmte", weights, cut(v, SMALL))
    out += near.reshape(out.shape)
    for level in chunk.levels:
        right = cut_pairs(a, level.half)[1] * level.decay[:, :, None]
        weights = product("bhgmtc,bhmjc->bhgmtj", right, level.keys)
        out = add_right(out, product("bhgmtj,bhmje->bhgmte", weights, cut_pairs(v, level.half)[0]))
    return out


def multiply_means(chunk: Chunk, g: Array, v: Array, mean_value: Array) -> Array:
    """g_t . S_tc [B, H, G, n, C] for g [B, H, G, n, E], with S_t never formed."""
    found = chunk.past[:, :, None] * product("bhgne,bhce->bhgnc", g, mean_value)
    scores = product("bhgmte,bhmje->bhgmtj", cut(g, SMALL), cut(v, SMALL))
    found += jnp.einsum("bhgmtj,bhmtjc->bhgmtc", scores, chunk.near).reshape(found.shape)
    for level in chunk.levels:
        right, left = cut_pairs(g, level.half)[1], cut_pairs(v, level.half)[0]
        scores = product("bhgmte,bhmje->bhgmtj", right, left)
        found = add_right(found, level.decay[:, :, None] * product("bhgmtj,bhmjc->bhgmtc", scores, level.keys))
    return found


class Rows(NamedTuple):
    """What one chunk is made of."""

    q: Array  # [B, H, G, n, D]
    k: Array | None  # [B, H, n, D], of the evidence read
    v: Array  # [B, H, n, E]
    x: Array  # [B, H, n, C]
    alpha: Array | None  # [B, H, G, n, D] where it differs from row to row
    runs: Array | None  # [B, 1, n, 1]


def attend_chunk(
    carried: tuple[LLNState, Array | None], rows: Rows, alpha: Array, scale: float, centre: Array | None
) -> tuple[tuple[LLNState, Array | None], Array]:
    """(the state after the chunk and its last row's sequence, o of its rows)"""
    state, last = carried
    x = rows.x.astype(state.log_sum.dtype)
    chunk = make_chunk(x, state, rows.runs, last, rows.v.dtype)
    if state.mean_key is None:
        a = read_paper(rows.q, alpha if rows.alpha is None else rows.alpha, chunk.log_sums)
    else:
        assert rows.k is not None
        assert chunk.entropies is not None
        logits = multiply_means(chunk, scale * rows.q, rows.k - centre, state.mean_key - centre)
        logits += chunk.entropies.astype(logits.dtype)[:, :, None]
        a = softmax_or_zero(hide_empty(logits, chunk.log_sums[:, :, None]))
    out = weigh_values(chunk, a, rows.v, state.mean_value)
    new = None if rows.runs is None else rows.runs[:, :, -1:]
    kept = state
    if last is not None:
        kept = dataclasses.replace(state, log_sum=keep(state.log_sum, (last == new)[..., 0]))
    after = merge(kept, fold(keep(rows.x, is_same(rows.runs, new)), rows.k, rows.v))
    return (after, new), out


def attend_causally(
    q: Array, k: Array, v: Array, x: Array, alpha: Array, state: LLNState, scale: float, runs: Array | None
) -> tuple[Array, LLNState]:
    """(o [B, H, G, N, E], the state after all rows). Every row sees the state, the rows before it and itself.

    runs [B, N]: of packed sequences; then the state must be empty."""
    length = q.shape[3]
    size = min(CHUNK, max(SMALL, 1 << (length - 1).bit_length()))
    missing = -length % size

    def lay(t: Array, axis: int, value: float = 0.0, mode: str = "constant") -> Array:
        """[..., N, ...] -> [N / size, ..., size, ...]"""
        widths = [(0, missing if at == axis % t.ndim else 0) for at in range(t.ndim)]
        options: dict[str, Any] = {"constant_values": value} if mode == "constant" else {}
        t = jnp.pad(t, widths, mode=mode, **options)
        at = axis % t.ndim
        return jnp.moveaxis(t.reshape(*t.shape[:at], -1, size, *t.shape[at + 1 :]), at, 0)

    with_keys = state.mean_key is not None
    each_row = alpha.shape[-2] > 1
    rows = Rows(
        lay(q, -2), lay(k, -2) if with_keys else None, lay(v, -2), lay(x, -2, -jnp.inf),
        lay(alpha, -2) if each_row else None,
        None if runs is None else lay(runs[:, None, :, None], -2, mode="edge"),
    )  # fmt: skip
    centre = find_centre(k, state) if with_keys else None
    last = None if runs is None else vary_as(jnp.full((runs.shape[0], 1, 1, 1), -1, runs.dtype), q, k, v)

    def body(carried: Any, part: Rows) -> Any:
        return attend_chunk(carried, part, alpha, scale, centre)

    (after, _), outs = lax.scan(jax.checkpoint(body), (vary_as(state, q, k, v), last), rows)
    out = jnp.moveaxis(outs, 0, 3)  # [B, H, G, chunks, size, E]
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length], after


def find_centre(k: Array, state: LLNState) -> Array:
    """A vector that may be taken from all keys: what the first row sees, so that none sees later ones."""
    assert state.mean_key is not None
    some = (state.log_sum > -jnp.inf)[..., None]
    held = jnp.where(some, state.mean_key, k[:, :, :1])
    return lax.stop_gradient(held.mean(-2, keepdims=True))
