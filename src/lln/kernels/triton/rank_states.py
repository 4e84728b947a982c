"""States of several ranks, as they come over the network, in one launch each: merged into one, what is asked of the
merged one given back to each, and what others give back added up.

Of each rank there are `step` numbers of float64 in a row: L of n channels, S [n, E] in float32, and with the evidence
read K [n, D] in float32 and H. Gradients lie alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.evidence_fold import log_weight
from lln.kernels.triton.fold import weigh_part

COUNTS = ["n", "others", "step"]
SMALLEST = tl.constexpr(1e-30)  # a share below it rounds away whatever it has a part in


@triton.jit
def place_rows(i, others, n, step, c, BP: tl.constexpr):
    """(ranks from i on and whether they are there; their channels c in float64 and whether those are there)"""
    p = i + tl.arange(0, BP)
    has = p < others
    return p.to(tl.int64), has, p.to(tl.int64)[:, None] * step + c[None, :], has[:, None] & (c < n)[None, :]


@triton.jit
def load_matrices(X, p, has, c, w, begin, n, step, W: tl.constexpr):
    """[BP, BC, BW]: channels c of some ranks, of W numbers of float32 each, `begin` after a rank's first."""
    at = X + p[:, None, None] * (2 * step) + begin + c[None, :, None] * W + w[None, None, :]
    return tl.load(at, mask=has[:, None, None] & (c < n)[None, :, None] & (w < W)[None, None, :], other=0.0)


