"""The backward of `causal_slow`: as `causal_backward`, chunk by chunk with a reference that moves."""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import block_keys
from lln.kernels.triton.causal_backward import linear_weight_gradient, log_norm
from lln.kernels.triton.causal_slow import (
    any_of,
    channel_offset,
    exact_state,
    key_weights,
    lost_rows,
    moved_reference,
)
from lln.kernels.triton.fold import split_range
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
)


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "total", "H"])
def slow_queries_kernel(
    Q, K, V, GRAD, ALPHA, BETA, LOG, MEAN, LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK,
    CU, OWNER, BEGIN, START, SEED, DQ, REACH, REACH_D, LOG_Z, OWN, MARK, REFERENCE, WIDTH, DALPHA, DLLN, DBLOCK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DALPHA: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `causal_backward.causal_queries_kernel` for the marked splits; and M at each chunk's start, for one query head
    of a group, and how many rows of the chunk went together."""
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
    if BS:
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
    stream = (b * H * G + h) * 2
    dalpha = tl.zeros([BD], tl.float32)
    dlln = tl.zeros([BE], tl.float32)
    dblock = tl.zeros([BE], tl.float32)
    before = hk.to(tl.int64) * works + w
    marked = 0  # the heads of a group go together: they share the keys' backward
    for group in range(G):
        marked = tl.maximum(marked, tl.load(MARK + (hk * G + group).to(tl.int64) * works + w))
    if marked == 0:
        return
    reference, z, state, some = exact_state(LOG, MEAN, before, D, E, BD, BE)
    start_reference = reference
    reach = tl.zeros([BD, BE], tl.float32)
    reach_d = tl.zeros([BD], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        dq = tl.zeros([BM, BD], tl.float32)
        gl = g.to(DOT)
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
            dq = tl.dot(ds, kb.to(DOT), input_precision=PRECISION)
            gl = (g * lln_weight).to(DOT)
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(DOT)
        gv = tl.where(causal, tl.dot(gl, tl.trans(v), input_precision=PRECISION), 0.0).to(DOT)
        if h % G == 0:
            tl.store(REFERENCE + (before * tiles + t - begin) * D + d, reference, mask=d < D)
        log_z = tl.full([BM], float("inf"), tl.float32)
        if WIDE:
            log_z = log_z.to(tl.float64)
        own = tl.zeros([BM], tl.float32)
        done = 0
        width = BM
        while done < BM:
            rows_in = (r >= done) & (r < done + width)
            now = visible & rows_in
            moved = moved_reference(k, now, factor, reference)
            fade = exp2(reference - moved)
            offset, highest = channel_offset(moved, D, BD)
            e = key_weights(k, now, factor, low, moved, WIDE)
            u, _total, peak = softmax_rows(scaled(q, alpha_factor, alpha_low, offset, WIDE))
            sums = tl.dot(causal.to(DOT), e.to(DOT), input_precision=PRECISION) + (z * fade)[None, :]
            Z = tl.sum(u * sums, 1)
            if (width == 1) | (not any_of(lost_rows(Z, rows_in & ok, now, some, BM))):
                state = state * fade[:, None]
                u = u * tl.where(rows_in & (Z > 0.0), 1.0 / Z, 0.0)[:, None]
                y = tl.dot(gl, tl.trans(state.to(DOT)), input_precision=PRECISION)
                y = tl.dot(gv, e.to(DOT), y, input_precision=PRECISION)
                kept = u
                if DROPOUT:
                    chosen = keep(SEED, stream, rows, d, BD, dropout)
                    y = y * chosen
                    kept = u * chosen
                if HAS_DWEIGHT:
                    dlln += linear_weight_gradient(kept, e, state, v, g, causal, DOT, PRECISION)
                pulled = tl.sum(u * y, 1)
                dl = u * (y - pulled[:, None] * sums)
                dq += dl * alpha
                if HAS_DALPHA:
                    dalpha += tl.sum(dl * q, 0)
                own = tl.where(rows_in, pulled, own)
                log_z = tl.where(rows_in & (Z > 0.0), log_norm(highest, peak, Z, WIDE), log_z)
                back = exp2(start_reference - moved)
                reach += tl.dot(tl.trans(kept.to(DOT)), gl, input_precision=PRECISION) * back[:, None]
                reach_d += tl.sum(u * pulled[:, None], 0) * back
                state = tl.dot(tl.trans(e.to(DOT)), v, state, input_precision=PRECISION)
                z = z * fade + tl.sum(e, 0)
                reference = moved
                some = tl.maximum(some, tl.max(now.to(tl.int32), 0))
                done += width
            else:
                width = width // 2
        tl.store(LOG_Z + row_base + rows, log_z, mask=ok)
        tl.store(OWN + row_base + rows, own, mask=ok)
        tl.store(WIDTH + (h.to(tl.int64) * works + w) * tiles + t - begin, width)
        store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
    index = tl.program_id(0).to(tl.int64)
    if WIDE:
        _start, start_low = key_log(LOG, before, D, BD)
        reach = reach * exp2(start_low)[:, None]
        reach_d = reach_d * exp2(start_low)
    store_matrix(REACH + index * D * E, reach, D, E, BD, BE)
    tl.store(REACH_D + index * D + d, reach_d, mask=d < D)
    if HAS_DALPHA:
        tl.store(DALPHA + index * D + d, dalpha, mask=d < D)
    if HAS_DWEIGHT:
        tl.store(DLLN + index * E + e_, dlln, mask=e_ < E)
        tl.store(DBLOCK + index * E + e_, dblock, mask=e_ < E)


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "total", "H"])
def slow_keys_kernel(
    Q, K, V, GRAD, ALPHA, BETA, LOG, LOG_END, SUFFIX, SUFFIX_D, LOG_Z, OWN, MARK, REFERENCE, WIDTH,
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
    """As `causal_backward.causal_keys_kernel` for the marked splits."""
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
    marked = 0
    for group in range(G):
        marked = tl.maximum(marked, tl.load(MARK + (h * G + group).to(tl.int64) * works + w))
    if marked == 0:
        return
    # L at the end of this split is L before the next one, or that of the whole sequence.
    _first, stop = split_range(b, splits, BEGIN, PACKED)
    if w + 1 < stop:
        reference, log_low = key_log(LOG, index + 1, D, BD)
    else:
        reference, log_low = key_log(LOG_END, b.to(tl.int64) * H + h, D, BD)
    suffix = load_matrix(SUFFIX + index * D * E, D, E, BD, BE)
    suffix_d = tl.load(SUFFIX_D + index * D + d, mask=d < D, other=0.0)
    if WIDE:
        suffix = suffix * exp2(-log_low)[:, None]
        suffix_d = suffix_d * exp2(-log_low)
    for back in range(0, end - begin):
        t = end - 1 - back
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        dk = tl.zeros([BM, BD], tl.float32)
        dv = tl.zeros([BM, BE], tl.float32)
        width = BM
        for group in range(G):
            head = h * G + group
            width = tl.minimum(width, tl.load(WIDTH + (head.to(tl.int64) * works + w) * tiles + t - begin))
        if BS:
            here = tl.where(t == 0, opened, 0)
            kb, vb, seen = block_keys(
                k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + h, b, here,
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            for group in range(G):
                head = h * G + group
                q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
                g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
                q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
                g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
                dp, block_weight = block_products(
                    g, vb, BLOCK_WEIGHT, b, head, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
                )
                ds, p = block_backward(
                    q, kb, dp, seen, BLOCK_WEIGHT, b, head, block_b, block_h, SEED, (b * H * G + head) * 2, rows, scale,
                    dropout, BM, BS, USED, True, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                dk = tl.dot(tl.trans(ds), q.to(DOT), dk, input_precision=PRECISION)
                dv += block_values(p, g, block_weight, UNIFORM, DOT, PRECISION)
            if HAS_OPEN:
                inside = r < here
                at = (b.to(tl.int64) * H + h) * BS
                store_rows(DOPEN_K, at * D, r, inside, D, 1, dk, D, BD, False)
                store_rows(DOPEN_V, at * E, r, inside, E, 1, dv, E, BE, False)
        start_reference = tl.load(REFERENCE + (index * tiles + t - begin) * D + d, mask=d < D, other=-1e38)
        k = k.to(tl.float32)
        v = v.to(DOT)
        dx = tl.zeros([BM, BD], tl.float32)
        for part in range(0, BM // width):
            stop_row = BM - part * width
            rows_in = ok & (r >= stop_row - width) & (r < stop_row)
            moved = moved_reference(k, visible & (r < stop_row), factor, start_reference)
            fade = exp2(tl.minimum(moved - reference, 1.0))
            offset, top = channel_offset(moved, D, BD)
            reference = moved
            suffix = suffix * fade[:, None]
            suffix_d = suffix_d * fade
            e = key_weights(k, visible & rows_in, factor, low, moved, WIDE).to(DOT)
            dv = tl.dot(e, suffix.to(DOT), dv, input_precision=PRECISION)
            de = tl.dot(v, tl.trans(suffix.to(DOT)), input_precision=PRECISION) - suffix_d[None, :]
            for group in range(G):
                head = h * G + group
                q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
                g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
                row_base = (data * (H * G) + head.to(tl.int64)) * total + first
                q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN).to(tl.float32)
                g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
                alpha, alpha_low = two_words(load_factor(ALPHA, b, head, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
                if BS:
                    g = g * load_factor(LLN_WEIGHT, b, head, lln_b, lln_h, lln_e, E, BE, UNIFORM)
                g = g.to(DOT)
                log_z = tl.load(LOG_Z + row_base + rows, mask=rows_in, other=float("inf"))
                own = tl.load(OWN + row_base + rows, mask=ok, other=0.0)
                relative = (log_z - top).to(tl.float32)
                logits = scaled(q, alpha, alpha_low, offset, WIDE) - relative[:, None]
                u = exp2(tl.minimum(logits, 100.0))
                dropped = u
                if DROPOUT:
                    dropped = u * keep(SEED, (b * H * G + head) * 2, rows, d, BD, dropout)
                dropped = dropped.to(DOT)
                scores = tl.where(causal, tl.dot(dropped, tl.trans(e), input_precision=PRECISION), 0.0)
                dv = tl.dot(tl.trans(scores.to(DOT)), g, dv, input_precision=PRECISION)
                gv = tl.dot(g, tl.trans(v), input_precision=PRECISION)
                if DROPOUT:
                    gv = tl.where(causal, gv, 0.0).to(DOT)
                    de = tl.dot(tl.trans(gv), dropped, de, input_precision=PRECISION)
                    gv = tl.where(causal, tl.broadcast_to(-own[:, None], [BM, BM]), 0.0).to(DOT)
                    de = tl.dot(tl.trans(gv), u.to(DOT), de, input_precision=PRECISION)
                else:
                    gv = tl.where(causal, gv - own[:, None], 0.0).to(DOT)
                    de = tl.dot(tl.trans(gv), dropped, de, input_precision=PRECISION)
                suffix = tl.dot(tl.trans(dropped), g, suffix, input_precision=PRECISION)
                suffix_d += tl.sum(u * own[:, None], 0)
            dx += e.to(tl.float32) * de
        if HAS_DBETA:
            dbeta += tl.sum(dx * k, 0)
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk + dx * beta, D, BD, EVEN)
    if HAS_DBETA:
        tl.store(DBETA + index * D + d, dbeta, mask=d < D)
