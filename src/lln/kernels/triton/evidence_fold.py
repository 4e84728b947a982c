"""The evidence read, bidirectional: `lln.kernels.evidence` says what it computes, and how its states merge.

    B = e^(x - L)     S = B^T v     K = B^T k     H = L - rowsum of B^T x      x = beta k, and -beta k where SIGNS = 2
    A = softmax_c(scale q K^T + H)                o = r A S + p softmax_block(q k^T) v
    W = r dO S^T      dl = A (W - rowsum(A W))    dq = scale dl K
    dS = r A^T dO     dK = scale dl^T q           dH = sum_i dl_i
    dv = B dS         dx = B (v dS^T + k dK^T - dH (x - L) - c)     c = S.dS + K.dK + dH H     dk = B dK + beta dx
                         = B (v dS^T + k M^T - S.dS - K.M)          M = dK - diag(beta dH), since H = L - beta K_cc

The last form is a product less a number a channel. Where float32 is asked for (WIDE) M is dK: the difference would
cancel where beta k is large.

K is so many more columns of values, and k is there anyway. H is summed relative to the reference that the exponents
have, never as L - beta K, which would cancel. Keys far from 0 cost no digits: K is divided by the sum of the weights as
they were multiplied, a vector that all K share changes neither A nor dq, and c is made of dS and dK as they are
multiplied with v and k.

Signed channels come as two sets of D, the second after the first: a state has SIGNS * D rows. Where both are worked on
at once they are filled up to SIGNS * BD.

Channels along directions of their own (DIRECTED) come in sets of BX, the last of them perhaps not full: x = k W^T.
W has beta in it and is in two words wherever keys are multiplied with it; beta_c above becomes a row of W. What else
they need is in `evidence_directed`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.fold import LAG, key_exponents, place_channels, split_range, weigh_part
from lln.kernels.triton.parts import (
    LENGTHS,
    load_factor,
    load_rows,
    make_identity,
    place,
    split_factor,
    store_matrix,
    visible_keys,
)

LN2 = tl.constexpr(0.6931471805599453)
FAINT = tl.constexpr(-200.0)  # 2 to this is 0 in float32


@triton.jit
def split_words(x, DOT: tl.constexpr, LOW: tl.constexpr):
    """(x as it is multiplied; what that lost; the float32 that both are, or with LOW off the first alone)"""
    high = x.to(DOT)
    lost = (x - high.to(tl.float32)).to(DOT)
    used = high.to(tl.float32)
    if LOW:
        used += lost.to(tl.float32)
    return high, lost, used


@triton.jit
def load_set(X, base, first, M: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr):
    """Rows `first` to first + BX of the M rows of W numbers at `base`, filled up with zeros."""
    c = first + tl.arange(0, BX)
    w = tl.arange(0, BW)
    at = X + base + c[:, None] * W + w[None, :]
    if M % BX == 0 and W == BW:
        return tl.load(at)
    else:
        return tl.load(at, mask=(c < M)[:, None] & (w < W)[None, :], other=0.0)


@triton.jit
def store_set(X, x, base, first, M: tl.constexpr, W: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr):
    """As `load_set`."""
    c = first + tl.arange(0, BX)
    w = tl.arange(0, BW)
    tl.store(X + base + c[:, None] * W + w[None, :], x, mask=(c < M)[:, None] & (w < W)[None, :])


@triton.jit
def load_way(WAY, b, h, first, way_b, way_h, M: tl.constexpr, D: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr):
    """A set of rows of W."""
    return load_set(WAY, b.to(tl.int64) * way_b + h * way_h, first, M, D, BX, BD)


@triton.jit
def direct_keys(way, low, k, DOT: tl.constexpr, EXACT: tl.constexpr):
    """W k^T in float32 for keys k [BM, BD]; kept inside the finite numbers, as eager's exponents."""
    keys = tl.trans(k.to(DOT))
    if DOT == tl.float32:  # noqa: SIM300
        return tl.minimum(tl.maximum(tl.dot(way, keys, input_precision=EXACT), -1e38), 1e38)
    else:
        return tl.dot(low, keys, tl.dot(way, keys))


