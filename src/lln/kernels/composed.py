"""The eager back end's kernels composed of operations that are differentiable by themselves: what those get who take a
computation apart, see `common.run`.

Elsewhere the backward passes are written out, which keeps less memory, and work goes span by span, or chunk by chunk.
Here nothing is a loop over the length, so that a compiler's graph is the same for all lengths: causal attention takes
all chunks at once, and adds their states up in groups. Shapes are those of `common`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lln.kernels.blocks import cut_into_blocks, place, weights
from lln.kernels.causal import CHUNK, Chunk, outputs, prefix_log_sums
from lln.kernels.common import (
    Dropout,
    compute_dtype,
    count_parts,
    cut_rows,
    drop,
    exponents,
    fit_size,
    is_surely,
    join_rows,
    keep_full_precision,
    logaddexp,
    make_finite,
    softmax_or_zero,
    wide_dtype,
)
from lln.kernels.fold import make_empty, make_readable, merge

GROUP = 8  # chunks whose states are added up together


@keep_full_precision
def compose_fold(k: Tensor, v: Tensor, beta: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `fold.Fold`."""
    if is_surely(k.shape[-2] == 0):
        return make_empty(k, v, beta.dtype)
    return fold_openly(exponents(k, beta, hidden), v.to(beta.dtype))


def fold_openly(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `fold.fold_rows`, and x stays as it is."""
    wide = wide_dtype(x.device)
    top = make_finite(x.detach().amax(-2, keepdim=True))
    weights = (x - top).exp()
    total = weights.sum(-2)
    some, held = total > 0, total.clamp_min(0.5)  # log(0) has no derivative
    log_sum = (top.squeeze(-2).to(wide) + held.to(wide).log()).masked_fill(~some, -torch.inf)
    return log_sum, (weights.transpose(-1, -2) @ v) / held.unsqueeze(-1)


@keep_full_precision
def compose_read(
    q: Tensor, alpha: Tensor, log_sum: Tensor, mean_value: Tensor, weight: Tensor | None, dtype: torch.dtype,
    dropout: Dropout | None,
) -> Tensor:  # fmt: skip
    """As `fold.Read`."""
    offset, mean_value, _ = make_readable(log_sum, mean_value)
    a = (exponents(q, alpha) + offset).softmax(-1)
    out = drop(a, dropout, 0)[0] @ mean_value
    return (out if weight is None else out * weight).to(dtype)


@keep_full_precision
def compose_blocks(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, open_key: Tensor | None, open_value: Tensor | None,
    start: Tensor | None, key_mask: Tensor | None, block_size: int, is_causal: bool, scale: float,
    dtype: torch.dtype, dropout: Dropout | None,
) -> Tensor:  # fmt: skip
    """As `blocks.Blocks`."""
    computed = compute_dtype(q.dtype)
    placement = place(start, key_mask, block_size, open_key)
    *rows, visible = cut_into_blocks(q, k, v, open_key, open_value, placement, block_size)
    qs, ks, vs = (t.to(computed) for t in rows)
    out = drop(weights(qs, ks, visible, is_causal, scale), dropout, 0)[0] @ vs
    out = (out if weight is None else out * weight.unsqueeze(-2)).to(dtype)
    out = join_rows(out, q.shape[-2] if placement is None else placement.count * block_size)
    return out if placement is None else placement.take_new_rows(out)


@keep_full_precision
def compose_causal(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, log_sum: Tensor, mean_value: Tensor,
    weight: Tensor | None, hidden: Tensor | None, dtype: torch.dtype, dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `causal.Causal`."""
    length = q.shape[-2]
    if is_surely(length == 0):
        return q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype), log_sum, mean_value
    size = fit_size(CHUNK, length)
    count = count_parts(length, size)

    x, v, q_logits = (
        cut_rows(t, count, size) for t in (exponents(k, beta, hidden), v.to(alpha.dtype), exponents(q, alpha))
    )
    x = x.masked_fill(list_places(count, size, length, x.device)[..., None], -torch.inf)
    (before, mean), state = add_up_before((log_sum, mean_value), *fold_openly(x, v))
    before, x = before.unsqueeze(-2), x.to(before.dtype)
    log_sums = logaddexp(before, prefix_log_sums(x))
    offset = (log_sums - make_finite(log_sums.detach().amax(-1, keepdim=True))).to(alpha.dtype)
    a = softmax_or_zero(q_logits + offset)
    dropped, mask = drop(a, dropout, 0)
    out = outputs(Chunk(x, v, before, log_sums, a, dropped, mask), mean)
    out = join_rows(out, length)
    return (out if weight is None else out * weight).to(dtype), *state


def add_up_before(
    state: tuple[Tensor, Tensor], log_sum: Tensor, mean: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(The states before each of n chunks, the one after them) from a state [B, H, 1, D] and [B, H, 1, D, E] and those
    of the chunks, [B, H, 1, n, D] and [B, H, 1, n, D, E]. Without a loop: chunks within groups, then the groups."""
    count = log_sum.shape[-2]
    group = fit_size(GROUP, count)
    groups = count_parts(count, group)
    none = list_places(groups, group, count, mean.device)[..., None]
    log_sum = cut_rows(log_sum, groups, group).masked_fill(none, -torch.inf)
    mean = cut_rows(mean, groups, group, -3).masked_fill(none[..., None], 0.0)
    inner = [(log_sum[..., 0, :], mean[..., 0, :, :])]
    for at in range(1, group):
        inner.append(merge(*inner[-1], log_sum[..., at, :], mean[..., at, :, :]))
    log_sum, mean = (torch.stack(parts, -i) for i, parts in enumerate(zip(*inner, strict=True), 2))
    outer_sum = torch.cat([state[0].unsqueeze(-2), log_sum[..., -1, :]], -2)
    outer_sum, outer_mean = add_up(outer_sum, torch.cat([state[1].unsqueeze(-3), mean[..., -1, :, :]], -3))
    # What a chunk comes after: the groups before its own, and the chunks before it in that.
    inner_sum = functional.pad(log_sum[..., :-1, :], (0, 0, 1, 0), value=-torch.inf)
    inner_mean = functional.pad(mean[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    before, held = merge(outer_sum[..., :-1, None, :], outer_mean[..., :-1, None, :, :], inner_sum, inner_mean)
    return (join_rows(before, count), join_rows(held, count, -3)), (outer_sum[..., -1, :], outer_mean[..., -1, :, :])


def list_places(count: int, size: int, length: int, device: torch.device) -> Tensor:
    """[count, size] bool: where parts of that size hold no row."""
    return torch.arange(count, device=device)[:, None] * size + torch.arange(size, device=device) >= length


def add_up(log_sum: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The state of each row and all before it, of states [..., n, D] and [..., n, D, E], every pair of them met."""
    rows = log_sum.shape[-2]
    at = torch.arange(rows, device=log_sum.device)
    later = at > at.unsqueeze(-1)  # [row, one of those before it]
    parts = log_sum.unsqueeze(-3).masked_fill(later.unsqueeze(-1), -torch.inf)  # [..., n, n, D]
    top = make_finite(parts.detach().amax(-2, keepdim=True))
    shares = (parts - top).exp()
    total = shares.sum(-2)
    some, held = total > 0, total.clamp_min(0.5)
    shares = (shares / held.unsqueeze(-2)).to(mean.dtype).movedim(-1, -3)  # [..., D, n, n]
    found = (shares @ mean.transpose(-3, -2)).transpose(-3, -2)
    return (top.squeeze(-2) + held.log()).masked_fill(~some, -torch.inf), found
