"""Keys and values into states: one for every split of a sequence, then merged into one, or into all prefixes."""

from __future__ import annotations

import triton
import triton.language as tl

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

# A reference may fall so far (in base 2) behind the keys before it is moved: moving it rescales the whole sum.
LAG = tl.constexpr(16.0)


@triton.jit
def key_exponents(x, factor, low, reference, visible, EVEN: tl.constexpr, WIDE: tl.constexpr):
    """factor * x - reference for keys x [BD, BM], -inf where a key is hidden. EVEN: none is."""
    if WIDE:
        high = tl.broadcast_to(factor, x.shape)
        y = tl.fma(x, high, -tl.broadcast_to(reference[:, None], x.shape)) + x * low
        y = tl.minimum(tl.maximum(y, -1e38), 1e38)
    else:
        y = x * factor - reference[:, None]
    if EVEN:
        return y
    else:
        return tl.where(visible[None, :], y, -float("inf"))


@triton.jit(do_not_specialize=LENGTHS)
def fold_kernel(
    K, V, BETA, MASK, CU, OWNER, BEGIN, START, LOG, MEAN,
    k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, beta_b, beta_h, beta_d, mask_b, mask_n,
    N, works, splits, tiles, H,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr,
    PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr,
    SINGLE: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of each split, in [heads, works]; with SINGLE (one split a sequence) in [sequences, heads]."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    d = tl.arange(0, BD)
    r = tl.arange(0, BM)
    data = 0 if PACKED else b.to(tl.int64)
    k_base = data * k_b + h.to(tl.int64) * k_h + first * k_n
    v_base = data * v_b + h.to(tl.int64) * v_h + first * v_n
    mask_base = data * mask_b + first * mask_n
    # Channels are rows here: what there is one of for each of them takes few registers, and is summed inside a warp.
    factor, low = split_factor(tl.trans(load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT)))
    eye = make_identity(BD, DOT)

    m = tl.full([BD], -1e38, tl.float32)
    z = tl.zeros([BD], tl.float32)
    s = tl.zeros([BD, BE], tl.float32)
    for t in range(begin, end):
        rows = (origin + t * USED + r).to(tl.int64)
        ok = (rows >= 0) & (rows < n) & (r < USED)
        k = load_rows(K, k_base, rows, ok, k_n, k_d, D, BD, EVEN)
        v = load_rows(V, v_base, rows, ok, v_n, v_d, E, BE, EVEN)
        visible = visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED)
        if DOT == tl.bfloat16 and BD <= 128:  # noqa: SIM108, SIM300
            x = tl.dot(eye, tl.trans(k))  # see parts.widen
        else:
            x = tl.trans(k.to(tl.float32))
        y = key_exponents(x, factor, low, m, visible, EVEN, WIDE)
        if tl.max(y) > LAG:  # of the tile laid flat: by rows and then over them, Triton 3.6 fails for sm_100
            moved = tl.max(key_exponents(x, factor, low, tl.zeros([BD], tl.float32), visible, EVEN, WIDE), 1)
            moved = tl.minimum(tl.maximum(m, moved), 1e38)
            fade = tl.exp2(m - moved)
            m = moved
            z = z * fade
            s = s * fade[:, None]
            y = tl.minimum(key_exponents(x, factor, low, m, visible, EVEN, WIDE), LAG)  # some may have overflowed
        p = tl.exp2(y)
        z += tl.sum(p, 1)
        s = tl.dot(p.to(DOT), v.to(DOT), s, input_precision=PRECISION)
    log = (m.to(tl.float64) + tl.log2(z.to(tl.float64))) * 0.6931471805599453094
    log = tl.where(z > 0.0, log, -float("inf"))
    s = s * tl.where(z > 0.0, 1.0 / z, 0.0)[:, None]
    index = b.to(tl.int64) * H + h if SINGLE else tl.program_id(0).to(tl.int64)
    tl.store(LOG + index * D + d, log, mask=d < D)
    store_matrix(MEAN + index * D * E, s, D, E, BD, BE)


