"""Count, sum and sum of squares of queries and keys, read once, and the alpha and beta of eq. (10) from them.

A program takes some rows of one sample and key head, with all query heads that share it. Every lane of its tile keeps
count, sum and squares of what it sees less the first of it, so a large common offset costs no digits; lanes, and then
programs, are merged by Chan's formula, in an order that shapes alone decide.

Packed sequences need no table, and the host need not know their lengths: with splits of `chunk` rows, sequence i owns
the slots from cu[i] // chunk + i up to cu[i + 1] // chunk + i + 1, which are enough for its rows and nobody else's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.common import PAPER_A, PAPER_B, SIGMA_FLOOR

TWICE_A, OFFSET, FLOOR = tl.constexpr(2 * PAPER_A), tl.constexpr(PAPER_B), tl.constexpr(SIGMA_FLOOR**2)
LANE = 16  # elements of a tile for each thread
STAGES = tl.constexpr(4)

# Numbers that vary with the length are not specialised: a new length must not compile anew.


@triton.jit
def find_owner(CU, slot, chunk, sequences):
    """The sequence that owns a slot: the last one whose first slot is not behind it."""
    low = tl.full((), 0, tl.int32)
    high = low + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        behind = tl.load(CU + middle).to(tl.int64) // chunk + middle > slot
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    return low


@triton.jit
def load_tile(
    X, MASK, x_n, x_d, m_n, begin, last, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Rows from `begin` on in float32, zeros where nothing counts, and which rows do. FULL: all of them."""
    rows = begin + tl.arange(0, ROWS)
    columns = tl.arange(0, COLS)
    place = X + rows[:, None] * x_n + columns[None, :].to(tl.int64) * x_d
    counts = rows < last
    if FULL:
        x = tl.load(place) if D == COLS else tl.load(place, mask=(columns < D)[None, :], other=0.0)
    else:
        if MASK is not None:
            counts = counts & (tl.load(MASK + rows * m_n, mask=counts, other=0) != 0)
        x = tl.load(place, mask=counts[:, None] & (columns < D)[None, :], other=0.0)
    return x.to(tl.float32), counts


@triton.jit
def add_tile(x, counts, n, pivot, sums, squares):
    """The sums with a tile not all of whose rows need count."""
    pivot = tl.where((counts & (n == 0.0))[:, None], x, pivot)
    off = tl.where(counts[:, None], x - pivot, 0.0)
    return n + counts.to(tl.float32), pivot, sums + off, squares + off * off


