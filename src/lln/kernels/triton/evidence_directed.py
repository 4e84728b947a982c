"""The queries' side of the evidence read with channels along directions of their own: as many as one likes.

What `evidence_read` holds all at once comes here in sets of BX channels, one after the other, as softmax attention
takes its keys: a channel is a key K_c with the value S_c and H_c added to its logit. Forward the largest logit so far
is the reference. Backward a first kernel gives dq, and ln Z_i and D_i = sum_c A_ic W_ic of every row; then each set of
channels collects what it is asked for, dS, dK and dH.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import LN2, load_set, split_words, store_set
from lln.kernels.triton.parts import (
    LENGTHS,
    LOG2E,
    block_backward,
    block_output,
    block_products,
    block_weight_gradient,
    draw_kept,
    load_factor,
    load_rows,
    place,
    store_rows,
    visible_keys,
)


@triton.jit
def directed_ready_kernel(
    MEAN, KEY, ENTROPY, READ_KEY, READ_KEY_LOW, READ_MEAN, OFFSET, CENTRE, scale,
    SETS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, LOW: tl.constexpr, CENTRED: tl.constexpr, DROPOUT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A set of channels as queries read it: K without what all channels share, with scale, and H, both in base 2; S,
    for the backward pass (CENTRED) without it, too: of W, unless it drops some, only differences between channels
    count."""
    pid = tl.program_id(0)
    index = (pid // SETS).to(tl.int64)
    first = (pid % SETS) * BX
    c = first + tl.arange(0, BX)
    d = tl.arange(0, BD)
    shared = tl.zeros([BD], tl.float32)
    common = tl.zeros([BE], tl.float32)
    for other in range(SETS):
        shared += tl.sum(load_set(KEY, index * M * D, other * BX, M, D, BX, BD), 0)
        if CENTRED and not DROPOUT:
            common += tl.sum(load_set(MEAN, index * M * E, other * BX, M, E, BX, BE), 0)
    shared = shared * (1.0 / M)
    key = load_set(KEY, index * M * D, first, M, D, BX, BD) - shared[None, :]
    high, lost, _used = split_words(key * (scale * LOG2E), DOT, LOW)
    store_set(READ_KEY, high, index * M * D, first, M, D, BX, BD)
    if LOW and CENTRED:
        store_set(READ_KEY_LOW, lost, index * M * D, first, M, D, BX, BD)
    mean = load_set(MEAN, index * M * E, first, M, E, BX, BE) - (common * (1.0 / M))[None, :]
    store_set(READ_MEAN, mean.to(DOT), index * M * E, first, M, E, BX, BE)
    entropy = tl.load(ENTROPY + index * M + c, mask=c < M, other=0.0)
    tl.store(OFFSET + index * M + c, (entropy * LOG2E).to(tl.float32), mask=c < M)
    if CENTRED:
        tl.store(CENTRE + index * D + d, shared, mask=d < D)


@triton.jit
def load_offset(OFFSET, index, first, M: tl.constexpr, BX: tl.constexpr):
    """H, -inf in channels that are padding."""
    c = first + tl.arange(0, BX)
    return tl.load(OFFSET + index * M + c, mask=c < M, other=-float("inf"))


@triton.jit(do_not_specialize=LENGTHS)
def directed_read_kernel(
    Q, K, V, READ_MEAN, READ_KEY, OFFSET, LLN_WEIGHT, BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED, OUT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    SETS: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, DROPOUT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of each split. BS = 0: no blocks. H is the number of key heads, each read by G query heads."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    c = tl.arange(0, BX)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    state = b.to(tl.int64) * H + hk
    if BS:
        k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
        v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
        mask_base = data * mask_b + first * mask_n
    stream = (b * H * G + h) * 2
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        top = tl.full([BM], -float("inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        o = tl.zeros([BM, BE], tl.float32)
        for i in range(SETS):
            key = load_set(READ_KEY, state * M * D, i * BX, M, D, BX, BD)
            mean = load_set(READ_MEAN, state * M * E, i * BX, M, E, BX, BE)
            logits = tl.dot(q.to(DOT), tl.trans(key), input_precision=PRECISION)
            logits += load_offset(OFFSET, state, i * BX, M, BX)[None, :]
            moved = tl.maximum(top, tl.max(logits, 1))
            fade = tl.exp2(top - moved)
            p = tl.exp2(logits - moved[:, None])
            total = total * fade + tl.sum(p, 1)
            top = moved
            if DROPOUT:
                p = p * draw_kept(SEED, stream, rows, i * BX + c, SETS * BX, dropout)
            o = tl.dot(p.to(DOT), mean, o * fade[:, None], input_precision=PRECISION)
        o = o * (1.0 / total)[:, None]
        if BS:
            k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
            v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
            visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
            o = o * load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
            block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
            o += block_weight * block_output(
                q, k, v, visible, SEED, stream, rows, scale, dropout,
                BM, BS, USED, False, DROPOUT, EVEN, DOT, PRECISION,
            )  # fmt: skip
        store_rows(OUT, o_base, rows, ok, o_n, o_d, o, E, BE, EVEN)


@triton.jit
def load_weighted(
    GRAD, base, rows, ok, g_n, g_e, LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E: tl.constexpr, BE: tl.constexpr,
    BS: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(dO; with the weight of the linear part, unless it is one a head: then it is for `load_weight`)"""
    g = load_rows(GRAD, base, rows, ok, g_n, g_e, E, BE, EVEN)
    if BS and not UNIFORM:
        return g, (g * load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, False)).to(DOT)
    else:
        return g, g.to(DOT)


@triton.jit
def load_weight(LLN_WEIGHT, b, h, lln_b, lln_h, BS: tl.constexpr, UNIFORM: tl.constexpr):
    if BS and UNIFORM:
        return tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + h * lln_h)
    else:
        return 1.0


@triton.jit(do_not_specialize=LENGTHS)
def directed_rows_kernel(
    Q, K, V, GRAD, READ_MEAN, READ_KEY, READ_KEY_LOW, OFFSET, CENTRE, LLN_WEIGHT, BLOCK_WEIGHT, MASK,
    CU, OWNER, BEGIN, START, SEED, DQ, LOG_Z, OWN, DWEIGHT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    SETS: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per split and query head: dq; log2 Z and D of every row; of the block weight's gradient."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    c = tl.arange(0, BX)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    dq_base = data * dq_b + h.to(tl.int64) * dq_h + first * dq_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    state = b.to(tl.int64) * H + hk
    if BS:
        k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
        v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
        mask_base = data * mask_b + first * mask_n
    dweight = tl.zeros([BE], tl.float32)
    stream = (b * H * G + h) * 2
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        g, gw = load_weighted(
            GRAD, g_base, rows, ok, g_n, g_d, LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, BS, EVEN, UNIFORM, DOT
        )  # fmt: skip
        top = tl.full([BM], -float("inf"), tl.float32)
        norm = tl.zeros([BM], tl.float32)
        own = tl.zeros([BM], tl.float32)
        for i in range(SETS):
            key = load_set(READ_KEY, state * M * D, i * BX, M, D, BX, BD)
            mean = load_set(READ_MEAN, state * M * E, i * BX, M, E, BX, BE)
            logits = tl.dot(q.to(DOT), tl.trans(key), input_precision=PRECISION)
            logits += load_offset(OFFSET, state, i * BX, M, BX)[None, :]
            w_ = tl.dot(gw, tl.trans(mean), input_precision=PRECISION)
            if DROPOUT:
                w_ = w_ * draw_kept(SEED, stream, rows, i * BX + c, SETS * BX, dropout)
            moved = tl.maximum(top, tl.max(logits, 1))
            fade = tl.exp2(top - moved)
            p = tl.exp2(logits - moved[:, None])
            norm = norm * fade + tl.sum(p, 1)
            own = own * fade + tl.sum(p * w_, 1)
            top = moved
        own = own * (1.0 / norm)
        log_z = top + tl.log2(norm)
        tl.store(LOG_Z + row_base + rows, log_z, mask=ok)
        tl.store(OWN + row_base + rows, own, mask=ok)
        dq = tl.zeros([BM, BD], tl.float32)
        for i in range(SETS):
            key = load_set(READ_KEY, state * M * D, i * BX, M, D, BX, BD)
            mean = load_set(READ_MEAN, state * M * E, i * BX, M, E, BX, BE)
            logits = tl.dot(q.to(DOT), tl.trans(key), input_precision=PRECISION)
            logits += load_offset(OFFSET, state, i * BX, M, BX)[None, :]
            w_ = tl.dot(gw, tl.trans(mean), input_precision=PRECISION)
            if DROPOUT:
                w_ = w_ * draw_kept(SEED, stream, rows, i * BX + c, SETS * BX, dropout)
            dl = (tl.exp2(logits - log_z[:, None]) * (w_ - own[:, None])).to(DOT)
            dq = tl.dot(dl, key, dq, input_precision=PRECISION)
            if LOW:
                key_low = load_set(READ_KEY_LOW, state * M * D, i * BX, M, D, BX, BD)
                dq = tl.dot(dl, key_low, dq, input_precision=PRECISION)
        dq = dq * (LN2 * load_weight(LLN_WEIGHT, b, h, lln_b, lln_h, BS, UNIFORM))
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
            # As in `evidence_read`: rows of ds sum to 0 but for its rounding.
            d = tl.arange(0, BD)
            centre = tl.load(CENTRE + state * D + d, mask=d < D, other=0.0)
            near = (k.to(tl.float32) - centre[None, :]).to(DOT)
            dq = tl.dot(ds, near, dq, input_precision=PRECISION)
            if HAS_DWEIGHT:
                dweight += block_weight_gradient(p, v, g, DOT, PRECISION)
        store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
    if HAS_DWEIGHT:
        e = tl.arange(0, BE)
        tl.store(DWEIGHT + tl.program_id(0).to(tl.int64) * E + e, dweight, mask=e < E)


@triton.jit(do_not_specialize=LENGTHS)
def directed_asked_kernel(
    Q, GRAD, READ_MEAN, READ_KEY, OFFSET, LLN_WEIGHT, CU, OWNER, BEGIN, START, SEED, LOG_Z, OWN, DMEAN, DKEY, DENTROPY,
    q_b, q_h, q_n, q_d, g_b, g_h, g_n, g_d, lln_b, lln_h, lln_e, scale, dropout, N, works, splits, tiles, total, H,
    SETS: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
    SHIFT: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, DROPOUT: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Per split, query head and set of channels what the queries ask of them: A^T dO, dK and dH.

    A^T dO is without the weight of the linear part, as in `evidence_read`. Channels are rows here, as in the fold."""
    both, work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    h = both // SETS
    first_row = (both % SETS) * BX
    hk = h // G
    r = tl.arange(0, BM)
    c = first_row + tl.arange(0, BX)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    state = b.to(tl.int64) * H + hk
    key = load_set(READ_KEY, state * M * D, first_row, M, D, BX, BD)
    mean = load_set(READ_MEAN, state * M * E, first_row, M, E, BX, BE)
    offset = load_offset(OFFSET, state, first_row, M, BX)
    dmean = tl.zeros([BX, BE], tl.float32)
    dkey = tl.zeros([BX, BD], tl.float32)
    dentropy = tl.zeros([BX], tl.float32)
    stream = (b * H * G + h) * 2
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        g, gw = load_weighted(
            GRAD, g_base, rows, ok, g_n, g_d, LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, BS, EVEN, UNIFORM, DOT
        )  # fmt: skip
        if EVEN:
            log_z = tl.load(LOG_Z + row_base + rows)
            own = tl.load(OWN + row_base + rows)
        else:
            log_z = tl.load(LOG_Z + row_base + rows, mask=ok, other=float("inf"))
            own = tl.load(OWN + row_base + rows, mask=ok, other=0.0)
        logits = tl.dot(key, tl.trans(q.to(DOT)), input_precision=PRECISION) + offset[:, None]
        a = tl.exp2(logits - log_z[None, :])
        w_ = tl.dot(mean, tl.trans(gw), input_precision=PRECISION)
        dropped = a
        if DROPOUT:
            kept = tl.trans(draw_kept(SEED, stream, rows, c, SETS * BX, dropout))
            dropped = a * kept
            w_ = w_ * kept
        dmean = tl.dot(dropped.to(DOT), g.to(DOT), dmean, input_precision=PRECISION)
        dl = a * (w_ - own[None, :])
        dentropy += tl.sum(dl, 1)
        dkey = tl.dot(dl.to(DOT), q.to(DOT), dkey, input_precision=PRECISION)
    index = h.to(tl.int64) * works + work
    weight = load_weight(LLN_WEIGHT, b, h, lln_b, lln_h, BS, UNIFORM)
    store_set(DMEAN, dmean, index * M * E, first_row, M, E, BX, BE)
    store_set(DKEY, dkey * (scale * weight), index * M * D, first_row, M, D, BX, BD)
    tl.store(DENTROPY + index * M + c, dentropy * weight, mask=c < M)
