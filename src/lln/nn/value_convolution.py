"""A depthwise convolution of the values over the tokens, added to what attention gives: a direct way to the neighbours.

    out_i = sum_j P_ij v_j + sum_w taps_w * v_(i + w - left)        left = (W - 1) / 2, causal: W - 1

of each value head and channel for itself; query heads that share a value head share its convolution. P of LLN attention
has rank at most the head dimension, so it cannot draw local patterns; this path draws them, and at taps = 0, where it
starts, it is nothing, to the last bit. A causal one has a state: the last W - 1 values. Patches of an image have rows
and columns of taps, [H, E, R, C] in the place of [H, E, W].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from lln.checks import CuSeqlens
from lln.distributed.halo import fetch_last, fetch_neighbours
from lln.kernels.carry import owners
from lln.kernels.common import compute_dtype, run
from lln.nn.image_grid import Patches, require_patches
from lln.ranks import find_ranks, refuse_ranks, tie
from lln.state import LLNState
from lln.values import describe

Width = int | str  # of tokens, or "rows x columns" of patches


def read_width(width: Width) -> tuple[int, ...]:
    """The sizes of the taps: (tokens,), or (rows, columns) of patches. ValueError for what is neither.

    >>> read_width(5), read_width("3x3")
    ((5,), (3, 3))
    """
    sides: tuple[Any, ...] = (width,)
    if isinstance(width, str):
        sides = tuple(int(side) if side.isdecimal() else 0 for side in width.split("x"))
    odd = all(isinstance(side, int) and not isinstance(side, bool) and side >= 3 and side % 2 == 1 for side in sides)
    if not odd or len(sides) != 1 + isinstance(width, str):
        raise ValueError(
            "value_convolution must be an odd int of 3 or more, '3x3' (likewise odd) for the patches of an image, or "
            f"None for none; got {width!r}."
        )
    return sides


def take_near(
    value: Tensor,
    taps: Tensor,
    patches: Patches | None,
    *,
    is_causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: CuSeqlens | None,
    past: Tensor | None = None,
) -> Tensor:
    """What each token takes from its neighbours: of a sequence, or of the image whose patches lie so. `check_tokens`
    has seen the call."""
    if taps.ndim == 4:
        refuse_ranks("value_convolution", "an image is not spread over ranks; use an odd number of tokens")
        if is_causal or cu_seqlens is not None:
            raise ValueError(
                "value_convolution: an image is seen as a whole, so causal attention and packed sequences have no rows "
                "and columns of it; use an odd number of tokens."
            )
        known = require_patches(patches, "value_convolution")
        grid = known.find_grid(value.shape[2], "value_convolution")
        return convolve_patches(value, taps, grid, known.prefix, key_mask)
    offsets = cu_seqlens if isinstance(cu_seqlens, Tensor) else None
    return convolve_values(value, taps, is_causal=is_causal, key_mask=key_mask, cu_seqlens=offsets, past=past)


def convolve_values(
    value: Tensor,
    taps: Tensor,
    *,
    is_causal: bool,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    past: Tensor | None = None,
) -> Tensor:
    """What each token takes from the values of its neighbours [B, H, N, E], float32 (float64 for float64).

    value [B, H, N, E], taps [H, E, W]. key_mask [B, N]: tokens that are there; what is hidden gives and takes nothing.
    cu_seqlens: offsets of packed sequences, which do not reach into one another. past [B or sequences, H, W - 1, E]:
    the values before these, as `keep_last` has kept them; causal alone.

    >>> ones = torch.ones(1, 1, 4, 1)
    >>> convolve_values(ones, torch.ones(1, 1, 3), is_causal=True).flatten().tolist()
    [1.0, 2.0, 3.0, 3.0]
    >>> convolve_values(ones, torch.ones(1, 1, 3), is_causal=True, past=ones[:, :, :2]).flatten().tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    shown, width = hide(value, key_mask), taps.shape[-1]
    wide = None
    if (ranks := find_ranks()) is not None:
        left = width - 1 if is_causal else width // 2
        wide = fetch_neighbours(ranks, shown, left, width - 1 - left, cu_seqlens)
        shown, cu_seqlens = wide.rows, wide.cu_seqlens
    rows: Tensor | slice = slice(None)
    if past is not None:
        shown, cu_seqlens, rows = join(shown, past, cu_seqlens)
    sequence = None
    if cu_seqlens is not None:
        sequence = owners(torch.arange(shown.shape[2], device=shown.device), cu_seqlens)
    left = width - 1 if is_causal else width // 2
    near = slide(shown, taps, sequence, left, compute_dtype(value.dtype))
    near = near[:, :, rows] if isinstance(rows, slice) else near.index_select(2, rows)
    near = near if wide is None else tie(wide.take(near), wide.token)
    return hide(near, key_mask)


