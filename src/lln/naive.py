"""Equation (8) of the paper, dense and in float64, to be read: the standard that every back end is held to.

    out_i = sum_j P_ij v_j      P_ij = n_ij / sum_j' n_ij'      n_ij = sum_c exp(alpha q_ic) exp(beta k_jc)

and beside it the evidence read, which is ours. Nothing here is fast, and nothing here knows the two softmaxes, chunks
or merges of the package: P is an explicit [B, H, Nq, Nk] matrix. Everything is differentiable by autograd.

    >>> import torch, lln
    >>> from lln.naive import naive_lln
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).double()
    >>> bool(torch.allclose(lln.lln_attention(q, k, v, 1.5, 1.5), naive_lln(q, k, v, 1.5, 1.5)))
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.state import LLNState

__all__ = ["naive_evidence", "naive_lln", "naive_lln_diag", "naive_value_convolution"]


class Result(NamedTuple):
    out: Tensor  # [B, Hq, Nq, Dv]
    log_sum: Tensor  # [B, Hk, D]
    mean_value: Tensor  # [B, Hk, D, Dv]


def naive_lln(
    query: Tensor, key: Tensor, value: Tensor, alpha: Any, beta: Any, *, is_causal: bool = False,
    key_mask: Tensor | None = None, cu_seqlens: Any = None, state: Any = None,
) -> Tensor:  # fmt: skip
    """LLN attention by eq. (8): [B, Hq, Nq, Dv] in float64. The arguments are those of `lln.lln_attention`.

    >>> q, k, v = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    >>> units = torch.eye(4).expand(1, 1, 4, 4)  # as values they show P, whose rows sum to one
    >>> p = naive_lln(q, k, units, 1.0, 1.0, is_causal=True)
    >>> [round(x, 6) for x in p.sum(-1).flatten().tolist()]
    [1.0, 1.0, 1.0, 1.0]
    >>> bool(p.triu(1).any())  # nobody sees a later key
    False
    """
    return naive_attention(
        query, key, value, alpha, beta, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens, state=state
    ).out


def naive_lln_diag(
    query: Tensor, key: Tensor, value: Tensor, alpha: Any, beta: Any, block_size: int, *, mix: Any = 0.5,
    scale: float | None = None, is_causal: bool = False, key_mask: Tensor | None = None, cu_seqlens: Any = None,
    state: Any = None,
) -> Tensor:  # fmt: skip
    """LLN+Diag: mix * eq. (8) + (1 - mix) * softmax attention inside blocks: [B, Hq, Nq, Dv] in float64.

    >>> q, k, v = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).double()
    >>> blocks = naive_lln_diag(q, k, v, 1.0, 1.0, 4, mix=0.0)  # one block, and nothing of LLN
    >>> bool(torch.allclose(blocks, torch.nn.functional.scaled_dot_product_attention(q, k, v)))
    True
    """
    return naive_attention(
        query, key, value, alpha, beta, block_size=block_size, mix=mix, scale=scale, is_causal=is_causal,
        key_mask=key_mask, cu_seqlens=cu_seqlens, state=state,
    ).out  # fmt: skip


def naive_evidence(
    query: Tensor, key: Tensor, value: Tensor, beta: Any, *, directions: Any = None, block_size: int | None = None,
    mix: Any = 0.5, overlap: bool = False, evidence_offset: Any = 0.0, scale: float | None = None,
    is_causal: bool = False, key_mask: Tensor | None = None, cu_seqlens: Any = None,
) -> Tensor:  # fmt: skip
    """The evidence read, which is not the paper's, with or without blocks: [B, Hq, Nq, Dv] in float64. Each query has
    the weights of its own keys written out, [B, Hk, Nq, Nk, channels]. With mix="evidence" these are the keys outside
    its block, and how much they count follows from their evidence.

    >>> q, k, v = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).double()
    >>> one = naive_evidence(q, k[:, :, :1], v[:, :, :1], 1.0)  # of one key nothing but its value can come
    >>> bool(torch.allclose(one, v[:, :, :1].expand_as(one)))
    True
    """
    return naive_attention(
        query, key, value, 1.0, beta, block_size=block_size, mix=mix, scale=scale, is_causal=is_causal,
        key_mask=key_mask, cu_seqlens=cu_seqlens, read="evidence", directions=directions, overlap=overlap,
        evidence_offset=evidence_offset,
    ).out  # fmt: skip


def naive_value_convolution(
    value: Tensor, taps: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None, cu_seqlens: Any = None,
) -> Tensor:  # fmt: skip
    """What `value_convolution` adds to attention, by its definition: [B, H, N, E] in float64 of values [B, H, N, E] and
    taps [H, E, W]. Each token takes taps_w times the value that stands w - left places after it, where that is there,
    is not hidden and is of the same sequence; left is W - 1 where causal, else half of it.

    >>> taps = torch.tensor([[[1.0, 0.0, 0.0]]])  # of the token before alone
    >>> naive_value_convolution(torch.arange(4.0).view(1, 1, 4, 1), taps).flatten().tolist()
    [0.0, 0.0, 1.0, 2.0]
    """
    value, width, n = value.double(), taps.shape[-1], value.shape[2]
    left = width - 1 if is_causal else (width - 1) // 2
    row, column = torch.arange(n)[:, None], torch.arange(n)
    w = column - row + left  # which tap a token has for another
    taken = (w >= 0) & (w < width)
    if cu_seqlens is not None:
        sequence = torch.tensor([int((cu_seqlens[1:] <= i).sum()) for i in range(n)])
        taken = taken & (sequence[:, None] == sequence)
    weight = taps.double()[:, :, w.clamp(0, width - 1)] * taken  # [H, E, N, N]
    seen = torch.ones(value.shape[0], n).double() if key_mask is None else key_mask.double()
    return torch.einsum("heij,bhje,bi,bj->bhie", weight, value, seen, seen)


def raw_map(aq: Tensor, bk: Tensor, allowed: Tensor) -> Tensor:
    """Eq. (8) letter by letter. aq [..., Nq, D], bk [..., Nk, D], allowed and P [..., Nq, Nk]."""
    n = (aq.exp() @ bk.exp().transpose(-1, -2)) * allowed
    return n / n.sum(-1, keepdim=True)


def log_similarity(aq: Tensor, bk: Tensor) -> Tensor:
    """log n_ij = log sum_c exp(alpha q_ic + beta k_jc), [..., Nq, Nk].

    n_ij / sum_j' n_ij' = softmax_j(log n_ij), so eq. (8) is a softmax over keys of this number: the same P as
    `raw_map`, but no exponential is ever taken of a large number.
    """
    return (aq[..., :, None, :] + bk[..., None, :, :]).logsumexp(-1)


def masked_softmax(score: Tensor, allowed: Tensor, dim: int = -1) -> Tensor:
    """Softmax over the allowed entries; all zero, with zero gradient, where nothing is allowed."""
    return score.masked_fill(~allowed, torch.finfo(score.dtype).min).softmax(dim) * allowed


def expand_per_head(number: Any, batch: int, heads: int, width: int) -> Tensor:
    """A number, [], [H], [B, H], [H, width] or [B, H, width] -> [B, H, 1 or width]."""
    x: Tensor = torch.as_tensor(number, dtype=torch.float64)
    if x.dim() == 2:
        if x.shape not in ((batch, heads), (heads, width)):
            raise ValueError(
                f"alpha, beta and mix of two dimensions must be [batch, heads] = [{batch}, {heads}] or [heads, dim] = "
                f"[{heads}, {width}]; got {list(x.shape)}."
            )
        x = x[:, :, None] if x.shape == (batch, heads) else x[None]
    elif x.dim() < 2:
        x = x.reshape(1, -1, 1)
    return x.expand(batch, heads, -1)


def naive_attention(
    query: Tensor,  # [B, Hq, Nq, D]
    key: Tensor,  # [B, Hk, Nk, D]
    value: Tensor,  # [B, Hk, Nk, Dv]
    alpha: Any,
    beta: Any,
    *,
    block_size: int | None = None,
    mix: Any = 0.5,
    is_causal: bool = False,
    key_mask: Tensor | None = None,  # [B, Nk]
    cu_seqlens: Any = None,
    state: Any = None,
    scale: float | None = None,
    read: str = "paper",
    directions: Any = None,
    overlap: bool = False,
    evidence_offset: Any = 0.0,
) -> Result:
    """Any of them, and (log_sum, mean_value) of the state after it."""
    query, key, value = query.double(), key.double(), value.double()
    packs = cu_seqlens if isinstance(cu_seqlens, Sequence) else (cu_seqlens, cu_seqlens)
    batch = query.shape[0] if cu_seqlens is None else len(packs[0]) - 1
    (hq, dim), (hk, value_dim) = query.shape[1::2], value.shape[1::2]
    width = directions.shape[-2] if isinstance(directions, Tensor) else dim
    alpha, beta = expand_per_head(alpha, batch, hq, dim), expand_per_head(beta, batch, hk, width)
    joint = isinstance(mix, str)
    r, p = (0.5, 0.5) if joint else mix if isinstance(mix, Sequence) else (mix, 1 - mix)
    offset = expand_per_head(evidence_offset, batch, hq, 1)  # [B, Hq, 1]
    r, p = expand_per_head(r, batch, hq, value_dim), expand_per_head(p, batch, hq, value_dim)
    if key_mask is None:
        key_mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool)

    if cu_seqlens is not None:  # a packed batch is by definition its sequences one at a time
        parts = []
        for s in range(batch):
            rows, cols = (slice(int(cu[s]), int(cu[s + 1])) for cu in packs)
            own = [x[s : s + 1] for x in (alpha, beta, r, p, offset)]
            held = None if state is None else state.index_select(torch.tensor([s]))
            parts.append(naive_attention(
                query[:, :, rows], key[:, :, cols], value[:, :, cols], *own[:2],
                mix=mix if joint else own[2:4], overlap=overlap, evidence_offset=own[4], block_size=block_size,
                is_causal=is_causal, key_mask=key_mask[:, cols], state=held, scale=scale, read=read,
                directions=directions,
            ))  # fmt: skip
        outs, sums, means = zip(*parts, strict=True)
        return Result(torch.cat(outs, 2), torch.cat(sums), torch.cat(means))

    n, m = query.shape[2], key.shape[2]
    along = key @ directions.double().transpose(-1, -2) if isinstance(directions, Tensor) else key
    bk = beta[:, :, None] * along  # [B, Hk, Nk, D or channels]
    bk = torch.cat([bk, -bk], -1) if directions == "signed" else bk
    if state is None:
        state = LLNState.empty(batch, hk, bk.shape[-1], value_dim, dtype=torch.float64)

    def heads(x: Tensor) -> Tensor:  # query head h uses key head h // group
        return x.repeat_interleave(hq // hk, dim=1)

    visible = key_mask[:, None, None, :].expand(batch, 1, n, m)
    if is_causal:
        visible = visible & torch.ones(n, m, dtype=torch.bool).tril()

    scale = dim**-0.5 if scale is None else scale
    if joint:
        assert block_size is not None
        near = visible & see_window(key_mask, n, block_size, overlap, is_causal)
        far, evidence = read_evidence(query, key, value, bk, visible & ~near, scale)
        score = scale * query @ heads(key).transpose(-1, -2)
        normaliser = score.masked_fill(~near, torch.finfo(score.dtype).min).logsumexp(-1)
        weight = torch.sigmoid(evidence + offset - normaliser)
        weight = torch.where(near.any(-1), weight, 1.0) * (visible & ~near).any(-1)
        out = weight[..., None] * far + (1 - weight[..., None]) * (masked_softmax(score, near) @ heads(value))
        return Result(out, *_fold(bk, value, key_mask, state))
    if read == "evidence":
        out, _ = read_evidence(query, key, value, bk, visible, scale)
    else:
        # A state is D further keys that everyone sees: key c has the exponent log_sum_c in channel c, -inf in all
        # others, and the value mean_value_c. Its log similarity to query i is therefore alpha q_ic + log_sum_c.
        aq = alpha[:, :, None] * query  # [B, Hq, Nq, D]
        past = heads(state.log_sum.double())[:, :, None]  # [B, Hq, 1, D]
        score = torch.cat([aq + past, log_similarity(aq, heads(bk))], -1)  # [B, Hq, Nq, D + Nk]
        allowed = torch.cat([past.isfinite().expand_as(aq), visible.expand(-1, hq, -1, -1)], -1)
        out = masked_softmax(score, allowed) @ heads(torch.cat([state.mean_value.double(), value], 2))
    log_sum, mean_value = _fold(bk, value, key_mask, state)

    if block_size is not None:  # softmax(scale q k^T) v over each row's block, counted from the first valid key
        first = key_mask.int().argmax(-1) if m else torch.zeros(batch, dtype=torch.long)  # [B]
        count = torch.zeros_like(first) if state.count is None else state.count
        start = torch.where(count > 0, count, -first)
        block = (start[:, None] + torch.arange(m)).div(block_size, rounding_mode="floor")  # [B, N]
        visible = visible & (block[:, None, :, None] == block[:, None, None, :])
        if state.block_key is not None:  # the keys of the block that was open when the state was taken
            is_open = state.block_mask & (count % block_size != 0)[:, None]  # [B, block_size]
            is_open = is_open[:, None, :] & (block == (count // block_size)[:, None])[:, :, None]  # [B, Nq, block_size]
            visible = torch.cat([is_open[:, None], visible], -1)
            key = torch.cat([state.block_key.double(), key], 2)
            value = torch.cat([state.block_value.double(), value], 2)
        score = scale * query @ heads(key).transpose(-1, -2)
        out = r[:, :, None] * out + p[:, :, None] * (masked_softmax(score, visible) @ heads(value))
    return Result(out, log_sum, mean_value)


def see_window(key_mask: Tensor, length: int, block_size: int, overlap: bool, is_causal: bool) -> Tensor:
    """[B, 1, Nq, Nk]: whether a key lies in the query's block, or window, counted from the first valid key."""
    first = key_mask.int().argmax(-1)[:, None, None, None] if length else torch.zeros(1, 1, 1, 1, dtype=torch.long)
    row, column = torch.arange(length)[:, None] - first, torch.arange(length) - first
    rows = block_size // 2 if overlap else block_size
    before = (block_size // 2 if is_causal else block_size // 4) if overlap else 0
    begin = row.div(rows, rounding_mode="floor") * rows - before
    return (row >= 0) & (column >= begin) & (column < begin + block_size)


def read_evidence(
    query: Tensor, key: Tensor, value: Tensor, x: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(the linear part of the evidence read by its definition, zeros where a query sees nothing; its evidence [B, Hq,
    Nq]). x [B, Hk, Nk, M] are the channels' exponents, visible [B, 1, Nq, Nk]."""
    seen = visible[..., None].expand(-1, -1, -1, -1, x.shape[-1])  # [B, 1, Nq, Nk, M]
    b = masked_softmax(x[:, :, None].expand(-1, -1, query.shape[2], -1, -1), seen, dim=3)  # [B, Hk, Nq, Nk, M]
    entropy = -(b * b.clamp_min(1e-300).log()).sum(3)  # [B, Hk, Nq, M]; 0 ln 0 = 0, also in the gradient
    centre = torch.einsum("bhnjm,bhjd->bhnmd", b, key)
    mean_value = torch.einsum("bhnjm,bhjd->bhnmd", b, value)
    group = query.shape[1] // key.shape[1]
    entropy, centre, mean_value = (t.repeat_interleave(group, dim=1) for t in (entropy, centre, mean_value))
    logits = scale * torch.einsum("bhnd,bhnmd->bhnm", query, centre) + entropy
    a = logits.softmax(-1)
    return torch.einsum("bhnm,bhnmd->bhnd", a, mean_value), (a * logits).sum(-1)


def _fold(bk: Tensor, value: Tensor, key_mask: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """(log_sum, mean_value) of the state's keys and these, straight from their definition."""
    exponent = torch.cat([state.log_sum.double()[:, :, None], bk], 2)  # [B, Hk, 1 + Nk, D]
    present = torch.cat([state.log_sum.isfinite()[:, :, None], key_mask[:, None, :, None].expand_as(bk)], 2)
    weight = masked_softmax(exponent, present, dim=2)
    mean_value = weight[:, :, 0, :, None] * state.mean_value.double() + weight[:, :, 1:].transpose(-1, -2) @ value
    log_sum = exponent.masked_fill(~present, torch.finfo(torch.float64).min).logsumexp(2)
    return log_sum.masked_fill(~present.any(2), -torch.inf), mean_value
