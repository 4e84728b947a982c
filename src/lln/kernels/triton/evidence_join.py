"""Blocks and the evidence read under one normaliser, forward and backward: `evidence_mix` says what it computes.

A program takes a group of queries (R rows) of one head with its window (SIZE keys), and the state of all that lies
outside it, whose channels come in sets of BX. In each row, with K and k less the mean of all K:

    l_c = scale q.K_c + H_c    A = softmax(l)    z = A.l          f = A S
    s_j = scale q.k_j          P = softmax(s)    y = ln sum e^s   n = P V
    w = sigmoid(z + offset - y)                  o = w f + (1 - w) n

    dt = w (1 - w) g.(f - n)                     dA_c = w (g.S_c - g.f)
    dl_c = A_c (dA_c + dt (1 + l_c - z))         ds_j = P_j ((1 - w) (g.v_j - g.n) - dt)

Kept for the backward pass are ln sum e^l, y, z and the argument of the sigmoid; everything else is made again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import LN2, load_set, split_words, store_set
from lln.kernels.triton.parts import LOG2E, draw_kept, load_rows, store_rows

MUCH = tl.constexpr(1e4)  # as in `evidence_mix`
MANY = ["groups", "H", "mask_b"]  # these vary: see `parts.LENGTHS`


@triton.jit
def find_group(groups, H, EMPTY, G: tl.constexpr, MOVED: tl.constexpr):
    """(sequence, query head, key head, group, its state, whether it has a window)"""
    pid = tl.program_id(0)
    h = (pid // groups) % (H * G)
    b = pid // groups // (H * G)
    g = pid % groups
    state = (b.to(tl.int64) * groups + g) * H + h // G
    windowed = g >= 0
    if MOVED:
        windowed = g >= tl.load(EMPTY + b)
    return b, h, h // G, g, state, windowed


@triton.jit
def find_centre(KEY, state, SETS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr):
    """The mean of all K."""
    shared = tl.zeros([BD], tl.float32)
    for i in range(SETS):
        shared += tl.sum(load_set(KEY, state * M * D, i * BX, M, D, BX, BD), 0)
    return shared * (1.0 / M)


@triton.jit
def load_read(
    KEY, ENTROPY, state, first, centre, scale, M: tl.constexpr, D: tl.constexpr, BX: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """(K less the centre with scale, H) of a set of channels in base 2; H = -inf in channels that are padding"""
    c = first + tl.arange(0, BX)
    d = tl.arange(0, BD)
    key = load_set(KEY, state * M * D, first, M, D, BX, BD) - centre[None, :]
    key = tl.where((c < M)[:, None] & (d < D)[None, :], key, 0.0)
    entropy = tl.load(ENTROPY + state * M + c, mask=c < M, other=-float("inf"))
    return key * (scale * LOG2E), (entropy * LOG2E).to(tl.float32)


@triton.jit
def score_window(
    q, k, centre, visible, scale, BM: tl.constexpr, BN: tl.constexpr, BEFORE: tl.constexpr, CAUSAL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s in base 2, -inf for keys that a row does not see."""
    r = tl.arange(0, BM)
    j = tl.arange(0, BN)
    s = tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision=PRECISION)
    s = (s - tl.sum(q.to(tl.float32) * centre[None, :], 1)[:, None]) * (scale * LOG2E)
    s = tl.where(visible[None, :], s, -float("inf"))
    if CAUSAL:
        s = tl.where(j[None, :] > r[:, None] + BEFORE, -float("inf"), s)
    return s