def keep_last(
    value: Tensor,
    width: int,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    past: Tensor | None = None,
) -> Tensor:
    """The last `width` values of each sequence, [B or sequences, H, width, E], zeros where there are none: what a
    causal convolution of width + 1 taps goes on from. The other arguments are those of `convolve_values`."""
    if (ranks := find_ranks()) is not None:
        value, key_mask = fetch_last(ranks, hide(value, key_mask), width), None
    batch, heads, _, dim = value.shape
    if past is None:
        past = value.new_zeros(batch if cu_seqlens is None else cu_seqlens.numel() - 1, heads, width, dim)
    joined, offsets, _ = join(hide(value, key_mask), past, cu_seqlens)
    if offsets is None:
        return joined[:, :, joined.shape[2] - width :].contiguous()
    ends = offsets[1:, None].to(torch.int64) - width + torch.arange(width, device=value.device)
    rows: Tensor = joined[0].index_select(1, ends.flatten()).unflatten(1, ends.shape)
    return rows.transpose(0, 1).contiguous()


def join(value: Tensor, past: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | slice]:
    """The values with their past before them, of packed sequences each with its own; the offsets of the sequences in
    it; and where the values are."""
    width = past.shape[2]
    if offsets is None:
        return torch.cat([past, value], 2), None, slice(width, None)
    device, count = value.device, len(past)
    at = torch.arange(value.shape[2], device=device)
    number = torch.arange(count + 1, device=device)
    rows = at + width * (owners(at, offsets) + 1)
    begins = offsets + width * number
    before = (begins[:-1, None] + torch.arange(width, device=device)).flatten()
    both = torch.cat([past.transpose(0, 1).flatten(1, 2).unsqueeze(0), value], 2)
    # Where each row of the result is among the rows of both.
    source = torch.empty(both.shape[2], dtype=torch.int64, device=device)
    source = source.scatter(0, torch.cat([before, rows]).to(torch.int64), torch.arange(both.shape[2], device=device))
    return both.index_select(2, source), begins, rows


def hide(value: Tensor, key_mask: Tensor | None) -> Tensor:
    return value if key_mask is None else value.masked_fill(~key_mask[:, None, :, None], 0.0)


