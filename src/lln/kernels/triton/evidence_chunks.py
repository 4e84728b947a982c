"""What the kernels of the causal evidence read share: the states before every split, and what a chunk of rows begins
with. See `evidence_causal`."""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import FAINT, load_way, log_weight, split_words
from lln.kernels.triton.fold import place_channels, split_range, weigh_part
from lln.kernels.triton.parts import LENGTHS, draw_kept, load_factor, scale_rows, split_factor


@triton.jit(do_not_specialize=LENGTHS)
def evidence_prefix_kernel(
    LOG, MEAN, KEY, ENTROPY, BEGIN, LOG_IN, MEAN_IN, KEY_IN, ENTROPY_IN, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
    BEFORE, MEAN_BEFORE, KEY_BEFORE, ENTROPY_BEFORE, END, END32, works, splits, H,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """As `prefix_kernel`, of the states of the evidence read."""
    b, h, c, e, out, inside = place_channels(H, M, E, BC, BE)
    d = tl.arange(0, BD)
    inside_key = (c < M)[:, None] & (d < D)[None, :]
    log = tl.full([BC], -float("inf"), tl.float64)
    entropy = tl.zeros([BC], tl.float64)
    mean = tl.zeros([BC, BE], tl.float32)
    key = tl.zeros([BC, BD], tl.float32)
    if HAS_STATE:
        log = tl.load(LOG_IN + out, mask=c < M, other=-float("inf"))
        entropy = tl.load(ENTROPY_IN + out, mask=c < M, other=0.0)
        mean = tl.load(MEAN_IN + out[:, None] * E + e[None, :], mask=inside, other=0.0)
        key = tl.load(KEY_IN + out[:, None] * D + d[None, :], mask=inside_key, other=0.0)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for i in range(begin, end):
        at = (h.to(tl.int64) * works + i) * M + c
        values = at[:, None] * E + e[None, :]
        keys = at[:, None] * D + d[None, :]
        tl.store(BEFORE + at, log, mask=c < M)
        tl.store(ENTROPY_BEFORE + at, entropy, mask=c < M)
        tl.store(MEAN_BEFORE + values, mean, mask=inside)
        tl.store(KEY_BEFORE + keys, key, mask=inside_key)
        part = tl.load(LOG + at, mask=c < M, other=-float("inf"))
        own = tl.load(ENTROPY + at, mask=c < M, other=0.0)
        top = tl.maximum(log, part)
        total = weigh_part(log, top) + weigh_part(part, top)
        both = tl.where(total > 0.0, top + tl.log2(total.to(tl.float64)) * 0.6931471805599453094, -float("inf"))
        old = weigh_part(log, both)
        new = weigh_part(part, both)
        entropy = old * (entropy - log_weight(log, both)) + new * (own - log_weight(part, both))
        # As in `prefix_kernel`: the form of a merge that does not drift.
        mean = mean + new[:, None] * (tl.load(MEAN + values, mask=inside, other=0.0) - mean)
        key = key + new[:, None] * (tl.load(KEY + keys, mask=inside_key, other=0.0) - key)
        log = both
        tl.store(END + at, log, mask=c < M)
        finite = tl.where(log == -float("inf"), 0.0, log * 1.4426950408889634074)
        tl.store(END32 + at, finite.to(tl.float32), mask=c < M)
    tl.store(LOG_OUT + out, log, mask=c < M)
    tl.store(ENTROPY_OUT + out, entropy, mask=c < M)
    tl.store(MEAN_OUT + out[:, None] * E + e[None, :], mean, mask=inside)
    tl.store(KEY_OUT + out[:, None] * D + d[None, :], key, mask=inside_key)


@triton.jit
def load_exponents(
    BETA, WAY, b, h, beta_b, beta_h, beta_d, way_b, way_h, M: tl.constexpr, D: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, FLAT: tl.constexpr, DIRECTED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(beta, it in base 2 and what that lost; W in two words): what `chunk_exponents` takes. Of the two, one."""
    if DIRECTED:
        way, way_low, _used = split_words(load_way(WAY, b, h, 0, way_b, way_h, M, D, BX, BD), DOT, True)
        one = tl.full([1, 1], 1.0, tl.float32)
        factor, low = split_factor(one)
        return one, factor, low, way, way_low
    else:
        beta = load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT)
        factor, low = split_factor(beta)
        return beta, factor, low, beta, beta


@triton.jit
def chunk_exponents(
    k, factor, low, way, way_low, reference, DIRECTED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """y [BM, BX] of keys k, in base 2; > 0 only where it is rounded away, and no less than what counts."""
    if DIRECTED:
        x = tl.dot(k.to(DOT), tl.trans(way), input_precision=EXACT)
        if DOT == tl.bfloat16:  # noqa: SIM300
            x = tl.dot(k.to(DOT), tl.trans(way_low), x)
    else:
        x = k.to(tl.float32)
    return tl.maximum(tl.minimum(scale_rows(x, factor, low, -reference, WIDE), 1.0), FAINT)


@triton.jit
def move_evidence_reference(
    k, visible, factor, low, way, way_low, reference, BX: tl.constexpr, DIRECTED: tl.constexpr, WIDE: tl.constexpr,
    DOT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The reference after these keys."""
    if DIRECTED:
        x = tl.dot(k.to(DOT), tl.trans(way), input_precision=EXACT)
        if DOT == tl.bfloat16:  # noqa: SIM300
            x = tl.dot(k.to(DOT), tl.trans(way_low), x)
    else:
        x = k.to(tl.float32)
    x = tl.where(visible[:, None], scale_rows(x, factor, low, tl.zeros([BX], tl.float32), WIDE), -float("inf"))
    return tl.minimum(tl.maximum(reference, tl.max(x, 0)), 1e38)


@triton.jit
def find_shared(key, M: tl.constexpr, BX: tl.constexpr):
    """A vector that may be taken from all keys: the mean of the channels' centres, 0 where it is small beside what
    these differ by, since what is left of a key would have to be rounded once more."""
    there = (tl.arange(0, BX) < M)[:, None]
    mean = tl.sum(key, 0) * (1.0 / M)
    apart = tl.where(there, key - mean[None, :], 0.0)
    return tl.where(mean * mean * M > 16.0 * tl.sum(apart * apart, 0), mean, 0.0)


@triton.jit
def start_chunks(BEFORE, END32, before, M: tl.constexpr, BX: tl.constexpr, SLOW: tl.constexpr):
    """(M; z; log2 of it, 0 where the state before the split is empty; whether it is not)"""
    c = tl.arange(0, BX)
    log = tl.load(BEFORE + before * M + c, mask=c < M, other=-float("inf")) * 1.4426950408889634074
    alive = log > -float("inf")
    if SLOW:
        reference = tl.where(alive, log.to(tl.float32), -1e38)
    else:
        reference = tl.load(END32 + before * M + c, mask=c < M, other=0.0)
    log = tl.where(alive, log - reference.to(tl.float64), 0.0).to(tl.float32)
    return reference, tl.where(alive, tl.exp2(log), 0.0), log, tl.max(alive.to(tl.int32), 0)


@triton.jit
def load_row_numbers(X, row_base, rows, ok, c, M: tl.constexpr, BX: tl.constexpr, EVEN: tl.constexpr):
    """What an earlier kernel stored of rows, [BM, BX]."""
    at = X + (row_base + rows)[:, None] * M + c[None, :]
    if EVEN and M == BX:
        return tl.load(at)
    else:
        return tl.load(at, mask=ok[:, None] & (c < M)[None, :], other=0.0)


@triton.jit
def store_row_numbers(X, x, row_base, rows, ok, c, M: tl.constexpr, BX: tl.constexpr, EVEN: tl.constexpr):
    at = X + (row_base + rows)[:, None] * M + c[None, :]
    if EVEN and M == BX:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=ok[:, None] & (c < M)[None, :])


@triton.jit
def drop_weights(a, SEED, stream, rows, c, BX: tl.constexpr, dropout, DROPOUT: tl.constexpr, DOT: tl.constexpr):
    """a as values are multiplied with it."""
    if DROPOUT:
        return (a.to(tl.float32) * draw_kept(SEED, stream, rows, c, BX, dropout)).to(DOT)
    else:
        return a