@triton.jit
def measure_spread(
    X, MASK, x_g, x_n, x_d, m_n, first, last,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """(count, mean, squares around it) of the rows from first to last of G heads, in float64."""
    n = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    pivot = tl.zeros([ROWS, COLS], tl.float32)  # what counts first of each lane
    if MASK is None:
        pivot, _ = load_tile(X, None, x_n, x_d, m_n, first, last, D, ROWS, COLS, False)
    length = tl.maximum(last - first, 0).to(tl.int32)
    full = length // ROWS
    for g in range(G):
        at = X + g * x_g
        # Stages: further tiles are on their way while one is added. Nothing else hides the latency of a pure reduction.
        if MASK is None:
            for t in tl.range(0, full, num_stages=STAGES):
                x, _ = load_tile(at, None, x_n, x_d, m_n, first + t * ROWS, last, D, ROWS, COLS, True)
                off = x - pivot
                sums += off
                squares += off * off
            n += full.to(tl.float32)
            if full * ROWS < length:
                x, counts = load_tile(at, None, x_n, x_d, m_n, first + full * ROWS, last, D, ROWS, COLS, False)
                n, pivot, sums, squares = add_tile(x, counts, n, pivot, sums, squares)
        else:
            for t in tl.range(0, (length + ROWS - 1) // ROWS, num_stages=STAGES):
                x, counts = load_tile(at, MASK, x_n, x_d, m_n, first + t * ROWS, last, D, ROWS, COLS, False)
                n, pivot, sums, squares = add_tile(x, counts, n, pivot, sums, squares)
    # The pivot is one of the values, so this loses no more digits than a lane has values.
    step = sums * tl.div_rn(1.0, tl.maximum(n, 1.0))[:, None]
    mean = pivot + step
    squares = squares - sums * step
    # Around a centre in float32 that is almost the mean, what is summed is small; its rest is corrected in float64.
    count = tl.sum(n.to(tl.float64), 0) * D
    centre = tl.sum(mean * n[:, None]) / tl.maximum(count, 1.0).to(tl.float32)
    inside = (n > 0.0)[:, None] & (tl.arange(0, COLS) < D)[None, :]
    off = tl.where(inside, mean - centre, 0.0)
    weighted = off * n[:, None]
    rest = tl.sum(weighted).to(tl.float64) / tl.maximum(count, 1.0)
    around = tl.sum(squares + weighted * off).to(tl.float64) - rest * rest * count
    return count, centre.to(tl.float64) + rest, tl.where(around < 0.0, 0.0, around)


@triton.jit
def measure_split(
    X, MASK, CU, p, x_b, x_h, x_n, x_d, m_b, m_n, length, chunk, splits, samples, H,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`measure_spread` of split p: in order of sample, head, split, or of head, slot where packed."""
    split = p % splits
    if CU is not None:
        row = 0
        h = (p // splits).to(tl.int64)
        i = find_owner(CU, split, chunk, samples)
        start = tl.load(CU + i).to(tl.int64)
        first = start + (split - start // chunk - i) * chunk
        last = tl.minimum(first + chunk, tl.load(CU + i + 1).to(tl.int64))
    else:
        row = (p // splits // H).to(tl.int64)
        h = (p // splits % H).to(tl.int64)
        first = split.to(tl.int64) * chunk
        last = first + chunk
    first = tl.maximum(first, 0)  # offsets on a device are not checked
    last = tl.minimum(last, length)
    mask = MASK
    if MASK is not None:
        mask = MASK + row * m_b
    return measure_spread(X + row * x_b + h * G * x_h, mask, x_h, x_n, x_d, m_n, first, last, G, D, ROWS, COLS)


@triton.jit
def measure_sample(
    X, MASK, CU, b, h, x_b, x_h, x_n, x_d, m_b, m_n, length,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`measure_spread` of all rows of sample b."""
    first = tl.full((), 0, tl.int64)
    last = first + length
    mask = MASK
    if CU is not None:
        first = tl.maximum(tl.load(CU + b).to(tl.int64), 0)
        last = tl.minimum(tl.load(CU + b + 1).to(tl.int64), last)
        at = X + h * G * x_h
    else:
        at = X + b * x_b + h * G * x_h
        if MASK is not None:
            mask = MASK + b * m_b
    return measure_spread(at, mask, x_h, x_n, x_d, m_n, first, last, G, D, ROWS, COLS)


@triton.jit
def merge_splits(PARTS, CU, b, h, offset, programs, chunk, splits, H, SPLITS: tl.constexpr):
    """(count, mean, squares around it) of sample b and head h from those of its splits."""
    if CU is not None:
        # Unchecked offsets must not lead out of the buffer.
        start = tl.load(CU + b).to(tl.int64) // chunk + b
        stop = tl.load(CU + b + 1).to(tl.int64) // chunk + b + 1
        begin = h * splits + tl.maximum(start, 0)
        end = h * splits + tl.minimum(stop, splits)
    else:
        begin = (b * H + h) * splits
        end = begin + splits
    count = tl.full((), 0.0, tl.float64)
    mean = tl.full((), 0.0, tl.float64)
    squares = tl.full((), 0.0, tl.float64)
    for i in range(begin, end, SPLITS):
        place = i + tl.arange(0, SPLITS)
        inside = place < end
        at = PARTS + offset + place
        n = tl.load(at, mask=inside, other=0.0)
        means = tl.load(at + programs, mask=inside, other=0.0)
        around = tl.load(at + 2 * programs, mask=inside, other=0.0)
        more = tl.sum(n, 0)
        centre = tl.sum(n * means, 0) / tl.maximum(more, 1.0)
        off = means - centre
        step = centre - mean
        share = more / tl.maximum(count + more, 1.0)
        squares += tl.sum(around + n * off * off, 0) + step * step * count * share
        mean += step * share
        count += more
    return count, mean, squares


@triton.jit
def store_sums(OUT, cell, cells, count, mean, squares):
    """As `lln.matching.moments.moments` gives them: squares around 0."""
    tl.store(OUT + cell, count)
    tl.store(OUT + cells + cell, count * mean)
    tl.store(OUT + 2 * cells + cell, squares + count * mean * mean)


@triton.jit
def match_variances(variance_q, variance_k, FACTOR: tl.constexpr):
    """(alpha, beta) by eq. (10), in float32. Constants in float64 by tl.full: bare ones would be float32."""
    floor = tl.full((), FLOOR, tl.float64)
    q = tl.sqrt(tl.where(variance_q < floor, floor, variance_q))  # not tl.maximum: a NaN is to be seen
    k = tl.sqrt(tl.where(variance_k < floor, floor, variance_k))
    t = tl.full((), FACTOR, tl.float64) * ((q * k) * (q * k))
    half = tl.sqrt((t - tl.full((), OFFSET, tl.float64)) / tl.full((), TWICE_A, tl.float64))
    return (half / q).to(tl.float32), (half / k).to(tl.float32)


@triton.jit
def store_match(ALPHA, BETA, cell, variance_q, variance_k, FACTOR: tl.constexpr, G: tl.constexpr):
    """alpha of G query heads, and beta."""
    alpha, beta = match_variances(variance_q, variance_k, FACTOR)
    for g in range(G):
        tl.store(ALPHA + cell * G + g, alpha)
    tl.store(BETA + cell, beta)


@triton.jit
def finish(
    OUT, ALPHA, BETA, cell, cells, count_q, mean_q, squares_q, count_k, mean_k, squares_k,
    FACTOR: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    if FACTOR is None:
        store_sums(OUT, cell, cells, count_q, mean_q, squares_q)
        store_sums(OUT + 3 * cells, cell, cells, count_k, mean_k, squares_k)
    else:
        variance_q = squares_q / tl.maximum(count_q - 1.0, 1.0)
        variance_k = squares_k / tl.maximum(count_k - 1.0, 1.0)
        store_match(ALPHA, BETA, cell, variance_q, variance_k, FACTOR, G)


@triton.jit(do_not_specialize=["mq_b", "mk_b", "length_q", "length_k", "H"])
def sample_kernel(
    Q, K, MASK_Q, MASK_K, CU_Q, CU_K, OUT, ALPHA, BETA,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, mq_b, mq_n, mk_b, mk_n, length_q, length_k, H,
    FACTOR: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Short inputs, or many: a program for each sample and key head does it all."""
    cell = tl.program_id(0).to(tl.int64)
    b = cell // H
    h = cell % H
    count_q, mean_q, squares_q = measure_sample(
        Q, MASK_Q, CU_Q, b, h, q_b, q_h, q_n, q_d, mq_b, mq_n, length_q, G, D, ROWS, COLS
    )
    count_k, mean_k, squares_k = measure_sample(
        K, MASK_K, CU_K, b, h, k_b, k_h, k_n, k_d, mk_b, mk_n, length_k, 1, D, ROWS, COLS
    )
    cells = tl.num_programs(0)
    finish(OUT, ALPHA, BETA, cell, cells, count_q, mean_q, squares_q, count_k, mean_k, squares_k, FACTOR, G)


@triton.jit(
    do_not_specialize=[
        "mq_b", "mk_b", "length_q", "length_k", "chunk_q", "chunk_k", "splits_q", "splits_k", "B", "H", "programs_q",
    ]
)  # fmt: skip
def split_kernel(
    Q, K, MASK_Q, MASK_K, CU_Q, CU_K, PARTS,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, mq_b, mq_n, mk_b, mk_n, length_q, length_k,
    chunk_q, chunk_k, splits_q, splits_k, B, H, programs_q,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Long inputs: the first programs take splits of the queries, the others splits of the keys."""
    p = tl.program_id(0)
    if p < programs_q:
        count, mean, squares = measure_split(
            Q, MASK_Q, CU_Q, p, q_b, q_h, q_n, q_d, mq_b, mq_n, length_q, chunk_q, splits_q, B, H, G, D, ROWS, COLS
        )
    else:
        count, mean, squares = measure_split(
            K, MASK_K, CU_K, p - programs_q, k_b, k_h, k_n, k_d, mk_b, mk_n, length_k, chunk_k, splits_k, B, H,
            1, D, ROWS, COLS,
        )  # fmt: skip
    programs = tl.num_programs(0)
    tl.store(PARTS + p, count)
    tl.store(PARTS + programs + p, mean)
    tl.store(PARTS + 2 * programs.to(tl.int64) + p, squares)


@triton.jit(do_not_specialize=["chunk_q", "chunk_k", "splits_q", "splits_k", "H", "programs_q", "programs"])
def merge_kernel(
    PARTS, CU_Q, CU_K, OUT, ALPHA, BETA, chunk_q, chunk_k, splits_q, splits_k, H, programs_q, programs,
    FACTOR: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64)
    b = cell // H
    h = cell % H
    count_q, mean_q, squares_q = merge_splits(PARTS, CU_Q, b, h, 0, programs, chunk_q, splits_q, H, SPLITS)
    count_k, mean_k, squares_k = merge_splits(PARTS, CU_K, b, h, programs_q, programs, chunk_k, splits_k, H, SPLITS)
    cells = tl.num_programs(0)
    finish(OUT, ALPHA, BETA, cell, cells, count_q, mean_q, squares_q, count_k, mean_k, squares_k, FACTOR, G)


@triton.jit
def match_kernel(VARIANCE_Q, VARIANCE_K, ALPHA, BETA, FACTOR: tl.constexpr, G: tl.constexpr):
    """For running averages: [key heads] of variances to alpha and beta."""
    cell = tl.program_id(0).to(tl.int64)
    variance_q = tl.load(VARIANCE_Q + cell).to(tl.float64)
    variance_k = tl.load(VARIANCE_K + cell).to(tl.float64)
    store_match(ALPHA, BETA, cell, variance_q, variance_k, FACTOR, G)


@triton.jit
def settle_kernel(GIVEN_Q, GIVEN_K, ALPHA, BETA, count_q, count_k, LEARNED: tl.constexpr, BLOCK: tl.constexpr):
    """alpha and beta in float32 from what a module keeps, which where they are learned are their logarithms."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(GIVEN_Q + at, mask=at < count_q, other=0.0)
    b = tl.load(GIVEN_K + at, mask=at < count_k, other=0.0)
    if LEARNED:
        a, b = tl.exp(a.to(tl.float32)), tl.exp(b.to(tl.float32))
    tl.store(ALPHA + at, a.to(tl.float32), mask=at < count_q)
    tl.store(BETA + at, b.to(tl.float32), mask=at < count_k)
