"""Linear attention by feature maps that are not exponentials: fold the keys, let the queries read. Eq. (4),

    S = sum_j f(k_j) v_j^T      z = sum_j f(k_j)      o_i = f(q_i) S / f(q_i) z

(Exponential features are LLN's business: `fold` and `causal` hold them without overflow.) The features of a span of
rows live only while it is worked on, forward and backward; between the passes q, k, v and the state are kept, however
many features there are. Causal attention carries (S, z) from chunk to chunk, with a gate g decaying:

    S_t = g_t S_{t-1} + f(k_t) v_t^T,  so that query t sees key j with  f(q_t) . f(k_j) e^(c_t - c_j),  c = cumsum log g

A row whose weights sum to no more than `floor` in size (nothing to attend to, or no common feature) gives zeros.
Dropout acts on the query's features in the numerator, as on A of LLN. Shapes are those of `common`; log_gate is
[B, H, 1, M, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lln.kernels.common import Dropout, compute_dtype, drop, keep_full_precision, spans

FeatureMap = Callable[[Tensor], Tensor]  # [..., n, D] -> [..., n, F], row by row
CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Maps:
    """What turns queries and keys into features, and how the sum of the weights is used."""

    query: FeatureMap
    key: FeatureMap
    normalise: bool = True
    floor: float = 1e-30

    def spans(self, t: Tensor, phi: FeatureMap, causal: bool) -> Iterator[slice]:
        """Spans of the rows of t, as short as its features ask for."""
        if causal:
            return iter(slice(first, min(first + CHUNK, t.shape[-2])) for first in range(0, t.shape[-2], CHUNK))
        one = phi(t.new_zeros((*t.shape[:-2], 1, t.shape[-1]), dtype=compute_dtype(t.dtype)))
        return spans(one[..., :1, :].expand(*t.shape[:-1], one.shape[-1]))

    def divide(self, numerator: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """(out, 1 / total), both 0 where the weights sum to nothing."""
        if not self.normalise:
            return numerator, torch.ones_like(total)
        alive = total.abs() > self.floor
        inverse = alive / torch.where(alive, total, 1.0)
        return numerator * inverse, inverse

    def divide_backward(self, g: Tensor, out: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the numerator and of the total."""
        if not self.normalise:
            return g, torch.zeros_like(inverse)
        g = g * inverse
        return g, -(g * out).sum(-1, keepdim=True)


def map_rows(t: Tensor, rows: slice, phi: FeatureMap, hidden: Tensor | None = None) -> Tensor:
    """Features of some rows, zeros where the row is hidden."""
    features = phi(t[..., rows, :].to(compute_dtype(t.dtype)))
    return features if hidden is None else features.masked_fill(hidden[..., rows, :], 0.0)


