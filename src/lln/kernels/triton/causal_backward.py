"""Causal attention, backward: after the queries' pass (`causal`) one backwards for dk and dv; nothing of the forward is
kept.

With the symbols of `causal`, and relative to M as T and z are,

    R = sum_{t later} n_t dO_t     r = sum_{t later} n_t D_t
    dv_j = e_j R + sum_{t >= j} (n_t . e_j) dO_t           dx_j = e_j (R v_j - r + sum_{t >= j} (dO_t . v_j - D_t) n_t)
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import (
    block_keys,
    channel_offset,
    is_marked,
    key_weights,
    load_key_reference,
    load_query_reference,
    move_reference,
)
from lln.kernels.triton.fold import place_channels, split_range, weigh_part
from lln.kernels.triton.parts import (
    LENGTHS,
    block_backward,
    block_products,
    block_values,
    draw_kept,
    hide_keys,
    key_log,
    load_factor,
    load_matrix,
    load_rows,
    place,
    scale_rows,
    split_factor,
    store_rows,
    visible_keys,
)


@triton.jit(do_not_specialize=LENGTHS)
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
        through = weigh_part(before, log)
        reach = reach * through[:, None] + here
        reach_d = reach_d * through + here_d
        log = before
    # An empty incoming state has no say, also when there are no rows.
    alive = tl.where(log == -float("inf"), 0.0, 1.0).to(tl.float32)
    tl.store(REACH_0 + out[:, None] * E + e[None, :], reach * alive[:, None], mask=inside)
    tl.store(REACH_D0 + out, reach_d * alive, mask=c < D)


@triton.jit(do_not_specialize=LENGTHS)
def causal_keys_kernel(
    Q, K, V, GRAD, ALPHA, BETA, END, END32, SUFFIX, SUFFIX_D, LOG_Z, OWN, MARK, REFERENCE,
    LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK, CU, OWNER, BEGIN, START, SEED,
    DK, DV, DBETA, DOPEN_K, DOPEN_V,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, AGAIN: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DBETA: tl.constexpr,
    SLOW: tl.constexpr,
    DROPOUT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of each split and key head, from its last chunk to its first; SLOW: of those that are marked. AGAIN:
    what the query heads of a group have in common is made anew for each, and takes no shared memory in between."""
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
    factor, low = split_factor(beta)
    dbeta = tl.zeros([BD], tl.float32)
    index = tl.program_id(0).to(tl.int64)
    marked = is_marked(MARK, h, w, works, G)
    if SLOW and not marked:
        return
    if not SLOW and marked:  # it is done by the SLOW one
        end = begin
    suffix = load_matrix(SUFFIX + index * D * E, D, E, BD, BE)
    suffix_d = tl.load(SUFFIX_D + index * D + d, mask=d < D, other=0.0)
    if WIDE or SLOW:
        reference, log_low = key_log(END, index, D, BD)
        suffix = suffix * tl.exp2(-log_low)[:, None]
        suffix_d = suffix_d * tl.exp2(-log_low)
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
        if not SLOW:
            edge = load_key_reference(END32, index, D, BD)
            e = tl.exp2(hide_keys(tl.minimum(scale_rows(k, factor, low, edge, WIDE), 1.0), visible, EVEN)).to(DOT)
            dv = tl.dot(e, suffix.to(DOT), dv, input_precision=PRECISION)
            de = tl.dot(v, tl.trans(suffix.to(DOT)), input_precision=PRECISION) - suffix_d[None, :]
        for group in tl.range(0, G, disable_licm=AGAIN):
            head = h * G + group
            q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
            g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
            row_base = (data * (H * G) + head.to(tl.int64)) * total + first
            q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
            g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
            alpha, alpha_low = split_factor(load_factor(ALPHA, b, head, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
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
            if not SLOW:
                log_z = tl.load(LOG_Z + row_base + rows, mask=ok, other=float("inf"))
                own = tl.load(OWN + row_base + rows, mask=ok, other=0.0)
                offset, top = load_query_reference(END32, index, D, BD, WIDE)
                relative = (log_z - top).to(tl.float32)[:, None]
                u = tl.exp2(tl.minimum(scale_rows(q.to(tl.float32), alpha, alpha_low, offset, WIDE) - relative, 100.0))
                if BS and UNIFORM:
                    u = u * tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + head * lln_h)
                kept = u
                if DROPOUT:
                    kept = u * draw_kept(SEED, (b * H * G + head) * 2, rows, d, BD, dropout)
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
        if SLOW:
            start = tl.load(REFERENCE + (index * tiles + t - begin) * D + d, mask=d < D, other=-1e38)
            for back_row in range(0, USED):
                i = USED - 1 - back_row
                at = origin + t * USED + i + tl.zeros([1], tl.int64)
                there = (at >= 0) & (at < n)
                k1 = load_rows(K, k_base, at, there, k_n, k_d, D, BD, False).to(tl.float32)
                v1 = load_rows(V, v_base, at, there, v_n, v_d, E, BE, False).to(tl.float32)
                moved = move_reference(k, visible & (r <= i), factor, start)
                fade = tl.exp2(tl.minimum(moved - reference, 1.0))
                reference = moved
                suffix = suffix * fade[:, None]
                suffix_d = suffix_d * fade
                offset, top = channel_offset(moved, D, BD)
                for group in range(G):
                    head = h * G + group
                    q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
                    g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
                    q1 = load_rows(Q, q_base, at, there, q_n, q_d, D, BD, False).to(tl.float32)
                    g1 = load_rows(GRAD, g_base, at, there, g_n, g_d, E, BE, False).to(tl.float32)
                    alpha, alpha_low = split_factor(load_factor(ALPHA, b, head, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
                    if BS:
                        g1 = g1 * load_factor(LLN_WEIGHT, b, head, lln_b, lln_h, lln_e, E, BE, UNIFORM)
                    row_base = (data * (H * G) + head.to(tl.int64)) * total + first
                    log_z = tl.load(LOG_Z + row_base + at, mask=there, other=float("inf"))
                    own = tl.load(OWN + row_base + at, mask=there, other=0.0)
                    relative = (log_z - top).to(tl.float32)[:, None]
                    u1 = tl.exp2(tl.minimum(scale_rows(q1, alpha, alpha_low, offset, WIDE) - relative, 100.0))
                    suffix_d += tl.reshape(u1 * own[:, None], [BD])
                    if DROPOUT:
                        u1 = u1 * draw_kept(SEED, (b * H * G + head) * 2, at, d, BD, dropout)
                    # Not a reshape to [BD, 1], whose layout would be that of all: a thread with 8 BE numbers of R.
                    suffix += tl.reshape(u1, [BD])[:, None] * g1
                seen1 = visible_keys(MASK, mask_base, at, there, mask_n, MASKED)
                e1 = key_weights(k1, seen1, factor, low, moved, BD, WIDE)
                dx = e1 * (tl.sum(suffix * v1, 1) - suffix_d)
                if HAS_DBETA:
                    dbeta += dx * tl.reshape(k1, [BD])
                dk += tl.where((r == i)[:, None], dx[None, :] * beta, 0.0)
                dv += tl.where((r == i)[:, None], tl.sum(e1[:, None] * suffix, 0)[None, :], 0.0)
        if HAS_OPEN:  # rows of the open block have no part in the linear attention of this call
            inside = r < here
            at = (b.to(tl.int64) * H + h) * BS
            store_rows(DOPEN_K, at * D, r, inside, D, 1, dk, D, BD, False)
            store_rows(DOPEN_V, at * E, r, inside, E, 1, dv, E, BE, False)
        if not SLOW:
            dx = e.to(tl.float32) * de
            if HAS_DBETA:
                dbeta += tl.sum(dx * k, 0)
            dk = dk + dx * beta
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk, D, BD, EVEN)
    if HAS_DBETA:
        tl.store(DBETA + index * D + d, dbeta, mask=d < D)
