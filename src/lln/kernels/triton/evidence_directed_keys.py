"""The keys' backward of the evidence read with channels along directions of their own: see `evidence_fold`.

    dk = B M + B (v dS^T + k M^T - c + dH) W        dW = sum_j dx_j k_j^T

The first needs all channels of a key, set after set, and the second all keys of a channel, so they are two kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import FAINT, direct_keys, load_set, split_words, store_set
from lln.kernels.triton.evidence_keys import ask_blocks
from lln.kernels.triton.fold import key_exponents
from lln.kernels.triton.parts import (
    LENGTHS,
    hide_keys,
    load_rows,
    place,
    scale_rows,
    split_factor,
    store_rows,
    visible_keys,
)


@triton.jit
def load_numbers(X, index, first, M: tl.constexpr, BX: tl.constexpr):
    """One for each channel of a set."""
    c = first + tl.arange(0, BX)
    return tl.load(X + index * M + c, mask=c < M, other=0.0)


@triton.jit
def load_two(
    X, X_LOW, base, first, M: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """(a set as it is multiplied; with LOW what that lost)"""
    high = load_set(X, base, first, M, W, BX, BW)
    if LOW:
        return high, load_set(X_LOW, base, first, M, W, BX, BW)
    else:
        return high, high


@triton.jit
def multiply_two(a, high, low, sums, LOW: tl.constexpr, PRECISION: tl.constexpr):
    """sums + a (high + low)"""
    sums = tl.dot(a, high, sums, input_precision=PRECISION)
    if LOW:
        sums = tl.dot(a, low, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=LENGTHS)
def directed_keys_kernel(
    Q, K, V, GRAD, ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, ASK_X, ASK_X_LOW, ASK_H, PULL_K, LOG2, LOG2_LOW,
    BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED, DK, DV,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    SETS: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
    SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, LOW: tl.constexpr,
    DROPOUT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Per split and key head: dk and dv."""
    NARROW: tl.constexpr = DOT == tl.bfloat16  # noqa: SIM300
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    r = tl.arange(0, BM)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    dk_base = data * dk_b + h.to(tl.int64) * dk_h + first * dk_n
    dv_base = data * dv_b + h.to(tl.int64) * dv_h + first * dv_n
    mask_base = data * mask_b + first * mask_n
    state = b.to(tl.int64) * H + h
    factor, low = split_factor(tl.full([1, 1], 1.0, tl.float32))
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        dk = tl.zeros([BM, BD], tl.float32)
        dv = tl.zeros([BM, BE], tl.float32)
        if BS:
            dk, dv = ask_blocks(
                dk, dv, k, v, visible, rows, ok, Q, GRAD, BLOCK_WEIGHT, SEED, b, h, data, first,
                q_b, q_h, q_n, q_d, g_b, g_h, g_n, g_d, block_b, block_h, block_e, scale, dropout, H,
                G, D, E, BD, BE, BM, USED, BS, EVEN, UNIFORM, DROPOUT, DOT, PRECISION,
            )  # fmt: skip
        k = k.to(DOT)
        v = v.to(DOT)
        for i in range(SETS):
            way, way_low = load_two(ASK_X, ASK_X_LOW, state * M * D, i * BX, M, D, BX, BD, NARROW)
            if WIDE:  # the same sums as in the fold: of large exponents the rounding would count, too
                x = tl.trans(direct_keys(way, way_low, k, DOT, EXACT))
            else:
                x = multiply_two(k, tl.trans(way), tl.trans(way_low), tl.zeros([BM, BX], tl.float32), NARROW, PRECISION)
            x = scale_rows(x, factor, low, -load_numbers(LOG2, state, i * BX, M, BX), WIDE)
            if WIDE:
                x = tl.maximum(x - load_numbers(LOG2_LOW, state, i * BX, M, BX)[None, :], FAINT)
            x = tl.minimum(x, 1.0)  # > 0 only where it is rounded away
            p = tl.exp2(hide_keys(x, visible, EVEN))
            ask_v, ask_v_low = load_two(ASK_V, ASK_V_LOW, state * M * E, i * BX, M, E, BX, BE, LOW)
            ask_k, ask_k_low = load_two(ASK_K, ASK_K_LOW, state * M * D, i * BX, M, D, BX, BD, LOW)
            weights = p.to(DOT)
            dv = multiply_two(weights, ask_v, ask_v_low, dv, LOW, PRECISION)
            dk = multiply_two(weights, ask_k, ask_k_low, dk, LOW, PRECISION)
            db = tl.dot(v, tl.trans(ask_v), input_precision=PRECISION)
            db = multiply_two(k, tl.trans(ask_k), tl.trans(ask_k_low), db, LOW, PRECISION)
            if LOW:
                db = tl.dot(v, tl.trans(ask_v_low), db, input_precision=PRECISION)
            if WIDE:
                db -= load_numbers(ASK_H, state, i * BX, M, BX)[None, :] * x
            dx = p * (db - load_numbers(PULL_K, state, i * BX, M, BX)[None, :])
            dk = multiply_two(dx.to(DOT), way, way_low, dk, NARROW, PRECISION)
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk, D, BD, EVEN)


