"""The keys' backward of the evidence read: see `evidence_fold`."""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import FAINT
from lln.kernels.triton.parts import (
    LENGTHS,
    block_backward,
    block_products,
    block_values,
    hide_keys,
    load_factor,
    load_matrix,
    load_rows,
    make_identity,
    place,
    scale_rows,
    split_factor,
    store_rows,
    visible_keys,
    widen,
)


@triton.jit
def load_asked(
    ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, row, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """(dS and M of one set of channels, whose first row is `row`; with LOW what they lost)"""
    ask_v = load_matrix(ASK_V + row * E, D, E, BD, BE)
    ask_k = load_matrix(ASK_K + row * D, D, D, BD, BD)
    if LOW:
        low_v = load_matrix(ASK_V_LOW + row * E, D, E, BD, BE)
        return ask_v, low_v, ask_k, load_matrix(ASK_K_LOW + row * D, D, D, BD, BD)
    else:
        return ask_v, ask_v, ask_k, ask_k


@triton.jit
def ask_keys(
    dk, dv, k, v, k32, visible, beta, factor, low, ask_v, ask_v_low, ask_k, ask_k_low,
    KEY, ASK_H, PULL, PULL_K, LOG2, LOG2_LOW, row, D: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr,
    HAS_DBETA: tl.constexpr, LOW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(dk and dv with the part of one set of channels, sum over keys of dx k). Vectors that a loop keeps in registers
    crowd out what it works on: they are read in each turn."""
    at = row + tl.arange(0, BD)
    there = tl.arange(0, BD) < D
    x = scale_rows(k32, factor, low, -tl.load(LOG2 + at, mask=there, other=0.0), WIDE)
    if WIDE:
        x = tl.maximum(x - tl.load(LOG2_LOW + at, mask=there, other=0.0)[None, :], FAINT)
    b = tl.exp2(hide_keys(tl.minimum(x, 1.0), visible, EVEN))  # > 0 only where x is rounded away
    weights = b.to(DOT)
    dv = tl.dot(weights, ask_v, dv, input_precision=PRECISION)
    dk = tl.dot(weights, ask_k, dk, input_precision=PRECISION)
    db = tl.dot(v.to(DOT), tl.trans(ask_v), input_precision=PRECISION)
    db = tl.dot(k.to(DOT), tl.trans(ask_k), db, input_precision=PRECISION)
    if LOW:
        dv = tl.dot(weights, ask_v_low, dv, input_precision=PRECISION)
        dk = tl.dot(weights, ask_k_low, dk, input_precision=PRECISION)
        db = tl.dot(v.to(DOT), tl.trans(ask_v_low), db, input_precision=PRECISION)
        db = tl.dot(k.to(DOT), tl.trans(ask_k_low), db, input_precision=PRECISION)
    if WIDE:
        db -= tl.load(ASK_H + at, mask=there, other=0.0)[None, :] * tl.minimum(x, 1.0)
    dk += b * (db * beta - tl.load(PULL_K + at, mask=there, other=0.0)[None, :] * beta)
    dbeta = tl.zeros([BD], tl.float32)
    if HAS_DBETA:
        if CENTRED:  # where dx adds up to 0, but for its rounding, which keys far from 0 would make large
            k32 = k32 - tl.load(KEY + at * D + tl.arange(0, BD), mask=there, other=0.0)[None, :]
        dbeta = tl.sum(b * (db - tl.load(PULL + at, mask=there, other=0.0)[None, :]) * k32, 0)
    return dk, dv, dbeta


@triton.jit
def ask_blocks(
    dk, dv, k, v, visible, rows, ok, Q, GRAD, BLOCK_WEIGHT, SEED, b, h, data, first,
    q_b, q_h, q_n, q_d, g_b, g_h, g_n, g_d, block_b, block_h, block_e, scale, dropout, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, DROPOUT: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv with the part of the blocks of a tile, of all query heads of a group."""
    for group in range(G):
        head = h * G + group
        q_base = data * q_b + head.to(tl.int64) * q_h + first * q_n
        g_base = data * g_b + head.to(tl.int64) * g_h + first * g_n
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        g = load_rows(GRAD, g_base, rows, ok, g_n, g_d, E, BE, EVEN)
        dp, block_weight = block_products(
            g, v, BLOCK_WEIGHT, b, head, block_b, block_h, block_e, E, BE, UNIFORM, DOT, PRECISION
        )
        ds, p = block_backward(
            q, k, dp, visible, BLOCK_WEIGHT, b, head, block_b, block_h, SEED, (b * H * G + head) * 2, rows,
            scale, dropout, BM, BS, USED, False, UNIFORM, DROPOUT, EVEN, DOT, PRECISION,
        )  # fmt: skip
        dv += block_values(p, g, block_weight, UNIFORM, DOT, PRECISION)
        dk = tl.dot(tl.trans(ds), q.to(DOT), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def evidence_fold_backward_kernel(
    Q, K, V, GRAD, BETA, ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, KEY, ASK_H, PULL, PULL_K, LOG2, LOG2_LOW,
    BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED, DK, DV, DBETA,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d,
    dk_b, dk_h, dk_n, dk_d, dv_b, dv_h, dv_n, dv_d,
    beta_b, beta_h, beta_d, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    SIGNS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr,
    MASKED: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr, CENTRED: tl.constexpr,
    HAS_DBETA: tl.constexpr, LEAN: tl.constexpr, LOW: tl.constexpr, DROPOUT: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per split and key head: dk, dv and dbeta. LOW: dS and dK in two words of the narrow type, since their rounding
    would be an error of every key and value alike."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    dk_base = data * dk_b + h.to(tl.int64) * dk_h + first * dk_n
    dv_base = data * dv_b + h.to(tl.int64) * dv_h + first * dv_n
    mask_base = data * mask_b + first * mask_n
    sets = (b.to(tl.int64) * H + h) * SIGNS
    beta = load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT)
    factor, low = split_factor(beta)
    ask_v, ask_v_low, ask_k, ask_k_low = load_asked(
        ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, sets * D, D, E, BD, BE, LOW
    )  # fmt: skip
    if SIGNS == 2:
        ask_v2, ask_v_low2, ask_k2, ask_k_low2 = load_asked(
            ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, (sets + 1) * D, D, E, BD, BE, LOW
        )  # fmt: skip
    dbeta = tl.zeros([BD], tl.float32)
    eye = make_identity(BD, DOT)
    for t in tl.range(begin, end, disable_licm=LEAN):
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
        k32 = widen(k, eye, BD, DOT)
        dk, dv, more = ask_keys(
            dk, dv, k, v, k32, visible, beta, factor, low, ask_v, ask_v_low, ask_k, ask_k_low,
            KEY, ASK_H, PULL, PULL_K, LOG2, LOG2_LOW, sets * D, D, BD, CENTRED,
            HAS_DBETA, LOW, EVEN, WIDE, DOT, PRECISION,
        )  # fmt: skip
        if SIGNS == 2:
            dk, dv, less = ask_keys(
                dk, dv, k, v, k32, visible, -beta, -factor, -low, ask_v2, ask_v_low2, ask_k2, ask_k_low2,
                KEY, ASK_H, PULL, PULL_K, LOG2, LOG2_LOW, (sets + 1) * D, D, BD, CENTRED,
                HAS_DBETA, LOW, EVEN, WIDE, DOT, PRECISION,
            )  # fmt: skip
            more -= less
        dbeta += more
        store_rows(DV, dv_base, rows, ok, dv_n, dv_d, dv, E, BE, EVEN)
        store_rows(DK, dk_base, rows, ok, dk_n, dk_d, dk, D, BD, EVEN)
    if HAS_DBETA:
        tl.store(DBETA + tl.program_id(0).to(tl.int64) * D + d, dbeta, mask=d < D)