@triton.jit(do_not_specialize=LENGTHS)
def evidence_fold_kernel(
    K, V, BETA, WAY, MASK, CU, OWNER, BEGIN, START, LOG, MEAN, KEY, ENTROPY,
    k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, beta_b, beta_h, beta_d, way_b, way_h, mask_b, mask_n,
    N, works, splits, tiles, H,
    DIRECTED: tl.constexpr, SIGNS: tl.constexpr, SETS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BX: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    USED: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr,
    SINGLE: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The state of each split, in [heads, works]; with SINGLE (one split a sequence) in [sequences, heads]. A program
    for each set of channels: all but the first find their keys in the cache."""
    both, work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    h = both // SETS
    c_ = tl.arange(0, BX)
    r = tl.arange(0, BM)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    mask_base = data * mask_b + first * mask_n
    # Channels are rows here, as in `fold_kernel`.
    if DIRECTED:
        first_row = (both % SETS) * BX
        way, way_low, _used = split_words(load_way(WAY, b, h, first_row, way_b, way_h, M, D, BX, BD), DOT, True)
        factor, low = split_factor(tl.full([1, 1], 1.0, tl.float32))
    else:
        beta = tl.trans(load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT))
        if SIGNS == 2:
            beta = beta * (1.0 - 2.0 * (both % SIGNS).to(tl.float32))
        factor, low = split_factor(beta)
        eye = make_identity(BD, DOT)

    m = tl.full([BX], -1e38, tl.float32)
    z = tl.zeros([BX], tl.float32)
    held = tl.zeros([BX], tl.float32)  # z of the weights as they are multiplied
    u = tl.zeros([BX], tl.float32)  # sum of weights times their exponents
    s = tl.zeros([BX, BE], tl.float32)
    c = tl.zeros([BX, BD], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if DIRECTED:
            x = direct_keys(way, way_low, k, DOT, EXACT)
        elif DOT == tl.bfloat16 and BD <= 128:  # noqa: SIM300
            x = tl.dot(eye, tl.trans(k))  # see parts.widen
        else:
            x = tl.trans(k.to(tl.float32))
        y = key_exponents(x, factor, low, m, visible, EVEN, WIDE)
        if tl.max(y) > LAG:
            moved = tl.max(key_exponents(x, factor, low, tl.zeros([BX], tl.float32), visible, EVEN, WIDE), 1)
            moved = tl.minimum(tl.maximum(m, moved), 1e38)
            fade = tl.exp2(m - moved)
            u = tl.where(fade > 0.0, fade * (u + z * (m - moved)), 0.0)
            m = moved
            z = z * fade
            held = held * fade
            s = s * fade[:, None]
            c = c * fade[:, None]
            y = tl.minimum(key_exponents(x, factor, low, m, visible, EVEN, WIDE), LAG)
        p = tl.exp2(y)
        z += tl.sum(p, 1)
        u += tl.sum(p * tl.maximum(y, FAINT), 1)
        weights = p.to(DOT)
        if DOT == tl.bfloat16:  # noqa: SIM300
            held += tl.sum(weights.to(tl.float32), 1)
        s = tl.dot(weights, v.to(DOT), s, input_precision=PRECISION)
        c = tl.dot(weights, k.to(DOT), c, input_precision=PRECISION)
    if DOT != tl.bfloat16:  # noqa: SIM300
        held = z
    bits = tl.log2(z.to(tl.float64))
    log = tl.where(z > 0.0, (m.to(tl.float64) + bits) * LN2, -float("inf"))
    entropy = tl.where(z > 0.0, (bits - u.to(tl.float64) / z.to(tl.float64)) * LN2, 0.0)
    inverse = tl.where(held > 0.0, 1.0 / held, 0.0)[:, None]
    index = b.to(tl.int64) * H + h if SINGLE else h.to(tl.int64) * works + work
    if DIRECTED:
        row = index * M + first_row
        there = first_row + c_ < M
    else:
        row = (index * SIGNS + both % SIGNS) * D
        there = c_ < D
    tl.store(LOG + row + c_, log, mask=there)
    tl.store(ENTROPY + row + c_, tl.maximum(entropy, 0.0), mask=there)
    if DIRECTED:
        store_set(MEAN, s * inverse, index * M * E, first_row, M, E, BX, BE)
        store_set(KEY, c * inverse, index * M * D, first_row, M, D, BX, BD)
    else:
        store_matrix(MEAN + row * E, s * inverse, D, E, BD, BE)
        store_matrix(KEY + row * D, c * inverse, D, D, BD, BD)


@triton.jit
def log_weight(part, whole):
    """ln of `weigh_part`, 0 for an empty part: it has no share of the entropy."""
    return tl.where(part == -float("inf"), 0.0, part - tl.where(whole == -float("inf"), 0.0, whole))


@triton.jit
def load_parts(X, rows, has, c, w, M: tl.constexpr, W: tl.constexpr):
    """[BP, BC, BW]: the channels c of some states, which have M rows of W numbers."""
    at = X + rows[:, None, None] * M * W + c[None, :, None] * W + w[None, None, :]
    return tl.load(at, mask=has[:, None, None] & (c < M)[None, :, None] & (w < W)[None, None, :], other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def evidence_merge_kernel(
    LOG, MEAN, KEY, ENTROPY, BEGIN, LOG_IN, MEAN_IN, KEY_IN, ENTROPY_IN, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
    works, splits, H,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """All splits of a sequence, and the state before them, into one state; BC channels a program, BP splits at once."""
    b, h, c, e, out, inside = place_channels(H, M, E, BC, BE)
    d = tl.arange(0, BD)
    p = tl.arange(0, BP)
    at = out[:, None] * E + e[None, :]
    at_key = out[:, None] * D + d[None, :]
    inside_key = (c < M)[:, None] & (d < D)[None, :]
    log = tl.full([BC], -float("inf"), tl.float64)
    entropy = tl.zeros([BC], tl.float64)
    mean = tl.zeros([BC, BE], tl.float32)
    key = tl.zeros([BC, BD], tl.float32)
    if HAS_STATE:
        log = tl.load(LOG_IN + out, mask=c < M, other=-float("inf"))
        entropy = tl.load(ENTROPY_IN + out, mask=c < M, other=0.0)
        mean = tl.load(MEAN_IN + at, mask=inside, other=0.0)
        key = tl.load(KEY_IN + at_key, mask=inside_key, other=0.0)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for i in range(begin, end, BP):
        some = h.to(tl.int64) * works + i + p
        has = i + p < end
        rows = some[:, None] * M + c[None, :]
        there = has[:, None] & (c < M)[None, :]
        part = tl.load(LOG + rows, mask=there, other=-float("inf"))
        parts = tl.load(ENTROPY + rows, mask=there, other=0.0)
        top = tl.maximum(log, tl.max(part, 0))
        old = weigh_part(log, top)
        new = weigh_part(part, tl.broadcast_to(top[None, :], [BP, BC]))
        total = old + tl.sum(new, 0)
        inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
        bits = tl.where(total > 0.0, tl.log2(total.to(tl.float64)) * LN2, 0.0)
        both = tl.where(total > 0.0, top + bits, -float("inf"))
        # The chain rule of entropy, whose terms are all >= 0.
        entropy = old * (entropy - log_weight(log, both))
        entropy += tl.sum(new * (parts - log_weight(part, tl.broadcast_to(both[None, :], [BP, BC]))), 0)
        entropy = entropy * inverse
        values = load_parts(MEAN, some, has, c, e, M, E)
        mean = (mean * old[:, None] + tl.sum(values * new[:, :, None], 0)) * inverse[:, None]
        keys = load_parts(KEY, some, has, c, d, M, D)
        key = (key * old[:, None] + tl.sum(keys * new[:, :, None], 0)) * inverse[:, None]
        log = both
    tl.store(LOG_OUT + out, log, mask=c < M)
    tl.store(ENTROPY_OUT + out, entropy, mask=c < M)
    tl.store(MEAN_OUT + at, mean, mask=inside)
    tl.store(KEY_OUT + at_key, key, mask=inside_key)


@triton.jit(do_not_specialize=LENGTHS)
def evidence_sum_kernel(
    DMEAN, DKEY, DENTROPY, BEGIN, LLN_WEIGHT, BETA, LOG, MEAN, KEY, ENTROPY, G_LOG, G_MEAN, G_KEY, G_ENTROPY,
    WAY, DMEAN_OUT, DKEY_OUT, DENTROPY_OUT, ASK_V, ASK_V_LOW, ASK_K, ASK_K_LOW, ASK_H, PULL, PULL_K, LOG2, LOG2_LOW,
    ASK_X, ASK_X_LOW, lln_b, lln_h, lln_e, beta_b, beta_h, beta_d, way_b, way_h, works, splits, H,
    DIRECTED: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, PACKED: tl.constexpr, WEIGHTED: tl.constexpr,
    HAS_GRAD: tl.constexpr, HAS_STATE: tl.constexpr, WIDE: tl.constexpr, LOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What the queries of all splits and of all heads of a group ask of a state, dS, dK and dH, with the gradients of a
    returned one; and this as the keys' backward reads it: dS and M in two words each, c, what dk takes for it, and L in
    base 2.
    DIRECTED: W in two words, too. HAS_STATE: dS, dK and dH as they are, too."""
    b, h, c, e, out, inside = place_channels(H, M, E, BC, BE)
    d = tl.arange(0, BD)
    p = tl.arange(0, BP)
    at = out[:, None] * E + e[None, :]
    at_key = out[:, None] * D + d[None, :]
    inside_key = (c < M)[:, None] & (d < D)[None, :]
    dmean = tl.zeros([BC, BE], tl.float32)
    dkey = tl.zeros([BC, BD], tl.float32)
    dentropy = tl.zeros([BC], tl.float32)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for g in range(G):
        head = h * G + g
        here = tl.zeros([BC, BE], tl.float32)
        for i in range(begin, end, BP):
            some = head.to(tl.int64) * works + i + p
            has = i + p < end
            here += tl.sum(load_parts(DMEAN, some, has, c, e, M, E), 0)
            dkey += tl.sum(load_parts(DKEY, some, has, c, d, M, D), 0)
            there = has[:, None] & (c < M)[None, :]
            dentropy += tl.sum(tl.load(DENTROPY + some[:, None] * M + c[None, :], mask=there, other=0.0), 0)
        if WEIGHTED:
            weight = tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + head * lln_h + e * lln_e, mask=e < E, other=0.0)
            here = here * weight[None, :]
        dmean += here
    log = tl.load(LOG + out, mask=c < M, other=-float("inf"))
    alive = log > -float("inf")
    if HAS_GRAD:  # where there is no key nothing passes it on
        dmean += tl.where(alive[:, None], tl.load(G_MEAN + at, mask=inside, other=0.0), 0.0)
        dkey += tl.where(alive[:, None], tl.load(G_KEY + at_key, mask=inside_key, other=0.0), 0.0)
        dentropy += tl.where(alive, tl.load(G_ENTROPY + out, mask=c < M, other=0.0), 0.0).to(tl.float32)
    if HAS_STATE:
        tl.store(DMEAN_OUT + at, dmean, mask=inside)
        tl.store(DKEY_OUT + at_key, dkey, mask=inside_key)
        tl.store(DENTROPY_OUT + out, dentropy, mask=c < M)

    if DIRECTED:
        own = tl.zeros([BC, BD], tl.float32)
        at_way = WAY + b.to(tl.int64) * way_b + h * way_h + c[:, None] * D + d[None, :]
        way = tl.load(at_way, mask=inside_key, other=0.0)
        high, lost, _used = split_words(way, DOT, True)
        tl.store(ASK_X + at_key, high, mask=inside_key)
        if DOT == tl.bfloat16:  # noqa: SIM300
            tl.store(ASK_X_LOW + at_key, lost, mask=inside_key)
        if not WIDE:
            own = dentropy[:, None] * way
    else:
        at_beta = BETA + b.to(tl.int64) * beta_b + h * beta_h + (c % D) * beta_d
        beta = tl.load(at_beta, mask=c < M, other=0.0)
        beta = tl.where(c < D, beta, -beta)
        own = tl.zeros([BC, BD], tl.float32)
        if not WIDE:
            own = tl.where((c % D)[:, None] == d[None, :], (dentropy * beta)[:, None], 0.0)
    ask_v, ask_v_low, used = split_words(dmean, DOT, LOW)
    pull = tl.sum(tl.load(MEAN + at, mask=inside, other=0.0) * used, 1)
    ask_k, ask_k_low, used_key = split_words(dkey - own, DOT, LOW)
    key = tl.load(KEY + at_key, mask=inside_key, other=0.0)
    pull += tl.sum(key * used_key, 1)
    entropy = tl.load(ENTROPY + out, mask=c < M, other=0.0)
    if WIDE:
        pull += dentropy * entropy.to(tl.float32)
        tl.store(ASK_H + out, dentropy * LN2, mask=c < M)
    elif HAS_STATE:  # H = L - beta K of all that came from keys; a state is what its owner says
        pull += dentropy * (entropy - tl.where(alive, log, 0.0)).to(tl.float32) + tl.sum(own * key, 1)
    if HAS_GRAD:
        pull -= tl.load(G_LOG + out, mask=c < M, other=0.0).to(tl.float32)
    tl.store(ASK_V + at, ask_v, mask=inside)
    tl.store(ASK_K + at_key, ask_k, mask=inside_key)
    if LOW:
        tl.store(ASK_V_LOW + at, ask_v_low, mask=inside)
        tl.store(ASK_K_LOW + at_key, ask_k_low, mask=inside_key)
    tl.store(PULL + out, pull, mask=c < M)
    tl.store(PULL_K + out, pull if WIDE else pull - dentropy, mask=c < M)
    log = tl.where(alive, log * 1.4426950408889634074, 0.0)
    tl.store(LOG2 + out, log.to(tl.float32), mask=c < M)
    lost = tl.minimum(tl.maximum(log - log.to(tl.float32).to(tl.float64), -1.0), 1.0)  # of a huge L nothing is left
    tl.store(LOG2_LOW + out, lost.to(tl.float32), mask=c < M)
