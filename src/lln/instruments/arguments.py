"""Checks of what the maps are made of, in the words of their own arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks import DTYPES, check_key_mask, describe


def check_tensor(name: str, t: Any, shape: str, dims: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor; got {describe(t)}.")
    if t.ndim not in dims:
        raise ValueError(f"{name} must {shape}; got shape {list(t.shape)}.")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16; got {describe(t)}.")


def check_pair(q: Any, k: Any, names: tuple[str, str], key_mask: Any, query_mask: Any, is_causal: bool = False) -> None:
    """Two tensors [batch, heads, length, dim] that agree in batch, dim, dtype and device; k may have fewer heads."""
    for name, t in zip(names, (q, k), strict=True):
        check_tensor(name, t, "have 4 dimensions, [batch, heads, length, dim]", (4,))
    first, second = names
    if q.device != k.device:
        raise ValueError(f"{first} and {second} must be on one device; got {q.device} and {k.device}.")
    shapes = f"{first} {list(q.shape)} and {second} {list(k.shape)}"
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{first} and {second} must agree in batch and dim; got {shapes}.")
    if 0 in (q.shape[1], q.shape[3], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{first} must have a positive multiple of the heads of {second}, and both at least one dim; got {shapes}."
        )
    check_masks(q, k, names, key_mask, query_mask, is_causal)


def check_masks(q: Tensor, k: Tensor, names: tuple[str, str], key_mask: Any, query_mask: Any, is_causal: bool) -> None:
    """q and k are looked at for their batch, length and device only."""
    check_key_mask(key_mask, k, "key_mask", names[1])
    check_key_mask(query_mask, q, "query_mask", names[0])
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be True or False; got {describe(is_causal)}.")
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"is_causal needs {names[0]} and {names[1]} of equal length; got {q.shape[2]} and {k.shape[2]}."
        )


def check_dense(p: Tensor) -> Tensor:
    """p as [batch, heads, rows, keys]."""
    check_tensor("p", p, "be [rows, keys] or [batch, heads, rows, keys]", (2, 4))
    return p if p.ndim == 4 else p[None, None]


def check_stochastic(p: Tensor, live: Tensor) -> None:
    """p [B, H, N, M]: no entry of a live row (live [B, N]) is negative and each of these rows sums to 1."""
    rows = torch.where(live[:, None, :, None], p, 0.0)
    off = torch.where(live[:, None], (rows.sum(-1, dtype=torch.float32) - 1).abs(), 0.0)
    # The comparisons are written so that NaN fails them.
    if p.numel() and not bool((rows >= 0).all() & (off <= 0.02).all()):
        raise ValueError(
            "p must be an attention matrix: no entry negative and every row summing to 1 over its visible keys; "
            f"got a smallest entry of {rows.min().item():.3g} and a row that is off 1 by {off.max().item():.3g}."
        )


def check_count(name: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}; got {describe(value)}.")
