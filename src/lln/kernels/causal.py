"""Causal LLN attention: the same state, carried from prefix to prefix, in chunks of rows.

    L_t = logaddexp(L_{t-1}, x_t)     A_t = softmax_c(alpha q_t + L_t)     P_tj = sum_c A_tc e^(x_jc - L_tc)

with x = beta k. Inside a chunk P is never built from one common reference: a key that is large in some
channel would wipe out what came before it, or overflow. Instead every pair j < t is met at the edge b between
them in a binary tree, where P_tj = sum_c [A_tc e^(L_b - L_t)] [e^(x_j - L_b)] and both exponents are <= 0:

    rows 0..3 | 4..7        level of b = 4: queries 4..7 attend keys 0..3, edge at row 3
    0 1 | 2 3   4 5 | 6 7   level of b = 2 ... and so on, down to b = 1; the pair t = j is added by itself.

The backward pass walks the chunks twice: forwards for dq (the states are folded again rather than kept), then
backwards for dk and dv with the suffix sums R_b = sum_{t>b} A_t e^(L_b - L_t) dO_t and r_b, likewise with
D_t = dO_t . o_t in place of dO_t. Memory is linear in the length; shapes are those of `common`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.kernels.common import (
    Dropout,
    can_look,
    drop,
    exponents,
    is_surely,
    keep_full_precision,
    logaddexp,
    make_finite,
    softmax_or_zero,
    zeros_like,
)
from lln.kernels.fold import exp_, fold_rows, merge

CHUNK = 128
REACH = 30.0  # e^30 times all that a chunk adds up is well inside float32


@dataclasses.dataclass
class Chunk:
    """What a chunk of n rows (n a power of two) is made of.

    Exponents are kept wide (float64) and narrowed only as differences, which are small where they matter: rounded to
    float32, an exponent of 400 is off by 1e-5, and so is every weight made from it."""

    x: Tensor  # [B, H, 1, n, D] wide  beta k, -inf where hidden
    v: Tensor  # [B, H, 1, n, E]
    before: Tensor  # [B, H, 1, 1, D] wide  L at the start of the chunk
    log_sums: Tensor  # [B, H, 1, n, D] wide  L_t of every row
    a: Tensor  # [B, H, G, n, D]  A_t
    dropped: Tensor  # A_t after dropout
    mask: Tensor | None

    def levels(self) -> Iterator[Level]:
        half = self.x.shape[-2] // 2
        while half:
            edge = take_left(self.log_sums, half)[..., -1:, :]
            keys = self.share(take_left(self.x, half), edge)
            decay = self.share(edge, take_right(self.log_sums, half))
            yield Level(half, keys, decay)
            half //= 2

    def weigh_past(self) -> Tensor:
        """e^(L_b - L_t) for the edge b at the chunk's start: the share of the past in every row."""
        return self.share(self.before, self.log_sums)

    def weigh_own(self) -> Tensor:
        """e^(x_t - L_t): the share of a row's own key."""
        return self.share(self.x, self.log_sums)

    def share(self, part: Tensor, whole: Tensor) -> Tensor:
        """e^(part - whole), at most 1; 0 for an empty part of an empty whole."""
        return (part - make_finite(whole)).to(self.v.dtype).exp()


@dataclasses.dataclass
class Level:
    half: int
    keys: Tensor  # [B, H, 1, n / 2b, b, D]  e^(x_j - L_b)
    decay: Tensor  # [B, H, 1, n / 2b, b, D]  e^(L_b - L_t)


def take_left(t: Tensor, half: int) -> Tensor:
    """The left halves [..., n / 2b, b, D] of the blocks of 2b rows, b = half."""
    halves: Tensor = t.unflatten(-2, (-1, 2, half))
    return halves.select(-3, 0)


def take_right(t: Tensor, half: int) -> Tensor:
    """The right halves of the same blocks."""
    halves: Tensor = t.unflatten(-2, (-1, 2, half))
    return halves.select(-3, 1)


