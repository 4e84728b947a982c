"""The evidence read: queries compare themselves with the keys that a channel holds, not with one coordinate of them.

Channels are written as LLN attention writes them, with exponents x_j (beta k_j along the channels' directions):

    B_jc = softmax_j(x_jc)     S_c = sum_j B_jc v_j     K_c = sum_j B_jc k_j     H_c = -sum_j B_jc ln B_jc
    A_ic = softmax_c(scale q_i . K_c + H_c)             o_i = sum_c A_ic S_c

By Jensen's inequality a logit is a lower bound of ln sum_j exp(scale q_i . k_j), softmax's own normaliser, with B_c as
the trial distribution; it is exact where x_jc = scale q_i . k_j. So o is a mixture of one estimate of softmax attention
for each channel, weighted by their evidence. It is ours, not the paper's: for weights that were trained with softmax.

The state is (L, S, K, H), L = logsumexp_j(x_j). H is kept rather than derived from L and K, which would cancel, and
merges by the chain rule of entropy, H = w1 (H1 - ln w1) + w2 (H2 - ln w2), whose terms are all >= 0. Everything here is
made of differentiable operations. Shapes are those of `common`, with M channels in place of D where x, L, S, K and H
have them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lln.kernels.call import Call
from lln.kernels.causal import Chunk, chunks, outputs, pad_rows, take_left, take_right, value_products
from lln.kernels.common import (
    Dropout,
    compute_dtype,
    drop,
    exponents,
    is_autocast_enabled,
    make_finite,
    softmax_or_zero,
    spans,
    split_heads,
    wide_dtype,
)

SIGNED = "signed"


class Held(NamedTuple):
    """A state. L and H are wide, since many merges would let them drift."""

    log_sum: Tensor  # [B, H, 1, M] wide
    mean_value: Tensor  # [B, H, 1, M, E]
    mean_key: Tensor  # [B, H, 1, M, D]
    entropy: Tensor  # [B, H, 1, M] wide


def count_channels(directions: Tensor | str | None, dim: int) -> int:
    """M: the keys' own D channels, twice as many with their negatives, or one for each direction."""
    if directions is None:
        return dim
    return 2 * dim if isinstance(directions, str) else directions.shape[-2]


def attend(call: Call) -> tuple[Tensor, ...]:
    """(out [B, Hq, N, E] in the compute dtype with the linear part's weight, and the state as in `lln.LLNState`:
    log_sum [B, Hk, M], mean_value [B, Hk, M, E], mean_key [B, Hk, M, D], entropy [B, Hk, M]) of one sequence."""
    if is_autocast_enabled(call.query.device.type):  # as `keep_full_precision`
        with torch.autocast(call.query.device.type, enabled=False):
            return attend(call)
    heads, dtype = call.key.shape[1], compute_dtype(call.query.dtype)
    q = call.query.unflatten(1, (heads, -1)).to(dtype)
    k, v = call.key.unsqueeze(2).to(dtype), call.value.unsqueeze(2).to(dtype)
    hidden = None if call.key_mask is None else ~call.key_mask[:, None, None, :, None]
    directions = call.directions.unsqueeze(1) if isinstance(call.directions, Tensor) else call.directions
    x = channel_exponents(k, call.beta[:, :, None, None], directions, hidden)
    given = call.log_sum, call.mean_value, call.mean_key, call.entropy
    state = Held(*(t.unsqueeze(2) for t in given if t is not None)) if call.log_sum is not None else None
    if call.is_causal and q.shape[-2] > 1:
        out, state = attend_causally(q, k, v, x, state or make_empty(x, k, v), call.scale, call.dropout)
    else:  # one token sees no later one: it is after its state and itself
        new = fold(x, k, v)
        state = new if state is None else merge(state, new)
        out = read(q, state, call.scale, call.dropout)
    if call.lln_weight is not None:
        out = out * split_heads(call.lln_weight, heads).unsqueeze(-2)
    return out.flatten(1, 2), *(t.squeeze(2) for t in state)


def channel_exponents(k: Tensor, beta: Tensor, directions: Tensor | str | None, hidden: Tensor | None) -> Tensor:
    """x [B, H, 1, N, M] of keys [B, H, 1, N, D]: beta times the keys along the channels' directions [H, 1, M, D]."""
    if isinstance(directions, Tensor):
        along: Tensor = k @ directions.to(k.dtype).transpose(-1, -2)
        return exponents(along, beta, hidden)
    x = exponents(k, beta)
    x = torch.cat([x, -x], -1) if directions == SIGNED else x
    return x if hidden is None else x.masked_fill(hidden, -torch.inf)


