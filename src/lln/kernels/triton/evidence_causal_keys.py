"""The evidence read, causal, backward: after the queries' pass (`evidence_causal`) one backwards for dk and dv.

With the symbols of `evidence_causal`, relative to M as these are,

    R, Q, h, r = sum_{t later} a_t dO_t, scale b_t q_t, b_t, r_t
    dv_j = e_j R + sum_{t >= j} (a_t . e_j) dO_t
    dx_j = e_j (R v_j + Q k_j - h y_j - r + sum_{t >= j} (dO_t . v_j) a_t + (scale q_t . k_j - y_j) b_t - r_t)
    dk_j = e_j Q + sum_{t >= j} (b_t . e_j) scale q_t + the directions of x times dx_j

Where a reference is lower by s, h y_j + r becomes h y_j + (r + h s), and all four are e^-s of what they were.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal import is_marked
from lln.kernels.triton.evidence_chunks import (
    chunk_exponents,
    drop_weights,
    load_exponents,
    load_row_numbers,
    move_evidence_reference,
)
from lln.kernels.triton.evidence_fold import LN2, load_set, split_words, store_set
from lln.kernels.triton.fold import place_channels, split_range, weigh_part
from lln.kernels.triton.parts import LENGTHS, hide_keys, load_rows, place, store_rows, visible_keys


@triton.jit(do_not_specialize=LENGTHS)
def evidence_suffix_kernel(
    REACH, REACH_K, REACH_H, REACH_R, BEFORE, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, CENTRE,
    G_LOG, G_MEAN, G_KEY, G_ENTROPY, SUFFIX, SUFFIX_K, SUFFIX_H, SUFFIX_R, FIRST, FIRST_K, FIRST_H, FIRST_R, BEGIN,
    works, splits, H,
    M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BC: tl.constexpr, PACKED: tl.constexpr, HAS_GRAD: tl.constexpr,
):  # fmt: skip
    """R, Q, h and r at the end of each split and at the start of the sequence."""
    b, h, c, e, out, inside = place_channels(H, M, E, BC, BE)
    d = tl.arange(0, BD)
    inside_key = (c < M)[:, None] & (d < D)[None, :]
    log = tl.load(LOG_OUT + out, mask=c < M, other=-float("inf"))
    reach = tl.zeros([BC, BE], tl.float32)
    reach_k = tl.zeros([BC, BD], tl.float32)
    reach_h = tl.zeros([BC], tl.float32)
    reach_r = tl.zeros([BC], tl.float32)
    if HAS_GRAD:
        alive = log > -float("inf")
        reach = tl.load(G_MEAN + out[:, None] * E + e[None, :], mask=inside & alive[:, None], other=0.0)
        reach_k = tl.load(G_KEY + out[:, None] * D + d[None, :], mask=inside_key & alive[:, None], other=0.0)
        reach_h = tl.load(G_ENTROPY + out, mask=alive, other=0.0).to(tl.float32)
        mean = tl.load(MEAN_OUT + out[:, None] * E + e[None, :], mask=inside, other=0.0)
        key = tl.load(KEY_OUT + out[:, None] * D + d[None, :], mask=inside_key, other=0.0)
        key -= tl.load(CENTRE + (b * H + h).to(tl.int64) * D + d, mask=d < D, other=0.0)[None, :]
        reach_r = tl.sum(mean * reach, 1) + tl.sum(key * reach_k, 1)
        reach_r += reach_h * tl.load(ENTROPY_OUT + out, mask=c < M, other=0.0).to(tl.float32)
        reach_r -= tl.load(G_LOG + out, mask=alive, other=0.0).to(tl.float32)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for back in range(0, end - begin):
        i = end - 1 - back
        at = (h.to(tl.int64) * works + i) * M + c
        tl.store(SUFFIX + at[:, None] * E + e[None, :], reach, mask=inside)
        tl.store(SUFFIX_K + at[:, None] * D + d[None, :], reach_k, mask=inside_key)
        tl.store(SUFFIX_H + at, reach_h, mask=c < M)
        tl.store(SUFFIX_R + at, reach_r, mask=c < M)
        before = tl.load(BEFORE + at, mask=c < M, other=-float("inf"))
        through = weigh_part(before, log)
        shift = tl.where(before > -float("inf"), before - log, 0.0).to(tl.float32)
        reach_r = (reach_r + reach_h * shift) * through
        reach_h = reach_h * through
        reach = reach * through[:, None]
        reach_k = reach_k * through[:, None]
        for g in range(G):
            at = ((h * G + g).to(tl.int64) * works + i) * M + c
            reach += tl.load(REACH + at[:, None] * E + e[None, :], mask=inside, other=0.0)
            reach_k += tl.load(REACH_K + at[:, None] * D + d[None, :], mask=inside_key, other=0.0)
            reach_h += tl.load(REACH_H + at, mask=c < M, other=0.0)
            reach_r += tl.load(REACH_R + at, mask=c < M, other=0.0)
        log = before
    alive = tl.where(log == -float("inf"), 0.0, 1.0).to(tl.float32)  # an empty incoming state has no say
    tl.store(FIRST + out[:, None] * E + e[None, :], reach * alive[:, None], mask=inside)
    tl.store(FIRST_K + out[:, None] * D + d[None, :], reach_k * alive[:, None], mask=inside_key)
    tl.store(FIRST_H + out, reach_h * alive, mask=c < M)
    tl.store(FIRST_R + out, reach_r * alive, mask=c < M)


@triton.jit(do_not_specialize=LENGTHS)
def evidence_causal_keys_kernel(
    Q, K, V, GRAD, BETA, WAY, END, END32, CENTRE, SUFFIX, SUFFIX_K, SUFFIX_H, SUFFIX_R, ROW_A, ROW_B, ROW_R,
    MARK, REFERENCE, MASK, CU, OWNER, BEGIN, START, SEED, DK, DV, DBETA, DWAY,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    beta_b, beta_h, beta_d, way_b, way_h, mask_b, mask_n, scale, dropout, N, works, splits, tiles, total, H,
    DIRECTED: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, FINE: tl.constexpr,
    PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr,
    HAS_DBETA: tl.constexpr, SLOW: tl.constexpr, DROPOUT: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dk, dv and the gradient of beta, or W, of each split and key head, from its last chunk to its first. SLOW: of
    those that are marked, row by row; in a tile of the first row alone there are no others."""
    h, w, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    r = tl.arange(0, BM)
    c = tl.arange(0, BX)
    d = tl.arange(0, BD)
    causal = r[:, None] >= r[None, :]
    at_or_after = (r[:, None] <= r[None, :]).to(DOT)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    dk_base = data * dk_b + h.to(tl.int64) * dk_h + first * dk_n
    dv_base = data * dv_b + h.to(tl.int64) * dv_h + first * dv_n
    mask_base = data * mask_b + first * mask_n
    index = tl.program_id(0).to(tl.int64)
    marked = is_marked(MARK, h, w, works, G)
    if SLOW and not marked:
        return
    if not SLOW and marked:  # it is done by the SLOW one
        end = begin
    beta, factor, low, way, way_low = load_exponents(
        BETA, WAY, b, h, beta_b, beta_h, beta_d, way_b, way_h, M, D, BX, BD, FLAT, DIRECTED, DOT
    )  # fmt: skip
    centre = tl.load(CENTRE + (b.to(tl.int64) * H + h) * D + d, mask=d < D, other=0.0)
    reference = tl.load(END32 + index * M + c, mask=c < M, other=0.0)
    suffix = load_set(SUFFIX, index * M * E, 0, M, E, BX, BE)
    suffix_k = load_set(SUFFIX_K, index * M * D, 0, M, D, BX, BD)
    suffix_h = tl.load(SUFFIX_H + index * M + c, mask=c < M, other=0.0)
    suffix_r = tl.load(SUFFIX_R + index * M + c, mask=c < M, other=0.0)
    if WIDE or SLOW:  # they are relative to L, of which the reference is what float32 has
        log = tl.load(END + index * M + c, mask=c < M, other=0.0) * 1.4426950408889634074
        apart = tl.where(log > -float("inf"), log - reference.to(tl.float64), 0.0)
        apart = tl.minimum(tl.maximum(apart, -1.0), 1.0).to(tl.float32)
        suffix_r = (suffix_r - suffix_h * (apart * LN2)) * tl.exp2(-apart)
        suffix_h = suffix_h * tl.exp2(-apart)
        suffix = suffix * tl.exp2(-apart)[:, None]
        suffix_k = suffix_k * tl.exp2(-apart)[:, None]
    dbeta = tl.zeros([BD], tl.float32)
    if DIRECTED and HAS_DBETA:
        dway = tl.zeros([BX, BD], tl.float32)
    for back in tl.range(0, end - begin, disable_licm=True):
        t = end - 1 - back
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN).to(DOT)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if SLOW:
            several = tl.arange(0, FINE)
            place_t = (t - begin) // FINE
            others = (origin + begin + place_t * FINE + several).to(tl.int64)
            there = (others >= 0) & (others < n) & (begin + place_t * FINE + several <= t)
            k_others = load_rows(K, k_base, others, there, k_n, k_d, D, BD, False)
            seen = visible_keys(MASK, mask_base, others, there, mask_n, MASKED)
            at = REFERENCE + (index * (tiles // FINE) + place_t) * M + c
            moved = move_evidence_reference(
                k_others, seen, factor, low, way, way_low, tl.load(at, mask=c < M, other=-1e38), BX, DIRECTED, WIDE,
                DOT, EXACT,
            )  # fmt: skip
            shift = tl.minimum(tl.maximum(moved - reference, -1e4), 1.0)
            fade = tl.exp2(shift)
            suffix_r = (suffix_r + suffix_h * (shift * LN2)) * fade
            suffix_h = suffix_h * fade
            suffix = suffix * fade[:, None]
            suffix_k = suffix_k * fade[:, None]
            reference = moved
        y = chunk_exponents(k, factor, low, way, way_low, reference, DIRECTED, WIDE, DOT, EXACT)
        e = tl.exp2(hide_keys(y, visible, EVEN)).to(DOT)
        y = y * LN2
        k32 = k.to(tl.float32) - centre[None, :]
        near = k32.to(DOT)
        dv = tl.dot(e, suffix.to(DOT), input_precision=PRECISION)
        dk = tl.dot(e, suffix_k.to(DOT), input_precision=PRECISION)
        de = tl.dot(v, tl.trans(suffix.to(DOT)), input_precision=PRECISION)
        de = tl.dot(near, tl.trans(suffix_k.to(DOT)), de, input_precision=PRECISION)
        de -= suffix_r[None, :] + suffix_h[None, :] * y
        for group in range(G):
            head = h * G + group
            q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
            g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
            row_base = (data * (H * G) + head.to(tl.int64)) * total + first
            q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN).to(DOT)
            g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN).to(DOT)
            a = load_row_numbers(ROW_A, row_base, rows, ok, c, M, BX, EVEN)
            a = drop_weights(a, SEED, (b * H * G + head) * 2, rows, c, BX, dropout, DROPOUT, DOT)
            b_ = load_row_numbers(ROW_B, row_base, rows, ok, c, M, BX, EVEN)
            r_ = load_row_numbers(ROW_R, row_base, rows, ok, c, M, BX, EVEN)
            gv = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            gv = tl.where(causal, gv, 0.0).to(DOT)
            de = tl.dot(tl.trans(gv), a, de, input_precision=PRECISION)
            qk = tl.dot(q, tl.trans(near), input_precision=PRECISION) * scale
            qk = tl.where(causal, qk, 0.0).to(DOT)
            de = tl.dot(tl.trans(qk), b_, de, input_precision=PRECISION)
            high, lost, _used = split_words(-r_, DOT, True)
            de = tl.dot(at_or_after, high, de, input_precision=PRECISION)
            if DOT == tl.bfloat16:  # noqa: SIM300
                de = tl.dot(at_or_after, lost, de)
            de -= tl.dot(at_or_after, b_, input_precision=PRECISION) * y
            pairs = tl.where(causal, tl.dot(a, tl.trans(e), input_precision=PRECISION), 0.0).to(DOT)
            dv = tl.dot(tl.trans(pairs), g, dv, input_precision=PRECISION)
            pairs = tl.dot(b_, tl.trans(e), input_precision=PRECISION) * scale
            pairs = tl.where(causal, pairs, 0.0).to(DOT)
            dk = tl.dot(tl.trans(pairs), q, dk, input_precision=PRECISION)
            suffix = tl.dot(tl.trans(a), g, suffix, input_precision=PRECISION)
            suffix_k += tl.dot(tl.trans(b_), q, input_precision=PRECISION) * scale
            suffix_h += tl.sum(b_.to(tl.float32), 0)
            suffix_r += tl.sum(r_, 0)
        dx = e.to(tl.float32) * de
        if not CENTRED:
            k32 = k.to(tl.float32)
        if DIRECTED:
            high, lost, _used = split_words(dx, DOT, True)
            dk = tl.dot(high, way, dk, input_precision=PRECISION)
            if DOT == tl.bfloat16:  # noqa: SIM300
                dk = tl.dot(high, way_low, dk)
            if HAS_DBETA:
                dway = tl.dot(tl.trans(high), k32.to(DOT), dway, input_precision=PRECISION)
                if DOT == tl.bfloat16:  # noqa: SIM300
                    dway = tl.dot(tl.trans(lost), k32.to(DOT), dway)
        else:
            dk += dx * beta
            if HAS_DBETA:
                dbeta += tl.sum(dx * k32, 0)
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk, D, BD, EVEN)
    if HAS_DBETA and (SLOW or not marked):
        if DIRECTED:
            store_set(DWAY, dway, index * M * D, 0, M, D, BX, BD)
        else:
            tl.store(DBETA + index * D + d, dbeta, mask=d < D)
