"""Bidirectional attention of whole sequences: a program folds one and reads it at once.

Where there are many sequences none of them needs to be cut, and of a short one the second reading of keys and values
finds them in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.fold import fold_rows
from lln.kernels.triton.parts import LENGTHS, load_factor, place, relate_logs, split_factor, store_matrix
from lln.kernels.triton.read import read_rows


@triton.jit(do_not_specialize=LENGTHS)
def whole_kernel(
    Q, K, V, ALPHA, BETA, LLN_WEIGHT, BLOCK_WEIGHT, MASK, CU, OWNER, BEGIN, START, SEED, LOG, MEAN, OUT,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b, o_h, o_n, o_d,
    alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, mask_n,
    scale, dropout, N, works, splits, tiles, H,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, USED: tl.constexpr,
    BS: tl.constexpr, PACKED: tl.constexpr, SHIFT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr,
    EVEN_KEYS: tl.constexpr, UNIFORM: tl.constexpr, DROPOUT: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state [sequences, heads] and the output rows of each sequence and head, with as many heads of keys as of
    queries. EVEN_KEYS: EVEN of the tiles that are folded, which begin at row 0."""
    h, _work, b, first, n, origin, begin, end, _opened = place(
        works, splits, tiles, N, CU, OWNER, BEGIN, START, PACKED, SHIFT, USED
    )
    d = tl.arange(0, BD)
    row, head = b.to(tl.int64), h.to(tl.int64)
    k_base = row * k_b + head * k_h
    v_base = row * v_b + head * v_h
    mask_base = row * mask_b
    beta, beta_low = split_factor(tl.trans(load_factor(BETA, b, h, beta_b, beta_h, beta_d, D, BD, FLAT)))
    log, mean = fold_rows(
        K, V, MASK, beta, beta_low, k_base, v_base, mask_base, k_n, k_d, v_n, v_d, mask_n,
        n, 0, 0, (n + USED - 1) // USED,
        D, E, BD, BE, BM, USED, MASKED, EVEN_KEYS, WIDE, DOT, PRECISION,
    )  # fmt: skip
    index = row * H + h
    tl.store(LOG + index * D + d, log, mask=d < D)
    store_matrix(MEAN + index * D * E, mean, D, E, BD, BE)
    offset = relate_logs(tl.where(d < D, log, -float("inf")), D, BD)
    alpha, low = split_factor(load_factor(ALPHA, b, h, alpha_b, alpha_h, alpha_d, D, BD, FLAT))
    block_weight = alpha
    if BS:
        mean = mean * load_factor(LLN_WEIGHT, b, h, lln_b, lln_h, lln_e, E, BE, UNIFORM)
        block_weight = load_factor(BLOCK_WEIGHT, b, h, block_b, block_h, block_e, E, BE, UNIFORM)
    read_rows(
        Q, K, V, MASK, SEED, OUT, alpha, low, offset, mean.to(DOT), block_weight, (b * H + h) * 2,
        row * q_b + head * q_h, k_base, v_base, mask_base, row * o_b + head * o_h,
        q_n, q_d, k_n, k_d, v_n, v_d, mask_n, o_n, o_d,
        scale, dropout, n, origin, begin, end,
        D, E, BD, BE, BM, USED, BS, MASKED, EVEN, DROPOUT, WIDE, DOT, PRECISION,
    )  # fmt: skip
