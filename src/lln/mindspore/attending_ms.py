"""The op in MindSpore: LLN attention on query, key and value tensors, in PYNATIVE and in GRAPH mode."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import ops

from lln.mindspore.prefixes import attend_causally
from lln.mindspore.sums import NOTHING, exponents, fold, hide, merge, read, softmax_or_zero

WRONG = "lln.mindspore.lln_attention: "


def lln_attention(
    query: Any,
    key: Any,
    value: Any,
    alpha: Any,
    beta: Any,
    *,
    block_size: int | None = None,
    mix: Any = 0.5,
    is_causal: bool = False,
    key_mask: Any = None,
    state: Any = None,
    return_state: bool = False,
    scale: float | None = None,
) -> Any:
    """Compute Linear Log-Normal attention in MindSpore, in time and memory linear in the length. It gives the numbers
    of `lln.lln_attention`.

    Args:
        query: [batch, heads, length, dim], float32, float64 or float16; computed in float32 (float64 for float64).
        key: [batch, key heads, key length, dim]. Fewer key heads than query heads is grouped-query attention.
        value: [batch, key heads, key length, value dim].
        alpha: factor of the queries: a positive number, or a tensor [heads], [batch, heads, 1] or [batch, heads, dim].
            In a graph MindSpore keeps numbers in float32; what must be exact in float64 is given as a tensor.
        beta: factor of the keys, with the same shapes, of key heads.
        block_size: LLN+Diag: adds softmax attention inside consecutive blocks of so many tokens, counted from each
            sequence's first valid token. None: LLN alone.
        mix: out = mix * lln + (1 - mix) * diag; a pair (r, p) gives r * lln + p * diag. Numbers, or tensors as alpha.
        is_causal: a query attends its own and earlier positions.
        key_mask: [batch, key length] bool, True = attend.
        state: what came before, as return_state gives it: a pair (log_sum [batch, key heads, dim], mean_value [batch,
            key heads, dim, value dim]). Not with block_size.
        return_state: also return the pair after these keys and values.
        scale: of the softmax in the blocks, default 1 / sqrt(dim).

    Returns:
        [batch, heads, length, value dim] in the dtype of query; with return_state also the pair.

    Examples:
        >>> import mindspore as ms, numpy as np
        >>> from lln.mindspore import lln_attention
        >>> q, k, v = (ms.Tensor(np.random.randn(2, 4, 50, 16), ms.float32) for _ in range(3))
        >>> lln_attention(q, k, v, 2.0, 2.0, block_size=16).shape
        (2, 4, 50, 16)
    """
    batch, heads, length, dim = query.shape
    key_heads, key_length, width = key.shape[1], key.shape[2], value.shape[3]
    check_shapes(query.shape, key.shape, value.shape, block_size, is_causal, state is not None or return_state)
    group, rows = heads // key_heads, batch * key_heads
    dtype = ms.float64 if query.dtype == ms.float64 else ms.float32
    given = query.dtype

    def by_group(t: Any, last: int) -> Any:
        """[B, Hq, N, D] -> [P, N, G, D]"""
        return t.reshape(rows, group, length, last).swapaxes(1, 2)

    q = by_group(query.astype(dtype), dim)
    k, v = key.astype(dtype).reshape(rows, key_length, dim), value.astype(dtype).reshape(rows, key_length, width)
    factor = spread_heads(beta, batch, key_heads, 1, dtype).reshape(rows, 1, -1)
    a = spread_heads(alpha, batch, key_heads, group, dtype)
    hidden = None
    if key_mask is not None:
        hidden = ops.logical_not(key_mask)[:, None, :].broadcast_to((batch, key_heads, key_length))
        hidden = hidden.reshape(rows, key_length, 1)
    x = exponents(k, factor, hidden)
    if state is None:
        log_sum = ops.full((rows, dim), NOTHING, dtype=dtype)
        mean = ops.zeros((rows, dim, width), dtype)
    else:
        log_sum, mean = state[0].astype(dtype).reshape(rows, dim), state[1].astype(dtype).reshape(rows, dim, width)
    if is_causal:
        per_row = a.expand_dims(1)  # also over the chunks
        out, log_sum, mean = attend_causally(q, v, x, per_row, log_sum, mean)
    else:
        if key_length:
            own_sum, own_mean = fold(x, v)
            log_sum, mean = merge(log_sum, mean, own_sum, own_mean)
        out = read(q, a, log_sum, mean)
    if block_size is not None:
        softness = 1 / ops.sqrt(ops.full((1,), dim, dtype=dtype)) if scale is None else as_tensor(scale, dtype)
        near = attend_blocks(q * softness, k, v, block_size, is_causal, key_mask, batch)
        r, p = mix if isinstance(mix, (tuple, list)) else (mix, 1.0 - mix)
        out = spread_heads(r, batch, key_heads, group, dtype) * out
        out = out + spread_heads(p, batch, key_heads, group, dtype) * near
    out = out.swapaxes(1, 2).reshape(batch, heads, length, width).astype(given)
    if not return_state:
        return out
    return out, (log_sum.reshape(batch, key_heads, dim), mean.reshape(batch, key_heads, dim, width))


def as_tensor(value: Any, dtype: Any) -> Any:
    return ops.full((1,), value, dtype=dtype) if isinstance(value, (int, float)) else value.astype(dtype)


def spread_heads(factor: Any, batch: int, key_heads: int, group: int, dtype: Any) -> Any:
    """A number, [], [heads] or [batch, heads, D] -> [P, 1, G, D or 1]."""
    t = as_tensor(factor, dtype)
    if t.ndim < 2:
        t = t.reshape(1, -1, 1)
    t = t.broadcast_to((batch, key_heads * group, t.shape[2]))
    return t.reshape(batch * key_heads, 1, group, t.shape[2])


def attend_blocks(q: Any, k: Any, v: Any, size: int, is_causal: bool, key_mask: Any, batch: int) -> Any:
    """Softmax attention inside blocks [P, N, G, E]. Where a mask moves the blocks, rows are taken in groups of `size`,
    whose blocks lie in three groups of keys: the one before, itself and the one behind."""
    rows, length, group, dim = q.shape
    width, missing = v.shape[-1], -length % size
    count = (length + missing) // size
    place = ops.arange(length).astype(ms.int32)
    begin, seen = (place // size * size).expand_dims(0), ops.ones((1, length), ms.bool_)
    if key_mask is not None:
        first = ops.amin(ops.where(key_mask, place, ops.full_like(place, length)), -1, True)
        begin, seen = place - ops.floor_mod(place - first, ops.full_like(place, size)), key_mask
    before = 0 if key_mask is None else size
    behind = missing + before

    def lay(t: Any, value: Any, wide: bool) -> Any:
        """[S, N, ...] -> [S, n, size, ...], or of keys the rows that a group may see."""
        left, right = (before, behind) if wide else (0, missing)
        parts = [ops.full((t.shape[0], left, *t.shape[2:]), value, dtype=t.dtype)] if left else []
        parts.append(t)
        if right:
            parts.append(ops.full((t.shape[0], right, *t.shape[2:]), value, dtype=t.dtype))
        t = ops.cat(parts, 1) if len(parts) > 1 else t
        t = t.reshape(t.shape[0], -1, size, *t.shape[2:])
        if not wide or not before:
            return t
        return ops.cat([t[:, :count], t[:, 1 : count + 1], t[:, 2 : count + 2]], 2)

    visible = lay(begin, -2 * length - 2, False).expand_dims(3) == lay(begin, -2 * length - 1, True).expand_dims(2)
    visible = ops.logical_and(visible, (lay(seen.astype(ms.int32), 0, True) > 0).expand_dims(2))
    if is_causal:
        own = lay(place.expand_dims(0), 0, False).expand_dims(3)
        visible = ops.logical_and(visible, own >= lay(place.expand_dims(0), 0, True).expand_dims(2))
    keys, values = lay(k, 0.0, True), lay(v, 0.0, True)  # [P, n, S, D]
    many = keys.shape[2]
    # [B or 1, n, size, S] -> [P, n, size * G, S]
    hidden = ops.logical_not(visible).expand_dims(1).expand_dims(4)
    hidden = hidden.broadcast_to((batch, rows // batch, count, size, group, many))
    hidden = hidden.reshape(rows, count, size * group, many)
    queries = lay(q, 0.0, False).reshape(rows, count, size * group, dim)
    scores = ops.matmul(queries, keys.swapaxes(-1, -2))
    p = softmax_or_zero(hide(scores, hidden))
    out = ops.matmul(p, values).reshape(rows, count * size, group, width)
    return out[:, :length]


@ms.constexpr  # type: ignore[untyped-decorator]
def check_shapes(query: Any, key: Any, value: Any, block_size: int | None, is_causal: bool, with_state: bool) -> None:
    """Run while a graph is made, by Python itself."""
    came = f"got query {list(query)}, key {list(key)} and value {list(value)}."
    if not len(query) == len(key) == len(value) == 4:
        raise ValueError(f"{WRONG}query, key and value must be [batch, heads, length, dim]; {came}")
    if query[0] != key[0] or query[3] != key[3] or key[:3] != value[:3] or query[1] % key[1]:
        raise ValueError(
            f"{WRONG}query and key must agree in batch and dim, key and value in batch, heads and length, and the "
            f"number of query heads must be a multiple of that of key heads; {came}"
        )
    if is_causal and query[2] != key[2]:
        raise ValueError(f"{WRONG}is_causal needs query and key of equal length; {came}")
    if block_size is not None and query[2] != key[2]:
        raise ValueError(f"{WRONG}block_size must be None in cross attention; {came}")
    if block_size is not None and block_size < 1:
        raise ValueError(f"{WRONG}block_size must be a positive int; got {block_size}.")
    if block_size is not None and with_state:
        raise ValueError(
            f"{WRONG}state and block_size cannot be combined in MindSpore; leave one of them out, or use PyTorch or "
            "JAX."
        )