def map_with_backward(
    t: Tensor, rows: slice, phi: FeatureMap, hidden: Tensor | None = None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Features of some rows, and what takes their gradient to that of the rows."""
    source = t[..., rows, :].to(compute_dtype(t.dtype))
    features: Tensor
    features, back = torch.func.vjp(phi, source)  # type: ignore[misc]  # two, without has_aux
    if hidden is None:
        return features, lambda g: back(g)[0]
    mask = hidden[..., rows, :]
    return features.masked_fill(mask, 0.0), lambda g: back(g.masked_fill(mask, 0.0))[0]


class Decay:
    """e^(c_t - c_j) inside a chunk, e^c_t from its start, e^(c_end - c_j) to its end; ones without a gate."""

    def __init__(self, log_gate: Tensor | None, rows: slice) -> None:
        self.sums = None if log_gate is None else log_gate[..., rows, :].cumsum(-2)

    def weigh_pairs(self, scores: Tensor) -> Tensor:
        scores = scores.tril()
        if self.sums is None:
            return scores
        # Above the diagonal the exponent is positive; it is cut before it can overflow.
        return scores * (self.sums - self.sums.transpose(-1, -2)).clamp_max(0.0).exp()

    def weigh_from_start(self, t: Tensor) -> Tensor:
        return t if self.sums is None else t * self.sums.exp()

    def weigh_to_end(self, t: Tensor) -> Tensor:
        return t if self.sums is None else t * (self.sums[..., -1:, :] - self.sums).exp()

    def weigh_across(self, state: Tensor) -> Tensor:
        return state if self.sums is None else state * self.sums[..., -1:, :].exp()


def sum_shared(t: Tensor) -> Tensor:
    """Sum over the query heads that share a key head."""
    return t.sum(2, keepdim=True)


class FeatureAttention(Function):
    """(q, k, v, hidden, log_gate, maps, is_causal, dtype, dropout) -> out"""

    @staticmethod
    @keep_full_precision
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, log_gate: Tensor | None, maps: Maps,
        is_causal: bool, dtype: torch.dtype, dropout: Dropout | None,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        state: tuple[Tensor, Tensor] | None = None
        if is_causal:
            for rows in maps.spans(q, maps.query, True):
                decay = Decay(log_gate, rows)
                fq, fk = map_rows(q, rows, maps.query), map_rows(k, rows, maps.key, hidden)
                v_rows = v[..., rows, :].to(fk.dtype)
                out[..., rows, :], _, _ = attend_causal_rows(maps, decay, fq, fk, v_rows, state, dropout, rows.start)
                state = fold(fk, v_rows, state, decay)
        else:
            state = fold_all(maps, k, v, hidden)
            for rows in maps.spans(q, maps.query, False):
                fq = map_rows(q, rows, maps.query)
                numerator = drop(fq, dropout, rows.start)[0] @ state[0]
                out[..., rows, :], _ = maps.divide(numerator, fq @ state[1])
        ctx.save_for_backward(q, k, v, hidden, log_gate, *(() if is_causal or state is None else state))
        ctx.settings = maps, is_causal, dropout
        return out

    @staticmethod
    @keep_full_precision
    @once_differentiable  # the features' own derivative is taken by autograd, within
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (g_out,) = grads
        q, k, v, hidden, log_gate, *state = ctx.saved_tensors
        maps, is_causal, dropout = ctx.settings
        run = causal_backward if is_causal else bidirectional_backward
        dq, dk, dv, dgate = run(maps, q, k, v, hidden, log_gate, state, g_out, dropout)
        return dq, dk, dv, None, dgate, None, None, None, None


def fold(fk: Tensor, v: Tensor, state: tuple[Tensor, Tensor] | None, decay: Decay | None) -> tuple[Tensor, Tensor]:
    """(S [B, H, 1, F, E], z [B, H, 1, F, 1]) with some more keys in it."""
    late = fk if decay is None else decay.weigh_to_end(fk)
    s, z = late.transpose(-1, -2) @ v, late.sum(-2).unsqueeze(-1)
    if state is None:
        return s, z
    before = state if decay is None else (decay.weigh_across(state[0]), decay.weigh_across(state[1]))
    return before[0] + s, before[1] + z


def fold_all(maps: Maps, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    state = fold(map_rows(k, slice(0, 0), maps.key), v[..., :0, :].to(compute_dtype(v.dtype)), None, None)
    for rows in maps.spans(k, maps.key, False):
        fk = map_rows(k, rows, maps.key, hidden)
        state = fold(fk, v[..., rows, :].to(fk.dtype), state, None)
    return state


def attend_causal_rows(
    maps: Maps, decay: Decay, fq: Tensor, fk: Tensor, v: Tensor, state: tuple[Tensor, Tensor] | None,
    dropout: Dropout | None, place: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Out and 1 / total of a chunk's rows, and the dropout mask."""
    dropped, mask = drop(fq, dropout, place)
    weights = decay.weigh_pairs(fq @ fk.transpose(-1, -2))
    total = weights.sum(-1, keepdim=True)
    if mask is not None:
        weights = decay.weigh_pairs(dropped @ fk.transpose(-1, -2))
    numerator = weights @ v
    if state is not None:
        numerator = numerator + decay.weigh_from_start(dropped) @ state[0]
        total = total + decay.weigh_from_start(fq) @ state[1]
    out, inverse = maps.divide(numerator, total)
    return out, inverse, mask


def bidirectional_backward(
    maps: Maps, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, log_gate: Tensor | None,
    state: list[Tensor], g_out: Tensor, dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    s, z = state
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ds, dz = torch.zeros_like(s), torch.zeros_like(z)
    for rows in maps.spans(q, maps.query, False):
        fq, back = map_with_backward(q, rows, maps.query)
        dropped, mask = drop(fq, dropout, rows.start)
        out, inverse = maps.divide(dropped @ s, fq @ z)
        g, g_total = maps.divide_backward(g_out[..., rows, :].to(fq.dtype), out, inverse)
        from_values = g @ s.transpose(-1, -2)
        dfq = (from_values if mask is None else from_values * mask) + g_total * z.transpose(-1, -2)
        dq[..., rows, :] = back(dfq).to(q.dtype)
        ds += sum_shared(dropped.transpose(-1, -2) @ g)
        dz += sum_shared(fq.transpose(-1, -2) @ g_total)
    for rows in maps.spans(k, maps.key, False):
        fk, back = map_with_backward(k, rows, maps.key, hidden)
        dv[..., rows, :] = (fk @ ds).to(v.dtype)
        dfk = v[..., rows, :].to(ds.dtype) @ ds.transpose(-1, -2) + dz.transpose(-1, -2)
        dk[..., rows, :] = back(dfk).to(k.dtype)
    return dq, dk, dv, None


def causal_backward(
    maps: Maps, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, log_gate: Tensor | None,
    _: list[Tensor], g_out: Tensor, dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Forwards for dq (the states are folded again rather than kept), then backwards for dk and dv with the sums over
    later queries R = sum_t f(q_t) g_t^T and r, likewise with the gradient of the total in place of g_t."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dsums = None if log_gate is None else torch.zeros_like(log_gate)  # of c
    chunks = list(maps.spans(q, maps.query, True))
    state, kept = None, []
    for rows in chunks:
        decay, fk = Decay(log_gate, rows), map_rows(k, rows, maps.key, hidden)
        fq, back = map_with_backward(q, rows, maps.query)
        v_rows = v[..., rows, :].to(fk.dtype)
        out, inverse, mask = attend_causal_rows(maps, decay, fq, fk, v_rows, state, dropout, rows.start)
        g, g_total = maps.divide_backward(g_out[..., rows, :].to(fq.dtype), out, inverse)
        dfq = decay.weigh_pairs(g @ v_rows.transpose(-1, -2)) @ fk
        if state is not None:
            dfq = dfq + decay.weigh_from_start(g @ state[0].transpose(-1, -2))
        dfq = dfq if mask is None else dfq * mask
        dfq = dfq + decay.weigh_pairs(g_total.expand(*g_total.shape[:-1], fk.shape[-2])) @ fk
        if state is not None:
            dfq = dfq + decay.weigh_from_start(g_total) * state[1].transpose(-1, -2)
        dq[..., rows, :] = back(dfq).to(q.dtype)
        if dsums is not None and not maps.normalise:  # normalised, the numerator's share and the total's cancel
            dsums[..., rows, :] += sum_shared((g * out).sum(-1, keepdim=True))
        kept.append((inverse, g_total))
        state = fold(fk, v_rows, state, decay)
    later = later_total = None  # R [B, H, 1, F, E], r [B, H, 1, F, 1]
    for rows, (inverse, g_total) in zip(reversed(chunks), reversed(kept), strict=True):
        decay, fq = Decay(log_gate, rows), map_rows(q, rows, maps.query)
        fk, back = map_with_backward(k, rows, maps.key, hidden)
        v_rows = v[..., rows, :].to(fk.dtype)
        g = g_out[..., rows, :].to(fk.dtype) * inverse
        dropped, mask = drop(fq, dropout, rows.start)
        weights = decay.weigh_pairs(fq @ fk.transpose(-1, -2))
        of_values = weights if mask is None else decay.weigh_pairs(dropped @ fk.transpose(-1, -2))
        dv_rows = sum_shared(of_values.transpose(-1, -2) @ g)
        done = sum_shared(weights.transpose(-1, -2) @ g_total)  # gradient of the ones that the total sums
        dfk = sum_shared(decay.weigh_pairs(g @ v_rows.transpose(-1, -2)).transpose(-1, -2) @ dropped)
        ones = g_total.expand(*g_total.shape[:-1], fk.shape[-2])
        dfk = dfk + sum_shared(decay.weigh_pairs(ones).transpose(-1, -2) @ fq)
        if later is not None and later_total is not None:
            late = decay.weigh_to_end(fk)
            dv_rows, done = dv_rows + late @ later, done + late @ later_total
            dfk = dfk + decay.weigh_to_end(v_rows @ later.transpose(-1, -2) + later_total.transpose(-1, -2))
        dk[..., rows, :] = back(dfk).to(k.dtype)
        dv[..., rows, :] = dv_rows.to(v.dtype)
        if dsums is not None:
            dsums[..., rows, :] -= (dv_rows * v_rows).sum(-1, keepdim=True) + done
        new = sum_shared(decay.weigh_from_start(dropped).transpose(-1, -2) @ g)
        new_total = sum_shared(decay.weigh_from_start(fq).transpose(-1, -2) @ g_total)
        later = new if later is None else decay.weigh_across(later) + new
        later_total = new_total if later_total is None else decay.weigh_across(later_total) + new_total
    dgate = None if dsums is None else dsums.flip(-2).cumsum(-2).flip(-2)
    return dq, dk, dv, dgate
