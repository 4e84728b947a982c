"""Causal LLN attention in MindSpore: all chunks at once, each with the state of those before it, and no loop over them.

Every exponent is <= 0, as in `lln.kernels.causal`: pairs of rows meet at an edge between them, in a binary tree inside
each chunk, and chunks meet in the states before them, merged by doubling. So a graph has as many steps as the logarithm
of the length, and memory is linear in it.
"""

from __future__ import annotations

from typing import Any

from mindspore import ops

from lln.mindspore.sums import NOTHING, add_logs, fold, merge, share, weigh_channels

CHUNK = 64


def cut_pairs(t: Any, half: int) -> tuple[Any, Any]:
    """The left and the right halves [P, n, m, b, ...] of the blocks of 2b rows of t [P, n, C, ...], b = half."""
    halves = t.reshape(*t.shape[:2], -1, 2, half, *t.shape[3:])
    return halves[:, :, :, 0], halves[:, :, :, 1]


def join_pairs(left: Any, right: Any) -> Any:
    """The inverse."""
    joined = ops.stack([left, right], 3)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[5:])


def pad_rows(t: Any, missing: int, value: float) -> Any:
    """t [P, N, ...] with so many more rows."""
    if not missing:
        return t
    return ops.cat([t, ops.full((t.shape[0], missing, *t.shape[2:]), value, dtype=t.dtype)], 1)


def sum_prefixes(x: Any) -> Any:
    """Inclusive cumulative logsumexp over the rows of each chunk [P, n, C, D], by doubling."""
    half, sums = 1, x
    while half < x.shape[2]:
        left, right = cut_pairs(sums, half)
        sums = join_pairs(left, add_logs(left[:, :, :, -1:], right))
        half *= 2
    return sums


def find_states(log_sum: Any, mean: Any, first_sum: Any, first_mean: Any) -> tuple[Any, Any, Any, Any]:
    """The states [P, n, ...] before each of n chunks, and that after the last, from the chunks' own [P, n, ...] and the
    one [P, ...] before all of them."""
    sums = ops.cat([first_sum.expand_dims(1), log_sum], 1)  # [P, n + 1, D]
    means = ops.cat([first_mean.expand_dims(1), mean], 1)
    reach = 1
    while reach < sums.shape[1]:
        joined = merge(sums[:, :-reach], means[:, :-reach], sums[:, reach:], means[:, reach:])
        sums = ops.cat([sums[:, :reach], joined[0]], 1)
        means = ops.cat([means[:, :reach], joined[1]], 1)
        reach *= 2
    return sums[:, :-1], means[:, :-1], sums[:, -1], means[:, -1]


def attend_causally(q: Any, v: Any, x: Any, alpha: Any, first_sum: Any, first_mean: Any) -> tuple[Any, Any, Any]:
    """(o [P, N, G, E], L and S after all rows): a row sees the state, the rows before it and itself."""
    rows, length, group, dim = q.shape
    size = 1
    while size < length and size < CHUNK:
        size *= 2
    missing = -length % size
    count, width = (length + missing) // size, v.shape[-1]
    q = pad_rows(q, missing, 0.0).reshape(rows, count, size, group, dim)
    v = pad_rows(v, missing, 0.0).reshape(rows, count, size, width)
    x = pad_rows(x, missing, NOTHING).reshape(rows, count, size, dim)
    own_sum, own_mean = fold(x, v)
    before_sum, before_mean, after_sum, after_mean = find_states(own_sum, own_mean, first_sum, first_mean)
    edge = before_sum.expand_dims(2)  # [P, n, 1, D]
    log_sums = add_logs(edge, sum_prefixes(x))
    a = weigh_channels(q, alpha, log_sums.expand_dims(3))  # [P, n, C, G, D]

    def multiply(weights: Any, t: Any) -> Any:
        """[..., C, G, D] times [..., D, E]: heads of a group are rows."""
        flat = weights.reshape(*weights.shape[:-3], -1, weights.shape[-1])
        return ops.matmul(flat, t).reshape(*weights.shape[:-1], t.shape[-1])

    out = multiply(a * share(edge, log_sums).expand_dims(3), before_mean)
    out = out + (a * share(x, log_sums).expand_dims(3)).sum(-1, keepdims=True) * v.expand_dims(3)
    half = size // 2
    while half:
        left, right = cut_pairs(log_sums, half)
        edge = left[:, :, :, -1:]
        keys = share(cut_pairs(x, half)[0], edge)
        late = cut_pairs(a, half)[1] * share(edge, right).expand_dims(4)
        found = multiply(multiply(late, keys.swapaxes(-1, -2)), cut_pairs(v, half)[0])
        out = out + join_pairs(ops.zeros_like(found), found)
        half //= 2
    return out.reshape(rows, -1, group, width)[:, :length], after_sum, after_mean
