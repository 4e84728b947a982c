"""Causal attention: each split starts from the state of everything before it and goes on chunk by chunk.

With M_c = L_c at the end of the split as the reference of all its exponents,

    u_tc = e^(alpha q_tc + M_c - max_c)     e_jc = e^(beta k_jc - M_c) <= 1     T, z = the state so far, relative to M
    Z_t = u_t . z + sum_{j <= t} u_t . e_j          o_t = (u_t T + sum_{j <= t} (u_t . e_j) v_j) / Z_t

and backward, with n_t = u_t / Z_t, what the queries need (what the keys need is in `causal_backward`):

    Y_t = dO_t T^T + sum_{j <= t} (dO_t . v_j) e_j         D_t = n_t . Y_t            c_t = z + sum_{j <= t} e_j
    dl_t = n_t (Y_t - D_t c_t)                             dq_t = alpha dl_t

One reference is unsafe where keys far larger than all before them come late: Z_t of the rows before them underflows.
So the smallest Z of a split is looked at, and a split that has lost a row is marked, to be done again by the same
kernels with SLOW: row by row, with a reference that moves up with the keys, M_t = max(M_{t-1}, beta k_t), so that every
exponent is at most 0 and Z_t >= 1:

    e_t = e^(beta k_t - M_t)    T_t = e^(M_{t-1} - M_t) T_{t-1} + e_t v_t    z_t alike    o_t = u_t T_t / (u_t . z_t)

and, backwards, R_t = e^(M_t - M_{t+1}) R_{t+1} + n_t dO_t, r_t alike with D_t, of which key t takes e_t.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.parts import (
    LENGTHS,
    block_backward,
    block_output,
    block_products,
    block_weight_gradient,
    draw_kept,
    hide_keys,
    key_log,
    load_factor,
    load_matrix,
    load_rows,
    place,
    scale_rows,
    softmax_rows,
    split_factor,
    store_matrix,
    store_rows,
    visible_keys,
)

TINY = tl.constexpr(2.0**-80)


@triton.jit
def load_start(LOG, MEAN, END32, index, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """(z, which is also how much of M the state before the split is; T; whether there is any key in it)"""
    d = tl.arange(0, BD)
    before = tl.load(LOG + index * D + d, mask=d < D, other=-float("inf"))
    reference = tl.load(END32 + index * D + d, mask=d < D, other=0.0)
    z = tl.exp2((before * 1.4426950408889634074 - reference.to(tl.float64)).to(tl.float32))
    state = load_matrix(MEAN + index * D * E, D, E, BD, BE) * z[:, None]
    return z, state, tl.max((before > -float("inf")).to(tl.int32), 0)


@triton.jit
def load_query_reference(END32, index, D: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr):
    """(M, as the queries' logits have it, what was taken off). WIDE: its largest channel, since small exponents round
    less. Read again where it is used: a vector that a loop keeps crowds out what it works on."""
    d = tl.arange(0, BD)
    reference = tl.load(END32 + index * D + d, mask=d < D, other=-float("inf"))
    if WIDE:
        top = tl.max(reference, 0)
        return reference - top, top
    else:
        return reference, 0.0


@triton.jit
def load_key_reference(END32, index, D: tl.constexpr, BD: tl.constexpr):
    """-M, as the keys' exponents have it."""
    d = tl.arange(0, BD)
    return -tl.load(END32 + index * D + d, mask=d < D, other=0.0)


@triton.jit
def find_lowest(Z, so_far, ok, visible, keys, BM: tl.constexpr, EVEN: tl.constexpr):
    """(the smallest Z of each row so far, leaving out rows that have no key to attend to; keys seen so far)"""
    if EVEN:
        return tl.minimum(so_far, Z), keys
    else:
        seen = keys + tl.cumsum(visible.to(tl.int32), 0)
        return tl.where(ok & (seen > 0), tl.minimum(so_far, Z), so_far), keys + tl.sum(visible.to(tl.int32), 0)


@triton.jit
def is_marked(MARK, hk, w, works, G: tl.constexpr):
    """Whether a split is to be done again for any query head of a key head: they share the keys' backward."""
    marked = 0
    for group in range(G):
        marked = tl.maximum(marked, tl.load(MARK + (hk * G + group).to(tl.int64) * works + w))
    return marked > 0


@triton.jit
def open_keys(x, OPEN, base, opened, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """x with its first rows from the block that an earlier call left open."""
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    here = (r < opened)[:, None]
    at = OPEN + base + r[:, None] * D + d[None, :]
    return tl.where(here, tl.load(at, mask=here & (d < D)[None, :], other=0.0), x)


@triton.jit
def block_keys(
    k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, index, b, opened,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    HAS_OPEN: tl.constexpr,
):  # fmt: skip
    """Keys, values and visibility of a tile's blocks, with the open block's rows where there are any."""
    if HAS_OPEN:
        r = tl.arange(0, BM)
        k = open_keys(k, OPEN_K, index * BS * D, opened, D, BD, BM)
        v = open_keys(v, OPEN_V, index * BS * E, opened, E, BE, BM)
        before = tl.load(OPEN_MASK + b.to(tl.int64) * BS + r, mask=r < opened, other=0) != 0
        visible = visible | before
    return k, v, visible


@triton.jit
def channel_offset(reference, D: tl.constexpr, BD: tl.constexpr):
    """(M relative to its largest channel, that channel's); -inf in channels that are padding."""
    d = tl.arange(0, BD)
    top = tl.max(tl.where(d < D, reference, -float("inf")), 0)
    return tl.where(d < D, reference - top, -float("inf")), top


@triton.jit
def move_reference(k, visible, factor, reference):
    """M after these keys."""
    x = tl.where(visible[:, None], k * factor, -float("inf"))
    return tl.minimum(tl.maximum(reference, tl.max(x, 0)), 1e38)


@triton.jit
def key_weights(k, visible, factor, low, reference, BD: tl.constexpr, WIDE: tl.constexpr):
    """e [BD] of one row, 0 where it is hidden."""
    x = tl.minimum(scale_rows(k, factor, low, -reference, WIDE), 1.0)
    return tl.reshape(tl.exp2(tl.where(visible[:, None], x, -float("inf"))), [BD])


@triton.jit
def start_moving(LOG, MEAN, index, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """(M before the split; the same, to be moved; z; T; what R and r have to be multiplied with)"""
    d = tl.arange(0, BD)
    log = tl.load(LOG + index * D + d, mask=d < D, other=-float("inf"))
    start, low = key_log(LOG, index, D, BD)
    start = tl.where(log > -float("inf"), start, -1e38)
    z = tl.where(log > -float("inf"), tl.exp2(low), 0.0)
    return start, start, z, load_matrix(MEAN + index * D * E, D, E, BD, BE) * z[:, None], tl.exp2(low)


@triton.jit
def store_norm(LOG_Z, OWN, at, ok, top, peak, Z, own, WIDE: tl.constexpr):
    """log2 of Z_t, no longer relative to anything, and D_t."""
    log = top.to(tl.float64) + peak.to(tl.float64) + tl.log2(Z.to(tl.float64)) if WIDE else top + peak + tl.log2(Z)
    tl.store(LOG_Z + at, tl.where(Z > 0.0, log, float("inf")), mask=ok)
    tl.store(OWN + at, own, mask=ok)


@triton.jit
def linear_weight_gradient(u, e, state, v, g, causal, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Of the weight of the linear part, [BE]; u is normalised."""
    pairs = tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION)
    o = tl.dot(u.to(DOT), state.to(DOT), input_precision=PRECISION)
    o = tl.dot(tl.where(causal, pairs, 0.0).to(DOT), v, o, input_precision=PRECISION)
    return tl.sum(o * g.to(tl.float32), 0)


@triton.jit(do_not_specialize=LENGTHS)
def causal_rows_kernel(
    Q, K, V, GRAD, ALPHA, BETA, LOG, MEAN, END32, LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK,
    CU, OWNER, BEGIN, START, SEED, OUT, DQ, REACH, REACH_D, LOG_Z, OWN, MARK, REFERENCE, DALPHA, DLLN, DBLOCK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, o_b, o_h, o_n, o_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, total, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, HAS_DALPHA: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr, BACKWARD: tl.constexpr, SLOW: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of each split and query head. LOG and MEAN are the states before the splits, END32 is L after.
    BACKWARD: in place of the output dq, what the queries ask of the state before the split (REACH = R, REACH_D = r),
    log Z_t and D_t of every row. SLOW: of marked splits, and backward M at the start of each tile."""
    h, w, b, first, n, origin, begin, end, opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    if SLOW and not is_marked(MARK, hk, w, works, G):
        return
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    e_ = tl.arange(0, BE)
    causal = r[:, None] >= r[None, :]
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
    if BACKWARD:
        g_base = data * g_b + h.to(tl.int64) * g_h + first * g_n
    o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    mask_base = data * mask_b + first * mask_n
    row_base = (data * (H * G) + h.to(tl.int64)) * total + first
    factor, low = split_factor(load_factor(BETA, b, hk, beta_b, beta_h, beta_d, D, BD, FLAT))
    alpha = load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT)
    alpha_factor, alpha_low = split_factor(alpha)
    weight = 1.0
    lln_weight = tl.full([1, 1], 1.0, tl.float32)
    if BS:
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
        if UNIFORM and BACKWARD:  # then it is left out of dO and put into what comes of it
            weight = tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + h * lln_h)
    before_or_at = causal.to(DOT)
    stream = (b * H * G + h) * 2
    dalpha = tl.zeros([BD], tl.float32)
    dlln = tl.zeros([BE], tl.float32)
    dblock = tl.zeros([BE], tl.float32)
    before = hk.to(tl.int64) * works + w
    if SLOW:
        start, reference, z, state, back = start_moving(LOG, MEAN, before, D, E, BD, BE)
    else:
        z, state, keys = load_start(LOG, MEAN, END32, before, D, E, BD, BE)
        back = z * weight
        lowest_z = tl.full([BM], 1.0, tl.float32)
    reach = tl.zeros([BD, BE], tl.float32)
    reach_d = tl.zeros([BD], tl.float32)
    for t in tl.range(begin, end, disable_licm=BACKWARD):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        if BACKWARD:
            g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if SLOW:
            out = tl.zeros([BM, BD if BACKWARD else BE], tl.float32)
            if BACKWARD:
                tl.store(REFERENCE + (before * tiles + t - begin) * D + d, reference, mask=d < D)
            for i in range(0, USED):
                at = origin + t * USED + i + tl.zeros([1], tl.int64)
                here = (at >= 0) & (at < n)
                q1 = load_rows(Q, q_base, at, here, q_n, q_d, D, BD, False).to(tl.float32)
                k1 = load_rows(K, k_base, at, here, k_n, k_d, D, BD, False).to(tl.float32)
                v1 = load_rows(V, v_base, at, here, v_n, v_d, E, BE, False).to(tl.float32)
                seen1 = visible_keys(MASK, mask_base, at, here, mask_n, MASKED)
                moved = move_reference(k1, seen1, factor, reference)
                e1 = key_weights(k1, seen1, factor, low, moved, BD, WIDE)
                fade = tl.exp2(reference - moved)
                reference = moved
                z = z * fade + e1
                state = state * fade[:, None] + e1[:, None] * v1
                offset, top = channel_offset(moved, D, BD)
                u1, _total, peak = softmax_rows(scale_rows(q1, alpha_factor, alpha_low, offset, WIDE))
                Z1 = tl.sum(u1 * z[None, :], 1)  # [1]
                u1 = u1 * tl.where(Z1 > 0.0, 1.0 / Z1, 0.0)[:, None]
                kept1 = u1
                if DROPOUT:
                    kept1 = u1 * draw_kept(SEED, stream, at, d, BD, dropout)
                row = tl.sum(tl.reshape(kept1, [BD])[:, None] * state, 0)[None, :]
                if BACKWARD:
                    g1 = load_rows(GRAD, g_base, at, here, g_n, g_d, E, BE, False).to(tl.float32)
                    dlln += tl.reshape(g1 * row, [BE])
                    g1 = g1 * lln_weight
                    y1 = tl.sum(g1 * state, 1)[None, :]
                    if DROPOUT:
                        y1 = y1 * draw_kept(SEED, stream, at, d, BD, dropout)
                    own1 = tl.sum(u1 * y1, 1)  # [1]
                    row = u1 * (y1 - own1[:, None] * z[None, :])
                    dalpha += tl.reshape(row * q1, [BD])
                    row = row * alpha
                    far = tl.exp2(start - moved)
                    reach += (tl.reshape(kept1, [BD]) * far)[:, None] * g1
                    reach_d += tl.reshape(u1 * own1[:, None], [BD]) * far
                    store_norm(LOG_Z + row_base, OWN + row_base, at, here, top, peak, Z1, own1, WIDE)
                out += tl.where((r == i)[:, None], row, 0.0)
        else:
            if BACKWARD:
                gl = g
                if BS and not UNIFORM:
                    gl = g * lln_weight
                gl = gl.to(DOT)
                gv = tl.dot(gl, tl.trans(v.to(DOT)), input_precision=PRECISION)
                gv = tl.where(causal, gv, 0.0).to(DOT)
            offset, top = load_query_reference(END32, before, D, BD, WIDE)
            u, _total, peak = softmax_rows(scale_rows(q.to(tl.float32), alpha_factor, alpha_low, offset, WIDE))
            reference = load_key_reference(END32, before, D, BD)
            e = tl.exp2(
                hide_keys(tl.minimum(scale_rows(k.to(tl.float32), factor, low, reference, WIDE), 1.0), visible, EVEN)
            )
            if BACKWARD:
                e = e.to(DOT)
                c = tl.dot(before_or_at, e, input_precision=PRECISION) + z[None, :]
                Z = tl.sum(u * c, 1)
            else:
                scores = tl.where(causal, tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION), 0.0)
                Z = tl.sum(scores, 1) + tl.sum(u * z[None, :], 1)
            lowest_z, keys = find_lowest(Z, lowest_z, ok, visible, keys, BM, EVEN)
            if BACKWARD:
                u = u * tl.where(Z > 0.0, 1.0 / Z, 0.0)[:, None]
                y = tl.dot(gl, tl.trans(state.to(DOT)), input_precision=PRECISION)
                y = tl.dot(gv, e, y, input_precision=PRECISION)
                kept = u
                if DROPOUT:
                    mask = draw_kept(SEED, stream, rows, d, BD, dropout)
                    y = y * mask
                    kept = u * mask
                if HAS_DWEIGHT:
                    dlln += linear_weight_gradient(kept, e, state, v.to(DOT), g, causal, DOT, PRECISION)
                own = tl.sum(u * y, 1)
                out = u * (y - own[:, None] * c)
                if HAS_DALPHA:
                    dalpha += tl.sum(out * q.to(tl.float32), 0) * weight
                out = out * (alpha * weight)
                store_norm(LOG_Z + row_base, OWN + row_base, rows, ok, top, peak, Z, own, WIDE)
                reach = tl.dot(tl.trans(kept.to(DOT)), gl, reach, input_precision=PRECISION)
                reach_d += tl.sum(u * own[:, None], 0)
            else:
                if DROPOUT:
                    u = u * draw_kept(SEED, stream, rows, d, BD, dropout)
                    scores = tl.where(causal, tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION), 0.0)
                out = tl.dot(u.to(DOT), state.to(DOT), input_precision=PRECISION)
                out = tl.dot(scores.to(DOT), v.to(DOT), out, input_precision=PRECISION)
                out = out * tl.where(Z > 0.0, 1.0 / Z, 0.0)[:, None]
            state = tl.dot(tl.trans(e.to(DOT)), v.to(DOT), state, input_precision=PRECISION)
            z += tl.sum(e.to(tl.float32), 0)
        if BS:
            kb, vb, seen = block_keys(
                k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + hk, b, tl.where(t == 0, opened, 0),
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            if BACKWARD:
                dp, _weight = block_products(
                    g, vb, BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
                )
                ds, p = block_backward(
                    q, kb, dp, seen, BLOCK_WEIGHT, b, h, block_b, block_h, SEED, stream, rows, scale, dropout,
                    BM, BS, USED, True, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                if HAS_DWEIGHT:
                    dblock += block_weight_gradient(p, vb, g, DOT, PRECISION)
                out = tl.dot(ds, kb.to(DOT), out, input_precision=PRECISION)
            else:
                blocks = block_output(
                    q, kb, vb, seen, SEED, stream, rows, scale, dropout,
                    BM, BS, USED, True, DROPOUT, EVEN, DOT, PRECISION,
                )  # fmt: skip
                out = out * lln_weight + blocks * block_weight
        if BACKWARD:
            store_rows(DQ, o_base, rows, ok, o_n, o_d, out, D, BD, EVEN)
        else:
            store_rows(OUT, o_base, rows, ok, o_n, o_d, out, E, BE, EVEN)
    index = tl.program_id(0).to(tl.int64)
    if not SLOW:
        tl.store(MARK + index, (tl.min(lowest_z, 0) < TINY).to(tl.int32))
    if BACKWARD:
        store_matrix(REACH + index * D * E, reach * back[:, None], D, E, BD, BE)
        tl.store(REACH_D + index * D + d, reach_d * back, mask=d < D)
        if HAS_DALPHA:
            tl.store(DALPHA + index * D + d, dalpha, mask=d < D)
        if HAS_DWEIGHT:
            tl.store(DLLN + index * E + e_, dlln, mask=e_ < E)
            tl.store(DBLOCK + index * E + e_, dblock, mask=e_ < E)
