"""Masks as torch writes them, bool or added to scores, for attention that has no scores to add anything to."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.values import describe

HIDDEN = -1000.0  # exp of this is 0 in float64 too: so much added to a score, or less (-1e9, finfo.min), hides a key


def can_read(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device or breaking a compiled graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def read_hidden(name: str, mask: Tensor, shapes: list[list[int]], device: torch.device, look: bool) -> Tensor:
    """A mask of torch's, bool or float, as bool: True = ignore. `look`: refuse floats that neither show nor hide."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(f"{name} must be a tensor, bool (True = ignore) or float (0 or -inf); got {describe(mask)}.")
    if list(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}; got {describe(mask)}.")
    if mask.device != device:
        raise ValueError(f"{name} must be on the device of query, {device}; got {mask.device}.")
    if mask.dtype == torch.bool:
        return mask
    return read_added(name, mask, look)


def read_added(name: str, mask: Tensor, look: bool, remedy: str = "") -> Tensor:
    """What is added to scores, as bool: True = ignore. `look`: refuse what neither shows nor hides; `remedy` is what to
    do where it is 0 and 1."""
    if look and not ((mask == 0) | (mask <= HIDDEN)).all():
        remedy = remedy if bool(((mask == 0) | (mask == 1)).all()) else ""
        raise ValueError(
            f"{name} as float may hold 0 and -inf (or {HIDDEN:,.0f} and less) only, because linear attention forms no "
            f"query-key scores that a bias could be added to; got other values in {describe(mask)}.{remedy}"
        )
    return mask < 0


def split_mask(mask: Tensor, is_causal: bool, q: Tensor, key_length: int) -> tuple[bool, Tensor | None]:
    """(is it causal, the keys hidden from every query [B or 1, S]) of an attn_mask [L, S] or [B * H, L, S]."""
    batch, heads, length, _ = q.shape
    look = can_read(q) or not is_causal  # without the hint there is no other way to know
    pairs = read_hidden("attn_mask", mask, [[length, key_length], [batch * heads, length, key_length]], q.device, look)
    if not pairs.numel():
        return is_causal, None
    pairs = pairs.unflatten(0, (-1, heads)) if pairs.dim() == 3 else pairs[None, None]  # [B or 1, H or 1, L, S]
    keys = pairs[:, :1, -1:]  # in a causal mask the last query sees every key that is not padding
    if not look:
        return is_causal, keys[:, 0, 0]
    if is_causal or not (pairs == keys).all():
        later = torch.ones(length, key_length, dtype=torch.bool, device=q.device).triu(1)
        if length != key_length or not (pairs == (keys | later)).all():
            raise ValueError(
                "attn_mask must be causal with query and key of equal length, or hide the same keys from every query "
                "and head, because linear attention never forms query-key pairs that could be masked one by one; got "
                f"{describe(mask)} and is_causal={is_causal}."
            )
        is_causal = True
    return is_causal, keys[:, 0, 0] if keys.any() else None
