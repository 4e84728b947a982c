"""The evidence read, causal: each split starts from the state of everything before it and goes on chunk by chunk.

With M_c = L_c at the end of the split as the reference of all its exponents, y_jc = x_jc - M_c, and k without a vector
that all keys of the sequence share, which changes no A,

    e_jc = e^(y_jc)    z_t = sum_{j <= t} e_j    Y_t = sum_{j <= t} e_j y_j    T, U = e^T v, e^T k of the rows before
    K_t = (U + sum_{j <= t} e_j k_j) / z_t    A_t = softmax_c(scale q_t . K_t + ln z_t - Y_t / z_t)    a_t = A_t / z_t
    o_t = a_t T + sum_{j <= t} (a_t . e_j) v_j

where the state before the split is among the rows before. Backward, with S_t the channels' values as K_t is their keys,

    f_t = scale q_t . K_t - Y_t / z_t    W_t = dO_t S_t^T    D_t = A_t . W_t    b_t = a_t (W_t - D_t)
    r_t = a_t W_t + b_t f_t              dq_t = scale (b_t U + sum_{j <= t} (b_t . e_j) k_j)

For all of it at once a program has too few registers: a first kernel has U and stores a_t (and f_t), a second has T
and makes the output of these, or b_t and r_t, and a third dq. The keys' pass, in `evidence_causal_keys`, reads a_t, b_t
and r_t.

What comes before a key far larger than all others is lost, since z_t vanishes beside it. A split where that happens is
marked, and done again by the same kernels with SLOW: tiles of one row, and a reference that moves up with the keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import find_lowest, is_marked
from lln.kernels.triton.evidence_chunks import (
    chunk_exponents,
    drop_weights,
    find_shared,
    load_exponents,
    load_row_numbers,
    move_evidence_reference,
    start_chunks,
    store_row_numbers,
)
from lln.kernels.triton.evidence_fold import LN2, load_set, split_words, store_set
from lln.kernels.triton.parts import (
    LENGTHS,
    LOG2E,
    hide_keys,
    load_rows,
    place,
    softmax_rows,
    store_rows,
    visible_keys,
)

TINY = tl.constexpr(2.0**-80)


@triton.jit(do_not_specialize=LENGTHS)
def evidence_weights_kernel(
    Q, K, BETA, WAY, BEFORE, KEY_BEFORE, ENTROPY_BEFORE, END32, KEY_END, MASK, CU, OWNER, BEGIN, START,
    CENTRE, ROW_A, ROW_F, MARK, REFERENCE, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d,
    beta_b, beta_h, beta_d, way_b, way_h, mask_b, mask_n, scale, N, works, splits, tiles, total, H,
    DIRECTED: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, USED: tl.constexpr, FINE: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, BACKWARD: tl.constexpr, SLOW: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """a, and for the BACKWARD pass f, of the rows of each split and query head. SLOW: of marked splits, in tiles of one
    row (USED), FINE times as many; backward also M at the start of every FINE rows."""
    h, w, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    if SLOW and not is_marked(MARK, hk, w, works, G):
        return
    r = tl.arange(0, BM)
    c = tl.arange(0, BX)
    d = tl.arange(0, BD)
    causal = r[:, None] >= r[None, :]
    before_or_at = causal.to(DOT)
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    mask_base = data * mask_b + first * mask_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    _beta, factor, low, way, way_low = load_exponents(
        BETA, WAY, b, hk, beta_b, beta_h, beta_d, way_b, way_h, M, D, BX, BD, FLAT, DIRECTED, DOT
    )  # fmt: skip
    whole = b.to(tl.int64) * H + hk
    centre = find_shared(load_set(KEY_END, whole * M * D, 0, M, D, BX, BD), M, BX)
    tl.store(CENTRE + whole * D + d, centre, mask=d < D)  # all programs of a head the same

    before = hk.to(tl.int64) * works + w
    reference, z, log, keys = start_chunks(BEFORE, END32, before, M, BX, SLOW)
    entropy = tl.load(ENTROPY_BEFORE + before * M + c, mask=c < M, other=0.0) * 1.4426950408889634074
    y_ = z * (log - entropy.to(tl.float32))
    state_k = (load_set(KEY_BEFORE, before * M * D, 0, M, D, BX, BD) - centre[None, :]) * z[:, None]
    lowest = tl.full([BM], 1.0, tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN).to(DOT)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if SLOW:
            if BACKWARD and (t - begin) % FINE == 0:
                at = before * (tiles // FINE) + (t - begin) // FINE
                tl.store(REFERENCE + at * M + c, reference, mask=c < M)
            moved = move_evidence_reference(
                k, visible, factor, low, way, way_low, reference, BX, DIRECTED, WIDE, DOT, EXACT
            )
            fade = tl.exp2(reference - moved)
            y_ = tl.where(fade > 0.0, fade * (y_ + z * (reference - moved)), 0.0)
            z = z * fade
            state_k = state_k * fade[:, None]
            reference = moved
        y = chunk_exponents(k, factor, low, way, way_low, reference, DIRECTED, WIDE, DOT, EXACT)
        e = tl.exp2(hide_keys(y, visible, EVEN)).to(DOT)
        near = (k.to(tl.float32) - centre[None, :]).to(DOT)
        weighed = e.to(tl.float32) * y
        high, lost, _used = split_words(weighed, DOT, True)
        ys = tl.dot(before_or_at, high, input_precision=PRECISION)
        if DOT == tl.bfloat16:  # noqa: SIM300
            ys = tl.dot(before_or_at, lost, ys)
        ys += y_[None, :]
        y_ += tl.sum(weighed, 0)
        zs = tl.dot(before_or_at, e, input_precision=PRECISION) + z[None, :]
        lowest, keys = find_lowest(tl.min(tl.where((c < M)[None, :], zs, 1.0), 1), lowest, ok, visible, keys, BM, EVEN)
        inverse = tl.where(zs > 0.0, 1.0 / zs, 0.0)
        ys = ys * inverse
        scores = tl.dot(q, tl.trans(near), input_precision=PRECISION) * scale
        product = tl.dot(q, tl.trans(state_k.to(DOT)), input_precision=PRECISION) * scale
        product = tl.dot(tl.where(causal, scores, 0.0).to(DOT), e, product, input_precision=PRECISION)
        product = product * inverse  # of queries and the channels' centres
        if BACKWARD:
            store_row_numbers(ROW_F, product - ys * LN2, row_base, rows, ok, c, M, BX, EVEN)
        logits = tl.where((zs > 0.0) & (c < M)[None, :], product * LOG2E + tl.log2(zs) - ys, -float("inf"))
        p, norm, _top = softmax_rows(logits)
        a = p * inverse * tl.where(norm > 0.0, 1.0 / norm, 0.0)[:, None]
        store_row_numbers(ROW_A, a.to(DOT), row_base, rows, ok, c, M, BX, EVEN)
        state_k = tl.dot(tl.trans(e), near, state_k, input_precision=PRECISION)
        z += tl.sum(e.to(tl.float32), 0)
    if not SLOW:
        tl.store(MARK + tl.program_id(0).to(tl.int64), (tl.min(lowest, 0) < TINY).to(tl.int32))


@triton.jit(do_not_specialize=LENGTHS)
def evidence_values_kernel(
    K, V, GRAD, BETA, WAY, BEFORE, MEAN_BEFORE, END32, MASK, CU, OWNER, BEGIN, START, SEED, OUT,
    ROW_A, ROW_F, ROW_B, ROW_R, REACH, REACH_H, REACH_R, MARK,
    k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d,
    beta_b, beta_h, beta_d, way_b, way_h, mask_b, mask_n, dropout, N, works, splits, tiles, total, H,
    DIRECTED: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, PACKED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, BACKWARD: tl.constexpr, SLOW: tl.constexpr,
    DROPOUT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The output rows of each split and query head. BACKWARD: in their place b and r, and what the queries ask of the
    values before the split, the REACH, and as sums of b and r."""
    h, w, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    if SLOW and not is_marked(MARK, hk, w, works, G):
        return
    r = tl.arange(0, BM)
    c = tl.arange(0, BX)
    causal = r[:, None] >= r[None, :]
    before_or_at = causal.to(DOT)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
    if BACKWARD:
        g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    else:
        o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    mask_base = data * mask_b + first * mask_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    stream = (b * H * G + h) * 2
    _beta, factor, low, way, way_low = load_exponents(
        BETA, WAY, b, hk, beta_b, beta_h, beta_d, way_b, way_h, M, D, BX, BD, FLAT, DIRECTED, DOT
    )  # fmt: skip
    before = hk.to(tl.int64) * works + w
    reference, z, log, _keys = start_chunks(BEFORE, END32, before, M, BX, SLOW)
    start = reference
    back = z
    state = load_set(MEAN_BEFORE, before * M * E, 0, M, E, BX, BE) * z[:, None]
    if BACKWARD:
        reach = tl.zeros([BX, BE], tl.float32)
        reach_h = tl.zeros([BX], tl.float32)
        reach_r = tl.zeros([BX], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN).to(DOT)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if SLOW:
            moved = move_evidence_reference(
                k, visible, factor, low, way, way_low, reference, BX, DIRECTED, WIDE, DOT, EXACT
            )
            fade = tl.exp2(reference - moved)
            z = z * fade
            state = state * fade[:, None]
            reference = moved
        y = chunk_exponents(k, factor, low, way, way_low, reference, DIRECTED, WIDE, DOT, EXACT)
        e = tl.exp2(hide_keys(y, visible, EVEN)).to(DOT)
        a = load_row_numbers(ROW_A, row_base, rows, ok, c, M, BX, EVEN)
        dropped = drop_weights(a, SEED, stream, rows, c, BX, dropout, DROPOUT, DOT)
        if BACKWARD:
            g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN).to(DOT)
            gv = tl.where(causal, tl.dot(g, tl.trans(v), input_precision=PRECISION), 0.0)
            raw = tl.dot(g, tl.trans(state.to(DOT)), input_precision=PRECISION)
            raw = tl.dot(gv.to(DOT), e, raw, input_precision=PRECISION)  # times z
            own = tl.sum(dropped.to(tl.float32) * raw, 1)
            zs = tl.dot(before_or_at, e, input_precision=PRECISION) + z[None, :]
            raw = raw * tl.where(zs > 0.0, 1.0 / zs, 0.0)
            # Of a and b as they are multiplied, and products as the keys' pass rounds them: what it is taken from has
            # the same errors.
            b_ = (dropped.to(tl.float32) * raw - a.to(tl.float32) * own[:, None]).to(DOT)
            f = load_row_numbers(ROW_F, row_base, rows, ok, c, M, BX, EVEN)
            r_ = dropped.to(tl.float32) * raw + b_.to(tl.float32) * f
            store_row_numbers(ROW_B, b_, row_base, rows, ok, c, M, BX, EVEN)
            store_row_numbers(ROW_R, r_, row_base, rows, ok, c, M, BX, EVEN)
            if SLOW:  # what is asked of the state before the split is relative to that
                far = tl.exp2(start - reference)
                shift = tl.where(far > 0.0, reference - start, 0.0) * LN2
                reach += tl.dot(tl.trans(dropped), g, input_precision=PRECISION) * far[:, None]
                asked = tl.sum(b_.to(tl.float32), 0)
                reach_h += asked * far
                reach_r += (tl.sum(r_, 0) - asked * shift) * far
            else:
                reach = tl.dot(tl.trans(dropped), g, reach, input_precision=PRECISION)
                reach_h += tl.sum(b_.to(tl.float32), 0)
                reach_r += tl.sum(r_, 0)
        else:
            pairs = tl.where(causal, tl.dot(dropped, tl.trans(e), input_precision=PRECISION), 0.0)
            out = tl.dot(dropped, state.to(DOT), input_precision=PRECISION)
            out = tl.dot(pairs.to(DOT), v, out, input_precision=PRECISION)
            store_rows(OUT, o_base, rows, ok, o_n, o_d, out, E, BE, EVEN)
        state = tl.dot(tl.trans(e), v, state, input_precision=PRECISION)
        z += tl.sum(e.to(tl.float32), 0)
    if BACKWARD:
        index = tl.program_id(0).to(tl.int64)
        if not SLOW:
            reach_r = (reach_r + reach_h * (log * LN2)) * back
            reach_h = reach_h * back
            reach = reach * back[:, None]
        store_set(REACH, reach, index * M * E, 0, M, E, BX, BE)
        tl.store(REACH_H + index * M + c, reach_h, mask=c < M)
        tl.store(REACH_R + index * M + c, reach_r, mask=c < M)


