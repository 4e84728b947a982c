"""States of what lies outside the windows of `mix="evidence"`, by merging those of pieces: see `evidence_mix`.

Group g of a sequence has the window of pieces g to g + REACH - 1. Outside of it lie the given state, all pieces before
it and, unless attention is causal, all behind it. The first `empty` groups of a sequence have no window: their tokens
come before its first valid one, and all keys lie outside.

Backward, with w = e^(L_p - L_g) the share of piece p in group g:

    dS_p = sum_g w dS_g     dK_p = sum_g w dK_g     dH_p = sum_g w dH_g
    dL_p = sum_g w (dS_g.(S_p - S_g) + dK_g.(K_p - K_g) + dH_g (H_p - H_g - (L_p - L_g)))

Every w is at most 1. Sums over groups run relative to the least L so far, which no piece in these groups exceeds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import log_weight
from lln.kernels.triton.fold import place_channels, weigh_part

MANY = ["groups", "closed", "H"]  # these vary: see `parts.LENGTHS`
NONE = tl.constexpr(1e300)  # the reference of no group at all


@triton.jit
def load_held(
    LOG, MEAN, KEY, ENTROPY, at, c, e, d, M: tl.constexpr, E: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """(L, S, K, H) of channels c, whose first is at `at`."""
    row = at + c
    log = tl.load(LOG + row, mask=c < M, other=-float("inf"))
    mean = tl.load(MEAN + row[:, None] * E + e[None, :], mask=(c < M)[:, None] & (e < E)[None, :], other=0.0)
    key = tl.load(KEY + row[:, None] * D + d[None, :], mask=(c < M)[:, None] & (d < D)[None, :], other=0.0)
    return log, mean, key, tl.load(ENTROPY + row, mask=c < M, other=0.0)


@triton.jit
def store_held(
    LOG, MEAN, KEY, ENTROPY, at, c, e, d, log, mean, key, entropy, M: tl.constexpr, E: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    row = at + c
    tl.store(LOG + row, log, mask=c < M)
    tl.store(MEAN + row[:, None] * E + e[None, :], mean, mask=(c < M)[:, None] & (e < E)[None, :])
    tl.store(KEY + row[:, None] * D + d[None, :], key, mask=(c < M)[:, None] & (d < D)[None, :])
    tl.store(ENTROPY + row, entropy, mask=c < M)


@triton.jit
def merge_held(log, mean, key, entropy, log_2, mean_2, key_2, entropy_2):
    """As `evidence.merge`."""
    top = tl.maximum(log, log_2)
    total = weigh_part(log, top) + weigh_part(log_2, top)
    both = tl.where(total > 0.0, top + tl.log2(total.to(tl.float64)) * 0.6931471805599453094, -float("inf"))
    old = weigh_part(log, both)
    new = weigh_part(log_2, both)
    entropy = old * (entropy - log_weight(log, both)) + new * (entropy_2 - log_weight(log_2, both))
    return both, mean + new[:, None] * (mean_2 - mean), key + new[:, None] * (key_2 - key), entropy


@triton.jit(do_not_specialize=MANY)
def outside_kernel(
    LOG, MEAN, KEY, ENTROPY, LOG_IN, MEAN_IN, KEY_IN, ENTROPY_IN, EMPTY, CLOSED,
    LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, LOG_END, MEAN_END, KEY_END, ENTROPY_END, groups, closed, H,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    REACH: tl.constexpr, CAUSAL: tl.constexpr, MOVED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """States [sequences, groups, heads, M] of what lies outside; and at the end that of the first `closed` pieces."""
    b, h, c, e, out, _inside = place_channels(H, M, E, BC, BE)
    d = tl.arange(0, BD)
    step = H.to(tl.int64) * M
    pieces = b.to(tl.int64) * (groups + REACH - 1) * step + h * M
    at = b.to(tl.int64) * groups * step + h * M
    state = (out - c).to(tl.int64)
    empty = 0
    if MOVED:
        empty = tl.load(EMPTY + b).to(tl.int32)
        closed = tl.load(CLOSED + b).to(tl.int32)
    if not CAUSAL:
        log = tl.full([BC], -float("inf"), tl.float64)
        entropy = tl.zeros([BC], tl.float64)
        mean = tl.zeros([BC, BE], tl.float32)
        key = tl.zeros([BC, BD], tl.float32)
        for i in range(0, groups):
            g = groups - 1 - i
            log_2, mean_2, key_2, entropy_2 = load_held(
                LOG, MEAN, KEY, ENTROPY, pieces + (g + REACH - 1) * step, c, e, d, M, E, D
            )  # fmt: skip
            log_2, mean_2, key_2, entropy_2 = merge_held(log_2, mean_2, key_2, entropy_2, log, mean, key, entropy)
            # Of groups without a window the pieces in its place hold no key, but for the last.
            whole = g < empty
            store_held(
                LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, at + g * step, c, e, d, tl.where(whole, log_2, log),
                tl.where(whole, mean_2, mean), tl.where(whole, key_2, key), tl.where(whole, entropy_2, entropy),
                M, E, D,
            )  # fmt: skip
            log, mean, key, entropy = log_2, mean_2, key_2, entropy_2
        tl.debug_barrier()
    if HAS_STATE:
        log, mean, key, entropy = load_held(LOG_IN, MEAN_IN, KEY_IN, ENTROPY_IN, state, c, e, d, M, E, D)
    else:
        log = tl.full([BC], -float("inf"), tl.float64)
        entropy = tl.zeros([BC], tl.float64)
        mean = tl.zeros([BC, BE], tl.float32)
        key = tl.zeros([BC, BD], tl.float32)
    for g in range(0, groups):
        if g == closed:
            store_held(
                LOG_END, MEAN_END, KEY_END, ENTROPY_END, state, c, e, d, log, mean, key, entropy, M, E, D
            )  # fmt: skip
        if CAUSAL:
            log_2, mean_2, key_2, entropy_2 = log, mean, key, entropy
        else:
            log_2, mean_2, key_2, entropy_2 = load_held(
                LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, at + g * step, c, e, d, M, E, D
            )  # fmt: skip
            log_2, mean_2, key_2, entropy_2 = merge_held(log, mean, key, entropy, log_2, mean_2, key_2, entropy_2)
        store_held(
            LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, at + g * step, c, e, d, log_2, mean_2, key_2, entropy_2, M, E, D
        )  # fmt: skip
        log_2, mean_2, key_2, entropy_2 = load_held(
            LOG, MEAN, KEY, ENTROPY, pieces + g * step, c, e, d, M, E, D
        )  # fmt: skip
        log, mean, key, entropy = merge_held(log, mean, key, entropy, log_2, mean_2, key_2, entropy_2)
    if closed >= groups:
        store_held(LOG_END, MEAN_END, KEY_END, ENTROPY_END, state, c, e, d, log, mean, key, entropy, M, E, D)


@triton.jit
def add_group(
    least, values, keys, entropies, logs, pulls, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
    G_MEAN, G_KEY, G_ENTROPY, at, c, e, d, centre, centre_key, M: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """What a group asks, added to what those before it ask, relative to the least L of all of them."""
    log, mean, key, entropy = load_held(LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, at, c, e, d, M, E, D)
    _log, dmean, dkey, dentropy = load_held(LOG_OUT, G_MEAN, G_KEY, G_ENTROPY, at, c, e, d, M, E, D)
    alive = log > -float("inf")
    moved = tl.where(alive, tl.minimum(least, log), least)
    fade = tl.exp2((tl.maximum(moved - least, -1e30) * 1.4426950408889634074).to(tl.float32))
    weight = tl.exp2((tl.where(alive, moved - log, 0.0) * 1.4426950408889634074).to(tl.float32))
    weight = tl.where(alive, weight, 0.0)
    dentropy = dentropy.to(tl.float32)
    asked = weight * dentropy
    shift = tl.maximum(moved - least, -1e30).to(tl.float32)
    logs = fade * (logs + shift * entropies)
    logs += tl.where(alive, moved - log, 0.0).to(tl.float32) * asked
    pull = tl.sum((mean - centre) * dmean, 1) + tl.sum((key - centre_key) * dkey, 1)
    pulls = fade * pulls + weight * (pull + entropy.to(tl.float32) * dentropy)
    entropies = fade * entropies + asked
    values = values * fade[:, None] + weight[:, None] * dmean
    keys = keys * fade[:, None] + weight[:, None] * dkey
    return moved, values, keys, entropies, logs, pulls


@triton.jit
def ask_piece(
    LOG, MEAN, KEY, ENTROPY, at, c, e, d, least, values, keys, entropies, logs, pulls, centre, centre_key,
    M: tl.constexpr, E: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(dL, dS, dK, dH) of a piece in all these groups."""
    log, mean, key, entropy = load_held(LOG, MEAN, KEY, ENTROPY, at, c, e, d, M, E, D)
    below = tl.maximum(tl.where(log > -float("inf"), log - least, -1e30), -1e30)
    weight = tl.exp2((below * 1.4426950408889634074).to(tl.float32))
    own = tl.sum((mean - centre) * values, 1) + tl.sum((key - centre_key) * keys, 1)
    own += (entropy - below).to(tl.float32) * entropies - logs - pulls
    return (
        tl.where(weight > 0.0, weight * own, 0.0),
        weight[:, None] * values,
        weight[:, None] * keys,
        weight * entropies,
    )


