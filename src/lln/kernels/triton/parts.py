"""Pieces that every GPU kernel uses: where a program works, how rows are read, exponents, softmax in a block, dropout.

A kernel's grid is one-dimensional: program = head * works + work. A *work* is a run of tiles of one sequence, and a
tile is the USED rows that a program handles at a time (BM of them, a power of two; the rest is padding). With blocks
(LLN+Diag) a tile holds whole blocks: tiles are laid over the slots of a sequence, which count from its first valid
token or go on where a state left off, so that tile 0 may begin before row 0.

Exponents are in base 2, the hardware's. WIDE (float32 inputs) carries a second word where one would round too much.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Arguments that vary with the length are not specialised: a new length must not compile anew.
LENGTHS = ["N", "total", "works", "splits", "tiles", "H", "mask_b"]


@triton.jit
def place(
    works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED: tl.constexpr, SHIFT: tl.constexpr, USED: tl.constexpr
):
    """-> (head, work, sequence, index of its first row in the data, its length, row where tile 0 begins, its first and
    its last tile + 1, slots of the open block before row 0)"""
    pid = tl.program_id(0)
    h = pid // works
    w = pid % works
    if PACKED:
        b = tl.load(OWNER + w).to(tl.int32)
        split = w - tl.load(BEGIN + b).to(tl.int32)
        first = tl.load(CU + b).to(tl.int64)
        n = (tl.load(CU + b + 1) - tl.load(CU + b)).to(tl.int32)
    else:
        b = w // splits
        split = w % splits
        first = tl.zeros([], tl.int64)
        n = N
    if SHIFT:
        start = tl.load(START + b).to(tl.int32)
        # Tile 0 begins at the last multiple of USED at or below `start`; division truncates towards zero.
        base = tl.where(start < 0, -((-start + USED - 1) // USED), 0) * USED
        origin = base - start
        opened = tl.maximum(start, 0)
    else:
        origin = 0
        opened = 0
    begin = split * tiles
    end = tl.minimum(begin + tiles, (n - origin + USED - 1) // USED)
    return h, w, b, first, n, origin, begin, end, opened


@triton.jit
def load_rows(X, base, rows, ok, stride_n, stride_d, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a [., ., length, dim] tensor, zeros where there is none. EVEN: all rows are there."""
    d = tl.arange(0, BD)
    at = X + base + rows[:, None] * stride_n + d[None, :] * stride_d
    if EVEN and D == BD:
        return tl.load(at)
    else:
        return tl.load(at, mask=ok[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(X, base, rows, ok, stride_n, stride_d, x, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    d = tl.arange(0, BD)
    at = X + base + rows[:, None] * stride_n + d[None, :] * stride_d
    if EVEN and D == BD:
        tl.store(at, x.to(X.dtype.element_ty))
    else:
        tl.store(at, x.to(X.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


@triton.jit
def load_matrix(X, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """A contiguous [D, E] matrix, filled up with zeros."""
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    at = X + d[:, None] * E + e[None, :]
    if D != BD or E != BE:
        return tl.load(at, mask=(d < D)[:, None] & (e < E)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_matrix(X, x, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    at = X + d[:, None] * E + e[None, :]
    if D != BD or E != BE:
        tl.store(at, x, mask=(d < D)[:, None] & (e < E)[None, :])
    else:
        tl.store(at, x)


@triton.jit
def load_factor(X, b, h, stride_b, stride_h, stride_d, D: tl.constexpr, BD: tl.constexpr, FLAT: tl.constexpr):
    """alpha, beta or a weight of one head, [1, BD] float32; FLAT, one number for all channels: [1, 1], which takes no
    registers. Strides are 0 where it is the same for all."""
    at = X + b.to(tl.int64) * stride_b + h * stride_h
    if FLAT:
        return tl.full([1, 1], 1.0, tl.float32) * tl.load(at)
    else:
        d = tl.arange(0, BD)[None, :]
        return tl.load(at + d * stride_d, mask=d < D, other=0.0)


@triton.jit
def split_factor(factor):
    """factor * log2(e) as a float32 and what it lost: a rounded factor would shift every exponent."""
    exact = factor.to(tl.float64) * 1.4426950408889634074
    high = exact.to(tl.float32)
    return high, (exact - high.to(tl.float64)).to(tl.float32)


@triton.jit
def scale_rows(x, factor, low, shift, WIDE: tl.constexpr):
    """factor * x + shift for x [BM, BD] and shift [BD]. WIDE: kept inside the finite numbers, as eager's exponents."""
    if WIDE:
        high = tl.broadcast_to(factor, x.shape)
        y = tl.fma(x, high, tl.broadcast_to(shift[None, :], x.shape)) + x * low
        return tl.minimum(tl.maximum(y, -1e38), tl.where(shift == -float("inf"), -float("inf"), 1e38)[None, :])
    else:
        return x * factor + shift[None, :]


@triton.jit
def softmax_rows(logits):
    """(weights, their sum, the largest logit) of each row, the weights relative to the largest."""
    top = tl.max(logits, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(logits - top[:, None])
    return p, tl.sum(p, 1), top


@triton.jit
def load_state(LOG, MEAN, index, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """(L relative to its largest channel in base 2, S) as queries read them; L = 0 where there is no key at all,
    -inf in channels that are padding."""
    d = tl.arange(0, BD)
    log = tl.load(LOG + index * D + d, mask=d < D, other=-float("inf"))
    top = tl.max(log, 0)
    # A softmax over channels does not see the difference, and small exponents round less.
    offset = ((log - top) * 1.4426950408889634074).to(tl.float32)
    offset = tl.where(top == -float("inf"), tl.where(d < D, 0.0, -float("inf")), offset)
    return offset, load_matrix(MEAN + index * D * E, D, E, BD, BE)


@triton.jit
def key_log(LOG, index, D: tl.constexpr, BD: tl.constexpr):
    """L in base 2 as a float32 and what it lost, finite where there is no key."""
    d = tl.arange(0, BD)
    log = tl.load(LOG + index * D + d, mask=d < D, other=0.0) * 1.4426950408889634074
    log = tl.where(log == -float("inf"), 0.0, log)
    high = log.to(tl.float32)
    # Of a huge L nothing is left to save.
    return high, tl.minimum(tl.maximum(log - high.to(tl.float64), -1.0), 1.0).to(tl.float32)


@triton.jit
def visible_keys(MASK, mask_base, rows, ok, mask_n, MASKED: tl.constexpr):
    if MASKED:
        return ok & (tl.load(MASK + mask_base + rows * mask_n, mask=ok, other=0) != 0)
    else:
        return ok


@triton.jit
def block_softmax(
    q, k, visible, scale, BM: tl.constexpr, BS: tl.constexpr, USED: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(weights, inverse of their sum) of softmax attention inside the blocks of a tile; 0 in rows without a key.
    EVEN: every key may be attended to. scale > 0."""
    r = tl.arange(0, BM)
    s = tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision=PRECISION)
    if not EVEN:
        s = tl.where(visible[None, :], s, -float("inf"))
    if BS < USED:
        s = tl.where((r // BS)[:, None] == (r // BS)[None, :], s, -float("inf"))
    if CAUSAL:
        s = tl.where(r[:, None] >= r[None, :], s, -float("inf"))
    top = tl.max(s, 1) * (scale * LOG2E)
    if not EVEN:
        top = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s * (scale * LOG2E) - top[:, None])
    total = tl.sum(p, 1)
    return p, tl.where(total > 0.0, 1.0 / total, 0.0)


@triton.jit
def block_output(
    q, k, v, visible, SEED, stream, rows, scale, dropout, BM: tl.constexpr, BS: tl.constexpr, USED: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The blocks' part of the output, without its weight."""
    p, inverse = block_softmax(q, k, visible, scale, BM, BS, USED, CAUSAL, EVEN, DOT, PRECISION)
    if DROPOUT:
        p = p * draw_kept(SEED, stream + 1, rows, tl.arange(0, BM), BM, dropout)
    return tl.dot(p.to(DOT), v.to(DOT), input_precision=PRECISION) * inverse[:, None]


@triton.jit
def block_products(
    g, v, WEIGHT, b, head, weight_b, weight_h, weight_e, E: tl.constexpr, BE: tl.constexpr, UNIFORM: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dO v^T, the weight of the block part), the weight being in the product unless it is UNIFORM, one a head."""
    weight = load_factor(WEIGHT, b, head, weight_b, weight_h, weight_e, E, BE, UNIFORM)
    if not UNIFORM:
        g = g * weight
    return tl.dot(g.to(DOT), tl.trans(v.to(DOT)), input_precision=PRECISION), weight


@triton.jit
def block_backward(
    q, k, dp, visible, WEIGHT, b, head, weight_b, weight_h, SEED, stream, rows, scale, dropout,
    BM: tl.constexpr, BS: tl.constexpr, USED: tl.constexpr, CAUSAL: tl.constexpr,
    UNIFORM: tl.constexpr, DROPOUT: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dscores, P after dropout) from dp = dO v^T. Both have a UNIFORM weight in them."""
    r = tl.arange(0, BM)
    p, inverse = block_softmax(q, k, visible, scale, BM, BS, USED, CAUSAL, EVEN, DOT, PRECISION)
    factor = inverse
    if UNIFORM:
        factor = inverse * tl.load(WEIGHT + b.to(tl.int64) * weight_b + head * weight_h)
    if DROPOUT:
        mask = draw_kept(SEED, stream + 1, rows, r, BM, dropout)
        dp = dp * mask
    own = tl.sum(p * dp, 1) * inverse
    p = p * factor[:, None]
    ds = (p * (dp - own[:, None]) * scale).to(DOT)
    if DROPOUT:
        p = p * mask
    return ds, p.to(DOT)


@triton.jit
def block_values(p, g, weight, UNIFORM: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The blocks' part of dv."""
    dv = tl.dot(tl.trans(p), g.to(DOT), input_precision=PRECISION)
    if UNIFORM:
        return dv
    else:
        return dv * weight


@triton.jit
def block_weight_gradient(p, v, g, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Of the weight, [BE], from P without it."""
    return tl.sum(tl.dot(p, v.to(DOT), input_precision=PRECISION) * g.to(tl.float32), 0)


@triton.jit
def draw_kept(SEED, stream, rows, columns, width: tl.constexpr, dropout):
    """The dropout mask, 0 or 1 / (1 - p), of (rows, columns); a function of the seed and the place alone.

    Philox makes two keys of the seed once, and a short mixer (the constants of Wellons' triple32) a number of each
    place: with Philox for every weight the kernels are twice as long and run out of registers."""
    first, second, _, _ = tl.randint4x(tl.load(SEED) + stream, tl.full((), 0, tl.uint32))
    x = (rows[:, None] * width + columns[None, :]).to(tl.uint32) ^ first
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ second) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = (x ^ (x >> 14)) >> 8  # 24 bits
    most = (tl.full((), 16777216.0, tl.float32) * dropout).to(tl.uint32)
    return tl.where(x >= most, 1.0 / tl.maximum(1.0 - dropout, 1e-30), 0.0)


@triton.jit
def hide_keys(x, visible, EVEN: tl.constexpr):
    """Exponents x [BM, BD] of keys, -inf where a key is hidden. EVEN: none is."""
    if EVEN:
        return x
    else:
        return tl.where(visible[:, None], x, -float("inf"))


@triton.jit
def make_identity(BD: tl.constexpr, DOT: tl.constexpr):
    """The matrix that `widen` multiplies by."""
    d = tl.arange(0, BD if BD <= 128 else 16)
    return (d[:, None] == d[None, :]).to(DOT)


@triton.jit
def widen(x, eye, BD: tl.constexpr, DOT: tl.constexpr):
    """x in float32. bfloat16 goes through the matrix unit, which has time to spare: the result is exact, and it comes
    out where the products that follow want it."""
    if DOT == tl.bfloat16 and BD <= 64:  # noqa: SIM300
        return tl.dot(x, eye)
    else:
        return x.to(tl.float32)
