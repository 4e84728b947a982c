"""Causal attention, forward: each split starts from the state of everything before it and goes on chunk by chunk.

With M_c = L_c at the end of the split as the reference of all its exponents,

    u_tc = e^(alpha q_tc + M_c - max_c)     e_jc = e^(beta k_jc - M_c) <= 1     T, z = the state so far, relative to M
    Z_t = u_t . z + sum_{j <= t} u_t . e_j          o_t = (u_t T + sum_{j <= t} (u_t . e_j) v_j) / Z_t

One reference is unsafe where keys far larger than all before them come late: Z_t of the rows before them underflows.
So the smallest Z of a split is looked at, and a split that has lost a row is marked, to be done again, with as many
references as it takes, by the kernels of `causal_slow`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.parts import (
    block_output,
    exp2,
    keep,
    load_factor,
    load_matrix,
    load_rows,
    place,
    scaled,
    softmax_rows,
    store_rows,
    two_words,
    visible_keys,
    where_visible,
)

TINY = tl.constexpr(2.0**-80)


@triton.jit
def start_state(LOG, MEAN, END32, index, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """(z, which is also how much of M the state before the split is; T; whether there is any key in it)"""
    d = tl.arange(0, BD)
    before = tl.load(LOG + index * D + d, mask=d < D, other=-float("inf"))
    reference = tl.load(END32 + index * D + d, mask=d < D, other=0.0)
    z = tl.exp2((before * 1.4426950408889634074 - reference.to(tl.float64)).to(tl.float32))
    state = load_matrix(MEAN + index * D * E, D, E, BD, BE) * z[:, None]
    return z, state, tl.max((before > -float("inf")).to(tl.int32), 0)


@triton.jit
def query_reference(END32, index, D: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr):
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
def key_reference(END32, index, D: tl.constexpr, BD: tl.constexpr):
    """-M, as the keys' exponents have it."""
    d = tl.arange(0, BD)
    return -tl.load(END32 + index * D + d, mask=d < D, other=0.0)


@triton.jit
def lowest(Z, so_far, ok, visible, keys, BM: tl.constexpr, EVEN: tl.constexpr):
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


@triton.jit(do_not_specialize=["N", "works", "splits", "tiles", "H"])
def causal_kernel(
    Q, K, V, ALPHA, BETA, LOG, MEAN, END, END32, LLN_WEIGHT, BLOCK_WEIGHT, MASK, OPEN_K, OPEN_V, OPEN_MASK,
    CU, OWNER, BEGIN, START, SEED, OUT, MARK,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, UNIFORM: tl.constexpr, HAS_OPEN: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of each split and query head. LOG and MEAN are the states before the splits, END is L after."""
    h, w, b, first, n, origin, begin, end, opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    hk = h // G
    r = tl.arange(0, BM)
    d = tl.arange(0, BD)
    causal = r[:, None] >= r[None, :]
    data = 0 if PACKED else b.to(tl.int64)
    q_base = data * q_b + h.to(tl.int64) * q_h + first * q_n
    k_base = data * k_b + hk.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + hk.to(tl.int64) * v_h + first * v_n
    o_base = data * o_b + h.to(tl.int64) * o_h + first * o_n
    mask_base = data * mask_b + first * mask_n
    factor, low = two_words(load_factor(BETA, b, hk, beta_b, beta_h, beta_d, D, BD, FLAT))
    alpha, alpha_low = two_words(load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
    if BS:
        lln_weight = load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
    stream = (b * H * G + h) * 2
    index = hk.to(tl.int64) * works + w
    z, state, keys = start_state(LOG, MEAN, END32, index, D, E, BD, BE)
    lowest_z = tl.full([BM], 1.0, tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        q = load_rows(Q, q_base, rows, ok, q_n, q_d, D, BD, EVEN)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        offset, _top = query_reference(END32, index, D, BD, WIDE)
        u, _total, _peak = softmax_rows(scaled(q.to(tl.float32), alpha, alpha_low, offset, WIDE))
        reference = key_reference(END32, index, D, BD)
        e = exp2(where_visible(tl.minimum(scaled(k.to(tl.float32), factor, low, reference, WIDE), 1.0), visible, EVEN))
        scores = tl.where(causal, tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION), 0.0)
        Z = tl.sum(scores, 1) + tl.sum(u * z[None, :], 1)
        lowest_z, keys = lowest(Z, lowest_z, ok, visible, keys, BM, EVEN)
        if DROPOUT:
            u = u * keep(SEED, stream, rows, d, BD, dropout)
            scores = tl.where(causal, tl.dot(u.to(DOT), tl.trans(e.to(DOT)), input_precision=PRECISION), 0.0)
        out = tl.dot(u.to(DOT), state.to(DOT), input_precision=PRECISION)
        out = tl.dot(scores.to(DOT), v.to(DOT), out, input_precision=PRECISION)
        out = out * tl.where(Z > 0.0, 1.0 / Z, 0.0)[:, None]
        state = tl.dot(tl.trans(e.to(DOT)), v.to(DOT), state, input_precision=PRECISION)
        z += tl.sum(e, 0)
        if BS:
            kb, vb, seen = block_keys(
                k, v, visible, OPEN_K, OPEN_V, OPEN_MASK, b.to(tl.int64) * H + hk, b, tl.where(t == 0, opened, 0),
                D, E, BD, BE, BM, BS, HAS_OPEN,
            )  # fmt: skip
            blocks = block_output(
                q, kb, vb, seen, SEED, stream, rows, scale, dropout,
                BM, BS, USED, True, DROPOUT, EVEN, DOT, PRECISION,
            )  # fmt: skip
            out = out * lln_weight + blocks * block_weight
        store_rows(OUT, o_base, rows, ok, o_n, o_d, out, E, BE, EVEN)
    tl.store(MARK + tl.program_id(0), (tl.min(lowest_z, 0) < TINY).to(tl.int32))
