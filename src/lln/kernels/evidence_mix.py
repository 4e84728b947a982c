"""Blocks and the evidence read under one normaliser: `mix="evidence"`.

A query attends by softmax to the keys of its window, and to the keys outside it through the channels of the evidence
read. Softmax attention is the mean of both, weighted by its normalisers there, Z_near and Z_far. Of these the first is
known, and for the second the evidence has a lower bound (see `evidence`):

    z_i = sum_c A_ic (scale q_i . K_c + H_c)  <=  ln Z_far        w_i = sigmoid(z_i + offset - ln Z_near)
    o_i = w_i far_i + (1 - w_i) near_i

So each query says for itself how much lies far away. It is exact where nothing lies outside, or one key.

Queries come in groups, each with a window of keys (see `carry.Layout`). Windows begin and end where *pieces* of as many
slots as a group has do, so that folding each piece once gives the state outside of every window by merging: all pieces
before it and, where attention is not causal, all behind it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from lln.kernels.blocks import gather_rows, slot_rows
from lln.kernels.call import Call
from lln.kernels.carry import Layout
from lln.kernels.common import compute_dtype, drop, is_autocast_enabled, make_finite, spans, split_heads
from lln.kernels.evidence import Held, call_again, channel_exponents, fold_nothing, fold_rows, make_empty, merge, read


def much() -> float:
    """The advantage of a part over one that has no key. Not a number with a name, of which torch.compile(dynamic=True)
    makes a symbol that it cannot hand on to a part of the graph."""
    return 1e4


def count_groups(layout: Layout, length: int, continued: bool) -> int:
    """Groups that so many new rows are in at most, where a state may have left one of them open."""
    return -(-(length + (layout.rows - 1 if continued else 0)) // layout.rows)


def first_slot(call: Call, layout: Layout) -> Tensor | None:
    """[B]: the slot of the first new row; None where that is `before` in every sequence. Tokens before the first valid
    one have slots below `before` and count as hidden."""
    if call.start is None:
        return None
    # Of a state `start` is the place in the open group, or minus the number of tokens before the first valid one.
    return call.start + layout.before


def attend(call: Call) -> tuple[Tensor, ...]:
    """(out [B, Hq, N, E] in the compute dtype, and the state as in `lln.LLNState`, without the rows that it keeps:
    log_sum [B, Hk, M], mean_value [B, Hk, M, E], mean_key [B, Hk, M, D], entropy [B, Hk, M]) of one sequence."""
    parts, state = attend_apart(call)
    heads = call.key.shape[1]
    offset = 0.0 if call.offset is None else split_heads(call.offset, heads).unsqueeze(-2)  # [B, H, G, 1, 1]
    return join(*parts, offset).flatten(1, 2), *(t.squeeze(2) for t in state)


def join(far: Tensor, near: Tensor, advantage: Tensor, offset: Tensor | float) -> Tensor:
    """What both parts make together."""
    weight = torch.sigmoid(advantage + offset)
    return weight * far + (1.0 - weight) * near


def attend_apart(call: Call) -> tuple[tuple[Tensor, Tensor, Tensor], Held]:
    """((attention to the keys outside the window [B, H, G, N, E]; to those inside; z - ln Z_near [B, H, G, N, 1]), the
    state) of one sequence."""
    if is_autocast_enabled(call.query.device.type):
        with torch.autocast(call.query.device.type, enabled=False):
            return attend_apart(call)
    assert call.block_size is not None
    heads, dtype, length = call.key.shape[1], compute_dtype(call.query.dtype), call.query.shape[2]
    layout = Layout.choose(call.block_size, call.overlap, call.is_causal)
    groups = count_groups(layout, length, call.count is not None) if length else 1
    q = call.query.unflatten(1, (heads, -1)).to(dtype)  # [B, H, G, N, D]
    first = first_slot(call, layout)
    k, v, seen = lay_keys(call, layout, groups, first, dtype)
    directions = call.directions.unsqueeze(1) if isinstance(call.directions, Tensor) else call.directions
    hidden = None if seen is None else ~seen[:, None, None, :, None]
    x = channel_exponents(k, call.beta[:, :, None, None], directions, hidden)
    given = call.log_sum, call.mean_value, call.mean_key, call.entropy
    held = [t.unsqueeze(2) for t in given if t is not None]
    state = Held(*held) if held else fold_nothing(x, k, v)
    pieces = fold_rows(*(t.unflatten(-2, (-1, layout.rows)) for t in (x, k, v)))
    prefixes = list_prefixes(state, pieces, groups)
    outside = stack(prefixes[:groups])
    if not call.is_causal:
        suffixes = list_suffixes(make_empty(x, k, v), pieces, groups, layout.size // layout.rows)
        outside = merge(outside, stack(suffixes))
    placed = place_queries(q, layout, groups, first).unflatten(-2, (groups, layout.rows))  # [B, H, G, n, R, D]
    parts = attend_groups(call, layout, placed, k, v, seen, outside).flatten(-3, -2)
    if first is None:
        parts = parts[..., :length, :]
    else:
        slots = torch.arange(length, device=first.device) + first.unsqueeze(-1) - layout.before  # [B, N]
        windowless = (slots < 0)[:, None, None, :, None]
        parts = gather_rows(parts, slots.clamp(0, parts.shape[-2] - 1)).masked_fill(windowless, 0.0)
        if not call.is_causal:
            # Rows before the first valid token have no window: all keys lie outside.
            every = functools.reduce(merge, (take_piece(pieces, at) for at in range(pieces.log_sum.shape[3])), state)
            far = read(q, every, call.scale, call.dropout)
            parts = torch.where(
                windowless, torch.cat([far, 0.0 * far, torch.full_like(far[..., :1], much())], -1), parts
            )
    far, near, advantage = parts.split([v.shape[-1], v.shape[-1], 1], -1)
    return (far, near, advantage), pick_prefix(prefixes, count_closed(call, layout, first))


def lay_keys(
    call: Call, layout: Layout, groups: int, first: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values [B, H, 1, slots, D | E] in their slots, 0 in those that hold none, and which slots [B, slots] may
    be attended to; None: those of the rows, and no other."""
    slots = (groups - 1) * layout.rows + layout.size
    k, v = call.key.unsqueeze(2).to(dtype), call.value.unsqueeze(2).to(dtype)
    after = slots - layout.before - k.shape[-2]
    if first is None:
        if not layout.before and not after:
            return k, v, None
        k, v = (functional.pad(t, (0, 0, layout.before, after)) for t in (k, v))
        at = torch.arange(slots, device=k.device)
        return k, v, ((at >= layout.before) & (at < slots - after)).unsqueeze(0)
    rows, filled = slot_rows(first, torch.arange(slots, device=k.device).unsqueeze(0), call.key.shape[2], layout.size)
    opened = [None if t is None else t.unsqueeze(2).to(dtype) for t in (call.open_key, call.open_value)]
    seen = filled & call.block_mask().gather(1, rows)
    kept = seen[:, None, None, :, None]

    def lay(t: Tensor, held: Tensor | None) -> Tensor:
        held = t.new_zeros(()).expand(*t.shape[:-2], layout.size, t.shape[-1]) if held is None else held
        return gather_rows(torch.cat([held, t], -2), rows).masked_fill(~kept, 0.0)

    return lay(k, opened[0]), lay(v, opened[1]), seen


