"""A residual depthwise convolution over the tokens, before anything attends.

    x'_ic = x_ic + sum_w kernel_cw x_(i + w - left)c        left = (W - 1) / 2, causal: W - 1

P of LLN attention has rank at most the head dimension, so it cannot draw local patterns; here each channel of each head
sees its neighbours before. At kernel = 0 it is the identity, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lln.distributed.halo import fetch_neighbours
from lln.functional import CuSeqlens
from lln.kernels.carry import owners
from lln.ranks import find_ranks, tie


def convolve(
    x: Tensor, kernel: Tensor, *, is_causal: bool, mask: Tensor | None, cu_seqlens: CuSeqlens | None = None
) -> Tensor:
    """x' in the dtype and the layout of x.

    x [B, H, N, D], kernel [H, D, W]. mask [B, N]: tokens that are there; what is hidden reaches nobody. cu_seqlens:
    offsets of packed sequences, which do not reach into one another."""
    shown = x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)
    assert cu_seqlens is None or isinstance(cu_seqlens, Tensor)  # see check_sequence
    width = kernel.shape[-1]
    left = width - 1 if is_causal else width // 2
    if (ranks := find_ranks()) is None:
        return x + run_along(shown, kernel, cu_seqlens, left)
    wide = fetch_neighbours(ranks, shown, left, width - 1 - left, cu_seqlens)
    return tie(x + wide.take(run_along(wide.rows, kernel, wide.cu_seqlens, left)), wide.token)


def run_along(x: Tensor, kernel: Tensor, cu_seqlens: Tensor | None, left: int) -> Tensor:
    """The convolution alone."""
    sequence = None
    if cu_seqlens is not None:
        sequence = owners(torch.arange(x.shape[2], device=x.device), cu_seqlens)
    out: Tensor = Convolve.apply(x, kernel, sequence, left, 1)
    return out


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
    """(x [B, H, N, D], kernel [H, D, W], sequence [N] or None, left, sign) -> sum_w kernel_w x_(i + sign (w - left))

    W shifted products, summed in place, with no copy of x for the backward pass: an own function, because autograd
    would keep each of them."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, sequence: Tensor | None, left: int, sign: int) -> Tensor:
        taps = kernel.to(x.dtype).permute(2, 0, 1).unsqueeze(-2)  # [W, H, 1, D]
        out = x * taps[left]
        for at, tap in enumerate(taps):
            if at == left:
                continue
            rows, others = shift_rows(x, sign * (at - left))
            factor = tap if sequence is None else tap * mark_together(sequence, rows, others, tap)
            out[:, :, rows].addcmul_(x[:, :, others], factor)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.left, ctx.sign = inputs[3:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, sequence = ctx.saved_tensors
        dx = dkernel = None
        if ctx.needs_input_grad[0]:
            dx = Convolve.apply(g, kernel, sequence, ctx.left, -ctx.sign)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(x.dtype, torch.float32)
            taps = []
            for at in range(kernel.shape[-1]):
                rows, others = shift_rows(x, ctx.sign * (at - ctx.left))
                product = g[:, :, rows] * x[:, :, others]
                if sequence is not None:
                    product = product * mark_together(sequence, rows, others, product)
                taps.append(product.sum((0, 2), dtype=wide))  # [H, D]
            dkernel = torch.stack(taps, -1).to(kernel.dtype)
        return dx, dkernel, None, None, None


def check_sequence(query: Tensor, key: Tensor, is_causal: bool, decoder: bool, cu_seqlens: Any) -> None:
    """ValueError for queries and keys that are not one sequence, or whose later tokens must not be seen."""
    if isinstance(cu_seqlens, (tuple, list)) or query.shape[2] != key.shape[2] or (decoder and not is_causal):
        raise ValueError(
            "convolution: it runs over one sequence, so cross attention (and a decoder's attention that is not causal) "
            f"has none; use convolution=None, got query {list(query.shape)} and key {list(key.shape)}."
        )


def check_value(value: Tensor, value_dim: int, with_state: bool) -> None:
    if with_state:
        raise ValueError(
            "convolution: a state does not keep the tokens that the convolution reaches back to; leave out state and "
            "return_state (in generate: use_cache=False)."
        )
    if value.shape[3] != value_dim:
        raise ValueError(f"value must have value_dim = {value_dim} channels; got {list(value.shape)}.")
