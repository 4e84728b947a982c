"""Bidirectional LLN attention as two steps: fold the keys and values into a state, let the queries read it.

    L_c = logsumexp_j(beta k_jc)            S_c = sum_j softmax_j(beta k_jc) v_j            (fold)
    o_i = sum_c softmax_c(alpha q_ic + L_c) S_c                                             (read)

Together they are eq. (8) of the paper, exactly. Both steps have their backward written out, so that only
q, k, v, L and S are kept between the passes. The backward itself is made of differentiable operations:
second derivatives work. Shapes are those of `common`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.kernels.common import (
    Dropout,
    can_look,
    drop,
    exponents,
    keep_full_precision,
    logaddexp,
    make_finite,
    reuse,
    spans,
    wide_dtype,
    zeros_like,
)

TOGETHER = 32  # spans that are summed up before they are merged, which rounds less than a longer sum


def merge(log_sum_1: Tensor, mean_1: Tensor, log_sum_2: Tensor, mean_2: Tensor) -> tuple[Tensor, Tensor]:
    """The state of two sets of keys and values from the states of each. Associative and commutative."""
    log_sum = logaddexp(log_sum_1, log_sum_2)
    share = (log_sum_2 - make_finite(log_sum)).exp().to(mean_1.dtype).unsqueeze(-1)
    # S1 + w (S2 - S1) rather than (1 - w) S1 + w S2: the rounding of 1 - w would drift over many merges.
    mean = mean_1 + share * (mean_2 - mean_1)
    return log_sum, mean.masked_fill((log_sum == -torch.inf).unsqueeze(-1), 0.0)


def make_empty(key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The state of no keys at all, the identity of `merge`."""
    batch, heads, _, _, dim = key.shape
    log_sum = key.new_full((batch, heads, 1, dim), -torch.inf, dtype=wide_dtype(key.device))
    return log_sum, value.new_zeros((batch, heads, 1, dim, value.shape[-1]), dtype=dtype)


def exp_(x: Tensor) -> Tensor:
    """e^x in its place: exp2 takes a third of the time of exp on a CPU."""
    # Written out: torch.compile(dynamic=True) makes a symbol of a number that has a name, and cannot hand it on here.
    return x.mul_(1.4426950408889634).exp2_()  # log2(e)


def is_ordinary(total: Tensor, most: float) -> Tensor:
    """Where a sum of exponentials lies between 1 / most and most, so that no exponent that counts is so large that its
    rounding shows. Not of NaN."""
    return (total * most > 1.0) & (total < most)


