"""Moments of the scores a_ij = scale q_i . k_j and of alpha q and beta k, exactly and without forming the pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.instruments.heads import Heads, SoftmaxHeads
from lln.instruments.maps import LLNMap, SoftmaxMap


def score_moments(p: SoftmaxMap) -> tuple[Tensor, Tensor]:
    """Mean and variance of the scores over all pairs of a row that counts and a key it sees, [batch, heads] each."""
    found = [pair_moments(group) for group in p.groups()]
    mean, squares = p.collect(found).unbind(-1)
    return mean, squares


def pair_moments(heads: Heads) -> Tensor:
    """(mean, variance) of the scores, [G, 2]. Bidirectional: E a^2 = tr(M_q M_k) with the second moments M of q and k,
    E a = qbar . kbar. Causal: the same sums over prefixes, by streaming."""
    assert isinstance(heads, SoftmaxHeads)
    q, k = heads.q, heads.k  # scaled; zero where hidden
    if heads.is_causal:
        return causal_pair_moments(heads)
    rows, keys = (mask.sum(1).to(q.dtype)[:, None, None] for mask in (heads.live, heads.seen))
    q_mean, k_mean = q.sum(1, keepdim=True) / rows, k.sum(1, keepdim=True) / keys
    mean = (q_mean * k_mean).sum((1, 2))
    # var = tr(M_q M_k) - (qbar . kbar)^2, written in covariances so that large means do not cancel:
    # tr(C_q C_k) + qbar' C_k qbar + kbar' C_q kbar.
    q_apart, k_apart = (q - q_mean) * heads.live.unsqueeze(-1), (k - k_mean) * heads.seen.unsqueeze(-1)
    c_q, c_k = q_apart.transpose(1, 2) @ q_apart / rows, k_apart.transpose(1, 2) @ k_apart / keys
    spread = (c_q * c_k).sum((1, 2)) + ((q_mean @ c_k) * q_mean).sum((1, 2)) + ((k_mean @ c_q) * k_mean).sum((1, 2))
    return torch.stack([mean, spread], 1)


def causal_pair_moments(heads: SoftmaxHeads) -> Tensor:
    count = total = squares = heads.q.new_zeros(len(heads))
    centre = None
    for rows in heads.chunks():
        scores = heads.scores(rows)
        there = (scores > -torch.inf) & heads.live[:, rows].unsqueeze(-1)
        scores.masked_fill_(~there, 0.0)
        found = there.sum((1, 2)).to(scores.dtype)
        if centre is None:  # near the mean, so that squares around it keep their digits
            centre = scores.sum((1, 2)) / found.clamp_min(1)
        apart = (scores - centre[:, None, None]).mul_(there)
        count, total, squares = count + found, total + apart.sum((1, 2)), squares + apart.square_().sum((1, 2))
    if centre is None:
        return heads.q.new_zeros(len(heads), 2)
    mean = total / count
    return torch.stack([centre + mean, squares / count - mean.square()], 1)


def lln_spread(p: LLNMap) -> Tensor:
    """s2 = alpha^2 sigma_q^2 + beta^2 sigma_k^2, the variance of alpha q plus that of beta k: [batch, heads]."""
    found = []
    for group in p.groups():
        a, x = group.a, group.x.masked_fill(~group.seen.unsqueeze(-1), 0.0)  # type: ignore[attr-defined]
        found.append(element_variance(a, group.live) + element_variance(x, group.seen))
    return p.collect(found)


def element_variance(t: Tensor, valid: Tensor) -> Tensor:
    """The unbiased variance of all elements of the valid tokens of t [G, N, D], zero elsewhere: [G]."""
    count = (valid.sum(1) * t.shape[-1]).to(t.dtype)
    mean = t.sum((1, 2)) / count
    apart = (t - mean[:, None, None]) * valid.unsqueeze(-1)
    return apart.square_().sum((1, 2)) / (count - 1)
