"""All argument rules of the op, so that what is behind it need not check.

Only what is known without waiting for a device is checked: types, shapes, dtypes, devices, Python numbers, and the
values of tensors on the CPU where a wrong one would be read as an index.
"""

from __future__ import annotations

import math
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lln.backend import block_start
from lln.kernels.call import Call
from lln.kernels.carry import Layout
from lln.kernels.common import compute_dtype, constant
from lln.kernels.evidence import SIGNED, count_channels
from lln.ranks import find_ranks
from lln.state import LLNState, check_state
from lln.values import check_choice, check_flag, check_fraction, check_number, describe, show

Coefficient = float | Tensor
Mix = Coefficient | tuple[Coefficient, Coefficient] | Literal["evidence"]
Backend = Literal["auto", "eager", "triton"]
CuSeqlens = Tensor | tuple[Tensor, Tensor]
Matching = Literal["paper", "variance", "entropy"]
Statistics = Literal["sample", "batch", "running", "fixed"]
Read = Literal["paper", "evidence"]
Directions = Tensor | Literal["signed"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
MATCHINGS: tuple[Matching, ...] = get_args(Matching)
STATISTICS: tuple[Statistics, ...] = get_args(Statistics)
READS: tuple[Read, ...] = get_args(Read)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """Query, key and value that fit together, and what is said of their rows. Where other queries, keys or values of
    the same shapes take their place, nothing need be checked again."""

    query: Tensor  # [B, Hq, N, D]
    key: Tensor  # [B, Hk, M, D]
    value: Tensor  # [B, Hk, M, E]
    key_mask: Tensor | None  # [B, M] bool
    cu_query: Tensor | None  # [sequences + 1] offsets of packed queries, contiguous; cu_key alike
    cu_key: Tensor | None
    cross: bool  # a pair of offsets came: queries and keys are of different sequences


def check_inputs(query: Tensor, key: Tensor, value: Tensor, *, key_mask: Any, cu_seqlens: Any) -> Inputs:
    """The tensors of a call, or a ValueError or TypeError that names the argument."""
    check_tensors(query, key, value)
    packing = check_packing(cu_seqlens, query, key)
    check_key_mask(key_mask, key)
    return Inputs(query, key, value, key_mask, *packing)


def check_call(
    inputs: Inputs,
    *,
    alpha: Coefficient | None = 1.0,
    beta: Coefficient | None = 1.0,
    read: str = "paper",
    directions: Directions | None = None,
    block_size: int | None = None,
    mix: Mix = 0.5,
    overlap: bool = False,
    evidence_offset: Coefficient = 0.0,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    state: LLNState | None = None,
    return_state: bool = False,
    scale: float | None = None,
) -> Call:
    """The arguments of `lln.lln_attention` as a Call, or a ValueError or TypeError that names the argument."""
    query, key, value, key_mask, cu_query, cu_key, cross = inputs
    for name, flag in (("is_causal", is_causal), ("return_state", return_state)):
        check_flag(name, flag)
    query_heads, length, dim = query.shape[1:]
    key_heads, key_length, value_dim = key.shape[1], key.shape[2], value.shape[3]
    batch = query.shape[0] if cu_query is None else cu_query.numel() - 1
    if is_causal and (cross or length != key_length):
        came = "a pair of cu_seqlens" if cross else f"lengths {length} and {key_length}"
        remedy = "Earlier tokens go into the `state` of lln.lln_attention."
        raise ValueError(f"is_causal needs query and key of one sequence; got {came}. {remedy}")
    # Lengths are compared only where it matters: a compiler that leaves both open would settle it.
    apart = block_size is not None and (cross or length != key_length)
    check_block_size(block_size, is_causal, apart, state is not None or return_state)
    dtype = compute_dtype(query.dtype)
    check_read(read, alpha, beta, directions)
    channelled = check_directions(directions, key)
    channels = count_channels(channelled, dim)
    width = channels if isinstance(channelled, Tensor) else dim
    alpha = coefficient("alpha", 1.0 if alpha is None else alpha, (batch, query_heads, dim), dtype, query.device)
    given, beta = beta, coefficient("beta", beta, (batch, key_heads, width), dtype, query.device)
    weights: tuple[Tensor | None, Tensor | None] = None, None
    joint = check_joint(mix, read, block_size, overlap, evidence_offset)
    offset = joint_offset(evidence_offset, (batch, query_heads), dtype, query.device) if joint else None
    if not joint:
        weights = mix_weights(mix, block_size, (batch, query_heads, value_dim), dtype, query.device)
    if state is not None:
        used = beta.detach() if isinstance(given, Tensor) else float(given)  # type: ignore[arg-type]
        check_state(state, batch, key, value, block_size, used, read, channels, joint, overlap)
    scale = 1.0 / math.sqrt(dim) if scale is None else check_number("scale", scale)
    count = None if state is None else state.count
    return Call(
        query=query,
        key=key,
        value=value,
        alpha=alpha,
        beta=beta,
        is_causal=is_causal,
        key_mask=key_mask,
        seed=None,
        dropout_p=check_fraction("dropout_p", dropout_p),
        cu_query=cu_query,
        cu_key=cu_key,
        log_sum=None if state is None else state.log_sum,
        mean_value=None if state is None else state.mean_value,
        block_size=None if block_size is None else int(block_size),
        scale=scale,
        lln_weight=weights[0],
        block_weight=weights[1],
        read=read,
        directions=channelled,
        mean_key=None if state is None else state.mean_key,
        entropy=None if state is None else state.entropy,
        count=count,
        joint=joint,
        overlap=overlap,
        offset=offset,
        start=None
        if block_size is None
        else block_start(key, key_mask, cu_key, count, Layout.choose(block_size, overlap, is_causal).rows),
        open_key=None if state is None else state.block_key,
        open_value=None if state is None else state.block_value,
        open_mask=None if state is None else state.block_mask,
    )


def check_read(read: Any, alpha: Any, beta: Any, directions: Any) -> None:
    """Which of the coefficients go with a read."""
    check_choice("read", read, *READS)
    if beta is None or (alpha is None and read == "paper"):
        if alpha is None and beta is None and read == "paper":
            raise TypeError(
                "alpha and beta are missing; give two positive numbers or tensors, as of lln.match_moments, or call "
                "lln.scaled_dot_product_attention, which finds them."
            )
        name = "beta" if beta is None else "alpha"
        raise TypeError(f"{name} is missing; give a positive number or a tensor, for example from lln.match_moments.")
    if read == "evidence":
        check_no_alpha(alpha)
    if read == "paper" and directions is not None:
        raise ValueError(f"directions go with read='evidence'; got {describe(directions)} and read='paper'.")


def check_joint(mix: Any, read: str, block_size: int | None, overlap: bool, offset: Any) -> bool:
    """Whether the evidence decides about the mix; ValueError for what does not go with that, or with another mix."""
    check_flag("overlap", overlap)
    if not isinstance(mix, str):
        for name, given in (("overlap", overlap), ("evidence_offset", isinstance(offset, Tensor) or offset != 0.0)):
            if given:
                raise ValueError(f"{name} goes with mix='evidence'; got mix={describe(mix)}.")
        return False
    if mix != "evidence":
        raise ValueError(f"mix must be a number, a tensor, a pair of them, or 'evidence'; got {show(mix)}.")
    if block_size is None or read != "evidence":
        raise ValueError(
            "mix='evidence' needs block_size and read='evidence', because it weighs each block against what the "
            f"evidence read finds outside the block; got block_size={block_size!r} and read={read!r}."
        )
    if overlap and block_size % 4:
        raise ValueError(f"overlap needs a block_size that is a multiple of 4; got {block_size}.")
    return True


def joint_offset(offset: Any, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """[batch, heads, 1], where any size may be 1; None for 0."""
    if not isinstance(offset, Tensor) and check_number("evidence_offset", offset, " or a tensor") == 0.0:
        return None
    return coefficient("evidence_offset", offset, (*shape, 1), dtype, device, positive=False)


def check_no_alpha(alpha: Any) -> None:
    """Of the evidence read."""
    if alpha is not None:
        raise ValueError("alpha must be left out with read='evidence', where scale sets the temperature.")


def check_directions(directions: Any, key: Tensor) -> Tensor | str | None:
    """[key heads, channels, dim], "signed" or None."""
    if directions is None:
        return None
    if isinstance(directions, str):
        if directions != SIGNED:
            raise ValueError(f"directions must be 'signed', a tensor or None; got {directions!r}.")
        return directions
    heads, dim = key.shape[1], key.shape[3]
    check_tensor("directions", directions, (2, 3), "be [key heads, channels, dim] or [channels, dim]")
    if directions.shape[-1] != dim or not directions.shape[-2] or (directions.ndim == 3 and len(directions) != heads):
        raise ValueError(
            f"directions must be [key heads, channels, dim] or [channels, dim], here with {heads} heads of {dim}; got "
            f"{list(directions.shape)}."
        )
    if directions.device != key.device:
        raise ValueError(f"directions must be on the device of key, {key.device}; got {directions.device}.")
    every: Tensor = directions.expand(heads, -1, -1)
    return every


def describe_shapes(names: tuple[str, str], *tensors: Tensor) -> str:
    return " and ".join(f"{name} {list(t.shape)}" for name, t in zip(names, tensors, strict=True))


def check_tensor(
    name: str, t: Tensor, dims: tuple[int, ...] = (4,), shape: str = "have 4 dimensions, [batch, heads, length, dim]"
) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor; got {describe(t)}.")
    if t.is_nested or t.layout != torch.strided:
        kind = "a nested tensor" if t.is_nested else f"layout {t.layout}"
        raise TypeError(f"{name} must be a dense tensor; got {kind}. Packed sequences use cu_seqlens.")
    if t.ndim not in dims:
        raise ValueError(f"{name} must {shape}; got shape {list(t.shape)}.")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float64, bfloat16 or float16; got {describe(t)}.")


def check_pair(q: Tensor, k: Tensor, names: tuple[str, str] = ("query", "key")) -> None:
    """Two tensors [batch, heads, length, dim] that agree in batch, dim and device; k may have fewer heads."""
    first, second = names
    check_tensor(first, q)
    check_tensor(second, k)
    if q.device != k.device:
        raise ValueError(f"{first} and {second} must be on one device; {first}: {q.device}, {second}: {k.device}.")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{first} and {second} must agree in batch and dim; got {describe_shapes(names, q, k)}.")
    if 0 in (q.shape[1], q.shape[3], k.shape[1]):
        raise ValueError(f"heads and dim must be at least 1; got {describe_shapes(names, q, k)}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of {first} heads must be a multiple of the number of {second} heads; "
            f"got {describe_shapes(names, q, k)}."
        )


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_pair(query, key)
    check_tensor("value", value)
    for name, t in (("key", key), ("value", value)):
        if t.dtype != query.dtype:
            raise TypeError(f"query, key and value must have one dtype; query is {query.dtype}, {name} is {t.dtype}.")
    if value.device != key.device:
        raise ValueError(f"key and value must be on one device; key: {key.device}, value: {value.device}.")
    if key.shape[:3] != value.shape[:3]:
        came = describe_shapes(("key", "value"), key, value)
        raise ValueError(f"key and value must agree in batch, heads and length; got {came}.")
    if value.shape[3] == 0:
        raise ValueError(f"heads and dim must be at least 1; got value {list(value.shape)}.")


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
            apart = find_ranks() is not None  # then they are of all ranks' rows, see `lln.distributed.across`
            if offsets[0] != 0 or (offsets[-1] != total and not apart) or any(a > b for a, b in pairwise(offsets)):
                raise ValueError(
                    f"cu_seqlens must rise from 0 to the total length of {what}, {total}; got {show(offsets)}."
                )
    if pair[0].numel() != pair[1].numel():
        raise ValueError(
            "cu_seqlens: queries and keys must have the same number of sequences; "
            f"got {pair[0].numel() - 1} and {pair[1].numel() - 1}."
        )
    cu_query = pair[0].contiguous()
    return cu_query, pair[1].contiguous() if cross else cu_query, cross


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


def check_masks(
    q: Tensor, k: Tensor, key_mask: Any, query_mask: Any, is_causal: bool, names: tuple[str, str] = ("query", "key")
) -> None:
    """q and k are looked at for their batch, length and device only."""
    check_key_mask(key_mask, k, "key_mask", names[1])
    check_key_mask(query_mask, q, "query_mask", names[0])
    check_flag("is_causal", is_causal)
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"is_causal needs {names[0]} and {names[1]} of equal length; got {q.shape[2]} and {k.shape[2]}."
        )


def check_block_size(block_size: int | None, is_causal: bool, cross: bool, with_state: bool) -> None:
    if block_size is None:
        return
    if not isinstance(block_size, (int, Integral)) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"block_size must be a positive int, or None for LLN alone; got {describe(block_size)}.")
    if cross:
        raise ValueError(
            "block_size must be None in cross attention, because blocks along the diagonal need query and key of one "
            "sequence."
        )
    if with_state and not is_causal:
        raise ValueError(
            "block_size with state or return_state is causal only, because an open block may still grow; "
            "set is_causal=True or block_size=None."
        )


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
    # Sizes are compared one by one: in torch.compile(dynamic=True) they are symbols, which `in` does not find.
    if value.ndim == 0 or (value.ndim == 1 and sizes[0] == heads):
        return value.reshape(1, -1, 1).to(dtype)
    if value.ndim == 2:
        of_samples = sizes[0] == batch and sizes[1] == heads
        of_channels = sizes[0] == heads and sizes[1] == dim
        if of_samples and of_channels and value.numel() > 1:
            raise ValueError(
                f"{name} of shape {list(sizes)} may be [batch, heads] or [heads, dim] here; "
                "say which with [batch, heads, 1] or [1, heads, dim]."
            )
        if of_samples or of_channels:
            return value.unsqueeze(-1 if of_samples else 0).to(dtype)
    if value.ndim == 3 and all(n == 1 or n == m for n, m in zip(sizes, shape, strict=True)):
        return value.to(dtype)
    raise ValueError(
        f"{name} must be a number or a tensor of shape [heads], [batch, heads], [heads, dim] or "
        f"[batch, heads, dim], here with batch, heads, dim = {batch}, {heads}, {dim}; got {list(sizes)}."
    )


def check_no_mix(mix: Any) -> None:
    """Of attention without blocks."""
    if not isinstance(mix, (int, float)) or mix != 0.5:
        raise ValueError(f"mix weighs LLN against the blocks and needs block_size; got {describe(mix)}.")


def mix_weights(
    mix: Any, block_size: int | None, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """(factor of the linear part, factor of the block part), None where there are no blocks."""
    if block_size is None:
        check_no_mix(mix)
        return None, None
    if isinstance(mix, (tuple, list)):
        if len(mix) != 2:
            raise ValueError(f"mix must be a number, a tensor, or a pair (r, p); got {len(mix)} values.")
        r, p = (coefficient("mix", m, shape, dtype, device, positive=False) for m in mix)
        return r, p
    if not isinstance(mix, Tensor):
        check_fraction("mix", mix, " A pair (r, p) gives r * lln + p * diag.")
    r = coefficient("mix", mix, shape, dtype, device, positive=False)
    return r, 1.0 - r if isinstance(mix, Tensor) else constant(1.0 - float(mix), dtype, device)