def place_queries(q: Tensor, layout: Layout, groups: int, first: Tensor | None) -> Tensor:
    """[B, H, G, n * rows, D]: the queries in their slots from `before` on, 0 where there is none."""
    slots = groups * layout.rows
    if first is None:
        return functional.pad(q, (0, 0, 0, slots - q.shape[-2])) if slots > q.shape[-2] else q
    row = torch.arange(slots, device=q.device) + layout.before - first.unsqueeze(-1)  # [B, slots]
    here, q = (row >= 0) & (row < q.shape[-2]), functional.pad(q, (0, 0, 0, 1))  # there may be no row at all
    return gather_rows(q, row.clamp(0, q.shape[-2] - 1)).masked_fill(~here[:, None, None, :, None], 0.0)


def list_prefixes(state: Held, pieces: Held, groups: int) -> list[Held]:
    """The state before each of so many pieces, and after the last of them."""
    found = [state]
    for at in range(groups):
        found.append(merge(found[-1], take_piece(pieces, at)))
    return found


def list_suffixes(state: Held, pieces: Held, groups: int, reach: int) -> list[Held]:
    """The state of the pieces behind the window of each group."""
    found = [state]
    for at in range(groups + reach - 2, reach - 1, -1):
        found.append(merge(found[-1], take_piece(pieces, at)))
    return found[::-1]