def make_empty(x: Tensor, k: Tensor, v: Tensor) -> Held:
    """The state of no keys at all, the identity of `merge`."""
    shape, wide = (*x.shape[:3], x.shape[-1]), wide_dtype(x.device)
    value, key = (t.new_zeros((*shape, t.shape[-1])) for t in (v, k))
    return Held(x.new_full(shape, -torch.inf, dtype=wide), value, key, x.new_zeros(shape, dtype=wide))


def join_entropies(sum_1: Tensor, entropy_1: Tensor, sum_2: Tensor, entropy_2: Tensor) -> tuple[Tensor, Tensor]:
    """(L, H) of two sets of keys from (L, H) of each."""
    top = make_finite(torch.maximum(sum_1, sum_2).detach())
    # Not logaddexp: its second derivative is NaN where one of them is -inf.
    first, second = sum_1 - top, sum_2 - top  # <= 0
    total = first.exp() + second.exp()  # 1 to 2, or 0 where there is no key
    none, log_total = total == 0, total.clamp_min(0.5).log()
    parts = []
    for part, entropy in ((first, entropy_1), (second, entropy_2)):
        log_share = part - log_total
        # An empty part has no share, and 0 ln 0 = 0, also in the gradient.
        parts.append(log_share.exp() * (entropy - log_share.masked_fill(log_share == -torch.inf, 0.0)))
    return (top + log_total).masked_fill(none, -torch.inf), (parts[0] + parts[1]).masked_fill(none, 0.0)


def merge(first: Held, second: Held) -> Held:
    """The state of both. Associative and commutative."""
    log_sum, entropy = join_entropies(first.log_sum, first.entropy, second.log_sum, second.entropy)
    share = (second.log_sum - make_finite(log_sum)).exp().to(first.mean_value.dtype).unsqueeze(-1)
    # As in `fold.merge`: 1 - share would drift.
    value = first.mean_value + share * (second.mean_value - first.mean_value)
    key = first.mean_key + share * (second.mean_key - first.mean_key)
    return Held(log_sum, value, key, entropy)


def fold(x: Tensor, k: Tensor, v: Tensor) -> Held:
    """The state of all rows, some of them at a time."""
    state = None
    for rows in spans(x):
        part = fold_rows(x[..., rows, :], k[..., rows, :], v[..., rows, :])
        state = part if state is None else merge(state, part)
    return fold_nothing(x, k, v) if state is None else state


def fold_nothing(x: Tensor, k: Tensor, v: Tensor) -> Held:
    """The state of none of the rows, with gradients, of zeros: whatever is trained takes part in every call."""
    nothing = x[..., :0, :].transpose(-1, -2)  # [B, H, 1, M, 0]
    return make_empty(x, k, v)._replace(mean_value=nothing @ v[..., :0, :], mean_key=nothing @ k[..., :0, :])


def fold_rows(x: Tensor, k: Tensor, v: Tensor) -> Held:
    wide = wide_dtype(x.device)
    top = make_finite(x.detach().amax(-2, keepdim=True))
    below = x - top  # <= 0
    weights = below.exp()
    total = weights.sum(-2)
    # The largest weight of a channel that has keys is 1, so the clamp changes empty channels only.
    some, held = total > 0, total.clamp_min(0.5)
    means = (weights.transpose(-1, -2) @ torch.cat([v, k], -1)) / held.unsqueeze(-1)
    # Both terms are >= 0, so that nothing cancels.
    entropy = held.to(wide).log() - ((weights * below.masked_fill(below == -torch.inf, 0.0)).sum(-2) / held).to(wide)
    log_sum = (top.squeeze(-2).to(wide) + held.to(wide).log()).masked_fill(~some, -torch.inf)
    mean_value, mean_key = means.split([v.shape[-1], k.shape[-1]], -1)
    return Held(log_sum, mean_value, mean_key, entropy.masked_fill(~some, 0.0))


def read(q: Tensor, state: Held, scale: float, dropout: Dropout | None) -> Tensor:
    """o [B, H, G, N, E] of queries that see all of the state; zeros where it holds no key."""
    # A vector that all keys share changes no output, and without it products are smaller and round less.
    key = state.mean_key - state.mean_key.detach().mean(-2, keepdim=True)
    alive = (state.log_sum > -torch.inf).any(-1)[..., None, None].to(q.dtype)
    offset, mean_value = state.entropy.to(q.dtype).unsqueeze(-2), state.mean_value * alive
    outs = []
    for rows in spans(q):
        a = ((scale * q[..., rows, :]) @ key.transpose(-1, -2) + offset).softmax(-1)
        outs.append(drop(a, dropout, rows.start)[0] @ mean_value)
    return torch.cat(outs, -2) if outs else (q @ key.transpose(-1, -2)) @ mean_value  # no rows, with gradients


