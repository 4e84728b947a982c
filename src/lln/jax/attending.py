"""The op in JAX: LLN attention on query, key and value arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from lln.jax.arguments import (
    check_arrays,
    check_directions,
    check_layout,
    check_mask,
    check_read,
    check_state,
    coefficient,
    mix_weights,
)
from lln.jax.arithmetic import compute_dtype
from lln.jax.diagonal import attend_blocks, find_start, keep_open_block
from lln.jax.holding import LLNState, fold, merge
from lln.jax.neighbours import check_past, convolve_values, keep_last
from lln.jax.reading import channel_exponents, read_state
from lln.jax.scanning import attend_causally
from lln.jax.segments import attend_in_runs, find_first, number_runs


def lln_attention(
    query: Array,
    key: Array,
    value: Array,
    alpha: float | Array | None = None,
    beta: float | Array | None = None,
    *,
    read: str = "paper",
    directions: Any = None,
    block_size: int | None = None,
    mix: Any = 0.5,
    is_causal: bool = False,
    key_mask: Array | None = None,
    segment_ids: Array | None = None,
    value_convolution: Array | None = None,
    state: LLNState | None = None,
    return_state: bool = False,
    scale: float | None = None,
) -> Any:
    """Compute Linear Log-Normal attention in JAX, in time and memory linear in the length. It gives the numbers of
    `lln.lln_attention`.

    It is a pure function that works under jit, vmap, grad, scan and shard_map. Options that are not arrays are static.

    Args:
        query: [batch, heads, length, dim]. float32, float64 (with `jax_enable_x64`), bfloat16 or float16; everything
            inside is computed in float32 (float64 for float64).
        key: [batch, key heads, key length, dim]. Fewer key heads than query heads is grouped-query attention.
        value: [batch, key heads, key length, value dim].
        alpha: factor of the queries: a positive number, or an array [heads], [batch, heads], [heads, dim] or
            [batch, heads, dim]; [batch, heads, length, 1 or dim] where each packed sequence has its own.
        beta: factor of the keys, with the same shapes, of key heads.
        read: "paper": by alpha q, eq. (8). "evidence": by the centres of the keys in each channel, without alpha, for
            weights that were trained with softmax attention; it is ours, not the paper's.
        directions: the directions of the evidence read's channels. None (default): the keys' own coordinates; "signed":
            these and their negatives; or an array [key heads, channels, dim] or [channels, dim].
        block_size: for LLN+Diag: adds softmax attention inside consecutive blocks of this many tokens, counted from
            each sequence's first valid token. None (default): LLN alone.
        mix: how LLN and the blocks are weighed, with block_size: out = mix * lln + (1 - mix) * diag; a pair (r, p)
            gives r * lln + p * diag. Numbers (default 0.5), or arrays as alpha (with value dim in place of dim).
        is_causal: a query attends to its own and earlier positions.
        key_mask: [batch, key length] bool, True = attend. It hides keys; a row that has nothing to attend to gives
            zeros. What is hidden must still be finite.
        segment_ids: [batch, length] ints: several sequences packed into a row. Tokens that follow each other with one
            id are a sequence, and see no other; the same id further on is another sequence.
        value_convolution: taps [key heads, value dim, width] of a convolution of the values, whose result is added to
            the output (see `convolve_values`).
        state: an LLNState of what came before: of earlier tokens when causal, of more keys and values when not.
        return_state: also return the LLNState after these keys and values (`state` included). With a query of length 0
            the call only computes the state; with keys of length 0 it only reads it.
        scale: factor of the scores in the blocks and in the evidence read, default 1 / sqrt(dim).

    Returns:
        [batch, heads, length, value dim] in the dtype of query; with return_state also the state.

    Raises:
        ValueError or TypeError: the message names the argument, what came, and what is allowed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from lln.jax import lln_attention
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 100, 16))
        >>> lln_attention(q, k, v, 2.0, 2.0).shape
        (2, 4, 100, 16)

        Compiled, and two sequences in one row:

        >>> attend = jax.jit(lln_attention, static_argnames=("block_size", "is_causal"))
        >>> ids = jnp.where(jnp.arange(100) < 30, 1, 2)[None].repeat(2, 0)
        >>> packed = attend(q, k, v, 2.0, 2.0, segment_ids=ids)
        >>> alone = attend(q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], 2.0, 2.0)
        >>> bool(abs(packed[:, :, 30:] - alone).max() < 1e-5)
        True
    """
    check_arrays(query, key, value)
    check_read(read, alpha, beta)
    with_state = state is not None or return_state
    check_layout(query, key, block_size, is_causal, segment_ids, with_state)
    check_mask("key_mask", key_mask, key)
    check_mask("segment_ids", segment_ids, key, "integers")
    ways = check_directions(directions, key, read)
    (batch, heads, length, dim), (key_heads, key_length) = query.shape, key.shape[1:3]
    value_dim, group, dtype = value.shape[3], heads // key_heads, compute_dtype(query.dtype)
    scale = 1.0 / math.sqrt(dim) if scale is None else float(scale)
    is_array = ways is not None and not isinstance(ways, str)
    channels = ways.shape[1] if is_array else dim * (1 if ways is None else 2)
    factor = coefficient("beta", beta, (batch, key_heads, channels if is_array else dim), dtype)
    per_query = coefficient("alpha", 1.0 if alpha is None else alpha, (batch, heads, dim), dtype)
    r, p = mix_weights(mix, block_size, (batch, heads, value_dim), dtype)

    def split_heads(t: Array) -> Array:
        """[B, Hq or 1, ...] -> [B, H, G, ...]"""
        return t.reshape(t.shape[0], *((1, 1) if t.shape[1] == 1 else (key_heads, group)), *t.shape[2:])

    q = query.astype(dtype).reshape(batch, key_heads, group, length, dim)
    k, v = key.astype(dtype), value.astype(dtype)
    a = split_heads(per_query)
    hidden = None if key_mask is None else ~key_mask[:, None, :, None]
    x = channel_exponents(k, factor, ways, hidden)
    empty = {"block_size": block_size, "read": read, "channels": channels, "dtype": query.dtype}
    if state is not None:
        check_state(state, batch, key, value, channels, read, block_size)
    if value_convolution is not None:
        check_past(state, value, value_convolution, (length, key_length), is_causal, with_state)
    held = LLNState.empty(batch, key_heads, dim, value_dim, **empty) if state is None else state
    past = LLNState(held.log_sum, held.mean_value, mean_key=held.mean_key, entropy=held.entropy)

    runs = None if segment_ids is None else number_runs(segment_ids)
    if not key_length:
        after, out = past, read_state(q, a, past, scale)
    elif is_causal:
        out, after = attend_causally(q, k, v, x, a, past, scale, runs)
    elif runs is not None:
        after, out = past, attend_in_runs(q, k, v, x, a, scale, runs, read == "evidence")
    else:
        after = fold(x, k if read == "evidence" else None, v)
        after = after if state is None else merge(past, after)
        out = read_state(q, a, after, scale)
    if block_size is not None:
        start = find_start(key_mask, state, batch, key_length, block_size)
        if length:
            if runs is not None:
                first = find_first(runs, key_mask)
            else:
                first = None if key_mask is None and state is None else -start[:, None]
            diag = attend_blocks(q, k, v, block_size, is_causal, scale, key_mask, first, runs, state)
            out = split_heads(r) * out + split_heads(p) * diag
        after = dataclasses.replace(after, **keep_open_block(key, value, block_size, key_mask, start, held))
    if value_convolution is not None:
        last, masks = None if state is None else state.last_value, {"key_mask": key_mask, "segment_ids": segment_ids}
        near = convolve_values(value, value_convolution, is_causal=is_causal, past=last, **masks)
        out = out + near[:, :, None]
        kept = keep_last(value, value_convolution.shape[-1] - 1, key_mask, last)
        after = dataclasses.replace(after, last_value=kept)
    out = out.reshape(batch, heads, length, value_dim).astype(query.dtype)
    return (out, after) if return_state else out


def fold_keys(key: Array, value: Array, beta: float | Array, **options: Any) -> LLNState:
    """Compute the state of keys and values without queries, to pass it to other devices or to later calls.

    options: other arguments of `lln_attention`.

    Examples:
        >>> import jax
        >>> from lln.jax import fold_keys
        >>> k, v = jax.random.normal(jax.random.key(0), (2, 1, 2, 10, 8))
        >>> fold_keys(k, v, 2.0).mean_value.shape
        (1, 2, 8, 8)
    """
    alpha = None if options.get("read") == "evidence" else 1.0
    none = jnp.zeros((*key.shape[:2], 0, key.shape[3]), key.dtype)
    found: LLNState = lln_attention(none, key, value, alpha, beta, return_state=True, **options)[1]
    return found
