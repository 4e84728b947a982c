"""Causal attention where one reference for a split is not enough: the recurrence, row by row, forward and backward.

The reference M moves up with the keys, M_t = max(M_{t-1}, beta k_t), so that every exponent is at most 0 and Z_t >= 1:

    e_t = e^(beta k_t - M_t)    T_t = e^(M_{t-1} - M_t) T_{t-1} + e_t v_t    z_t alike    o_t = u_t T_t / (u_t . z_t)

and, backwards, R_t = e^(M_t - M_{t+1}) R_{t+1} + n_t dO_t, r_t alike with D_t, of which key t takes e_t. The symbols
are those of `causal` and `causal_backward`. Only splits that their kernels marked are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import block_keys, is_marked
from lln.kernels.triton.causal_backward import log_norm
from lln.kernels.triton.fold import split_range
from lln.kernels.triton.parts import (
    block_backward,
    block_output,
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


@triton.jit
def channel_offset(reference, D: tl.constexpr, BD: tl.constexpr):
    """(M relative to its largest channel, that channel's); -inf in channels that are padding."""
    d = tl.arange(0, BD)
    top = tl.max(tl.where(d < D, reference, -float("inf")), 0)
    return tl.where(d < D, reference - top, -float("inf")), top


@triton.jit
def moved_reference(k, visible, factor, reference):
    """M after these keys."""
    x = tl.where(visible[:, None], k * factor, -float("inf"))
    return tl.minimum(tl.maximum(reference, tl.max(x, 0)), 1e38)


@triton.jit
def key_weights(k, visible, factor, low, reference, BD: tl.constexpr, WIDE: tl.constexpr):
    """e [BD] of one row, 0 where it is hidden."""
    x = tl.minimum(scaled(k, factor, low, -reference, WIDE), 1.0)
    return tl.reshape(exp2(tl.where(visible[:, None], x, -float("inf"))), [BD])


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "total", "H"])
def slow_rows_kernel(
    Q, K, V, GRAD, ALPHA, BETA, LOG, MEAN, LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK,
    CU, OWNER, BEGIN, START, SEED, MARK, OUT, DQ, REACH, REACH_D, LOG_Z, OWN, REFERENCE, DALPHA, DLLN, DBLOCK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DALPHA: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr, BACKWARD: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of the marked splits, as `causal.causal_kernel`; BACKWARD: what
    `causal_backward.causal_queries_kernel` leaves, and M at the start of each tile."""
    h, w, b, first, n, origin, begin, end, opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    if not is_marked(MARK, hk, w, works, G):
        return
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    e_ = tl.arange(0, BE)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
    mask_base = data * mask_b + first * mask_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    factor, low = two_words(load_factor(BETA, b, hk, beta_b, beta_h, beta_d, D, BD, FLAT))
    alpha = load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT)
    alpha_factor, alpha_low = two_words(alpha)
    lln_weight = tl.full([1, 1], 1.0, tl.float32)
    if BS:
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
    stream = (b * H * G + h) * 2
    index = tl.program_id(0).to(tl.int64)
    before = hk.to(tl.int64) * works + w
    log = tl.load(LOG + before * D + d, mask=d < D, other=-float("inf"))
    start, start_low = key_log(LOG, before, D, BD)
    start = tl.where(log > -float("inf"), start, -1e38)
    reference = start
    z = tl.where(log > -float("inf"), exp2(start_low), 0.0)
    state = load_matrix(MEAN + before * D * E, D, E, BD, BE) * z[:, None]
    reach = tl.zeros([BD, BE], tl.float32)
    reach_d = tl.zeros([BD], tl.float32)
    dalpha = tl.zeros([BD], tl.float32)
    dlln = tl.zeros([BE], tl.float32)
    dblock = tl.zeros([BE], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        out = tl.zeros([BM, BD if BACKWARD else BE], tl.float32)  # of the blocks, then of all: o, or dq
        if BS:
            queries = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
            keys = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
            values = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
            keys, values, seen = block_keys(
                keys, values, visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED), OPEN_K, OPEN_V, OPEN_MASK,
                b.to(tl.int64) * H + hk, b, tl.where(t == 0, opened, 0), D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            if BACKWARD:
                g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
                grads = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
                dp, _weight = block_products(
                    grads, values, BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
                )
                ds, p = block_backward(
                    queries, keys, dp, seen, BLOCK_WEIGHT, b, h, block_b, block_h, SEED, stream, rows, scale, dropout,
                    BM, BS, USED, True, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                if HAS_DWEIGHT:
                    dblock += block_weight_gradient(p, values, grads, DOT, PRECISION)
                out = tl.dot(ds, keys.to(DOT), input_precision=PRECISION)
            else:
                out = block_weight * block_output(
                    queries, keys, values, seen, SEED, stream, rows, scale, dropout,
                    BM, BS, USED, True, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
        if BACKWARD:
            tl.store(REFERENCE + (before * tiles + t - begin) * D + d, reference, mask=d < D)
        for i in range(0, USED):
            at = origin + t * USED + i + tl.zeros([1], tl.int64)
            here = (at >= 0) & (at < n)
            q = load_rows(Q, q_base, at, here, q_n, q_d, D, BD, False).to(tl.float32)
            k = load_rows(K, k_base, at, here, k_n, k_d, D, BD, False).to(tl.float32)
            v = load_rows(V, v_base, at, here, v_n, v_d, E, BE, False).to(tl.float32)
            visible = visible_keys(MASK, mask_base, at, here, mask_n, MASKED)
            moved = moved_reference(k, visible, factor, reference)
            e = key_weights(k, visible, factor, low, moved, BD, WIDE)
            fade = exp2(reference - moved)
            reference = moved
            z = z * fade + e
            state = state * fade[:, None] + e[:, None] * v
            offset, highest = channel_offset(moved, D, BD)
            u, _total, peak = softmax_rows(scaled(q, alpha_factor, alpha_low, offset, WIDE))
            Z = tl.sum(u * z[None, :], 1)  # [1]
            u = u * tl.where(Z > 0.0, 1.0 / Z, 0.0)[:, None]
            kept = u
            if DROPOUT:
                kept = u * keep(SEED, stream, at, d, BD, dropout)
            o = tl.sum(tl.reshape(kept, [BD, 1]) * state, 0)
            if BACKWARD:
                g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
                g = load_rows(GRAD, g_base, at, here, g_n, g_d, E, BE, False).to(tl.float32)
                dlln += tl.reshape(g, [BE]) * o
                g = g * lln_weight
                y = tl.sum(g * state, 1)[None, :]
                if DROPOUT:
                    y = y * keep(SEED, stream, at, d, BD, dropout)
                own = tl.sum(u * y, 1)  # [1]
                dl = u * (y - own[:, None] * z[None, :])
                dalpha += tl.reshape(dl * q, [BD])
                back = exp2(start - moved)
                reach += tl.reshape(kept * back[None, :], [BD, 1]) * g
                reach_d += tl.reshape(u * own[:, None], [BD]) * back
                log_z = tl.where(Z > 0.0, log_norm(highest, peak, Z, WIDE), float("inf"))
                tl.store(LOG_Z + row_base + at, log_z, mask=here)
                tl.store(OWN + row_base + at, own, mask=here)
                out += tl.where((r == i)[:, None], dl * alpha, 0.0)
            else:
                out += tl.where((r == i)[:, None], o[None, :] * lln_weight, 0.0)
        if BACKWARD:
            dq_base = data * dq_b + h.to(tl.int64) * dq_h + first * dq_n
            store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, out, D, BD, EVEN)
        else:
            o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
            store_rows(OUT, o_base, rows, ok, o_n, o_d, out, E, BE, EVEN)
    if BACKWARD:
        if WIDE:
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
    Q, K, V, GRAD, ALPHA, BETA, LOG, LOG_END, SUFFIX, SUFFIX_D, LOG_Z, OWN, MARK, REFERENCE,
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
    if not is_marked(MARK, h, w, works, G):
        return
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
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
        keys = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        values = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        dk = tl.zeros([BM, BD], tl.float32)
        dv = tl.zeros([BM, BE], tl.float32)
        if BS:
            inside = tl.where(t == 0, opened, 0)
            kb, vb, seen = block_keys(
                keys, values, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + h, b, inside,
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            for group in range(G):
                head = h * G + group
                q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
                g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
                queries = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
                grads = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
                dp, block_weight = block_products(
                    grads, vb, BLOCK_WEIGHT, b, head, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
                )
                ds, p = block_backward(
                    queries, kb, dp, seen, BLOCK_WEIGHT, b, head, block_b, block_h, SEED, (b * H * G + head) * 2, rows,
                    scale, dropout, BM, BS, USED, True, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                dk = tl.dot(tl.trans(ds), queries.to(DOT), dk, input_precision=PRECISION)
                dv += block_values(p, grads, block_weight, UNIFORM, DOT, PRECISION)
            if HAS_OPEN:
                block = (b.to(tl.int64) * H + h) * BS
                store_rows(DOPEN_K, block * D, r, r < inside, D, 1, dk, D, BD, False)
                store_rows(DOPEN_V, block * E, r, r < inside, E, 1, dv, E, BE, False)
        start = tl.load(REFERENCE + (index * tiles + t - begin) * D + d, mask=d < D, other=-1e38)
        for back_row in range(0, USED):
            i = USED - 1 - back_row
            at = origin + t * USED + i + tl.zeros([1], tl.int64)
            here = (at >= 0) & (at < n)
            k = load_rows(K, k_base, at, here, k_n, k_d, D, BD, False).to(tl.float32)
            v = load_rows(V, v_base, at, here, v_n, v_d, E, BE, False).to(tl.float32)
            moved = moved_reference(keys.to(tl.float32), visible & (r <= i), factor, start)
            fade = exp2(tl.minimum(moved - reference, 1.0))
            reference = moved
            suffix = suffix * fade[:, None]
            suffix_d = suffix_d * fade
            offset, top = channel_offset(moved, D, BD)
            for group in range(G):
                head = h * G + group
                q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
                g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
                row_base = (data * (H * G) + head.to(tl.int64)) * total + first
                q = load_rows(Q, q_base, at, here, q_n, q_d, D, BD, False).to(tl.float32)
                g = load_rows(GRAD, g_base, at, here, g_n, g_d, E, BE, False).to(tl.float32)
                alpha, alpha_low = two_words(load_factor(ALPHA, b, head, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
                if BS:
                    g = g * load_factor(LLN_WEIGHT, b, head, lln_b, lln_h, lln_e, E, BE, UNIFORM)
                log_z = tl.load(LOG_Z + row_base + at, mask=here, other=float("inf"))
                own = tl.load(OWN + row_base + at, mask=here, other=0.0)
                logits = scaled(q, alpha, alpha_low, offset, WIDE) - (log_z - top).to(tl.float32)[:, None]
                u = exp2(tl.minimum(logits, 100.0))
                suffix_d += tl.reshape(u * own[:, None], [BD])
                if DROPOUT:
                    u = u * keep(SEED, (b * H * G + head) * 2, at, d, BD, dropout)
                suffix += tl.reshape(u, [BD, 1]) * g
            e = key_weights(k, visible_keys(MASK, mask_base, at, here, mask_n, MASKED), factor, low, moved, BD, WIDE)
            dx = e * (tl.sum(suffix * v, 1) - suffix_d)
            if HAS_DBETA:
                dbeta += dx * tl.reshape(k, [BD])
            dk += tl.where((r == i)[:, None], dx[None, :] * beta, 0.0)
            dv += tl.where((r == i)[:, None], tl.sum(e[:, None] * suffix, 0)[None, :], 0.0)
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk, D, BD, EVEN)
    if HAS_DBETA:
        tl.store(DBETA + index * D + d, dbeta, mask=d < D)