@triton.jit(do_not_specialize=MANY)
def outside_backward_kernel(
    LOG, MEAN, KEY, ENTROPY, LOG_IN, MEAN_IN, KEY_IN, ENTROPY_IN, EMPTY, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
    G_MEAN, G_KEY, G_ENTROPY, DLOG, DMEAN, DKEY, DENTROPY, DLOG_IN, DMEAN_IN, DKEY_IN, DENTROPY_IN, groups, H,
    M: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
    REACH: tl.constexpr, CAUSAL: tl.constexpr, MOVED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Gradients of the pieces, and of the given state."""
    b, h, c, e, out, _inside = place_channels(H, M, E, BC, BE)
    d = tl.arange(0, BD)
    step = H.to(tl.int64) * M
    last = groups + REACH - 2
    pieces = b.to(tl.int64) * (groups + REACH - 1) * step + h * M
    at = b.to(tl.int64) * groups * step + h * M
    state = (out - c).to(tl.int64)
    empty = 0
    if MOVED:
        empty = tl.load(EMPTY + b).to(tl.int32)
    # As everywhere: a vector that all share may be far larger than what they differ by.
    _log, centre, centre_key, _entropy = load_held(
        LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, at + (groups - 1) * step, c, e, d, M, E, D
    )  # fmt: skip

    least = tl.full([BC], NONE, tl.float64)
    values = tl.zeros([BC, BE], tl.float32)
    keys = tl.zeros([BC, BD], tl.float32)
    entropies = tl.zeros([BC], tl.float32)
    logs = tl.zeros([BC], tl.float32)
    pulls = tl.zeros([BC], tl.float32)
    # Of groups behind a piece.
    for i in range(0, last + 1):
        p = last - i
        g = p + 1
        if g < groups:
            least, values, keys, entropies, logs, pulls = add_group(
                least, values, keys, entropies, logs, pulls, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
                G_MEAN, G_KEY, G_ENTROPY, at + g * step, c, e, d, centre, centre_key, M, E, D,
            )  # fmt: skip
        dlog, dmean, dkey, dentropy = ask_piece(
            LOG, MEAN, KEY, ENTROPY, pieces + p * step, c, e, d, least, values, keys, entropies, logs, pulls,
            centre, centre_key, M, E, D,
        )  # fmt: skip
        store_held(DLOG, DMEAN, DKEY, DENTROPY, pieces + p * step, c, e, d, dlog, dmean, dkey, dentropy, M, E, D)
    if HAS_STATE:
        least, values, keys, entropies, logs, pulls = add_group(
            least, values, keys, entropies, logs, pulls, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
            G_MEAN, G_KEY, G_ENTROPY, at, c, e, d, centre, centre_key, M, E, D,
        )  # fmt: skip
        dlog, dmean, dkey, dentropy = ask_piece(
            LOG_IN, MEAN_IN, KEY_IN, ENTROPY_IN, state, c, e, d, least, values, keys, entropies, logs, pulls,
            centre, centre_key, M, E, D,
        )  # fmt: skip
        store_held(
            DLOG_IN, DMEAN_IN, DKEY_IN, DENTROPY_IN, state, c, e, d, dlog, dmean, dkey, dentropy, M, E, D
        )  # fmt: skip
    if not CAUSAL:
        tl.debug_barrier()
        least = tl.full([BC], NONE, tl.float64)
        values = tl.zeros([BC, BE], tl.float32)
        keys = tl.zeros([BC, BD], tl.float32)
        entropies = tl.zeros([BC], tl.float32)
        logs = tl.zeros([BC], tl.float32)
        pulls = tl.zeros([BC], tl.float32)
        # Of groups before it: those whose window ends there, and of those without a window one more.
        for p in range(0, last + 1):
            g = p - REACH
            if (g >= 0) & (g >= empty):
                least, values, keys, entropies, logs, pulls = add_group(
                    least, values, keys, entropies, logs, pulls, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
                    G_MEAN, G_KEY, G_ENTROPY, at + g * step, c, e, d, centre, centre_key, M, E, D,
                )  # fmt: skip
            g = p - REACH + 1
            if (g >= 0) & (g < empty):
                least, values, keys, entropies, logs, pulls = add_group(
                    least, values, keys, entropies, logs, pulls, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT,
                    G_MEAN, G_KEY, G_ENTROPY, at + g * step, c, e, d, centre, centre_key, M, E, D,
                )  # fmt: skip
            dlog, dmean, dkey, dentropy = ask_piece(
                LOG, MEAN, KEY, ENTROPY, pieces + p * step, c, e, d, least, values, keys, entropies, logs, pulls,
                centre, centre_key, M, E, D,
            )  # fmt: skip
            dlog_2, dmean_2, dkey_2, dentropy_2 = load_held(
                DLOG, DMEAN, DKEY, DENTROPY, pieces + p * step, c, e, d, M, E, D
            )  # fmt: skip
            dlog = tl.where(c < M, dlog + dlog_2, 0.0)
            store_held(
                DLOG, DMEAN, DKEY, DENTROPY, pieces + p * step, c, e, d, dlog, dmean + dmean_2, dkey + dkey_2,
                dentropy + dentropy_2, M, E, D,
            )  # fmt: skip
