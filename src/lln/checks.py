"""The one place that checks the arguments of the op, so that what is behind it need not.

Only what is known without waiting for a device is checked: types, shapes, dtypes, devices, Python numbers, and the
values of tensors on the CPU where a wrong one would be read as an index.
"""

from __future__ import annotations

import math
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.carry import block_start
from lln.kernels.common import compute_dtype, constant
from lln.state import LLNState, same_beta

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    block_size: int | None,
    mix: Any,
    is_causal: bool,
    key_mask: Tensor | None,
    dropout_p: float,
    cu_seqlens: Any,
    state: LLNState | None,
    return_state: bool,
    scale: float | None,
) -> Call:
    """The arguments of `lln.lln_attention` as a Call, or a ValueError or TypeError that names the argument."""
    check_tensors(query, key, value)
    for name, flag in (("is_causal", is_causal), ("return_state", return_state)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False; got {describe(flag)}.")
    batch, query_heads, length, dim = query.shape
    key_heads, key_length, value_dim = key.shape[1], key.shape[2], value.shape[3]
    cu_query, cu_key, cross = check_packing(cu_seqlens, query, key)
    if cu_query is not None:
        batch = cu_query.numel() - 1
    if is_causal and (cross or length != key_length):
        came = "a pair of cu_seqlens" if cross else f"lengths {length} and {key_length}"
        raise ValueError(f"is_causal needs query and key of one sequence; got {came}. Earlier tokens go into `state`.")
    check_key_mask(key_mask, key)
    check_block_size(block_size, is_causal, cross or length != key_length, state is not None or return_state)
    dtype = compute_dtype(query.dtype)
    alpha = coefficient("alpha", alpha, (batch, query_heads, dim), dtype, query.device)
    given, beta = beta, coefficient("beta", beta, (batch, key_heads, dim), dtype, query.device)
    weights = mix_weights(mix, block_size, (batch, query_heads, value_dim), dtype, query.device)
    check_state(state, batch, key, value, block_size, beta.detach() if isinstance(given, Tensor) else float(given))
    scale = 1.0 / math.sqrt(dim) if scale is None else check_number("scale", scale)
    p = check_number("dropout_p", dropout_p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must lie between 0 and 1; got {p}.")
    count = None if state is None else state.count
    return Call(
        query=query,
        key=key,
        value=value,
        alpha=alpha,
        beta=beta,
        is_causal=is_causal,
        key_mask=key_mask,
        dropout_p=p,
        cu_query=cu_query,
        cu_key=cu_key,
        log_sum=None if state is None else state.log_sum,
        mean_value=None if state is None else state.mean_value,
        block_size=None if block_size is None else int(block_size),
        scale=scale,
        lln_weight=weights[0],
        block_weight=weights[1],
        count=count,
        start=None if block_size is None else block_start(key, key_mask, cu_key, count, block_size),
        open_key=None if state is None else state.block_key,
        open_value=None if state is None else state.block_value,
        open_mask=None if state is None else state.block_mask,
    )


def describe(value: Any) -> str:
    """What came, for the end of an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor; got {describe(t)}.")
        if t.is_nested or t.layout != torch.strided:
            kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
            raise TypeError(f"{name} must be a dense tensor; got {kind}. Packed sequences use cu_seqlens.")
        if t.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions, [batch, heads, length, dim]; got shape {list(t.shape)}.")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float64, bfloat16 or float16; got {describe(t)}.")
        if t.dtype != query.dtype:
            raise TypeError(f"query, key and value must have one dtype; query is {query.dtype}, {name} is {t.dtype}.")
        if t.device != query.device:
            raise ValueError(f"query, key and value must be on one device; query: {query.device}, {name}: {t.device}.")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            "key and value must agree in batch, heads and length; "
            f"got key {list(key.shape)} and value {list(value.shape)}."
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must agree in batch and dim; got query {list(query.shape)} and key {list(key.shape)}."
        )
    if query.shape[3] == 0 or value.shape[3] == 0 or key.shape[1] == 0:
        raise ValueError(
            f"heads and dim must be at least 1; got query {list(query.shape)}, key {list(key.shape)} and "
            f"value {list(value.shape)}."
        )
    if query.shape[1] % key.shape[1] or query.shape[1] == 0:
        raise ValueError(
            "the number of query heads must be a multiple of the number of key heads; "
            f"got query with {query.shape[1]} and key with {key.shape[1]}."
        )


def check_packing(cu_seqlens: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None, bool]:
    """(offsets of the queries, offsets of the keys, whether they are different sequences)"""
    if cu_seqlens is None:
        return None, None, False
    cross = isinstance(cu_seqlens, (tuple, list))
    pair = tuple(cu_seqlens) if cross else (cu_seqlens, cu_seqlens)
    if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        raise TypeError(
            "cu_seqlens must be an int32 tensor of offsets, or a pair of them (queries, keys); "
            f"got {describe(cu_seqlens)}."
        )
    if query.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences along the length, with batch 1; got batch {query.shape[0]}.")
    if not cross and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"cu_seqlens: query and key have different lengths, {query.shape[2]} and {key.shape[2]}; "
            "cross attention takes a pair (queries, keys)."
        )
    for t, what, total in ((pair[0], "query", query.shape[2]), (pair[1], "key", key.shape[2])):
        if t.dtype not in (torch.int32, torch.int64) or t.ndim != 1 or t.numel() < 2:
            raise ValueError(
                f"cu_seqlens must be an int32 tensor of shape [sequences + 1], at least [2]; got {describe(t)}."
            )
        if t.device != query.device:
            raise ValueError(f"cu_seqlens must be on the device of query, {query.device}; got {t.device}.")
        if t.is_cpu and not torch.compiler.is_compiling():
            offsets = t.tolist()
            if offsets[0] != 0 or offsets[-1] != total or any(a > b for a, b in pairwise(offsets)):
                raise ValueError(f"cu_seqlens must rise from 0 to the total length of {what}, {total}; got {offsets}.")
    if pair[0].numel() != pair[1].numel():
        raise ValueError(
            "cu_seqlens: queries and keys must have the same number of sequences; "
            f"got {pair[0].numel() - 1} and {pair[1].numel() - 1}."
        )
    return pair[0], pair[1], cross


def check_key_mask(key_mask: Tensor | None, key: Tensor, name: str = "key_mask", of: str = "key") -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor):
        raise TypeError(f"{name} must be a bool tensor [batch, {of} length]; got {describe(key_mask)}.")
    expected = [key.shape[0], key.shape[2]]
    if list(key_mask.shape) != expected:
        raise ValueError(
            f"{name} must have shape [batch, {of} length] = {expected}; got {list(key_mask.shape)}. "
            "It hides whole keys: linear attention forms no query-key pairs that could be masked one by one."
        )
    if key_mask.dtype != torch.bool:
        raise TypeError(f"{name} must be bool, True = attend; got {key_mask.dtype}. Use {name}.bool().")
    if key_mask.device != key.device:
        raise ValueError(f"{name} must be on the device of {of}, {key.device}; got {key_mask.device}.")


def check_block_size(block_size: int | None, is_causal: bool, cross: bool, with_state: bool) -> None:
    if block_size is None:
        return
    if not isinstance(block_size, (int, Integral)) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size must be a positive int, or None for LLN alone; got {describe(block_size)}.")
    if cross:
        raise ValueError(
            "block_size: blocks along the diagonal need query and key of one sequence, so cross attention has none; "
            "use block_size=None."
        )
    if with_state and not is_causal:
        raise ValueError(
            "block_size with state or return_state is causal only, because an open block may still grow; "
            "set is_causal=True or block_size=None."
        )


def check_number(name: str, value: Any, or_tensor: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{name} must be a number{or_tensor}; got {describe(value)}.")
    # A compiler that treats numbers as symbols cannot look at them; they were looked at when it was not compiling.
    if not torch.compiler.is_compiling() and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}.")
    return float(value)


def coefficient(
    name: str, value: Any, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, positive: bool = True
) -> Tensor:
    """alpha, beta or a side of mix as a tensor [batch, heads, dim] in which any size may be 1."""
    if not isinstance(value, Tensor):
        number = check_number(name, value, " or a tensor")
        if positive and number <= 0.0:
            raise ValueError(f"{name} must be positive; got {value}.")
        info = torch.finfo(dtype)
        if abs(number) > info.max or (positive and number < info.tiny):
            raise ValueError(f"{name} must lie between {info.tiny:.1e} and {info.max:.1e} for {dtype}; got {value}.")
        return constant(number, dtype, device)
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor or a number; got {describe(value)}.")
    if value.device != device:
        raise ValueError(f"{name} must be on the device of query, {device}; got {value.device}.")
    batch, heads, dim = shape
    sizes = tuple(value.shape)
    forms: dict[tuple[int, ...], tuple[int, ...]] = {}  # allowed shape -> the same as [batch, heads, dim]
    if value.ndim <= 1:
        forms = {(): (1, 1, 1), (heads,): (1, -1, 1)}
    elif value.ndim == 2:
        forms = {(batch, heads): (*sizes, 1), (heads, dim): (1, *sizes)}
        if len(forms) == 1 and value.numel() > 1:
            raise ValueError(
                f"{name} of shape {list(sizes)} may be [batch, heads] or [heads, dim] here; "
                "say which with [batch, heads, 1] or [1, heads, dim]."
            )
    elif value.ndim == 3 and all(n in (1, m) for n, m in zip(sizes, shape, strict=True)):
        return value.to(dtype)
    if sizes in forms:
        return value.reshape(forms[sizes]).to(dtype)
    raise ValueError(
        f"{name} must be a number or a tensor of shape [heads], [batch, heads], [heads, dim] or "
        f"[batch, heads, dim], here with batch, heads, dim = {batch}, {heads}, {dim}; got {list(sizes)}."
    )


def mix_weights(
    mix: Any, block_size: int | None, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """(factor of the linear part, factor of the block part), None where there are no blocks."""
    if block_size is None:
        if not isinstance(mix, (int, float)) or mix != 0.5:
            raise ValueError(f"mix weighs LLN against the blocks and needs block_size; got {describe(mix)}.")
        return None, None
    if isinstance(mix, (tuple, list)):
        if len(mix) != 2:
            raise ValueError(f"mix must be a number, a tensor, or a pair (r, p); got {len(mix)} of them.")
        first, second = (coefficient("mix", m, shape, dtype, device, positive=False) for m in mix)
        return first, second
    if not isinstance(mix, Tensor) and not 0.0 <= check_number("mix", mix) <= 1.0:
        raise ValueError(f"mix must lie between 0 and 1; got {mix}. A pair (r, p) gives r * lln + p * diag.")
    first = coefficient("mix", mix, shape, dtype, device, positive=False)
    second = 1.0 - first if isinstance(mix, Tensor) else constant(1.0 - float(mix), dtype, device)
    return first, second


def check_state(
    state: LLNState | None, batch: int, key: Tensor, value: Tensor, block_size: int | None, beta: float | Tensor
) -> None:
    if state is None:
        return
    if not isinstance(state, LLNState):
        raise TypeError(f"state must be an lln.LLNState; got {describe(state)}.")
    expected = [batch, key.shape[1], key.shape[3], value.shape[3]]
    if list(state.mean_value.shape) != expected:
        raise ValueError(
            f"state must be of [batch, key heads, dim, value dim] = {expected}; got {list(state.mean_value.shape)}."
        )
    if state.block_size != block_size:
        raise ValueError(
            f"state was made with block_size={state.block_size}, this call has block_size={block_size}; "
            "a sequence keeps one block_size from its start (LLNState.empty(..., block_size=...) begins one)."
        )
    if state.mean_value.device != key.device:
        raise ValueError(f"state is on {state.mean_value.device}, key on {key.device}; use state.to(key.device).")
    held = state.mean_value.dtype if state.block_key is None else state.block_key.dtype
    wanted = compute_dtype(key.dtype) if state.block_key is None else key.dtype
    if held != wanted or state.mean_value.dtype != compute_dtype(key.dtype):
        raise ValueError(f"state is for keys of another dtype than {key.dtype}; use state.to({key.dtype}).")
    if not same_beta(state.beta, beta):
        raise ValueError(
            "state was made with another beta than this call's, so their sums are not comparable; "
            "give every call of one sequence the same beta."
        )