def prefix_log_sums(x: Tensor) -> Tensor:
    """Inclusive cumulative logsumexp over the rows (a power of two of them), by doubling."""
    half, sums = 1, x
    while half < x.shape[-2]:
        first, second = take_left(sums, half), take_right(sums, half)
        sums = torch.stack([first, logaddexp(first[..., -1:, :], second)], -3).flatten(-4, -2)
        half *= 2
    return sums


def pad_rows(t: Tensor, rows: int, value: float = 0.0) -> Tensor:
    missing = rows - t.shape[-2]
    return t if is_surely(missing == 0) else torch.nn.functional.pad(t, (0, 0, 0, missing), value=value)


def load(
    before: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, hidden: Tensor | None,
    dropout: Dropout | None, first: int,
) -> Chunk:  # fmt: skip
    """A chunk from some rows of q, k, v, filled up with hidden rows to a power of two."""
    count = 1 << (q.shape[-2] - 1).bit_length()
    dtype = alpha.dtype
    x = pad_rows(exponents(k, beta, hidden), count, -torch.inf)
    before, x = before.unsqueeze(-2), x.to(before.dtype)
    log_sums = logaddexp(before, prefix_log_sums(x))
    offset = (log_sums - make_finite(log_sums.detach().amax(-1, keepdim=True))).to(dtype)
    a = softmax_or_zero(pad_rows(exponents(q, alpha), count) + offset)
    dropped, mask = drop(a, dropout, first)
    return Chunk(x, pad_rows(v.to(dtype), count), before, log_sums, a, dropped, mask)


