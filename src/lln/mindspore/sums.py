"""Sums of exponentials in MindSpore that cannot overflow, and states of keys and values, for both of its modes.

Layout of all that is computed in this folder: batch and key heads are one dimension P, and query heads that share a key
head stand beside each other in every row, so that they are rows of one product.

    q          [P, N, G, D]        G query heads for each key head
    k, v       [P, M, D], [P, M, E]
    x          [P, M, D]           beta k, -inf where hidden
    L, S       [P, D], [P, D, E]   a state
"""

from __future__ import annotations

from typing import Any

from mindspore import ops

# Exponents are kept between -LIMIT and LIMIT, so that differences are finite. An empty sum that is subtracted counts as
# LOW. Of Python's numbers MindSpore takes the first 24 bits, in float64 too: what must be exact comes as a tensor.
LIMIT, LOW, NOTHING = 1e37, -1e38, float("-inf")


def make_finite(x: Any) -> Any:
    """-inf becomes a very low number, so that subtracting it from an exponent of -inf gives -inf, not NaN."""
    return ops.clamp(x, min=LOW)


def top_of(x: Any, axis: int) -> Any:
    return ops.stop_gradient(make_finite(ops.amax(x, axis, True)))


def exponents(t: Any, factor: Any, hidden: Any = None) -> Any:
    """factor * t, -inf where hidden."""
    x = ops.clamp(t * factor, min=-LIMIT, max=LIMIT)
    return x if hidden is None else hide(x, hidden)


def hide(x: Any, hidden: Any) -> Any:
    """-inf where hidden. Not ops.masked_fill, which rounds float64 to float32 (MindSpore 2.10)."""
    return ops.where(hidden, ops.full_like(x, NOTHING), x)


def take_log(total: Any, top: Any) -> Any:
    """top + log(total), where a total of 0 makes an empty sum."""
    some = total > 0
    held = ops.where(some, total, ops.ones_like(total))
    return ops.where(some, top + ops.log(held), ops.full_like(total, NOTHING))


def add_logs(a: Any, b: Any) -> Any:
    """log(e^a + e^b); two empty sums (-inf) make an empty sum."""
    top = ops.stop_gradient(make_finite(ops.maximum(a, b)))
    return take_log(ops.exp(a - top) + ops.exp(b - top), top)


def share(part: Any, whole: Any) -> Any:
    """e^(part - whole), at most 1; 0 for an empty part of an empty whole."""
    return ops.exp(part - make_finite(whole))


def softmax_or_zero(logits: Any) -> Any:
    """Softmax over the last dimension; a row of -inf, which has nothing to attend to, gives zeros."""
    weights = ops.exp(logits - top_of(logits, -1))
    # The largest weight of a row that has any is exactly 1, so the floor changes empty rows only.
    return weights / ops.clamp(weights.sum(-1, keepdims=True), min=0.5)


def fold(x: Any, v: Any) -> tuple[Any, Any]:
    """The state of the rows: x [..., M, D], v [..., M, E] -> L [..., D], S [..., D, E]."""
    top = top_of(x, -2)
    weights = ops.exp(x - top)
    total = weights.sum(-2)
    mean = ops.matmul(weights.swapaxes(-1, -2), v) / ops.clamp(total, min=0.5).expand_dims(-1)
    return take_log(total, top.squeeze(-2)), mean


def merge(log_sum_1: Any, mean_1: Any, log_sum_2: Any, mean_2: Any) -> tuple[Any, Any]:
    """The state of two sets of keys. S1 + w (S2 - S1) drifts less over many merges than (1 - w) S1 + w S2."""
    log_sum = add_logs(log_sum_1, log_sum_2)
    weight = share(log_sum_2, log_sum).expand_dims(-1)
    return log_sum, mean_1 + weight * (mean_2 - mean_1)


def weigh_channels(q: Any, alpha: Any, log_sum: Any) -> Any:
    """softmax_c(alpha q + L): log_sum expands to q [P, N, G, D]. 0 where there is no key at all."""
    # Relative to the largest channel: a softmax does not see it, and small exponents round less.
    return softmax_or_zero(exponents(q, alpha) + (log_sum - top_of(log_sum, -1)))


def read(q: Any, alpha: Any, log_sum: Any, mean: Any) -> Any:
    """o [P, N, G, E] of queries that see all of the state."""
    a = weigh_channels(q, alpha, log_sum.expand_dims(1).expand_dims(1))
    rows = ops.matmul(a.reshape(a.shape[0], -1, a.shape[3]), mean)
    return rows.reshape(*q.shape[:3], mean.shape[-1])
