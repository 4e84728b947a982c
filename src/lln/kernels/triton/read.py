"""Bidirectional attention from a folded state: the queries' side, forward and backward, and the keys' backward.

    A = softmax_c(alpha q + L)        o = r A S + p softmax_block(q k^T) v
    W = r dO S^T      D = rowsum(A W)      dl = A (W - D)      dq = alpha dl      dS = A^T dO r      pull = A^T D
    B = e^(beta k - L)                dv = B dS                dk = beta B (v dS^T - pull)

With blocks the gradient of q has two parts. They meet in the keys' backward, where the block's own rows are at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.parts import (
    LENGTHS,
    block_backward,
    block_output,
    block_products,
    block_values,
    block_weight_gradient,
    draw_kept,
    hide_keys,
    key_log,
    load_factor,
    load_matrix,
    load_rows,
    load_state,
    make_identity,
    place,
    scale_rows,
    softmax_rows,
    split_factor,
    store_matrix,
    store_rows,
    visible_keys,
    widen,
)


@triton.jit(do_not_specialize=LENGTHS)
def read_kernel(
    Q, K, V, ALPHA, LOG, MEAN, LLN_WEIGHT, BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED, OUT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    alpha_b, alpha_h, alpha_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of each split. BS = 0: no blocks. H is the number of key heads, each read by G query heads."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    factor, low = split_factor(load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
    offset, mean = load_state(LOG, MEAN, b.to(tl.int64) * H + hk, D, E, BD, BE)
    if BS:
        k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
        v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
        mask_base = data * mask_b + first * mask_n
        mean = mean * load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
    mean = mean.to(DOT)
    stream = (b * H * G + h) * 2
    eye = make_identity(BD, DOT)
    for back in range(begin, end):
        t = begin + end - 1 - back  # the keys that were folded last are still in the cache
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        p, total, _top = softmax_rows(scale_rows(widen(q, eye, BD, DOT), factor, low, offset, WIDE))
        if DROPOUT:
            p = p * draw_kept(SEED, stream, rows, d, BD, dropout)
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


@triton.jit(do_not_specialize=LENGTHS)
def read_backward_kernel(
    Q, GRAD, ALPHA, LOG, MEAN, LLN_WEIGHT, CU, OWNER, BEGIN, START, SEED,
    DQ, DMEAN, PULL, DALPHA, TOP, INVERSE, OWN, LOG2,
    q_b, q_h, q_n, q_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    alpha_b, alpha_h, alpha_d, lln_b, lln_h, lln_e,
    dropout, N, works, splits, tiles, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, BLOCKS: tl.constexpr, HAS_DALPHA: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, SINGLE: tl.constexpr,
    DROPOUT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per split and query head: A^T dO, pull = A^T D and dalpha; and dq, unless blocks have a part in it: then
    what the keys' backward needs to make A again, and D, of every row.

    A^T dO is without the weight of the linear part: the gradient of that weight is a sum over it. With SINGLE (one
    split a sequence, one query head a key head) it is dS itself, weight included, in [sequences, heads]."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    dq_base = data * dq_b + h.to(tl.int64) * dq_h + first * dq_n
    alpha = load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT)
    factor, low = split_factor(alpha)
    offset, mean = load_state(LOG, MEAN, b.to(tl.int64) * H + hk, D, E, BD, BE)
    if D == BD and not WIDE:
        offset, _low = key_log(LOG, b.to(tl.int64) * H + hk, D, BD)
    row_base = (data * (H * G) + h.to(tl.int64)) * N + first
    if BLOCKS:
        tl.store(LOG2 + (b.to(tl.int64) * H + hk) * D + d, offset, mask=d < D)  # the same from every program
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        mean = mean * lln_weight
    mean = mean.to(DOT)
    dmean = tl.zeros([BD, BE], tl.float32)
    pull = tl.zeros([BM, BD], tl.float32)
    dalpha = tl.zeros([BD], tl.float32)
    if DROPOUT:
        stream = (b * H * G + h) * 2
    eye = make_identity(BD, DOT)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = widen(load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN), eye, BD, DOT)
        g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN).to(DOT)
        a, total, top = softmax_rows(scale_rows(q, factor, low, offset, WIDE))
        inverse = 1.0 / total
        a = a * inverse[:, None]
        w_ = tl.dot(g, tl.trans(mean), input_precision=PRECISION)
        dropped = a
        if DROPOUT:
            mask = draw_kept(SEED, stream, rows, d, BD, dropout)
            dropped = a * mask
            w_ = w_ * mask
        own = tl.sum(a * w_, 1)
        dmean = tl.dot(tl.trans(dropped.to(DOT)), g, dmean, input_precision=PRECISION)
        pull += a * own[:, None]
        if HAS_DALPHA:
            dalpha += tl.sum(a * (w_ - own[:, None]) * q, 0)
        if BLOCKS:
            tl.store(TOP + row_base + rows, top, mask=ok)
            tl.store(INVERSE + row_base + rows, inverse, mask=ok)
            tl.store(OWN + row_base + rows, own, mask=ok)
        else:
            # alpha (w - D), not (w - D) alpha: one instruction less.
            dq = a * (w_ * alpha - own[:, None] * alpha)
            store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
    index = tl.program_id(0).to(tl.int64)
    if HAS_DALPHA:
        tl.store(DALPHA + index * D + d, dalpha, mask=d < D)
    if SINGLE:
        index = b.to(tl.int64) * H + h
        if BLOCKS:
            dmean = dmean * lln_weight
    store_matrix(DMEAN + index * D * E, dmean, D, E, BD, BE)
    tl.store(PULL + index * D + d, tl.sum(pull, 0), mask=d < D)


@triton.jit
def push_queries(
    q, g, mean, eye, alpha, factor, low, offset, top, inverse, own, SEED, stream, rows, dropout,
    BD: tl.constexpr, DROPOUT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of the linear part, from what `read_backward_kernel` kept of A."""
    w_ = tl.dot(g.to(DOT), tl.trans(mean), input_precision=PRECISION)
    if DROPOUT:
        w_ = w_ * draw_kept(SEED, stream, rows, tl.arange(0, BD), BD, dropout)
    a = tl.exp2(scale_rows(widen(q, eye, BD, DOT), factor, low, offset, WIDE) - top[:, None])
    factors = inverse[:, None] * alpha
    return a * (w_ * factors - own[:, None] * factors)


