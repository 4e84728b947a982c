"""A residual depthwise convolution over the tokens, before anything attends. Deprecated for `value_convolution`.

    x'_ic = x_ic + sum_w kernel_cw x_(i + w - left)c        left = (W - 1) / 2, causal: W - 1

P of LLN attention has rank at most the head dimension, so it cannot draw local patterns; here each channel of each head
sees its neighbours before. At kernel = 0 it is the identity, to the last bit.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from lln.distributed.halo import fetch_neighbours
from lln.functional import CuSeqlens
from lln.kernels.carry import owners
from lln.nn.value_convolution import Convolve as Convolve  # by which lln.convolution had it
from lln.nn.value_convolution import slide
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
    return slide(x, kernel, sequence, left, x.dtype)


def warn_convolution() -> None:
    """It goes on working for this release, and what was saved with it loads."""
    warnings.warn(
        "convolution= of queries, keys and values is deprecated and will not be there in the next release; use "
        "value_convolution=, which is added to attention's output, learns more and decodes with a state.",
        DeprecationWarning,
        stacklevel=3,
    )


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