@triton.jit(do_not_specialize=LENGTHS)
def directed_ways_kernel(
    K, V, ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, ASK_X, ASK_X_LOW, ASK_H, PULL, LOG2, LOG2_LOW, CENTRE,
    MASK, CU, OWNER, BEGIN, START, DWAY, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, mask_b, mask_n,
    N, works, splits, tiles, H,
    SETS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, CENTRED: tl.constexpr, LOW: tl.constexpr, WIDE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Per split, key head and set of channels: dW. Channels are rows here, as in the fold."""
    NARROW: tl.constexpr = DOT == tl.bfloat16  # noqa: SIM300
    both, work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    h = both // SETS
    first_row = (both % SETS) * BX
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    mask_base = data * mask_b + first * mask_n
    state = b.to(tl.int64) * H + h
    factor, low = split_factor(tl.full([1, 1], 1.0, tl.float32))
    way, way_low = load_two(ASK_X, ASK_X_LOW, state * M * D, first_row, M, D, BX, BD, NARROW)
    ask_v, ask_v_low = load_two(ASK_V, ASK_V_LOW, state * M * E, first_row, M, E, BX, BE, LOW)
    ask_k, ask_k_low = load_two(ASK_K, ASK_K_LOW, state * M * D, first_row, M, D, BX, BD, LOW)
    log = load_numbers(LOG2, state, first_row, M, BX)
    pull = load_numbers(PULL, state, first_row, M, BX)
    centre = tl.load(CENTRE + state * D + d, mask=d < D, other=0.0)
    dway = tl.zeros([BX, BD], tl.float32)
    total = tl.zeros([BX], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        x = key_exponents(direct_keys(way, way_low, k, DOT, EXACT), factor, low, log, visible, True, WIDE)
        if WIDE:
            x = tl.maximum(x - load_numbers(LOG2_LOW, state, first_row, M, BX)[:, None], FAINT)
        x = tl.minimum(x, 1.0)
        p = x
        if not EVEN:
            p = tl.where(visible[None, :], x, -float("inf"))
        values = tl.trans(v.to(DOT))
        keys = tl.trans(k.to(DOT))
        db = tl.dot(ask_v, values, input_precision=PRECISION)
        db = tl.dot(ask_k, keys, db, input_precision=PRECISION)
        if LOW:
            db = tl.dot(ask_v_low, values, db, input_precision=PRECISION)
            db = tl.dot(ask_k_low, keys, db, input_precision=PRECISION)
        if WIDE:
            db -= load_numbers(ASK_H, state, first_row, M, BX)[:, None] * x
        dx, dx_low, used = split_words(tl.exp2(p) * (db - pull[:, None]), DOT, True)
        dway = tl.dot(dx, k.to(DOT), dway, input_precision=PRECISION)
        if NARROW:
            dway = tl.dot(dx_low, k, dway)
        total += tl.sum(used, 1)
    if CENTRED:  # where dx adds up to 0, but for its rounding, which keys far from 0 would make large
        dway -= total[:, None] * centre[None, :]
    store_set(DWAY, dway, (h.to(tl.int64) * works + work) * M * D, first_row, M, D, BX, BD)