def convolve_patches(
    value: Tensor, taps: Tensor, grid: tuple[int, int], prefix: int, key_mask: Tensor | None = None
) -> Tensor:
    """`convolve_values` of an image: taps [H, E, R, C] over the patches of a grid of (rows, columns), which come row by
    row after `prefix` other tokens (class, distillation, registers). These lie nowhere: they give and take nothing.

    >>> found = convolve_patches(torch.ones(1, 1, 7, 1), torch.ones(1, 1, 3, 3), (2, 3), 1)
    >>> found.flatten().tolist()
    [0.0, 4.0, 6.0, 4.0, 4.0, 6.0, 4.0]
    """
    dtype = compute_dtype(value.dtype)
    (heads, dim, *sides), (rows, columns) = taps.shape, grid
    patches = hide(value, key_mask)[:, :, prefix:].to(dtype).transpose(2, 3)  # [B, H, E, patches]
    image = patches.reshape(len(value), heads * dim, rows, columns)
    with torch.autocast(value.device.type, enabled=False):
        near = functional.conv2d(
            image, taps.to(dtype).flatten(0, 1).unsqueeze(1), padding=(sides[0] // 2, sides[1] // 2), groups=heads * dim
        )
    near = near.view(len(value), heads, dim, rows * columns).transpose(2, 3)
    return hide(functional.pad(near, (0, 0, prefix, 0)), key_mask)


def add_near(out: Tensor, near: Tensor) -> Tensor:
    """Attention's output [B, query heads, N, E] and what its value heads take from neighbours [B, H, N, E], in the
    dtype of the first and rounded once."""
    grouped: Tensor = out.unflatten(1, (near.shape[1], -1))
    return (grouped + near.unsqueeze(2)).flatten(1, 2).to(out.dtype)


def shift_rows(x: Tensor, shift: int) -> tuple[slice, slice]:
    """Rows i, and their neighbours i + shift, that are both there."""
    length = x.shape[2]
    reach = min(abs(shift), length)
    ends, starts = slice(0, length - reach), slice(reach, length)
    return (ends, starts) if shift >= 0 else (starts, ends)


def mark_together(sequence: Tensor, rows: slice, others: slice, like: Tensor) -> Tensor:
    """[rows, 1]: 1 where a row and its neighbour are of one packed sequence."""
    return (sequence[rows] == sequence[others]).to(like.dtype).unsqueeze(-1)


class Convolve(Function):
    """(x [B, H, N, D], taps [H, D, W], sequence [N] or None, left, sign, dtype) -> sum_w taps_w x_(i + sign (w - left))

    in that dtype: W shifted products, summed in place, with no copy of x for the backward pass: an own function,
    because autograd would keep each of them."""

    @staticmethod
    def forward(x: Tensor, taps: Tensor, sequence: Tensor | None, left: int, sign: int, dtype: torch.dtype) -> Tensor:
        each = taps.to(dtype).permute(2, 0, 1).unsqueeze(-2)  # [W, H, 1, D]
        out = x * each[left]
        for at, tap in enumerate(each):
            if at == left:
                continue
            rows, others = shift_rows(x, sign * (at - left))
            factor = tap if sequence is None else tap * mark_together(sequence, rows, others, tap)
            out[:, :, rows].addcmul_(x[:, :, others], factor)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.left, ctx.sign, ctx.dtype = inputs[3:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, sequence = ctx.saved_tensors
        dx = dtaps = None
        if ctx.needs_input_grad[0]:
            dx = Convolve.apply(g, taps, sequence, ctx.left, -ctx.sign, ctx.dtype).to(x.dtype)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(x.dtype, torch.float32)
            found = []
            for at in range(taps.shape[-1]):
                rows, others = shift_rows(x, ctx.sign * (at - ctx.left))
                product = g[:, :, rows] * x[:, :, others]
                if sequence is not None:
                    product = product * mark_together(sequence, rows, others, product)
                found.append(product.sum((0, 2), dtype=wide))  # [H, D]
            dtaps = torch.stack(found, -1).to(taps.dtype)
        return dx, dtaps, None, None, None, None


def slide(x: Tensor, taps: Tensor, sequence: Tensor | None, left: int, dtype: torch.dtype) -> Tensor:
    """(x [B, H, N, D], taps [H, D, W], sequence [N] or None) -> sum_w taps_w x_(i + w - left), in that dtype."""
    near: Tensor = run(Convolve, compose_convolution, x, taps, sequence, left, 1, dtype, in_graphs=True)
    return near


def compose_convolution(
    x: Tensor, taps: Tensor, sequence: Tensor | None, left: int, sign: int, dtype: torch.dtype
) -> Tensor:
    """As `Convolve` with sign = 1: rows beside x are zeros, so that nothing depends on how many there are."""
    length, around = x.shape[2], (left, taps.shape[-1] - 1 - left)
    rows = functional.pad(x, (0, 0, *around)).to(dtype)
    owned = None if sequence is None else functional.pad(sequence, around, value=-1)
    near = torch.zeros_like(x, dtype=dtype)
    for at, tap in enumerate(taps.to(dtype).permute(2, 0, 1).unsqueeze(-2)):  # [H, 1, D]
        window = slice(at, at + length)
        if owned is not None and sequence is not None:
            tap = tap * (owned[window] == sequence).to(dtype).unsqueeze(-1)
        near = near + tap * rows[:, :, window]
    return near


def check_tokens(query: Tensor, key: Tensor, is_causal: bool, decoder: bool, cu_seqlens: CuSeqlens | None) -> None:
    """ValueError for queries and keys that are not one sequence, or whose later tokens must not be seen."""
    if isinstance(cu_seqlens, (tuple, list)) or query.shape[2] != key.shape[2] or (decoder and not is_causal):
        raise ValueError(
            "value_convolution: it runs over one sequence, so cross attention (and a decoder's attention that is not "
            "causal) has none; use value_convolution=None, "
            f"got query {list(query.shape)} and key {list(key.shape)}."
        )


def check_taps(value: Tensor, taps: Tensor) -> None:
    """ValueError where these are not the values that the taps are for."""
    if not isinstance(taps, Tensor) or taps.ndim not in (3, 4) or taps.shape[:2] != value.shape[1:4:2]:
        raise ValueError(
            "value_convolution must be a tensor [key heads, value dim, width] = "
            f"[{value.shape[1]}, {value.shape[3]}, an odd number] here; got {describe(taps)}."
        )
    sides = list(taps.shape[2:])
    read_width(sides[0] if len(sides) == 1 else f"{sides[0]}x{sides[1]}")


def find_past(
    state: LLNState | None, value: Tensor, taps: Tensor, is_causal: bool, return_state: bool
) -> tuple[LLNState | None, Tensor | None]:
    """(the state without them, the values that come before these). ValueError where a sequence cannot be cut, or not
    here."""
    if (state is not None or return_state) and not is_causal:
        raise ValueError(
            "value_convolution: without is_causal=True it looks at later tokens too, so a sequence cannot be cut; "
            "leave out state and return_state, or use is_causal=True."
        )
    if state is None:
        return None, None
    held, width = state.last_value, taps.shape[-1] - 1
    if held is None or held.shape[1:] != (value.shape[1], width, value.shape[3]):
        kept = "none" if held is None else f"{list(held.shape)}"
        raise ValueError(
            f"state must hold the last {width} values of {value.shape[1]} heads for value_convolution={width + 1}; it "
            f"has {kept} (LLNState.empty(..., value_convolution={width + 1}) begins a sequence)."
        )
    if held.dtype != value.dtype:
        raise ValueError(f"state is for values of another dtype than {value.dtype}; use state.to({value.dtype}).")
    return state.with_last(None), held