def fold_rows(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a few rows: x = beta k [B, H, 1, n, D] (-inf where hidden) and v [B, H, 1, n, E].

    Overwrites x."""
    top = make_finite(x.detach().amax(-2, keepdim=True))
    weights = exp_(x.sub_(top))
    total = weights.sum(-2)
    # The largest weight of a channel that has keys is exactly 1, so the clamp changes empty channels only
    # (and not at 1: see `softmax_or_zero`).
    mean_value = (weights.transpose(-1, -2) @ v) / total.clamp_min(0.5).unsqueeze(-1)
    wide = wide_dtype(x.device)
    return top.squeeze(-2).to(wide) + total.to(wide).log(), mean_value


def fold_quickly(
    k: Tensor, v: Tensor, beta: Tensor, hidden: Tensor | None, parts: Sequence[slice]
) -> tuple[Tensor, Tensor, Tensor]:
    """(log_sum, mean_value) of some spans with one reference for all of them, the largest exponent of the first; and
    [B, H, 1] where that was not safe, so that the rest of that head is worth nothing."""
    edge = total = sums = x = None
    for rows in parts:
        k_rows, v_rows = k[..., rows, :], v[..., rows, :].to(beta.dtype)
        mask = None if hidden is None else hidden[..., rows, :]
        x = reuse(x, k_rows, beta.dtype)
        torch.mul(k_rows, beta, out=x)
        if mask is not None:
            x.masked_fill_(mask, -torch.inf)
        edge = x.amax(-2, keepdim=True) if edge is None else edge
        weights = exp_(x.sub_(edge))
        new, added = weights.sum(-2), weights.transpose(-1, -2) @ v_rows
        total, sums = (new.double(), added) if total is None or sums is None else (total.add_(new), sums.add_(added))
    assert edge is not None
    assert total is not None
    assert sums is not None
    log_sum = edge.squeeze(-2).double() + total.log()
    return log_sum, sums / total.to(sums.dtype).unsqueeze(-1), is_ordinary(total, 1e8).all(-1).logical_not_()


class Fold(Function):
    """(k, v, beta, hidden) -> (log_sum, mean_value)"""

    @staticmethod
    @keep_full_precision
    def forward(k: Tensor, v: Tensor, beta: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        if not k.shape[-2]:
            return make_empty(k, v, beta.dtype)
        if not can_look(k) or not k.numel():
            return Fold.fold_safely(k, v, beta, hidden, spans(k))
        parts, state = list(spans(k)), None
        for at in range(0, len(parts), TOGETHER):
            log_sum, mean, unsafe = fold_quickly(k, v, beta, hidden, parts[at : at + TOGETHER])
            if bool(unsafe.any()):  # head by head: what other sequences hold changes no bit
                safe_sum, safe_mean = Fold.fold_safely(k, v, beta, hidden, parts[at : at + TOGETHER])
                log_sum = torch.where(unsafe.unsqueeze(-1), safe_sum, log_sum)
                mean = torch.where(unsafe[..., None, None], safe_mean, mean)
            state = (log_sum, mean) if state is None else merge(*state, log_sum, mean)
        assert state is not None
        return state

    @staticmethod
    def fold_safely(
        k: Tensor, v: Tensor, beta: Tensor, hidden: Tensor | None, parts: Iterable[slice]
    ) -> tuple[Tensor, Tensor]:
        """Whatever the exponents are."""
        state, x = None, None
        for rows in parts:
            k_rows = k[..., rows, :]
            mask = None if hidden is None else hidden[..., rows, :]
            x = exponents(k_rows, beta, mask, out=reuse(x, k_rows, beta.dtype))
            part = fold_rows(x, v[..., rows, :].to(beta.dtype))
            state = part if state is None else merge(*state, *part)
        assert state is not None
        return state

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    @keep_full_precision
    def backward(ctx: Any, g_log_sum: Tensor, g_mean: Tensor) -> tuple[Tensor | None, ...]:
        k, v, beta, hidden, log_sum, mean_value = ctx.saved_tensors
        edge = make_finite(log_sum.to(beta.dtype)).unsqueeze(-2)
        # What log_sum loses in the narrower dtype would be an error of every weight of its channel.
        lost = (make_finite(log_sum) - edge.squeeze(-2)).clamp(-1.0, 1.0).to(beta.dtype).unsqueeze(-2)
        shift = (g_log_sum.to(beta.dtype) - (mean_value * g_mean).sum(-1)).unsqueeze(-2)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dbeta = torch.zeros_like(beta)
        for rows in spans(k):
            k_rows = k[..., rows, :].to(beta.dtype)
            x = exponents(k_rows, beta, None if hidden is None else hidden[..., rows, :])
            b = (x - edge - lost).exp()  # B = softmax_j(beta k)
            dv[..., rows, :] = (b @ g_mean).to(v.dtype)
            dx = b * (v[..., rows, :].to(beta.dtype) @ g_mean.transpose(-1, -2) + shift)
            dk[..., rows, :] = (beta * dx).to(k.dtype)
            if ctx.needs_input_grad[2]:
                dbeta = dbeta + (dx * k_rows).sum_to_size(beta.shape)
        return dk, dv, dbeta, None


class Read(Function):
    """(q, alpha, log_sum, mean_value, weight, dtype, dropout) -> weight * softmax_c(alpha q + log_sum) @ mean_value"""

    @staticmethod
    @keep_full_precision
    def forward(
        q: Tensor, alpha: Tensor, log_sum: Tensor, mean_value: Tensor, weight: Tensor | None,
        dtype: torch.dtype, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty((*q.shape[:-1], mean_value.shape[-1]), dtype=dtype)
        offset, mean_value, _ = make_readable(log_sum, mean_value)
        logits = a = o = None
        quick = dropout is None and can_look(q)
        for rows in spans(q):
            q_rows = q[..., rows, :]
            logits, o = reuse(logits, q_rows, alpha.dtype), reuse(o, out[..., rows, :], alpha.dtype)
            left = None  # the rows that are left to do, if not all
            if quick:
                left = read_quickly(q_rows, alpha, offset, mean_value, weight, logits, o, out[..., rows, :])
                quick = left is None  # where attention is very concentrated it would be in vain again
                if quick:
                    continue
            logits = exponents(q_rows, alpha, out=logits).add_(offset)
            a = torch.softmax(logits, -1, out=reuse(a, q_rows, alpha.dtype))
            dropped, _ = drop(a, dropout, rows.start)
            o = torch.matmul(dropped, mean_value, out=o)
            o = o if weight is None else o.mul_(weight)
            out[..., rows, :] = o if left is None else torch.where(left, o.to(dtype), out[..., rows, :])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.dropout = inputs[6]

    @staticmethod
    @keep_full_precision
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        q, alpha, log_sum, mean_value, weight = ctx.saved_tensors
        offset, mean_value, alive = make_readable(log_sum, mean_value)
        dq = torch.empty_like(q)
        dalpha, dmean, dlog_sum = torch.zeros_like(alpha), torch.zeros_like(mean_value), torch.zeros_like(offset)
        dweight = zeros_like(weight)
        for rows in spans(q):
            q_rows, g = q[..., rows, :], g_out[..., rows, :].to(alpha.dtype)
            a = (exponents(q_rows, alpha) + offset).softmax(-1)
            dropped, mask = drop(a, ctx.dropout, rows.start)
            if weight is not None:
                if ctx.needs_input_grad[4]:
                    dweight = dweight + (g * (dropped @ mean_value)).sum_to_size(weight.shape)
                g = g * weight
            da = g @ mean_value.transpose(-1, -2)
            da = da if mask is None else da * mask
            dlogit = a * (da - (a * da).sum(-1, keepdim=True))
            dq[..., rows, :] = (alpha * dlogit).to(q.dtype)
            dmean = dmean + (dropped.transpose(-1, -2) @ g).sum_to_size(dmean.shape)
            dlog_sum = dlog_sum + dlogit.sum(-2, keepdim=True).sum_to_size(dlog_sum.shape)
            if ctx.needs_input_grad[1]:
                dalpha = dalpha + (dlogit * q_rows).sum_to_size(alpha.shape)
        return dq, dalpha, dlog_sum.squeeze(-2).to(log_sum.dtype), dmean * alive, dweight, None, None


def read_quickly(
    q: Tensor, alpha: Tensor, offset: Tensor, mean_value: Tensor, weight: Tensor | None, weights: Tensor, o: Tensor,
    out: Tensor,
) -> Tensor | None:  # fmt: skip
    """Fill `out` from a few rows without a maximum over their channels, which only very large or small exponents need.
    weights and o: memory to work in. Returns the rows that are left, [..., n, 1]; None where there are none."""
    same = q.dtype == weights.dtype
    logits = torch.addcmul(offset, q, alpha, out=weights) if same else torch.mul(q, alpha, out=weights).add_(offset)
    total = exp_(logits).sum(-1, keepdim=True)
    torch.matmul(weights, mean_value, out=o)
    if weight is not None:
        out.copy_(o.div_(total).mul_(weight))
    elif out.dtype == o.dtype:
        torch.div(o, total, out=out)
    else:
        out.copy_(o.div_(total))
    if not total.numel() or bool(is_ordinary(torch.stack(total.aminmax()), 1e6).all()):
        return None
    return is_ordinary(total, 1e6).logical_not_()


def make_readable(log_sum: Tensor, mean_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state as queries use it: L relative to its largest channel (a softmax over channels does not see
    the difference, and small exponents round less), S zero and L finite where there is no key at all."""
    top = log_sum.detach().amax(-1, keepdim=True)
    alive = top > -torch.inf
    offset = (log_sum - make_finite(top)).masked_fill(~alive, 0.0)
    alive = alive.unsqueeze(-1).to(mean_value.dtype)
    return offset.unsqueeze(-2).to(mean_value.dtype), mean_value * alive, alive
