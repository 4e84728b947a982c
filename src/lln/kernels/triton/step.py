"""One token after a state, the step of decoding, as one kernel: see `lln.kernels.step` for what it computes.

A program takes a key head of a sequence with the query heads that share it. State in, state out, where they may be the
same memory: `count` and `block_mask` belong to all heads of a sequence, so in place the last program
to have read them writes them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.kernels.triton import plan
from lln.kernels.triton.forward import read_factor_strides
from lln.kernels.triton.library import define
from lln.kernels.triton.moments_kernels import match_variances
from lln.kernels.triton.tape import Recording, replay, signature

LIMIT = tl.constexpr(float(torch.finfo(torch.float32).max) / 8)  # of exponents, as in `common.exponents`
GIVEN, LOGARITHM, VARIANCE = 0, 1, 2  # what alpha and beta are made from
FROM_LOGARITHM, FROM_VARIANCE = tl.constexpr(LOGARITHM), tl.constexpr(VARIANCE)  # as kernels read globals
LARGEST = 2**13  # elements of a block's keys or values that a program can hold


@triton.jit
def load_factors(
    ALPHA, BETA, alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, b, h, rows, d, in_q, in_d,
    KIND: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """(alpha of the query heads, beta), in float32, from what `KIND` says is stored."""
    if KIND == FROM_VARIANCE:
        variance_q = tl.load(ALPHA + h).to(tl.float64)
        variance_k = tl.load(BETA + h).to(tl.float64)
        alpha, beta = match_variances(variance_q, variance_k, FACTOR)
    else:
        beta = tl.load(BETA + b * beta_b + h * beta_h + d * beta_d, mask=in_d, other=0.0).to(tl.float32)
        alpha = tl.load(ALPHA + b * alpha_b + rows[:, None] * alpha_h + d[None, :] * alpha_d, mask=in_q, other=0.0)
        alpha = alpha.to(tl.float32)
        if KIND == FROM_LOGARITHM:
            alpha, beta = tl.exp(alpha), tl.exp(beta)
    return alpha, beta


@triton.jit
def add_exponents(log, x):
    """(L' = logaddexp(L, x), the share of x in it, the channels where both are empty), of float64 [BD]."""
    top = tl.maximum(log, x)
    none = top == -float("inf")
    less = tl.exp(tl.where(none, tl.zeros_like(top), tl.minimum(log, x) - top))  # the smaller beside the larger
    new = tl.where(none, top, top + tl.log(1.0 + less))
    share = tl.where(x >= log, tl.full(top.shape, 1.0, tl.float64), less) / (1.0 + less)
    return new, tl.where(none, tl.zeros_like(share), share).to(tl.float32), none


@triton.jit
def weigh_channels(x, log, in_d):
    """softmax_c(x + L) [BG, BD], of L relative to its largest channel."""
    most = tl.max(log, 0)
    alive = most > -float("inf")
    offset = tl.where(alive, log - tl.where(alive, most, tl.zeros_like(most)), tl.zeros_like(log)).to(tl.float32)
    logits = tl.minimum(tl.maximum(x, -LIMIT), LIMIT) + offset[None, :]
    logits = tl.where(in_d[None, :], logits, -float("inf"))
    a = tl.exp(logits - tl.max(logits, 1)[:, None])
    return a / tl.sum(a, 1)[:, None]


@triton.jit
def weigh_rows(q, keys, seen, PRECISION: tl.constexpr):
    """softmax_j(q . k_j) [BG, BB] over the rows of the open block that are seen; zeros where none is."""
    scores = tl.dot(q, tl.trans(keys.to(tl.float32)), input_precision=PRECISION)
    scores = tl.where(seen[None, :], scores, -float("inf"))
    highest = tl.max(scores, 1)
    weights = tl.exp(scores - tl.where(highest == -float("inf"), 0.0, highest)[:, None])
    return weights / tl.maximum(tl.sum(weights, 1), 1.0)[:, None]


@triton.jit
def store_sequence(
    TICKET, NEW_COUNT, NEW_MASK, b, count, visible, at, stays, H,
    BS: tl.constexpr, MASKED: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """What belongs to all heads of a sequence. In place its last program to have read it writes it."""
    after = count + 1
    if MASKED:  # tokens before the first valid one are in no block
        after = tl.where((count > 0) | visible, after, tl.zeros_like(after))
    last = True
    if IN_PLACE:
        tl.debug_barrier()
        last = tl.atomic_add(TICKET + b, 1) == H - 1
    if last:
        tl.store(NEW_COUNT + b, after)
        tl.store(NEW_MASK + b * BS + at, stays, mask=at < BS)
        if IN_PLACE:
            tl.store(TICKET + b, 0)


@triton.jit
def load_columns(
    V, MEAN, OPEN_V, LLN, BLOCK, v_b, v_h, v_d, lln_b, lln_h, lln_e, block_b, block_h, block_e,
    b, h, cell, rows, d, e, at, in_q, D: tl.constexpr, E: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Of the values' channels e: the token's, the state's, the open block's and the weights of the two parts."""
    in_e = e < E
    v = tl.load(V + b * v_b + h * v_h + e * v_d, mask=in_e, other=0.0)
    mean = tl.load(MEAN + (cell * D + d[:, None]) * E + e[None, :], mask=(d < D)[:, None] & in_e[None, :], other=0.0)
    values, w, u = mean, mean, mean
    if BS > 0:
        near, in_o = (at < BS)[:, None] & in_e[None, :], in_q & in_e[None, :]
        values = tl.load(OPEN_V + (cell * BS + at[:, None]) * E + e[None, :], mask=near, other=0.0)
        w = tl.load(LLN + b * lln_b + rows[:, None] * lln_h + e[None, :] * lln_e, mask=in_o, other=0.0)
        u = tl.load(BLOCK + b * block_b + rows[:, None] * block_h + e[None, :] * block_e, mask=in_o, other=0.0)
    return v, mean, values, w, u


@triton.jit(do_not_specialize=["H", "mask_b"])
def step_kernel(
    Q, K, V, ALPHA, BETA, LLN, BLOCK, MASK, LOG, MEAN, COUNT, OPEN_K, OPEN_V, OPEN_MASK, TICKET, LENGTH,
    OUT, NEW_LOG, NEW_MEAN, NEW_COUNT, NEW_K, NEW_V, NEW_MASK,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d, alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d,
    lln_b, lln_h, lln_e, block_b, block_h, block_e, mask_b, scale, H,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BS: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, FACTOR: tl.constexpr,
    IN_PLACE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The new state of one key head, and what its G query heads read from it and from their open block. In new memory
    all rows of the block are written; in place the new one alone, or zeros over all where it fills the block."""
    p = tl.program_id(0)
    b, h = (p // H).to(tl.int64), (p % H).to(tl.int64)
    cell = b * H + h
    d, g, at, columns = tl.arange(0, BD), tl.arange(0, BG), tl.arange(0, BB), tl.arange(0, BE)
    in_d, rows = d < D, h * G + g
    in_q = (g < G)[:, None]
    # All that is read is asked for before anything is computed: there are few programs, and each waits by itself.
    visible = True
    if MASKED:
        visible = tl.load(MASK + b * mask_b) != 0
    k = tl.load(K + b * k_b + h * k_h + d * k_d, mask=in_d, other=0.0)
    q = tl.load(Q + b * q_b + rows[:, None] * q_h + d[None, :] * q_d, mask=in_q & in_d[None, :], other=0.0)
    log = tl.load(LOG + cell * D + d, mask=in_d, other=-float("inf"))
    if BS > 0:
        count = tl.load(COUNT + b)
        held = tl.load(OPEN_MASK + b * BS + at, mask=at < BS, other=0) != 0
        keys = tl.load(OPEN_K + (cell * BS + at[:, None]) * D + d[None, :], mask=(at < BS)[:, None] & in_d[None, :],
                       other=0.0)  # fmt: skip
    v, mean, values, w, u = load_columns(
        V, MEAN, OPEN_V, LLN, BLOCK, v_b, v_h, v_d, lln_b, lln_h, lln_e, block_b, block_h, block_e,
        b, h, cell, rows, d, columns, at, in_q, D, E, BS,
    )  # fmt: skip
    alpha, beta = load_factors(
        ALPHA, BETA, alpha_b, alpha_h, alpha_d, beta_b, beta_h, beta_d, b, h, rows, d, in_q & in_d[None, :], in_d,
        KIND, FACTOR,
    )  # fmt: skip
    q = q.to(tl.float32)
    x = tl.minimum(tl.maximum(k.to(tl.float32) * beta, -LIMIT), LIMIT).to(tl.float64)
    if MASKED:
        x = tl.where(visible, x, -float("inf"))
    x = tl.where(in_d, x, -float("inf"))
    new, share, none = add_exponents(log, x)
    a = weigh_channels(q * alpha, new, in_d)
    if BS > 0:
        slot = (count % BS).to(tl.int32)
        here = at == slot
        seen = held & (at < slot)
        seen = seen | (here & visible)
        keys = tl.where(here[:, None], k[None, :], keys)
        weights = weigh_rows(q * scale, keys, seen, PRECISION)
        stays = seen & (slot + 1 < BS)  # a full block is open no longer
        written = at < BS
        if IN_PLACE:  # the others are there already, and those that are hidden are zero
            written = written & (here | ((slot + 1) * (at - at + 1) == BS))
    for begin in tl.static_range(0, E, BE):
        e = begin + columns
        if begin > 0:
            v, mean, values, w, u = load_columns(
                V, MEAN, OPEN_V, LLN, BLOCK, v_b, v_h, v_d, lln_b, lln_h, lln_e, block_b, block_h, block_e,
                b, h, cell, rows, d, e, at, in_q, D, E, BS,
            )  # fmt: skip
        mean = mean + share[:, None] * (v.to(tl.float32)[None, :] - mean)
        mean = tl.where(none[:, None], 0.0, mean)
        out = tl.dot(a, mean, input_precision=PRECISION)
        if BS > 0:
            values = tl.where(here[:, None], v[None, :], values)
            out = out * w + tl.dot(weights, values.to(tl.float32), input_precision=PRECISION) * u
        tl.debug_barrier()  # what is written over has been read by all
        inside = in_d[:, None] & (e < E)[None, :]
        tl.store(NEW_MEAN + (cell * D + d[:, None]) * E + e[None, :], mean, mask=inside)
        if BS > 0:
            tl.store(NEW_V + (cell * BS + at[:, None]) * E + e[None, :], tl.where(stays[:, None], values, 0.0),
                     mask=written[:, None] & (e < E)[None, :])  # fmt: skip
        in_o = in_q & (e < E)[None, :]
        tl.store(OUT + (b * H * G + rows[:, None]) * E + e[None, :], out.to(OUT.dtype.element_ty), mask=in_o)
    tl.store(NEW_LOG + cell * D + d, new, mask=in_d)
    if LENGTH is not None:
        tl.store(LENGTH, tl.load(LENGTH) + 1, mask=p == 0)
    if BS > 0:
        tl.store(NEW_K + (cell * BS + at[:, None]) * D + d[None, :], tl.where(stays[:, None], keys, 0.0),
                 mask=written[:, None] & in_d[None, :])  # fmt: skip
        store_sequence(TICKET, NEW_COUNT, NEW_MASK, b, count, visible, at, stays, H, BS, MASKED, IN_PLACE)


class Step(NamedTuple):
    """What a step is given. alpha and beta: as a call has them, or by `kind` what they come from; state: log_sum,
    mean_value and, with blocks, count, block_key, block_value, block_mask."""

    query: Tensor  # [B, Hq, 1, D]
    key: Tensor  # [B, H, 1, D]
    value: Tensor  # [B, H, 1, E]
    alpha: Tensor
    beta: Tensor
    lln_weight: Tensor | None
    block_weight: Tensor | None
    key_mask: Tensor | None  # [B, 1] bool
    log_sum: Tensor
    mean_value: Tensor
    tokens: Tensor | None  # `count` of the state
    block_key: Tensor | None
    block_value: Tensor | None
    block_mask: Tensor | None


TENSORS = ", ".join(
    f"Tensor{'' if name in ('query', 'key', 'value', 'alpha', 'beta', 'log_sum', 'mean_value') else '?'} {name}"
    for name in Step._fields
)
MUTATED = dict(zip(Step._fields[8:], "abcdef", strict=True))


def can_step(query: Tensor, value: Tensor, block_size: int | None) -> bool:
    """Whether one program can hold what it needs."""
    dim, width = plan.pad_dim(query.shape[-1]), plan.pad_dim(value.shape[-1])
    rows = 0 if block_size is None else triton.next_power_of_2(block_size)
    return dim <= 256 and width <= 256 and rows * max(dim, min(width, 64)) <= LARGEST


def take_step(given: Step, scale: float, kind: int = GIVEN, factor: float = 1.0) -> tuple[Tensor, ...]:
    """(out [B, Hq, 1, E], the new state), in new memory."""
    state = given[8:]
    key = ("step", given.query.device, scale, kind, factor, signature(given))

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        new = [None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in state]
        out = allocate_out(given)
        launch(given, out, new, None, None, scale, kind, factor, recording)
        return [out, *(t for t in new if t is not None)]

    return tuple(replay(key, given, launches))


def take_step_in_place(
    given: Step, ticket: Tensor, length: Tensor | None, scale: float, kind: int, factor: float
) -> Tensor:
    """out [B, Hq, 1, E]; the state is written over. ticket: [B] int32, zeros before and after. length: [] int64, of
    which there is one more afterwards."""

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        out = allocate_out(given)
        launch(given, out, given[8:], ticket, length, scale, kind, factor, recording)
        return (out,)

    return replay(make_in_place_key(given, length, scale, kind, factor), (*given, ticket, length), launches)[0]


def make_in_place_key(given: Step, length: Tensor | None, scale: float, kind: int, factor: float) -> Hashable:
    return "step in place", given.query.device, length is None, scale, kind, factor, signature(given)


def allocate_out(given: Step) -> Tensor:
    """Room for the output, [B, Hq, 1, E]."""
    batch, heads = given.query.shape[:2]
    return given.query.new_empty(batch, heads, 1, given.value.shape[-1])


def choose_warps(programs: int, elements: int, device: torch.device) -> int:
    """Of programs that hold so many elements of a state: where there are few, each is alone and quicker if wide."""
    return 8 if elements > 4096 or programs <= 2 * plan.count_multiprocessors(device) else 4


def launch(
    given: Step, out: Tensor, new: Sequence[Tensor | None], ticket: Tensor | None, length: Tensor | None, scale: float,
    kind: int, factor: float, recording: Recording | None,
) -> None:  # fmt: skip
    batch, heads, dim = given.key.shape[0], given.key.shape[1], given.key.shape[3]
    width, group = given.value.shape[3], given.query.shape[1] // heads
    block = 0 if given.block_key is None else given.block_key.shape[2]
    strides = [t.stride(i) for t in (given.query, given.key, given.value) for i in (0, 1, 3)]
    factors = [0] * 6 if kind == VARIANCE else [*read_factor_strides(given.alpha), *read_factor_strides(given.beta)]
    weights = *read_factor_strides(given.lln_weight), *read_factor_strides(given.block_weight)
    padded = plan.pad_dim(dim)
    constants = (
        group, dim, width, max(triton.next_power_of_2(group), 16), padded, min(plan.pad_dim(width), 64), block,
        triton.next_power_of_2(block) if block >= 16 else 16, given.key_mask is not None, kind, factor,
        ticket is not None, "ieee" if plan.HIP else "tf32x3",
    )  # fmt: skip
    mask_b = 0 if given.key_mask is None else given.key_mask.stride(0)
    args = (
        *given, ticket, length, out, *new, *strides, *factors, *weights, mask_b, scale, heads, *constants
    )  # fmt: skip
    warps = choose_warps(batch * heads, padded * constants[5], given.query.device)
    with plan.use_device(given.query.device):
        compiled = step_kernel[(batch * heads,)](*args, num_warps=warps)
    if recording is not None:
        recording.make(out)
        for t in new if ticket is None else ():
            if t is not None:
                recording.make(t)
        recording.launch(compiled, (batch * heads,), args)


def step_in_place(*args: Any) -> Tensor:
    *given, ticket, length, scale, kind, factor = args
    return take_step_in_place(Step(*given), ticket, length, scale, kind, factor)


def fake_step_in_place(*args: Any) -> Tensor:
    return allocate_out(Step(*args[:14]))


SCHEMA = TENSORS
for name, letter in MUTATED.items():
    for before in (f"Tensor? {name}", f"Tensor {name}"):
        SCHEMA = SCHEMA.replace(before, before.replace("Tensor", f"Tensor({letter}!)"))
define(
    f"step_in_place({SCHEMA}, Tensor(g!) ticket, Tensor(h!)? length, float scale, int kind, float factor) -> Tensor",
    step_in_place, fake_step_in_place, torch.Tag.needs_fixed_stride_order,
)  # fmt: skip