def fold_chunk(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The state of the chunk's own keys and values."""
    return fold_rows(chunk.x.to(chunk.v.dtype, copy=True), chunk.v)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of the blocks of a level, [..., n / 2b, b, D]."""
    if not torch.compiler.is_exporting():
        return a @ b
    # There may be as many chunks before the blocks as the length is open. torch.export proves that a size fits where it
    # comes last of those over which a product goes.
    product: Tensor = a.transpose(-4, -3) @ b.transpose(-4, -3)
    return product.transpose(-4, -3)


def outputs(chunk: Chunk, mean_value: Tensor) -> Tensor:
    """o_t of every row of the chunk; mean_value is S at its start."""
    out = (chunk.dropped * chunk.weigh_past()) @ mean_value
    out = out + (chunk.dropped * chunk.weigh_own()).sum(-1, keepdim=True) * chunk.v
    for level in chunk.levels():
        weights = multiply(take_right(chunk.dropped, level.half) * level.decay, level.keys.transpose(-1, -2))
        take_right(out, level.half).add_(multiply(weights, take_left(chunk.v, level.half)))
    return out


def attend_quickly(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, state: tuple[Tensor, Tensor], hidden: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """(o_t of some rows, the state after them) with one reference r for all of them: with e_j = e^(x_j - r) and
    u_t = e^(alpha q_t + r - max), o_t = (tril(u e^T) v + (u e^(L_b - r)) S_b) / (the same with ones for v and S_b).

    r is what the first row sees, so that no bit depends on later ones. Last, the rows [B, H, 1, n, 1] that are worth
    nothing, nor is the state then: they see a key more than REACH above r."""
    before, mean_value = state
    x = exponents(k, beta, hidden)  # [B, H, 1, n, D]
    edge = torch.maximum(before.to(x.dtype), x[..., 0, :])  # r [B, H, 1, D]; differences to it are exact
    x.sub_(edge.unsqueeze(-2))
    unsafe = (x.amax(-1, keepdim=True).cummax(-2).values <= REACH).logical_not_()  # also where it is NaN
    e = exp_(x)
    entering = (before - edge).to(x.dtype).exp().unsqueeze(-2)
    logits = exponents(q, alpha).add_((edge - edge.amax(-1, keepdim=True)).unsqueeze(-2))
    u = exp_(logits.sub_(logits.amax(-1, keepdim=True)))
    p = (u @ e.transpose(-1, -2)).tril_()
    u *= entering
    total = p.sum(-1, keepdim=True) + u.sum(-1, keepdim=True)
    out = (p @ v).add_(u @ mean_value).div_(total)
    own = e.sum(-2)
    mean = (e.transpose(-1, -2) @ v) / own.clamp_min(torch.finfo(own.dtype).tiny).unsqueeze(-1)
    return out, merge(*state, edge.to(before.dtype) + own.to(before.dtype).log(), mean), unsafe


def attend_safely(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, state: tuple[Tensor, Tensor], hidden: Tensor | None,
    dropout: Dropout | None = None, first: int = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """The same by the tree, whatever the exponents are. first: of the rows, which dropout is a function of."""
    chunk = load(state[0], q, k, v, alpha, beta, hidden, dropout, first)
    return outputs(chunk, state[1])[..., : q.shape[-2], :], merge(*state, *fold_chunk(chunk))


def value_products(chunk: Chunk, mean_value: Tensor, g: Tensor) -> Tensor:
    """W_tc = dO_t . S_tc, with S_t never formed."""
    w = chunk.weigh_past() * (g @ mean_value.transpose(-1, -2))
    w = w + chunk.weigh_own() * (g * chunk.v).sum(-1, keepdim=True)
    for level in chunk.levels():
        scores = take_right(g, level.half) @ take_left(chunk.v, level.half).transpose(-1, -2)
        take_right(w, level.half).add_(level.decay * (scores @ level.keys))
    return w


def key_value_gradients(chunk: Chunk, g: Tensor, d: Tensor, suffix: Tensor, suffix_d: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dv) of the chunk's keys, from the queries of the chunk and, through R and r, of all later ones."""
    last = chunk.share(chunk.x, chunk.log_sums[..., -1:, :])
    dv = last @ suffix
    dx = last * (chunk.v @ suffix.transpose(-1, -2) - suffix_d)
    own = chunk.weigh_own()
    dv = dv + ((chunk.dropped * own).sum(-1, keepdim=True) * g).sum(2, keepdim=True)
    dx = dx + (own * (chunk.dropped * (g * chunk.v).sum(-1, keepdim=True) - chunk.a * d)).sum(2, keepdim=True)
    for level in chunk.levels():
        half = level.half
        reach = take_right(chunk.dropped, half) * level.decay
        g_right, v_left = take_right(g, half), take_left(chunk.v, half)
        weights = reach @ level.keys.transpose(-1, -2)
        take_left(dv, half).add_((weights.transpose(-1, -2) @ g_right).sum(2, keepdim=True))
        pull = (g_right @ v_left.transpose(-1, -2)).transpose(-1, -2) @ reach
        pull = pull - (take_right(chunk.a * d, half) * level.decay).sum(-2, keepdim=True)
        take_left(dx, half).add_(level.keys * pull.sum(2, keepdim=True))
    return dx, dv


def chunks(length: int) -> list[slice]:
    return [slice(first, min(first + CHUNK, length)) for first in range(0, length, CHUNK)]


class Causal(Function):
    """(q, k, v, alpha, beta, log_sum, mean_value, weight, hidden, dtype, dropout) -> (out, log_sum, mean_value)

    The incoming log_sum and mean_value are the state of everything before the first row."""

    @staticmethod
    @keep_full_precision
    def forward(
        q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, log_sum: Tensor, mean_value: Tensor,
        weight: Tensor | None, hidden: Tensor | None, dtype: torch.dtype, dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        state = log_sum.clone(), mean_value.clone()
        quick = dropout is None and can_look(q)
        for rows in chunks(q.shape[-2]):
            parts = q[..., rows, :], k[..., rows, :], v[..., rows, :].to(alpha.dtype)
            mask = None if hidden is None else hidden[..., rows, :]
            if quick:
                o, after, unsafe = attend_quickly(*parts, alpha, beta, state, mask)
                if bool(unsafe[..., -1, :].any()):  # row by row: what comes later, or elsewhere, changes no bit
                    others = attend_safely(*parts, alpha, beta, state, mask)
                    o = torch.where(unsafe, others[0], o)
                    ends = unsafe[..., -1, :]
                    log_sum = torch.where(ends, others[1][0], after[0])
                    after = log_sum, torch.where(ends.unsqueeze(-1), others[1][1], after[1])
            else:
                o, after = attend_safely(*parts, alpha, beta, state, mask, dropout, rows.start)
            out[..., rows, :] = o if weight is None else o * weight
            state = after
        return out, *state

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:9], output[2])
        ctx.dropout = inputs[10]

    @staticmethod
    @keep_full_precision
    def backward(ctx: Any, g_out: Tensor, g_log_sum: Tensor, g_mean: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, alpha, beta, log_sum, mean_value, weight, hidden, mean_end = ctx.saved_tensors
        dtype = alpha.dtype
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dalpha, dbeta = torch.zeros_like(alpha), torch.zeros_like(beta)
        dweight = zeros_like(weight)

        def load_rows(rows: slice, before: Tensor) -> tuple[Chunk, Tensor]:
            parts = q[..., rows, :], k[..., rows, :], v[..., rows, :]
            mask = None if hidden is None else hidden[..., rows, :]
            chunk = load(before, *parts, alpha, beta, mask, ctx.dropout, rows.start)
            return chunk, pad_rows(g_out[..., rows, :].to(dtype), chunk.x.shape[-2])

        starts, ds = [], []  # per chunk: L at its start, D_t of its rows
        state = log_sum, mean_value
        for rows in chunks(q.shape[-2]):
            chunk, g = load_rows(rows, state[0])
            n = rows.stop - rows.start
            if weight is not None:
                if ctx.needs_input_grad[7]:
                    dweight = dweight + (g * outputs(chunk, state[1])).sum_to_size(weight.shape)
                g = g * weight
            w = value_products(chunk, state[1], g)
            w = w if chunk.mask is None else w * chunk.mask
            d = (chunk.a * w).sum(-1, keepdim=True)
            dlogit = (chunk.a * (w - d))[..., :n, :]
            dq[..., rows, :] = (alpha * dlogit).to(q.dtype)
            if ctx.needs_input_grad[3]:
                dalpha = dalpha + (dlogit * q[..., rows, :]).sum_to_size(alpha.shape)
            starts.append(state[0])
            ds.append(d)
            state = merge(*state, *fold_chunk(chunk))

        suffix = g_mean  # R at the end of the sequence
        suffix_d = ((mean_end * g_mean).sum(-1) - g_log_sum.to(dtype)).unsqueeze(-2)  # r
        for rows, before, d in reversed(list(zip(chunks(q.shape[-2]), starts, ds, strict=True))):
            chunk, g = load_rows(rows, before)
            g = g if weight is None else g * weight
            n = rows.stop - rows.start
            dx, dv_rows = key_value_gradients(chunk, g, d, suffix, suffix_d)
            dv[..., rows, :] = dv_rows[..., :n, :].to(v.dtype)
            dk[..., rows, :] = (beta * dx[..., :n, :]).to(k.dtype)
            if ctx.needs_input_grad[4]:
                dbeta = dbeta + (dx[..., :n, :] * k[..., rows, :]).sum_to_size(beta.shape)
            entering = chunk.weigh_past()
            through = chunk.share(chunk.before, chunk.log_sums[..., -1:, :])
            reach = (chunk.dropped * entering).transpose(-1, -2) @ g
            suffix = through.transpose(-1, -2) * suffix + reach.sum(2, keepdim=True)
            reach_d = (chunk.a * entering * d).sum((2, -2), keepdim=True)
            suffix_d = through * suffix_d + reach_d
        # An empty incoming state has no say, also when there are no rows.
        no_past = log_sum == -torch.inf
        suffix, suffix_d = (
            suffix.masked_fill(no_past.unsqueeze(-1), 0.0),
            suffix_d.masked_fill(no_past.unsqueeze(-2), 0.0),
        )
        dlog_sum = ((mean_value * suffix).sum(-1) - suffix_d.squeeze(-2)).to(log_sum.dtype)
        return dq, dk, dv, dalpha, dbeta, dlog_sum, suffix, dweight, None, None, None
