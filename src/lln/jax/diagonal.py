"""Softmax attention inside blocks of consecutive tokens: the "Diag" of LLN+Diag, and what a state keeps of it.

Blocks count from a sequence's first valid token, and go on where a state left off. Each token knows the row at which
its block begins; a group of block_size rows then finds all of its blocks' keys in itself and in the groups beside it.
Where nothing moves a block the groups are the blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from lln.jax.arithmetic import product, softmax_or_zero
from lln.jax.holding import LLNState

NOWHERE = -(2**30)


def attend_blocks(
    q: Array, k: Array, v: Array, size: int, is_causal: bool, scale: float, key_mask: Array | None,
    first: Array | None, runs: Array | None, state: LLNState | None,
) -> Array:  # fmt: skip
    """[B, H, G, N, E]. first [B, N or 1]: the row at which a token's sequence begins to count; None: row 0, no key is
    hidden, and there is no state."""
    length = q.shape[3]
    missing = -length % size
    # The group before the first, and the one behind the last.
    beside = (0, missing) if first is None else (size, size + missing)
    place = jnp.arange(length)
    seen = jnp.ones((1, length), bool) if key_mask is None else key_mask
    begin = (place // size * size)[None] if first is None else place - (place - first) % size  # [B, N]
    q = pad(q, 3, (0, missing))
    begin_k, seen_k, places_k = pad(begin, 1, beside, NOWHERE), pad(seen, 1, beside), pad(place[None], 1, beside)
    k, v = (pad(t, 2, beside) for t in (k, v))
    numbers = runs_k = None
    if runs is not None:
        numbers, runs_k = pad(runs, 1, (0, missing), -1), pad(runs, 1, beside, -2)
    if state is not None and state.block_key is not None and first is not None:
        assert state.block_value is not None
        assert state.block_mask is not None
        k = k.at[:, :, :size].set(state.block_key.astype(k.dtype))
        v = v.at[:, :, :size].set(state.block_value.astype(v.dtype))
        # A state's block begins as far before the first row as it has tokens.
        open_rows = jnp.where(state.block_mask & (first < 0), first, NOWHERE)
        begin_k = jnp.broadcast_to(begin_k, (k.shape[0], k.shape[2])).at[:, :size].set(open_rows)
        seen_k = jnp.broadcast_to(seen_k, (k.shape[0], k.shape[2])).at[:, :size].set(state.block_mask)
        places_k = places_k.at[:, :size].set(-1)  # earlier than all rows

    def groups(t: Array, axis: int) -> Array:
        """[..., n, keys, ...]: of each group the rows that its queries may see."""
        whole = t.reshape(*t.shape[:axis], -1, size, *t.shape[axis + 1 :])
        if first is None:
            return whole
        count = whole.shape[axis] - 2
        parts = [jax.lax.slice_in_dim(whole, at, at + count, axis=axis) for at in range(3)]
        return jnp.concatenate(parts, axis + 1)

    def own(t: Array, axis: int) -> Array:
        return t.reshape(*t.shape[:axis], -1, size, *t.shape[axis + 1 :])

    begin_q, place_q = own(pad(begin, 1, (0, missing), NOWHERE - 1), 1), own(pad(place[None], 1, (0, missing)), 1)
    visible = (begin_q[..., :, None] == groups(begin_k, 1)[..., None, :]) & groups(seen_k, 1)[..., None, :]
    if is_causal:
        visible &= place_q[..., :, None] >= groups(places_k, 1)[..., None, :]
    if numbers is not None and runs_k is not None:
        visible &= own(numbers, 1)[..., :, None] == groups(runs_k, 1)[..., None, :]

    @jax.checkpoint  # type: ignore[untyped-decorator]
    def attend(q: Array, k: Array, v: Array) -> Array:
        scores = product("bhgnid,bhnjd->bhgnij", q * scale, k)
        p = softmax_or_zero(jnp.where(visible[:, None, None], scores, -jnp.inf))
        return product("bhgnij,bhnje->bhgnie", p, v)

    out = attend(own(q, 3), groups(k, 2), groups(v, 2))
    return out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length]


def pad(t: Array, axis: int, widths: tuple[int, int], value: float = 0) -> Array:
    return jnp.pad(t, [widths if at == axis else (0, 0) for at in range(t.ndim)], constant_values=value)


def find_start(key_mask: Array | None, state: LLNState | None, batch: int, length: int, size: int) -> Array:
    """[B]: the place in the open block of the first new token; where none is open minus the number of tokens before
    the first valid one."""
    first = jnp.zeros(batch, jnp.int32)
    if key_mask is not None and length:
        first = jnp.where(key_mask.any(1), key_mask.argmax(1), length).astype(jnp.int32)
    count = None if state is None else state.count
    return -first if count is None else jnp.where(count > 0, count % size, -first)


def keep_open_block(
    k: Array, v: Array, size: int, key_mask: Array | None, start: Array, state: LLNState
) -> dict[str, Array]:
    """count, block_key, block_value and block_mask of the state after these keys and values."""
    length = k.shape[2]
    assert state.count is not None
    assert state.block_key is not None
    assert state.block_value is not None
    assert state.block_mask is not None
    end = start + length
    count = jnp.where(state.count > 0, state.count + length, end)
    slots = (end // size * size)[:, None] + jnp.arange(size)
    row = slots - start[:, None]  # of the new rows; below 0 the state's
    index = jnp.clip(jnp.where(row < 0, slots, size + row), 0, size + length - 1)
    seen = jnp.ones((k.shape[0], length), bool) if key_mask is None else key_mask
    mask = jnp.concatenate([state.block_mask, seen], 1)
    kept = (row < length) & jnp.take_along_axis(mask, index, 1)

    def pick(held: Array, t: Array) -> Array:
        rows = jnp.take_along_axis(jnp.concatenate([held, t.astype(held.dtype)], 2), index[:, None, :, None], 2)
        return jnp.where(kept[:, None, :, None], rows, 0)

    return {
        "count": count, "block_key": pick(state.block_key, k), "block_value": pick(state.block_value, v),
        "block_mask": kept,
    }  # fmt: skip