@triton.jit(do_not_specialize=LENGTHS)
def evidence_queries_kernel(
    Q, K, BETA, WAY, BEFORE, KEY_BEFORE, END32, CENTRE, MASK, CU, OWNER, BEGIN, START, DQ, ROW_B, REACH_K, MARK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, dq_b, dq_h, dq_n, dq_d,
    beta_b, beta_h, beta_d, way_b, way_h, mask_b, mask_n, scale, N, works, splits, tiles, total, H,
    DIRECTED: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, USED: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, SLOW: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dq of each split and query head, and what the queries ask of the keys before the split."""
    h, w, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    if SLOW and not is_marked(MARK, hk, w, works, G):
        return
    r = tl.arange(0, BM)
    c = tl.arange(0, BX)
    d = tl.arange(0, BD)
    causal = r[:, None] >= r[None, :]
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    dq_base = data * dq_b + h.to(tl.int64) * dq_h + first * dq_n
    mask_base = data * mask_b + first * mask_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    _beta, factor, low, way, way_low = load_exponents(
        BETA, WAY, b, hk, beta_b, beta_h, beta_d, way_b, way_h, M, D, BX, BD, FLAT, DIRECTED, DOT
    )  # fmt: skip
    centre = tl.load(CENTRE + (b.to(tl.int64) * H + hk) * D + d, mask=d < D, other=0.0)
    before = hk.to(tl.int64) * works + w
    reference, z, _log, _keys = start_chunks(BEFORE, END32, before, M, BX, SLOW)
    start = reference
    back = z
    state_k = (load_set(KEY_BEFORE, before * M * D, 0, M, D, BX, BD) - centre[None, :]) * z[:, None]
    reach_k = tl.zeros([BX, BD], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN).to(DOT)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if SLOW:
            moved = move_evidence_reference(
                k, visible, factor, low, way, way_low, reference, BX, DIRECTED, WIDE, DOT, EXACT
            )
            state_k = state_k * tl.exp2(reference - moved)[:, None]
            reference = moved
        y = chunk_exponents(k, factor, low, way, way_low, reference, DIRECTED, WIDE, DOT, EXACT)
        e = tl.exp2(hide_keys(y, visible, EVEN)).to(DOT)
        near = (k.to(tl.float32) - centre[None, :]).to(DOT)
        b_ = load_row_numbers(ROW_B, row_base, rows, ok, c, M, BX, EVEN)
        dq = tl.dot(b_, state_k.to(DOT), input_precision=PRECISION)
        pairs = tl.where(causal, tl.dot(b_, tl.trans(e), input_precision=PRECISION), 0.0)
        dq = tl.dot(pairs.to(DOT), near, dq, input_precision=PRECISION) * scale
        store_rows(DQ, dq_base, rows, ok, dq_n, dq_d, dq, D, BD, EVEN)
        if SLOW:
            far = tl.exp2(start - reference)
            reach_k += tl.dot(tl.trans(b_), q, input_precision=PRECISION) * far[:, None]
        else:
            reach_k = tl.dot(tl.trans(b_), q, reach_k, input_precision=PRECISION)
        state_k = tl.dot(tl.trans(e), near, state_k, input_precision=PRECISION)
    if not SLOW:
        reach_k = reach_k * back[:, None]
    store_set(REACH_K, reach_k * scale, tl.program_id(0).to(tl.int64) * M * D, 0, M, D, BX, BD)