def take_piece(pieces: Held, at: int) -> Held:
    return Held(*(t[:, :, :, at] for t in pieces))


def stack(states: list[Held]) -> Held:
    """One state for each group, [B, H, 1, n, M, ...]."""
    return Held(*(torch.stack(fields, 3) for fields in zip(*states, strict=True)))


def count_closed(call: Call, layout: Layout, first: Tensor | None) -> int | Tensor:
    """How many pieces lie before the window of the token that comes next, of each sequence."""
    length = call.key.shape[2]
    if first is None:
        return length // layout.rows
    return (first + length - layout.before).div(layout.rows, rounding_mode="floor")


def pick_prefix(prefixes: list[Held], at: int | Tensor) -> Held:
    if isinstance(at, int):
        return prefixes[at]
    found = []
    for fields in zip(*prefixes, strict=True):
        every = torch.stack(fields, 1)  # [B, n + 1, H, 1, M, ...]
        index = at.view(-1, *[1] * (every.ndim - 1)).expand(-1, 1, *every.shape[2:])
        found.append(every.gather(1, index).squeeze(1))
    return Held(*found)


def attend_groups(
    call: Call, layout: Layout, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, outside: Held
) -> Tensor:
    """[far, near, advantage] [B, H, G, n, rows, 2 E + 1] of the groups' queries [B, H, G, n, rows, D]."""
    keys, values = (t.unfold(-2, layout.size, layout.rows).transpose(-1, -2) for t in (k, v))  # [B, H, 1, n, size, D]
    windows = None if seen is None else seen.unfold(-1, layout.size, layout.rows)[:, None, None]
    found = []
    for part in spans(q, dim=-3, at_least=1):
        given = q[..., part, :, :], keys[..., part, :, :], values[..., part, :, :]
        visible = None if windows is None else windows[..., part, :]
        held = (t[:, :, :, part] for t in outside)
        found.append(call_again(attend_group, *given, visible, *held, call, layout, part.start))
    return torch.cat(found, -3)


def attend_group(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, log_sum: Tensor, mean_value: Tensor, mean_key: Tensor,
    entropy: Tensor, call: Call, layout: Layout, first: int,
) -> Tensor:  # fmt: skip
    # A vector that all keys share changes nothing, and without it products are smaller and round less.
    centre = mean_key.detach().mean(-2, keepdim=True)
    alive = (log_sum > -torch.inf).any(-1)[..., None, None]  # [B, H, 1, n, 1, 1]: is there a key outside
    scaled = call.scale * q
    logits = scaled @ (mean_key - centre).transpose(-1, -2) + entropy.to(q.dtype).unsqueeze(-2)
    a = logits.softmax(-1)
    evidence = (a * logits).sum(-1, keepdim=True)
    far = drop(a, call.dropout, first)[0] @ (mean_value * alive)

    scores = scaled @ (k - centre).transpose(-1, -2)  # [B, H, G, n, rows, size]
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(-2), -torch.inf)
    if call.is_causal:
        row, slot = (torch.arange(count, device=q.device) for count in (layout.rows, layout.size))
        scores = scores.masked_fill(slot > row[:, None] + layout.before, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - make_finite(top)).exp()
    total = weights.sum(-1, keepdim=True)
    some, held = total > 0, total.clamp_min(0.5)  # as in `softmax_or_zero`
    dropout = None if call.dropout is None else call.dropout.make_stream(-1)  # independent of that of the channels
    near = drop(weights / held, dropout, first)[0] @ v
    advantage = evidence - (top.masked_fill(~some, 0.0) + held.log())
    advantage = torch.where(alive, torch.where(some, advantage, much()), -much())
    return torch.cat([far, near, advantage], -1)