@triton.jit(do_not_specialize=MANY)
def join_kernel(
    Q, K, V, LOG, MEAN, KEY, ENTROPY, ADD, MASK, EMPTY, SEED, OUT, LOG_FAR, LOG_NEAR, EVIDENCE, ADVANTAGE,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d, add_b, add_h, mask_b, mask_n,
    scale, dropout, groups, H,
    SETS: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
    BEFORE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, MOVED: tl.constexpr, HAS_ADD: tl.constexpr,
    DROPOUT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output rows of each group. q, k and v are in their slots."""
    b, h, hk, g_, state, windowed = find_group(groups, H, EMPTY, G, MOVED)
    r = tl.arange(0, BM)
    j = tl.arange(0, BN)
    c = tl.arange(0, BX)
    rows = (g_ * R + r).to(tl.int64)
    ok = r < R
    slots = (g_ * R + j).to(tl.int64)
    q = load_rows(Q, b.to(tl.int64) * q_b + h.to(tl.int64) * q_h, rows, ok, q_n, q_d, D, BD, R == BM)
    stream = (b * H * G + h) * 2
    centre = find_centre(KEY, state, SETS, M, D, BX, BD)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM], tl.float32)  # of weights times their logits
    far = tl.zeros([BM, BE], tl.float32)
    for i in range(SETS):
        key, entropy = load_read(KEY, ENTROPY, state, i * BX, centre, scale, M, D, BX, BD)
        mean = load_set(MEAN, state * M * E, i * BX, M, E, BX, BE)
        logits = tl.dot(q.to(DOT), tl.trans(key.to(DOT)), input_precision=PRECISION) + entropy[None, :]
        moved = tl.maximum(top, tl.max(logits, 1))
        fade = tl.exp2(top - moved)
        p = tl.exp2(logits - moved[:, None])
        total = total * fade + tl.sum(p, 1)
        sums = sums * fade + tl.sum(p * tl.maximum(logits, -1e30), 1)
        top = moved
        if DROPOUT:
            p = p * draw_kept(SEED, stream, rows, i * BX + c, SETS * BX, dropout)
        far = tl.dot(p.to(DOT), mean.to(DOT), far * fade[:, None], input_precision=PRECISION)
    far = far * (1.0 / total)[:, None]
    evidence = sums / total * LN2

    inside = (j < SIZE) & windowed
    visible = inside
    if MASKED:
        visible = inside & (tl.load(MASK + b * mask_b + slots * mask_n, mask=j < SIZE, other=0) != 0)
    k = load_rows(K, b.to(tl.int64) * k_b + hk.to(tl.int64) * k_h, slots, j < SIZE, k_n, k_d, D, BD, SIZE == BN)
    v = load_rows(V, b.to(tl.int64) * v_b + hk.to(tl.int64) * v_h, slots, j < SIZE, v_n, v_d, E, BE, SIZE == BN)
    s = score_window(q, k, centre, visible, scale, BM, BN, BEFORE, CAUSAL, DOT, PRECISION)
    largest = tl.max(s, 1)
    some = largest > -float("inf")
    largest = tl.where(some, largest, 0.0)
    p = tl.exp2(s - largest[:, None])
    count = tl.where(some, tl.sum(p, 1), 1.0)
    log_near = tl.where(some, largest + tl.log2(count), 0.0)
    if DROPOUT:
        p = p * draw_kept(SEED, stream + 1, rows, j, BN, dropout)
    near = tl.dot(p.to(DOT), v.to(DOT), input_precision=PRECISION) * (1.0 / count)[:, None]

    advantage = evidence - log_near * LN2
    # Of one key in a channel all have one.
    alive = tl.max(tl.load(LOG + state * M + c, mask=c < M, other=-float("inf")), 0) > -float("inf")
    advantage = tl.where(alive, tl.where(some, advantage, MUCH), -MUCH)
    if HAS_ADD:
        advantage += tl.load(ADD + b * add_b + h * add_h)
    weight = 1.0 / (1.0 + tl.exp2(tl.minimum(-advantage * LOG2E, 126.0)))
    weight = tl.where(advantage > -0.5 * MUCH, weight, 0.0)
    out = weight[:, None] * far + (1.0 - weight)[:, None] * near
    store_rows(OUT, b.to(tl.int64) * o_b + h.to(tl.int64) * o_h, rows, ok, o_n, o_d, out, E, BE, R == BM)
    kept = (b * H * G + h).to(tl.int64) * groups * R + rows
    tl.store(LOG_FAR + kept, top + tl.log2(total), mask=ok)
    tl.store(LOG_NEAR + kept, log_near, mask=ok)
    tl.store(EVIDENCE + kept, evidence, mask=ok)
    tl.store(ADVANTAGE + kept, advantage, mask=ok)


@triton.jit
def multiply_words(a, high, low, sums, LOW: tl.constexpr, PRECISION: tl.constexpr):
    """sums + a (high + low)^T"""
    sums = tl.dot(a, tl.trans(high), sums, input_precision=PRECISION)
    if LOW:
        sums = tl.dot(a, tl.trans(low), sums, input_precision=PRECISION)
    return sums


@triton.jit
def store_window(X, x, at, dim: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr):
    j = tl.arange(0, BN)
    w = tl.arange(0, BW)
    here = (j < SIZE)[:, None] & (w < dim)[None, :]
    tl.store(X + at * SIZE * dim + j[:, None] * dim + w[None, :], x.to(X.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=MANY)
def join_backward_kernel(
    Q, K, V, GRAD, MEAN, KEY, ENTROPY, MASK, EMPTY, SEED, LOG_FAR, LOG_NEAR, EVIDENCE, ADVANTAGE,
    DQ, DK, DV, DMEAN, DKEY, DENTROPY, DADVANTAGE,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_h, g_n, g_d, dq_b, dq_h, dq_n, dq_d,
    mask_b, mask_n, scale, dropout, groups, H,
    SETS: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BX: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
    BEFORE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, MOVED: tl.constexpr, DROPOUT: tl.constexpr,
    LOW: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, what a query head asks of its window and of the state outside, and the gradient of the advantage."""
    b, h, hk, g_, state, windowed = find_group(groups, H, EMPTY, G, MOVED)
    r = tl.arange(0, BM)
    j = tl.arange(0, BN)
    c = tl.arange(0, BX)
    rows = (g_ * R + r).to(tl.int64)
    ok = r < R
    slots = (g_ * R + j).to(tl.int64)
    head = (b * H * G + h).to(tl.int64)
    q = load_rows(Q, b.to(tl.int64) * q_b + h.to(tl.int64) * q_h, rows, ok, q_n, q_d, D, BD, R == BM)
    g = load_rows(GRAD, b.to(tl.int64) * g_b + h.to(tl.int64) * g_h, rows, ok, g_n, g_d, E, BE, R == BM)
    kept = head * groups * R + rows
    log_far = tl.load(LOG_FAR + kept, mask=ok, other=0.0)
    log_near = tl.load(LOG_NEAR + kept, mask=ok, other=0.0)
    evidence = tl.load(EVIDENCE + kept, mask=ok, other=0.0)
    advantage = tl.load(ADVANTAGE + kept, mask=ok, other=0.0)
    weight = 1.0 / (1.0 + tl.exp2(tl.minimum(-advantage * LOG2E, 126.0)))
    weight = tl.where(advantage > -0.5 * MUCH, weight, 0.0)
    stream = (b * H * G + h) * 2
    centre = find_centre(KEY, state, SETS, M, D, BX, BD)

    of_far = tl.zeros([BM], tl.float32)  # g.f
    for i in range(SETS):
        key, entropy = load_read(KEY, ENTROPY, state, i * BX, centre, scale, M, D, BX, BD)
        mean, low, _used = split_words(load_set(MEAN, state * M * E, i * BX, M, E, BX, BE), DOT, LOW)
        logits = tl.dot(q.to(DOT), tl.trans(key.to(DOT)), input_precision=PRECISION) + entropy[None, :]
        asked = multiply_words(g.to(DOT), mean, low, tl.zeros([BM, BX], tl.float32), LOW, PRECISION)
        if DROPOUT:
            asked = asked * draw_kept(SEED, stream, rows, i * BX + c, SETS * BX, dropout)
        of_far += tl.sum(tl.exp2(logits - log_far[:, None]) * asked, 1)

    inside = (j < SIZE) & windowed
    visible = inside
    if MASKED:
        visible = inside & (tl.load(MASK + b * mask_b + slots * mask_n, mask=j < SIZE, other=0) != 0)
    k = load_rows(K, b.to(tl.int64) * k_b + hk.to(tl.int64) * k_h, slots, j < SIZE, k_n, k_d, D, BD, SIZE == BN)
    v = load_rows(V, b.to(tl.int64) * v_b + hk.to(tl.int64) * v_h, slots, j < SIZE, v_n, v_d, E, BE, SIZE == BN)
    s = score_window(q, k, centre, visible, scale, BM, BN, BEFORE, CAUSAL, DOT, PRECISION)
    p = tl.exp2(s - log_near[:, None])
    dp = tl.dot(g.to(DOT), tl.trans(v.to(DOT)), input_precision=PRECISION)
    kept_weights = p
    if DROPOUT:
        drawn = draw_kept(SEED, stream + 1, rows, j, BN, dropout)
        dp = dp * drawn
        kept_weights = p * drawn
    of_near = tl.sum(p * dp, 1)  # g.n
    pull = weight * (1.0 - weight) * (of_far - of_near)
    tl.store(DADVANTAGE + kept, pull, mask=ok)
    ds = (p * ((1.0 - weight)[:, None] * (dp - of_near[:, None]) - pull[:, None])).to(DOT)
    near = (k.to(tl.float32) - centre[None, :]).to(DOT)
    dq = tl.dot(ds, near, input_precision=PRECISION) * scale
    window = head * groups + g_
    dk = tl.dot(tl.trans(ds), q.to(DOT), input_precision=PRECISION) * scale
    store_window(DK, dk, window, D, SIZE, BN, BD)
    kept_weights = (kept_weights * (1.0 - weight)[:, None]).to(DOT)
    store_window(DV, tl.dot(tl.trans(kept_weights), g.to(DOT), input_precision=PRECISION), window, E, SIZE, BN, BE)

    own = ((b.to(tl.int64) * groups + g_) * (H * G) + h) * M
    for i in range(SETS):
        key, entropy = load_read(KEY, ENTROPY, state, i * BX, centre, scale, M, D, BX, BD)
        key, key_low, _used = split_words(key, DOT, LOW)
        mean, low, _used = split_words(load_set(MEAN, state * M * E, i * BX, M, E, BX, BE), DOT, LOW)
        logits = tl.dot(q.to(DOT), tl.trans(key), input_precision=PRECISION) + entropy[None, :]
        a = tl.exp2(logits - log_far[:, None])
        asked = multiply_words(g.to(DOT), mean, low, tl.zeros([BM, BX], tl.float32), LOW, PRECISION)
        dropped = a
        if DROPOUT:
            mask = draw_kept(SEED, stream, rows, i * BX + c, SETS * BX, dropout)
            asked = asked * mask
            dropped = a * mask
        gain = 1.0 + tl.maximum(logits, -1e30) * LN2 - evidence[:, None]
        dl = a * (weight[:, None] * (asked - of_far[:, None]) + pull[:, None] * gain)
        dentropy = tl.sum(dl, 0)
        dl = dl.to(DOT)
        dmean = tl.dot(tl.trans((dropped * weight[:, None]).to(DOT)), g.to(DOT), input_precision=PRECISION)
        dkey = tl.dot(tl.trans(dl), q.to(DOT), input_precision=PRECISION) * scale
        dq += tl.dot(dl, key, input_precision=PRECISION) * LN2
        if LOW:
            dq += tl.dot(dl, key_low, input_precision=PRECISION) * LN2
        store_set(DMEAN, dmean, own * E, i * BX, M, E, BX, BE)
        store_set(DKEY, dkey, own * D, i * BX, M, D, BX, BD)
        tl.store(DENTROPY + own + i * BX + c, dentropy, mask=i * BX + c < M)
    store_rows(DQ, b.to(tl.int64) * dq_b + h.to(tl.int64) * dq_h, rows, ok, dq_n, dq_d, dq, D, BD, R == BM)
