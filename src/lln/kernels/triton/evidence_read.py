"""The queries' side of the evidence read, forward and backward: see `evidence_fold`."""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import LN2, split_words
from lln.kernels.triton.parts import (
    LENGTHS,
    LOG2E,
    block_backward,
    block_output,
    block_products,
    block_weight_gradient,
    draw_kept,
    load_factor,
    load_matrix,
    load_rows,
    place,
    softmax_rows,
    store_matrix,
    store_rows,
    visible_keys,
)


@triton.jit
def load_channels(
    X, index, D: tl.constexpr, W: tl.constexpr, SIGNS: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """All channels of a state [SIGNS * D, W], each set of them filled up with zeros: [SIGNS * BD, BW]."""
    if SIGNS == 1:
        return load_matrix(X + index * D * W, D, W, BD, BW)
    else:
        c = tl.arange(0, SIGNS * BD)
        w = tl.arange(0, BW)
        at = X + index * SIGNS * D * W + ((c // BD) * D + c % BD)[:, None] * W + w[None, :]
        return tl.load(at, mask=(c % BD < D)[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def load_reads(KEY, ENTROPY, index, scale, D: tl.constexpr, BD: tl.constexpr, SIGNS: tl.constexpr):
    """(K without what all channels share, with scale, and H, both in base 2; H = -inf in channels that are padding)"""
    c = tl.arange(0, SIGNS * BD)
    key = load_channels(KEY, index, D, D, SIGNS, BD, BD)
    key = tl.where((c % BD < D)[:, None], key - (tl.sum(key, 0) * (1.0 / (SIGNS * D)))[None, :], 0.0)
    row = index * SIGNS * D + (c // BD) * D + c % BD
    entropy = tl.load(ENTROPY + row, mask=c % BD < D, other=-float("inf"))
    return key * (scale * LOG2E), (entropy * LOG2E).to(tl.float32)


@triton.jit
def weigh_channels(q, key, offset, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """As `softmax_rows`, of the logits of queries q [BM, BD] for K [channels, BD]."""
    return softmax_rows(tl.dot(q.to(DOT), tl.trans(key), input_precision=PRECISION) + offset[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def evidence_read_kernel(
    Q, K, V, MEAN, KEY, ENTROPY, LLN_WEIGHT, BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED, OUT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    SIGNS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, DROPOUT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of each split. BS = 0: no blocks. H is the number of key heads, each read by G query heads."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    c = tl.arange(0, SIGNS * BD)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    state = b.to(tl.int64) * H + hk
    key, offset = load_reads(KEY, ENTROPY, state, scale, D, BD, SIGNS)
    key = key.to(DOT)
    mean = load_channels(MEAN, state, D, E, SIGNS, BD, BE)
    if BS:
        k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
        v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
        mask_base = data * mask_b + first * mask_n
        mean = mean * load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
    mean = mean.to(DOT)
    stream = (b * H * G + h) * 2
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        p, total, _top = weigh_channels(q, key, offset, DOT, PRECISION)
        if DROPOUT:
            p = p * draw_kept(SEED, stream, rows, c, SIGNS * BD, dropout)
        o = tl.dot(p.to(DOT), mean, input_precision=PRECISION) * (1.0 / total)[:, None]
        if BS:
            k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
            v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
            visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
            o += block_weight * block_output(
                q, k, v, visible, SEED, stream, rows, scale, dropout,
                BM, BS, USED, False, DROPOUT, EVEN, DOT, PRECISION,
            )  # fmt: skip
        store_rows(OUT, o_base, rows, ok, o_n, o_d, o, E, BE, EVEN)


@triton.jit
def store_channels(
    X, x, index, D: tl.constexpr, W: tl.constexpr, SIGNS: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """As `load_channels`."""
    if SIGNS == 1:
        store_matrix(X + index * D * W, x, D, W, BD, BW)
    else:
        c = tl.arange(0, SIGNS * BD)
        w = tl.arange(0, BW)
        at = X + index * SIGNS * D * W + ((c // BD) * D + c % BD)[:, None] * W + w[None, :]
        tl.store(at, x, mask=(c % BD < D)[:, None] & (w < W)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def evidence_read_backward_kernel(
    Q, K, V, GRAD, MEAN, KEY, ENTROPY, LLN_WEIGHT, BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED,
    DQ, DMEAN, DKEY, DENTROPY, DWEIGHT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    SIGNS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, LEAN: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per split and query head: dq, and what it asks of the state: A^T dO, dK and dH; of the block weight's gradient.

    A^T dO is without the weight of the linear part: the gradient of that weight is a sum over it."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    c = tl.arange(0, SIGNS * BD)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    dq_base = data * dq_b + h.to(tl.int64) * dq_h + first * dq_n
    state = b.to(tl.int64) * H + hk
    key, offset = load_reads(KEY, ENTROPY, state, scale, D, BD, SIGNS)
    key, key_low, _used = split_words(key, DOT, LOW)
    mean = load_channels(MEAN, state, D, E, SIGNS, BD, BE)
    if BS:
        k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
        v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
        mask_base = data * mask_b + first * mask_n
        mean = mean * load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        centre = tl.sum(load_channels(KEY, state, D, D, SIGNS, BD, BD), 0) * (1.0 / (SIGNS * D))
    # LOW: in two words, as K. What W has in common in a row goes away, and its rounding would not.
    mean, mean_low, _used = split_words(mean, DOT, LOW)
    dmean = tl.zeros([SIGNS * BD, BE], tl.float32)
    dkey = tl.zeros([SIGNS * BD, BD], tl.float32)
    # dH as one more product: sums over rows would go through shared memory.
    ones = tl.full([BM, 16], 1.0, tl.float32).to(DOT)
    dentropy = tl.zeros([SIGNS * BD, 16], tl.float32)
    dweight = tl.zeros([BE], tl.float32)
    stream = (b * H * G + h) * 2
    for t in tl.range(begin, end, disable_licm=LEAN):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
        a, total, _top = weigh_channels(q, key, offset, DOT, PRECISION)
        a = a * (1.0 / total)[:, None]
        w_ = tl.dot(g.to(DOT), tl.trans(mean), input_precision=PRECISION)
        if LOW:
            w_ = tl.dot(g.to(DOT), tl.trans(mean_low), w_, input_precision=PRECISION)
        dropped = a
        if DROPOUT:
            mask = draw_kept(SEED, stream, rows, c, SIGNS * BD, dropout)
            dropped = a * mask
            w_ = w_ * mask
        dmean = tl.dot(tl.trans(dropped.to(DOT)), g.to(DOT), dmean, input_precision=PRECISION)
        dl = (a * (w_ - tl.sum(a * w_, 1)[:, None])).to(DOT)
        dkey = tl.dot(tl.trans(dl), q.to(DOT), dkey, input_precision=PRECISION)
        dentropy = tl.dot(tl.trans(dl), ones, dentropy, input_precision=PRECISION)
        dq = tl.dot(dl, key, input_precision=PRECISION)
        if LOW and SIGNS == 1:
            dq = tl.dot(dl, key_low, dq, input_precision=PRECISION)
        dq = dq * LN2
        if BS:
            k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
            v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
            visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
            dp, _weight = block_products(
                g, v, BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
            )
            ds, p = block_backward(
                q, k, dp, visible, BLOCK_WEIGHT, b, h, block_b, block_h, SEED, stream, rows, scale, dropout,
                BM, BS, USED, False, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
            )  # fmt: skip
            # Rows of ds sum to 0 but for its rounding, which keys far from 0 would make large.
            near = (k.to(tl.float32) - centre[None, :]).to(DOT)
            dq = tl.dot(ds, near, dq, input_precision=PRECISION)
            if HAS_DWEIGHT:
                dweight += block_weight_gradient(p, v, g, DOT, PRECISION)
        store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
    index = tl.program_id(0).to(tl.int64)
    if HAS_DWEIGHT:
        e = tl.arange(0, BE)
        tl.store(DWEIGHT + index * E + e, dweight, mask=e < E)
    store_channels(DMEAN, dmean, index, D, E, SIGNS, BD, BE)
    store_channels(DKEY, dkey * scale, index, D, D, SIGNS, BD, BD)
    row = index * SIGNS * D + (c // BD) * D + c % BD
    tl.store(DENTROPY + row, tl.sum(dentropy, 1) * 0.0625, mask=c % BD < D)