@triton.jit
def place_channels(H, D: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr):
    """Where a program of a merging kernel works: (sequence, head, its channels, all value channels, the channels' place
    in [sequences, heads, D], which of [channels, value channels] there are)"""
    blocks: tl.constexpr = (D + BC - 1) // BC
    pid = tl.program_id(0)
    bh = pid // blocks
    c = (pid % blocks) * BC + tl.arange(0, BC)
    e = tl.arange(0, BE)
    return bh // H, bh % H, c, e, bh.to(tl.int64) * D + c, (c < D)[:, None] & (e < E)[None, :]


@triton.jit
def split_range(b, splits, BEGIN, PACKED: tl.constexpr):
    """The works of sequence b."""
    if PACKED:
        return tl.load(BEGIN + b).to(tl.int32), tl.load(BEGIN + b + 1).to(tl.int32)
    else:
        return b * splits, (b + 1) * splits


@triton.jit
def weigh_part(part, whole):
    """e^(part - whole) for logs of sums; 0 for an empty part of an empty whole."""
    whole = tl.where(whole == -float("inf"), 0.0, whole)
    return tl.exp2(((part - whole) * 1.4426950408889634074).to(tl.float32))


@triton.jit(do_not_specialize=LENGTHS)
def merge_kernel(
    LOG, MEAN, BEGIN, LOG_IN, MEAN_IN, LOG_OUT, MEAN_OUT, works, splits, H,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """All splits of a sequence, and the state before them, into one state; BC channels a program, BP splits at once."""
    b, h, c, e, out, inside = place_channels(H, D, E, BC, BE)
    p = tl.arange(0, BP)
    at = out[:, None] * E + e[None, :]
    if HAS_STATE:
        log = tl.load(LOG_IN + out, mask=c < D, other=-float("inf"))
        mean = tl.load(MEAN_IN + at, mask=inside, other=0.0)
    else:
        log = tl.full([BC], -float("inf"), tl.float64)
        mean = tl.zeros([BC, BE], tl.float32)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for i in range(begin, end, BP):
        some = h.to(tl.int64) * works + i + p
        has = i + p < end
        part = tl.load(LOG + some[:, None] * D + c[None, :], mask=has[:, None] & (c < D)[None, :], other=-float("inf"))
        values = tl.load(
            MEAN + some[:, None, None] * D * E + c[None, :, None] * E + e[None, None, :],
            mask=has[:, None, None] & inside[None, :, :],
            other=0.0,
        )
        top = tl.maximum(log, tl.max(part, 0))
        old = weigh_part(log, top)
        new = weigh_part(part, tl.broadcast_to(top[None, :], [BP, BC]))
        total = old + tl.sum(new, 0)
        inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
        mean = (mean * old[:, None] + tl.sum(values * new[:, :, None], 0)) * inverse[:, None]
        log = tl.where(total > 0.0, top + tl.log2(total.to(tl.float64)) * 0.6931471805599453094, -float("inf"))
    tl.store(LOG_OUT + out, log, mask=c < D)
    tl.store(MEAN_OUT + at, mean, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def prefix_kernel(
    LOG, MEAN, BEGIN, LOG_IN, MEAN_IN, LOG_OUT, MEAN_OUT, BEFORE, MEAN_BEFORE, END, END32, works, splits, H,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Like merge_kernel, and for each split: BEFORE and MEAN_BEFORE, the state of everything before it; END, L after
    it, and END32, the same in base 2 and finite, for kernels that read it often."""
    b, h, c, e, out, inside = place_channels(H, D, E, BC, BE)
    if HAS_STATE:
        log = tl.load(LOG_IN + out, mask=c < D, other=-float("inf"))
        mean = tl.load(MEAN_IN + out[:, None] * E + e[None, :], mask=inside, other=0.0)
    else:
        log = tl.full([BC], -float("inf"), tl.float64)
        mean = tl.zeros([BC, BE], tl.float32)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for i in range(begin, end):
        at = (h.to(tl.int64) * works + i) * D + c
        matrix = at[:, None] * E + e[None, :]
        part = tl.load(LOG + at, mask=c < D, other=-float("inf"))
        value = tl.load(MEAN + matrix, mask=inside, other=0.0)
        tl.store(BEFORE + at, log, mask=c < D)
        tl.store(MEAN_BEFORE + matrix, mean, mask=inside)
        top = tl.maximum(log, part)
        total = weigh_part(log, top) + weigh_part(part, top)
        both = tl.where(total > 0.0, top + tl.log2(total.to(tl.float64)) * 0.6931471805599453094, -float("inf"))
        # S1 + w (S2 - S1): the form of a merge that does not drift.
        mean = mean + weigh_part(part, both)[:, None] * (value - mean)
        log = both
        tl.store(END + at, log, mask=c < D)
        finite = tl.where(log == -float("inf"), 0.0, log * 1.4426950408889634074)
        tl.store(END32 + at, finite.to(tl.float32), mask=c < D)
    tl.store(LOG_OUT + out, log, mask=c < D)
    tl.store(MEAN_OUT + out[:, None] * E + e[None, :], mean, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def sum_kernel(
    DMEAN, PULL, BEGIN, LLN_WEIGHT, LOG, MEAN, G_LOG, G_MEAN, DMEAN_OUT, PULL_OUT,
    lln_b, lln_h, lln_e, works, splits, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    PACKED: tl.constexpr, WEIGHTED: tl.constexpr, HAS_GRAD: tl.constexpr,
):  # fmt: skip
    """What the queries of all splits and of all heads of a group ask of a state: dS, and r = sum_i A_i D_i.

    dx = B (V dS^T - r): r stands for rowsum(S dS) - dL, and takes in the gradients of a returned state."""
    b, h, c, e, out, inside = place_channels(H, D, E, BC, BE)
    p = tl.arange(0, BP)
    at = out[:, None] * E + e[None, :]
    dmean = tl.zeros([BC, BE], tl.float32)
    pull = tl.zeros([BC], tl.float32)
    begin, end = split_range(b, splits, BEGIN, PACKED)
    for g in range(G):
        head = h * G + g
        here = tl.zeros([BC, BE], tl.float32)
        for i in range(begin, end, BP):
            some = head.to(tl.int64) * works + i + p
            has = i + p < end
            parts = tl.load(
                DMEAN + some[:, None, None] * D * E + c[None, :, None] * E + e[None, None, :],
                mask=has[:, None, None] & inside[None, :, :],
                other=0.0,
            )
            pulls = tl.load(PULL + some[:, None] * D + c[None, :], mask=has[:, None] & (c < D)[None, :], other=0.0)
            here += tl.sum(parts, 0)
            pull += tl.sum(pulls, 0)
        if WEIGHTED:
            weight = tl.load(LLN_WEIGHT + b.to(tl.int64) * lln_b + head * lln_h + e * lln_e, mask=e < E, other=0.0)
            here = here * weight[None, :]
        dmean += here
    if HAS_GRAD:
        log = tl.load(LOG + out, mask=c < D, other=-float("inf"))
        alive = tl.where(log == -float("inf"), 0.0, 1.0).to(tl.float32)
        grad = tl.load(G_MEAN + at, mask=inside, other=0.0) * alive[:, None]
        mean = tl.load(MEAN + at, mask=inside, other=0.0)
        dmean += grad
        pull += tl.sum(mean * grad, 1) - tl.load(G_LOG + out, mask=c < D, other=0.0).to(tl.float32) * alive
    tl.store(DMEAN_OUT + at, dmean, mask=inside)
    tl.store(PULL_OUT + out, pull, mask=c < D)