@triton.jit(do_not_specialize=COUNTS)
def join_states_kernel(
    LOG, MEAN, KEY, ENTROPY, THEIRS, THEIRS32, LOG_OUT, MEAN_OUT, KEY_OUT, ENTROPY_OUT, n, others, step,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    HAS_OWN: tl.constexpr, EVIDENCE: tl.constexpr,
):  # fmt: skip
    """The state of the keys of all other ranks, and HAS_OWN of this one's; BC channels a program, BP ranks at once."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    e = tl.arange(0, BE)
    d = tl.arange(0, BD)
    at = c[:, None] * E + e[None, :]
    inside = (c < n)[:, None] & (e < E)[None, :]
    at_key = c[:, None] * D + d[None, :]
    inside_key = (c < n)[:, None] & (d < D)[None, :]
    log = tl.full([BC], -float("inf"), tl.float64)
    mean = tl.zeros([BC, BE], tl.float32)
    key = tl.zeros([BC, BD], tl.float32)
    entropy = tl.zeros([BC], tl.float64)
    if HAS_OWN:
        log = tl.load(LOG + c, mask=c < n, other=-float("inf"))
        mean = tl.load(MEAN + at, mask=inside, other=0.0)
        if EVIDENCE:
            key = tl.load(KEY + at_key, mask=inside_key, other=0.0)
            entropy = tl.load(ENTROPY + c, mask=c < n, other=0.0)
    for i in range(0, others, BP):
        p, has, rows, there = place_rows(i, others, n, step, c, BP)
        part = tl.load(THEIRS + rows, mask=there, other=-float("inf"))
        values = load_matrices(THEIRS32, p, has, c, e, 2 * n, n, step, E)
        top = tl.maximum(log, tl.max(part, 0))
        old = weigh_part(log, top)
        new = weigh_part(part, tl.broadcast_to(top[None, :], [BP, BC]))
        total = old + tl.sum(new, 0)
        inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
        bits = tl.where(total > 0.0, tl.log2(total.to(tl.float64)) * 0.6931471805599453094, 0.0)
        both = tl.where(total > 0.0, top + bits, -float("inf"))
        mean = (mean * old[:, None] + tl.sum(values * new[:, :, None], 0)) * inverse[:, None]
        if EVIDENCE:
            keys = load_matrices(THEIRS32, p, has, c, d, (2 + E) * n, n, step, D)
            key = (key * old[:, None] + tl.sum(keys * new[:, :, None], 0)) * inverse[:, None]
            parts = tl.load(THEIRS + rows + n + n * (D + E) // 2, mask=there, other=0.0)
            # The chain rule of entropy, whose terms are all >= 0.
            entropy = old * (entropy - log_weight(log, both))
            entropy += tl.sum(new * (parts - log_weight(part, tl.broadcast_to(both[None, :], [BP, BC]))), 0)
            entropy = entropy * inverse
        log = both
    tl.store(LOG_OUT + c, log, mask=c < n)
    tl.store(MEAN_OUT + at, mean, mask=inside)
    if EVIDENCE:
        tl.store(KEY_OUT + at_key, key, mask=inside_key)
        tl.store(ENTROPY_OUT + c, entropy, mask=c < n)


@triton.jit(do_not_specialize=COUNTS)
def give_states_kernel(
    LOG, MEAN, KEY, ENTROPY, THEIRS, THEIRS32, DMEAN, PULL, DKEY, DENTROPY, G_LOG, G_MEAN, G_KEY, G_ENTROPY,
    n, others, step,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, EVIDENCE: tl.constexpr,
):  # fmt: skip
    """The gradients of the states of other ranks, a program for BC channels of one, from what is asked of the merged
    one (L, S): dS and r, or dS, dK and dH.

    With w = e^(L_r - L): dS_r = w dS, and dL_r = w (rowsum(S_r dS) - r)."""
    blocks = (n + BC - 1) // BC
    p = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    e = tl.arange(0, BE)
    at = c[:, None] * E + e[None, :]
    inside = (c < n)[:, None] & (e < E)[None, :]
    part = tl.load(THEIRS + p * step + c, mask=c < n, other=-float("inf"))
    log = tl.load(LOG + c, mask=c < n, other=-float("inf"))
    share = weigh_part(part, log)
    values = tl.load(THEIRS32 + p * 2 * step + 2 * n + at, mask=inside, other=0.0)
    dmean = tl.load(DMEAN + at, mask=inside, other=0.0)
    given = dmean * share[:, None]
    # Of what is given as it is rounded, so that the other side can take it off again.
    grad = tl.sum(values.to(tl.float64) * given.to(tl.float64), 1)
    if EVIDENCE:
        d = tl.arange(0, BD)
        at_key = c[:, None] * D + d[None, :]
        inside_key = (c < n)[:, None] & (d < D)[None, :]
        keys = tl.load(THEIRS32 + p * 2 * step + (2 + E) * n + at_key, mask=inside_key, other=0.0)
        entropies = tl.load(THEIRS + p * step + n + n * (D + E) // 2 + c, mask=c < n, other=0.0)
        dkey = tl.load(DKEY + at_key, mask=inside_key, other=0.0)
        dentropy = tl.load(DENTROPY + c, mask=c < n, other=0.0).to(tl.float64)
        mean = tl.load(MEAN + at, mask=inside, other=0.0)
        key = tl.load(KEY + at_key, mask=inside_key, other=0.0)
        pull = tl.sum(mean.to(tl.float64) * dmean.to(tl.float64), 1)
        pull += tl.sum(key.to(tl.float64) * dkey.to(tl.float64), 1)
        pull += tl.load(ENTROPY + c, mask=c < n, other=0.0) * dentropy
        given_key = dkey * share[:, None]
        grad += tl.sum(keys.to(tl.float64) * given_key.to(tl.float64), 1)
        grad += share * (entropies - log_weight(part, log)) * dentropy
        tl.store(G_KEY + p * n * D + at_key, given_key, mask=inside_key)
        tl.store(G_ENTROPY + p * n + c, share * dentropy, mask=c < n)
    else:
        pull = tl.load(PULL + c, mask=c < n, other=0.0).to(tl.float64)
    tl.store(G_LOG + p * n + c, grad - share * pull, mask=c < n)
    tl.store(G_MEAN + p * n * E + at, given, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def take_states_kernel(
    LOG, MEAN, LOG_OWN, MEAN_OWN, THEIRS, THEIRS32, DMEAN, PULL, DKEY, DENTROPY,
    G_LOG, G_MEAN, G_KEY, G_ENTROPY, PULL_OUT, n, others, step,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    HAS_OWN: tl.constexpr, EVIDENCE: tl.constexpr,
):  # fmt: skip
    """What other ranks give back of this one's state (L_own, S_own), as asked of the larger one (L, S) that it is part
    of and that the keys' backward goes by: dS and r with HAS_OWN, which adds what the queries here ask; else the
    gradients of S and L. With the evidence read dS, dK and dH, and no gradient of L, which it does not read."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    e = tl.arange(0, BE)
    d = tl.arange(0, BD)
    at = c[:, None] * E + e[None, :]
    inside = (c < n)[:, None] & (e < E)[None, :]
    at_key = c[:, None] * D + d[None, :]
    inside_key = (c < n)[:, None] & (d < D)[None, :]
    log = tl.load(LOG + c, mask=c < n, other=-float("inf"))
    own = tl.load(LOG_OWN + c, mask=c < n, other=-float("inf"))
    mean_own = tl.load(MEAN_OWN + at, mask=inside, other=0.0).to(tl.float64)
    share = weigh_part(own, log)
    inverse = tl.where(share > SMALLEST, 1.0 / share, 0.0)
    dmean = tl.zeros([BC, BE], tl.float32)
    pull = tl.zeros([BC], tl.float64)
    dkey = tl.zeros([BC, BD], tl.float32)
    dentropy = tl.zeros([BC], tl.float64)
    for i in range(0, others, BP):
        p, has, rows, there = place_rows(i, others, n, step, c, BP)
        given = load_matrices(THEIRS32, p, has, c, e, 2 * n, n, step, E)
        dmean += tl.sum(given, 0)
        if EVIDENCE:
            dkey += tl.sum(load_matrices(THEIRS32, p, has, c, d, (2 + E) * n, n, step, D), 0)
            dentropy += tl.sum(tl.load(THEIRS + rows + n + n * (D + E) // 2, mask=there, other=0.0), 0)
        else:
            pulled = tl.sum(given.to(tl.float64) * mean_own[None, :, :], 2)
            pull += tl.sum(pulled - tl.load(THEIRS + rows, mask=there, other=0.0), 0)
    dmean = dmean * inverse[:, None]
    pull = pull * inverse
    if HAS_OWN:
        dmean += tl.load(DMEAN + at, mask=inside, other=0.0)
    tl.store(G_MEAN + at, dmean, mask=inside)
    if EVIDENCE:
        dkey = dkey * inverse[:, None] + tl.load(DKEY + at_key, mask=inside_key, other=0.0)
        dentropy = dentropy * inverse + tl.load(DENTROPY + c, mask=c < n, other=0.0)
        tl.store(G_KEY + at_key, dkey, mask=inside_key)
        tl.store(G_ENTROPY + c, dentropy, mask=c < n)
        tl.store(G_LOG + c, tl.zeros([BC], tl.float64), mask=c < n)
    elif HAS_OWN:
        pull += tl.load(PULL + c, mask=c < n, other=0.0).to(tl.float64)
        tl.store(PULL_OUT + c, pull.to(tl.float32), mask=c < n)
    else:
        mean = tl.load(MEAN + at, mask=inside, other=0.0).to(tl.float64)
        tl.store(G_LOG + c, tl.sum(mean * dmean.to(tl.float64), 1) - pull, mask=c < n)
