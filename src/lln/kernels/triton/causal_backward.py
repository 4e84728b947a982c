"""Causal attention, backward: one pass forwards for dq, one backwards for dk and dv; nothing of the forward is kept.

With u, e, T, z, Z of `causal` and n_t = u_t / Z_t,

    Y_t = dO_t T^T + sum_{j <= t} (dO_t . v_j) e_j         D_t = n_t . Y_t            c_t = z + sum_{j <= t} e_j
    dl_t = n_t (Y_t - D_t c_t)                             dq_t = alpha dl_t
    R = sum_{t later} n_t dO_t     r = sum_{t later} n_t D_t           relative to M, as T and z are
    dv_j = e_j R + sum_{t >= j} (n_t . e_j) dO_t           dx_j = e_j (R v_j - r + sum_{t >= j} (dO_t . v_j - D_t) n_t)

M is L at the end of the split throughout. The first pass leaves log Z_t and D_t of every row, and marks the splits that
have lost a row: `causal_slow` does these again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import TINY, block_keys, is_marked, key_reference, lowest, query_reference, start_state
from lln.kernels.triton.fold import place_channels, share, split_range
from lln.kernels.triton.parts import (
    block_backward,
    block_products,
    block_values,
    block_weight_gradient,
    exp2,
    keep,
    key_log,
    load_factor,
    load_matrix,
    load_rows,
    place,
    scaled,
    softmax_rows,
    store_matrix,
    store_rows,
    two_words,
    visible_keys,
    where_visible,
)


@triton.jit
def log_norm(top, peak, Z, WIDE: tl.constexpr):
    """log2 of Z_t, no longer relative to anything."""
    if WIDE:
        return top.to(tl.float64) + peak.to(tl.float64) + tl.log2(Z.to(tl.float64))
    else:
        return top + peak + tl.log2(Z)


@triton.jit
def linear_weight_gradient(u, e, state, v, g, causal, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Of the weight of the linear part, [BE]; u is normalised."""
    pairs = tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION)
    o = tl.dot(u.to(DOT), state.to(DOT), input_precision=PRECISION)
    o = tl.dot(tl.where(causal, pairs, 0.0).to(DOT), v, o, input_precision=PRECISION)
    return tl.sum(o * g.to(tl.float32), 0)


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "total", "H"])
def causal_queries_kernel(
    Q, K, V, GRAD, ALPHA, BETA, LOG, MEAN, END, END32, LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK,
    CU, OWNER, BEGIN, START, SEED, DQ, REACH, REACH_D, LOG_Z, OWN, MARK, DALPHA, DLLN, DBLOCK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DALPHA: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of each split and query head, and what its queries ask of the state before it: REACH = R, REACH_D = r."""
    h, w, b, first, n, origin, begin, end, opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    e_ = tl.arange(0, BE)
    causal = r[:, None] >= r[None, :]
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
    g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    dq_base = data * dq_b + h.to(tl.int64) * dq_h + first * dq_n
    mask_base = data * mask_b + first * mask_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    factor, low = two_words(load_factor(BETA, b, hk, beta_b, beta_h, beta_d, D, BD, FLAT))
    alpha = load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT)
    alpha_factor, alpha_low = two_words(alpha)
    weight = 1.0
    if BS:
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        if UNIFORM:  # then it is left out of dO and put into what comes of it
            weight = tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + h * lln_h)
    before_or_at = causal.to(DOT)
    stream = (b * H * G + h) * 2
    dalpha = tl.zeros([BD], tl.float32)
    dlln = tl.zeros([BE], tl.float32)
    dblock = tl.zeros([BE], tl.float32)
    before = hk.to(tl.int64) * works + w
    z, state, keys = start_state(LOG, MEAN, END32, before, D, E, BD, BE)
    back = z * weight
    lowest_z = tl.full([BM], 1.0, tl.float32)
    reach = tl.zeros([BD, BE], tl.float32)
    reach_d = tl.zeros([BD], tl.float32)
    for t in tl.range(begin, end, disable_licm=True):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        gl = g
        if BS and not UNIFORM:
            gl = g * lln_weight
        gl = gl.to(DOT)
        gv = tl.dot(gl, tl.trans(v.to(DOT)), input_precision=PRECISION)
        gv = tl.where(causal, gv, 0.0).to(DOT)
        offset, top = query_reference(END32, before, D, BD, WIDE)
        u, _total, peak = softmax_rows(scaled(q.to(tl.float32), alpha_factor, alpha_low, offset, WIDE))
        reference = key_reference(END32, before, D, BD)
        e = exp2(
            where_visible(tl.minimum(scaled(k.to(tl.float32), factor, low, reference, WIDE), 1.0), visible, EVEN)
        ).to(DOT)
        c = tl.dot(before_or_at, e, input_precision=PRECISION) + z[None, :]
        Z = tl.sum(u * c, 1)
        lowest_z, keys = lowest(Z, lowest_z, ok, visible, keys, BM, EVEN)
        u = u * tl.where(Z > 0.0, 1.0 / Z, 0.0)[:, None]
        y = tl.dot(gl, tl.trans(state.to(DOT)), input_precision=PRECISION)
        y = tl.dot(gv, e, y, input_precision=PRECISION)
        kept = u
        if DROPOUT:
            mask = keep(SEED, stream, rows, d, BD, dropout)
            y = y * mask
            kept = u * mask
        if HAS_DWEIGHT:
            dlln += linear_weight_gradient(kept, e, state, v.to(DOT), g, causal, DOT, PRECISION)
        own = tl.sum(u * y, 1)
        dl = u * (y - own[:, None] * c)
        if HAS_DALPHA:
            dalpha += tl.sum(dl * q.to(tl.float32), 0) * weight
        dq = dl * (alpha * weight)
        tl.store(LOG_Z + row_base + rows, tl.where(Z > 0.0, log_norm(top, peak, Z, WIDE), float("inf")), mask=ok)
        tl.store(OWN + row_base + rows, own, mask=ok)
        reach = tl.dot(tl.trans(kept.to(DOT)), gl, reach, input_precision=PRECISION)
        reach_d += tl.sum(u * own[:, None], 0)
        state = tl.dot(tl.trans(e), v.to(DOT), state, input_precision=PRECISION)
        z += tl.sum(e.to(tl.float32), 0)
        if BS:
            kb, vb, seen = block_keys(
                k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + hk, b, tl.where(t == 0, opened, 0),
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            dp, _weight = block_products(
                g, vb, BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
            )
            ds, p = block_backward(
                q, kb, dp, seen, BLOCK_WEIGHT, b, h, block_b, block_h, SEED, stream, rows, scale, dropout,
                BM, BS, USED, True, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
            )  # fmt: skip
            if HAS_DWEIGHT:
                dblock += block_weight_gradient(p, vb, g, DOT, PRECISION)
            dq = tl.dot(ds, kb.to(DOT), dq, input_precision=PRECISION)
        store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
    index = tl.program_id(0).to(tl.int64)
    tl.store(MARK + index, (tl.min(lowest_z, 0) < TINY).to(tl.int32))
    store_matrix(REACH + index * D * E, reach * back[:, None], D, E, BD, BE)
    tl.store(REACH_D + index * D + d, reach_d * back, mask=d < D)
    if HAS_DALPHA:
        tl.store(DALPHA + index * D + d, dalpha, mask=d < D)
    if HAS_DWEIGHT:
        tl.store(DLLN + index * E + e_, dlln, mask=e_ < E)
        tl.store(DBLOCK + index * E + e_, dblock, mask=e_ < E)


@triton.jit(do_not_specialize=["works", "splits", "H"])
def suffix_kernel(
    REACH, REACH_D, LOG, LOG_END, MEAN_END, G_LOG, G_MEAN, SUFFIX, SUFFIX_D, REACH_0, REACH_D0, BEGIN,
    works, splits, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    PACKED: tl.constexpr, HAS_GRAD: tl.constexpr,
):  # fmt: skip
    """R and r at the end of each split and at the start of the sequence."""
    b, h, c, e, out, inside = place_channels(H, D, E, BC, BE)
    log = tl.load(LOG_END + out, mask=c < D, other=-float("inf"))
    reach = tl.zeros([BC, BE], tl.float32)
    reach_d = tl.zeros([BC], tl.float32)
    if HAS_GRAD:
        alive = tl.where(log == -float("inf"), 0.0, 1.0).to(tl.float32)
        reach = tl.load(G_MEAN + out[:, None] * E + e[None, :], mask=inside, other=0.0) * alive[:, None]
        mean = tl.load(MEAN_END + out[:, None] * E + e[None, :], mask=inside, other=0.0)
        grad = tl.load(G_LOG + out, mask=c < D, other=0.0).to(tl.float32)
        reach_d = tl.sum(mean * reach, 1) - grad * alive
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for back in range(0, end - begin):
        i = end - 1 - back
        here = tl.zeros([BC, BE], tl.float32)
        here_d = tl.zeros([BC], tl.float32)
        for g in range(G):
            at = ((h * G + g).to(tl.int64) * works + i) * D + c
            here += tl.load(REACH + at[:, None] * E + e[None, :], mask=inside, other=0.0)
            here_d += tl.load(REACH_D + at, mask=c < D, other=0.0)
        at = (h.to(tl.int64) * works + i) * D + c
        tl.store(SUFFIX + at[:, None] * E + e[None, :], reach, mask=inside)
        tl.store(SUFFIX_D + at, reach_d, mask=c < D)
        before = tl.load(LOG + at, mask=c < D, other=-float("inf"))
        through = share(before, log)
        reach = reach * through[:, None] + here
        reach_d = reach_d * through + here_d
        log = before
    # An empty incoming state has no say, also when there are no rows.
    alive = tl.where(log == -float("inf"), 0.0, 1.0).to(tl.float32)
    tl.store(REACH_0 + out[:, None] * E + e[None, :], reach * alive[:, None], mask=inside)
    tl.store(REACH_D0 + out, reach_d * alive, mask=c < D)


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "total", "H"])
def causal_keys_kernel(
    Q, K, V, GRAD, ALPHA, BETA, END, END32, SUFFIX, SUFFIX_D, LOG_Z, OWN, MARK,
    LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK, CU, OWNER, BEGIN, START, SEED,
    DK, DV, DBETA, DOPEN_K, DOPEN_V,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DBETA: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of each split and key head, from its last chunk to its first."""
    h, w, b, first, n, origin, begin, end, opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    causal = r[:, None] >= r[None, :]
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    dk_base = data * dk_b + h.to(tl.int64) * dk_h + first * dk_n
    dv_base = data * dv_b + h.to(tl.int64) * dv_h + first * dv_n
    mask_base = data * mask_b + first * mask_n
    beta = load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT)
    factor, low = two_words(beta)
    dbeta = tl.zeros([BD], tl.float32)
    index = tl.program_id(0).to(tl.int64)
    if is_marked(MARK, h, w, works, G):  # it is done elsewhere
        end = begin
    suffix = load_matrix(SUFFIX + index * D * E, D, E, BD, BE)
    suffix_d = tl.load(SUFFIX_D + index * D + d, mask=d < D, other=0.0)
    if WIDE:
        _high, log_low = key_log(END, index, D, BD)
        suffix = suffix * exp2(-log_low)[:, None]
        suffix_d = suffix_d * exp2(-log_low)
    for back in tl.range(0, end - begin, disable_licm=True):
        t = end - 1 - back
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        dk = tl.zeros([BM, BD], tl.float32)
        dv = tl.zeros([BM, BE], tl.float32)
        kb, vb, seen = k, v, visible
        if BS:
            here = tl.where(t == 0, opened, 0)
            kb, vb, seen = block_keys(
                k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + h, b, here,
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
        k = k.to(tl.float32)
        v = v.to(DOT)
        reference = key_reference(END32, index, D, BD)
        e = exp2(where_visible(tl.minimum(scaled(k, factor, low, reference, WIDE), 1.0), visible, EVEN)).to(DOT)
        dv = tl.dot(e, suffix.to(DOT), dv, input_precision=PRECISION)
        de = tl.dot(v, tl.trans(suffix.to(DOT)), input_precision=PRECISION) - suffix_d[None, :]
        for group in range(G):
            head = h * G + group
            q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
            g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
            row_base = (data * (H * G) + head.to(tl.int64)) * total + first
            q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
            g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
            alpha, alpha_low = two_words(load_factor(ALPHA, b, head, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
            gl = g
            if BS and not UNIFORM:
                gl = g * load_factor(LLN_WEIGHT, b, head, lln_b, lln_h, lln_e, E, BE, UNIFORM)
            gl = gl.to(DOT)
            gv = tl.dot(gl, tl.trans(v), input_precision=PRECISION)
            if BS:
                if UNIFORM and not HAS_OPEN:
                    dp = gv
                    block_weight = suffix_d
                else:
                    dp, block_weight = block_products(
                        g, vb, BLOCK_WEIGHT, b, head, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
                    )
                ds, p = block_backward(
                    q, kb, dp, seen, BLOCK_WEIGHT, b, head, block_b, block_h, SEED, (b * H * G + head) * 2, rows, scale,
                    dropout, BM, BS, USED, True, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                dk = tl.dot(tl.trans(ds), q.to(DOT), dk, input_precision=PRECISION)
                if UNIFORM:
                    dv = tl.dot(tl.trans(p), gl, dv, input_precision=PRECISION)
                else:
                    dv += block_values(p, g, block_weight, UNIFORM, DOT, PRECISION)
            log_z = tl.load(LOG_Z + row_base + rows, mask=ok, other=float("inf"))
            own = tl.load(OWN + row_base + rows, mask=ok, other=0.0)
            offset, top = query_reference(END32, index, D, BD, WIDE)
            relative = (log_z - top).to(tl.float32)
            u = exp2(tl.minimum(scaled(q.to(tl.float32), alpha, alpha_low, offset, WIDE) - relative[:, None], 100.0))
            if BS and UNIFORM:
                u = u * tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + head * lln_h)
            kept = u
            if DROPOUT:
                kept = u * keep(SEED, (b * H * G + head) * 2, rows, d, BD, dropout)
            kept = kept.to(DOT)
            scores = tl.where(causal, tl.dot(kept, tl.trans(e), input_precision=PRECISION), 0.0)
            dv = tl.dot(tl.trans(scores.to(DOT)), gl, dv, input_precision=PRECISION)
            if DROPOUT:
                gv = tl.where(causal, gv, 0.0).to(DOT)
                de = tl.dot(tl.trans(gv), kept, de, input_precision=PRECISION)
                gv = tl.where(causal, tl.broadcast_to(-own[:, None], [BM, BM]), 0.0).to(DOT)
                de = tl.dot(tl.trans(gv), u.to(DOT), de, input_precision=PRECISION)
            else:
                gv = tl.where(causal, gv - own[:, None], 0.0).to(DOT)
                de = tl.dot(tl.trans(gv), kept, de, input_precision=PRECISION)
            suffix = tl.dot(tl.trans(kept), gl, suffix, input_precision=PRECISION)
            suffix_d += tl.sum(u * own[:, None], 0)
        if HAS_OPEN:  # rows of the open block have no part in the linear attention of this call
            inside = r < here
            at = (b.to(tl.int64) * H + h) * BS
            store_rows(DOPEN_K, at * D, r, inside, D, 1, dk, D, BD, False)
            store_rows(DOPEN_V, at * E, r, inside, E, 1, dv, E, BE, False)
        dx = e.to(tl.float32) * de
        if HAS_DBETA:
            dbeta += tl.sum(dx * k, 0)
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk + dx * beta, D, BD, EVEN)
    if HAS_DBETA:
        tl.store(DBETA + index * D + d, dbeta, mask=d < D)