def attend_causally(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, state: Held, scale: float, dropout: Dropout | None
) -> tuple[Tensor, Held]:
    """Every row sees the state, the rows before it and itself; chunk by chunk, as in `causal`."""
    centre = find_centre(k, state)
    outs = [(q[..., :0, :] @ k[..., :0, :].transpose(-1, -2)) @ v[..., :0, :]]  # no rows, with gradients
    for rows in chunks(q.shape[-2]):
        parts = q[..., rows, :], k[..., rows, :], v[..., rows, :], x[..., rows, :]
        out, state = call_again(attend_chunk, *parts, *state, centre, scale, dropout, rows.start)
        outs.append(out)
    return torch.cat(outs, -2), Held(*state)


def find_centre(k: Tensor, state: Held) -> Tensor:
    """A vector that may be taken from all keys, as in `read`: what the first row sees, so that none sees later ones."""
    centre = torch.where((state.log_sum > -torch.inf).unsqueeze(-1), state.mean_key, k[..., :1, :])
    return centre.detach().mean(-2, keepdim=True)


def call_again(function: Any, *args: Any) -> Any:
    """With gradients a chunk is computed again in the backward pass, so that what is kept is its inputs alone."""
    if not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in args):
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, log_sum: Tensor, mean_value: Tensor, mean_key: Tensor, entropy: Tensor,
    centre: Tensor, scale: float, dropout: Dropout | None, first: int,
) -> tuple[Tensor, Held]:  # fmt: skip
    """(o of the chunk's rows, the state after them)"""
    state = Held(log_sum, mean_value, mean_key, entropy)
    logits, chunk = weigh_chunk(q, k, x, state, centre, scale)
    a = softmax_or_zero(logits.masked_fill(chunk.log_sums == -torch.inf, -torch.inf))
    dropped, mask = drop(a, dropout, first)
    rows = Chunk(chunk.x, pad_rows(v, chunk.x.shape[-2]), chunk.before, chunk.log_sums, a, dropped, mask)
    return outputs(rows, mean_value)[..., : q.shape[-2], :], merge(state, fold_rows(x, k, v))


def weigh_chunk(q: Tensor, k: Tensor, x: Tensor, state: Held, centre: Tensor, scale: float) -> tuple[Tensor, Chunk]:
    """The logits of the chunk's rows, filled up to a power of two, and the chunk with its keys for values."""
    count = 1 << (q.shape[-2] - 1).bit_length()
    x = pad_rows(x, count, -torch.inf).to(state.log_sum.dtype)
    before, held = state.log_sum.unsqueeze(-2), state.entropy.unsqueeze(-2)
    log_sums, entropies = join_entropies(before, held, *prefix_entropies(x))
    none = q.new_zeros(())
    chunk = Chunk(x, pad_rows(k - centre, count), before, log_sums, none, none, None)
    products = value_products(chunk, state.mean_key - centre, pad_rows(scale * q, count))
    return products + entropies.to(q.dtype), chunk


def list_logits(q: Tensor, k: Tensor, x: Tensor, scale: float, is_causal: bool) -> Tensor:
    """What the queries read each channel by, [B, H, G, N, M], but for a number a row."""
    state = make_empty(x, k, k[..., :0])
    if not is_causal:
        state = fold(x, k, k[..., :0])
        return scale * q @ state.mean_key.transpose(-1, -2) + state.entropy.to(q.dtype).unsqueeze(-2)
    centre, found = find_centre(k, state), [q.new_zeros((*q.shape[:-2], 0, x.shape[-1]))]
    for rows in chunks(q.shape[-2]):
        parts = q[..., rows, :], k[..., rows, :], x[..., rows, :]
        found.append(weigh_chunk(*parts, state, centre, scale)[0][..., : rows.stop - rows.start, :])
        state = merge(state, fold_rows(parts[2], parts[1], parts[1][..., :0]))
    return torch.cat(found, -2)


def prefix_entropies(x: Tensor) -> tuple[Tensor, Tensor]:
    """(L, H) of each row and all before it (a power of two of them), by doubling."""
    half, sums, entropies = 1, x, torch.zeros_like(x)
    while half < x.shape[-2]:
        both = [(take_left(t, half), take_right(t, half)) for t in (sums, entropies)]
        (sum_1, sum_2), (entropy_1, entropy_2) = both
        joined = join_entropies(sum_1[..., -1:, :], entropy_1[..., -1:, :], sum_2, entropy_2)
        pairs = zip((sum_1, entropy_1), joined, strict=True)
        sums, entropies = (torch.stack(pair, -3).flatten(-4, -2) for pair in pairs)
        half *= 2
    return sums, entropies
