"""Causal attention where one reference for a split is not enough: chunk by chunk, and in a chunk as finely as it takes.

The reference M moves up with the keys. Where that loses earlier rows of a chunk (their Z underflows), the rows are
taken in halves, down to single rows if need be, for which Z >= 1. Only splits that the fast kernels marked are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import TINY, block_keys
from lln.kernels.triton.parts import (
    block_softmax,
    exp2,
    keep,
    key_log,
    load_factor,
    load_matrix,
    load_rows,
    place,
    scaled,
    softmax_rows,
    store_rows,
    two_words,
    visible_keys,
)


@triton.jit
def exact_state(LOG, MEAN, index, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """(M, z, T, whether there is any key) of the state before a split."""
    d = tl.arange(0, BD)
    log = tl.load(LOG + index * D + d, mask=d < D, other=-float("inf"))
    alive = log > -float("inf")
    reference, low = key_log(LOG, index, D, BD)
    z = tl.where(alive, exp2(low), 0.0)
    state = load_matrix(MEAN + index * D * E, D, E, BD, BE) * z[:, None]
    return tl.where(alive, reference, -1e38), z, state, tl.max(alive.to(tl.int32), 0)


@triton.jit
def channel_offset(reference, D: tl.constexpr, BD: tl.constexpr):
    """(M relative to its largest channel, that channel's); -inf in channels that are padding."""
    d = tl.arange(0, BD)
    top = tl.max(tl.where(d < D, reference, -float("inf")), 0)
    return tl.where(d < D, reference - top, -float("inf")), top


@triton.jit
def key_weights(k, visible, factor, low, reference, WIDE: tl.constexpr):
    """e = e^(beta k - M), 0 where a key is hidden."""
    x = tl.minimum(scaled(k, factor, low, -reference, WIDE), 1.0)
    return exp2(tl.where(visible[:, None], x, -float("inf")))


@triton.jit
def moved_reference(k, visible, factor, reference):
    """M after these keys."""
    x = tl.where(visible[:, None], k * factor, -float("inf"))
    return tl.minimum(tl.maximum(reference, tl.max(x, 0)), 1e38)


@triton.jit
def lost_rows(Z, rows_in, visible, any_before, BM: tl.constexpr):
    """Rows that have a key to attend to and have lost it."""
    r = tl.arange(0, BM)
    first = tl.where(any_before > 0, 0, tl.min(tl.where(visible, r, BM), 0))
    return rows_in & (r >= first) & (Z < TINY)


@triton.jit
def any_of(x):
    return tl.max(x.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "H"])
def slow_kernel(
    Q, K, V, ALPHA, BETA, LOG, MEAN, LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK,
    CU, OWNER, BEGIN, START, SEED, OUT, MARK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of the marked splits, as `causal.causal_kernel`."""
    h, w, b, first, n, origin, begin, end, opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    causal = r[:, None] >= r[None, :]
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
    o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    mask_base = data * mask_b + first * mask_n
    factor, low = two_words(load_factor(BETA, b, hk, beta_b, beta_h, beta_d, D, BD, FLAT))
    alpha, alpha_low = two_words(load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
    if BS:
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
    if DROPOUT:
        stream = (b * H * G + h) * 2
    if tl.load(MARK + tl.program_id(0)) == 0:
        end = begin
    reference, z, state, some = exact_state(LOG, MEAN, hk.to(tl.int64) * works + w, D, E, BD, BE)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        out = tl.zeros([BM, BE], tl.float32)
        if BS:
            kb, vb, seen = block_keys(
                k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + hk, b, tl.where(t == 0, opened, 0),
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            p, inverse = block_softmax(q, kb, seen, scale, BM, BS, USED, True, EVEN, DOT, PRECISION)
            if DROPOUT:
                p = p * keep(SEED, stream + 1, rows, r, BM, dropout)
            out = tl.dot(p.to(DOT), vb.to(DOT), input_precision=PRECISION) * inverse[:, None] * block_weight
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(DOT)
        done = 0
        width = BM
        while done < BM:
            rows_in = (r >= done) & (r < done + width)
            now = visible & rows_in
            moved = moved_reference(k, now, factor, reference)
            fade = exp2(reference - moved)
            offset, _highest = channel_offset(moved, D, BD)
            u, _total, _top = softmax_rows(scaled(q, alpha, alpha_low, offset, WIDE))
            e = key_weights(k, now, factor, low, moved, WIDE)
            pairs = tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION)
            Z = tl.sum(tl.where(causal, pairs, 0.0), 1) + tl.sum(u * (z * fade)[None, :], 1)
            if (width == 1) | (not any_of(lost_rows(Z, rows_in & ok, now, some, BM))):
                if DROPOUT:
                    u = u * keep(SEED, stream, rows, d, BD, dropout)
                    pairs = tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION)
                state = state * fade[:, None]
                o = tl.dot(u.to(DOT), state.to(DOT), input_precision=PRECISION)
                o = tl.dot(tl.where(causal, pairs, 0.0).to(DOT), v, o, input_precision=PRECISION)
                o = o * tl.where(rows_in & (Z > 0.0), 1.0 / Z, 0.0)[:, None]
                if BS:
                    o = o * lln_weight
                out += o
                state = tl.dot(tl.trans(e.to(DOT)), v, state, input_precision=PRECISION)
                z = z * fade + tl.sum(e, 0)
                reference = moved
                some = tl.maximum(some, tl.max(now.to(tl.int32), 0))
                done += width
            else:
                width = width // 2
        store_rows(OUT, o_base, rows, ok, o_n, o_d, out, E, BE, EVEN)