@triton.jit(do_not_specialize=LENGTHS)
def fold_backward_kernel(
    Q, K, V, GRAD, ALPHA, BETA, LOG, MEAN, DMEAN, PULL, LLN_WEIGHT, BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED,
    TOP, INVERSE, OWN, LOG2, DQ, DK, DV, DBETA, DWEIGHT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dq_b, dq_h, dq_n, dq_d, dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, LOW: tl.constexpr, AGAIN: tl.constexpr,
    HAS_DBETA: tl.constexpr, HAS_DWEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per split and key head: dk, dv and dbeta; with blocks also dq of the G query heads and the block weight's.

    AGAIN: keys and values are read anew for each query head and for what comes after the blocks. To keep them would
    take shared memory, more than there may be."""
    h, w, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    dk_base = data * dk_b + h.to(tl.int64) * dk_h + first * dk_n
    dv_base = data * dv_b + h.to(tl.int64) * dv_h + first * dv_n
    mask_base = data * mask_b + first * mask_n
    state = b.to(tl.int64) * H + h
    beta = load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT)
    factor, low = split_factor(beta)
    # Vectors that a loop keeps in registers crowd out what it works on: with blocks they are read again in each turn.
    LEAN: tl.constexpr = BS > 0 and D == BD and not WIDE
    if not LEAN:
        log, log_low = key_log(LOG, state, D, BD)
        pull = tl.load(PULL + state * D + d, mask=d < D, other=0.0)
    dmean = load_matrix(DMEAN + state * D * E, D, E, BD, BE)
    # LOW: in two words of the narrow type. Its rounding would be an error of every key and value alike.
    dmean_low = (dmean - dmean.to(DOT).to(tl.float32)).to(DOT)
    dmean = dmean.to(DOT)
    if BS:
        plain = load_matrix(MEAN + state * D * E, D, E, BD, BE)
        alpha = load_factor(ALPHA, b, h * G, alpha_b, alpha_h, alpha_d, D, BD, FLAT)
        alpha_factor, alpha_low = split_factor(alpha)
        mean = (plain * load_factor(LLN_WEIGHT, b, h * G, lln_b, lln_h, lln_e, E, BE, UNIFORM)).to(DOT)
    dbeta = tl.zeros([BD], tl.float32)
    dweight = tl.zeros([BE], tl.float32)
    eye = make_identity(BD, DOT)
    for t in tl.range(begin, end, disable_licm=BS > 0):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        if not AGAIN:
            k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
            v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        dk = tl.zeros([BM, BD], tl.float32)
        dv = tl.zeros([BM, BE], tl.float32)
        if BS:
            for g_head in range(G):
                head = h * G + g_head
                if AGAIN:
                    k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
                    v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
                if G > 1:
                    alpha = load_factor(ALPHA, b, head, alpha_b, alpha_h, alpha_d, D, BD, FLAT)
                    alpha_factor, alpha_low = split_factor(alpha)
                    lln_weight = load_factor(LLN_WEIGHT, b, head, lln_b, lln_h, lln_e, E, BE, UNIFORM)
                    mean = (plain * lln_weight).to(DOT)
                q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
                g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
                q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
                g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
                row_base = (data * (H * G) + head.to(tl.int64)) * N + first
                offset = tl.load(LOG2 + state * D + d, mask=d < D, other=-float("inf"))
                top = tl.load(TOP + row_base + rows, mask=ok, other=0.0)
                inverse = tl.load(INVERSE + row_base + rows, mask=ok, other=0.0)
                own = tl.load(OWN + row_base + rows, mask=ok, other=0.0)
                stream = (b * H * G + head) * 2
                if BD > 64:
                    dq = push_queries(
                        q, g, mean, eye, alpha, alpha_factor, alpha_low, offset, top, inverse, own, SEED, stream, rows,
                        dropout, BD, DROPOUT, WIDE, DOT, PRECISION,
                    )  # fmt: skip
                else:
                    dq = tl.zeros([BM, BD], tl.float32)
                    # Always true, which the compiler does not know: it would begin the products of the blocks before
                    # these are used up, and registers for all of them leave room for two programs instead of three.
                    if N > 0:
                        dq = push_queries(
                            q, g, mean, eye, alpha, alpha_factor, alpha_low, offset, top, inverse, own, SEED, stream,
                            rows, dropout, BD, DROPOUT, WIDE, DOT, PRECISION,
                        )  # fmt: skip
                dp, block_weight = block_products(
                    g, v, BLOCK_WEIGHT, b, head, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
                )
                ds, p = block_backward(
                    q, k, dp, visible, BLOCK_WEIGHT, b, head, block_b, block_h, SEED, stream, rows, scale, dropout,
                    BM, BS, USED, False, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                dq += tl.dot(ds, k.to(DOT), input_precision=PRECISION)
                dq_base = data * dq_b + head.to(tl.int64) * dq_h + first * dq_n
                store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
                dv += block_values(p, g, block_weight, UNIFORM, DOT, PRECISION)
                dk = tl.dot(tl.trans(ds), q.to(DOT), dk, input_precision=PRECISION)
                if HAS_DWEIGHT:
                    at = DWEIGHT + (head.to(tl.int64) * works + w) * E + e
                    part = block_weight_gradient(p, v, g, DOT, PRECISION)
                    if G > 1:
                        if t > begin:
                            part += tl.load(at, mask=e < E, other=0.0)
                        tl.store(at, part, mask=e < E)
                    else:
                        dweight += part
        if AGAIN:
            k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
            v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        if LEAN:
            log = tl.load(LOG2 + state * D + d)
            pull = tl.load(PULL + state * D + d)
        k32 = widen(k, eye, BD, DOT)
        x = scale_rows(k32, factor, low, -log, WIDE)
        if WIDE:
            x = x - log_low[None, :]
        weights = tl.exp2(hide_keys(tl.minimum(x, 1.0), visible, EVEN))  # > 0 only where x is rounded away
        dv = tl.dot(weights.to(DOT), dmean, dv, input_precision=PRECISION)
        if LOW:
            dv = tl.dot(weights.to(DOT), dmean_low, dv, input_precision=PRECISION)
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)  # before dw, whose registers it had
        dw = tl.dot(v.to(DOT), tl.trans(dmean), input_precision=PRECISION)
        if LOW:
            dw = tl.dot(v.to(DOT), tl.trans(dmean_low), dw, input_precision=PRECISION)
        if HAS_DBETA:
            dbeta += tl.sum(weights * (dw - pull[None, :]) * k32, 0)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk + weights * (dw * beta - pull[None, :] * beta), D, BD, EVEN)
    index = tl.program_id(0).to(tl.int64)
    if HAS_DBETA:
        tl.store(DBETA + index * D + d, dbeta, mask=d < D)
    if HAS_DWEIGHT and BS:
        if G == 1:
            tl.store(DWEIGHT + index * E + e, dweight, mask=e < E)
        elif end <= begin:
            for g_head in range(G):
                tl.store(DWEIGHT + ((h * G + g_head).to(tl.int64) * works + w) * E + e, dweight, mask=e < E)
