"""What a call of lln.jax may be given: what is wrong is refused in a sentence, as on the PyTorch side. Values inside
arrays are not looked at, since jax.jit knows none."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from lln.jax.arithmetic import compute_dtype
from lln.jax.holding import LLNState
from lln.jax.reading import SIGNED
from lln.rules import check_choice, check_count

DTYPES = ("float32", "float64", "bfloat16", "float16")


def describe(value: Any) -> str:
    """What came, for the end of an error message."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {value.dtype} array of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def check_arrays(query: Any, key: Any, value: Any) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not hasattr(t, "shape") or not hasattr(t, "dtype"):
            raise TypeError(
                f"{name} must be an array of JAX or NumPy; got {describe(t)}. Use jax.numpy.asarray({name})."
            )
        if t.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions, [batch, heads, length, dim]; got shape {list(t.shape)}. A dimension "
                "that is missing is added with jax.numpy.expand_dims."
            )
        if str(t.dtype) not in DTYPES:
            raise TypeError(f"{name} must be {', '.join(DTYPES)}; got {describe(t)}. Use {name}.astype('float32').")
        if t.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have one dtype; query is {query.dtype} and {name} is {t.dtype}. Use "
                f"{name}.astype(query.dtype)."
            )
    came = f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must agree in batch and dim; got {came}.")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value must agree in batch, heads and length; got {came}.")
    if 0 in (query.shape[1], query.shape[3], key.shape[1], value.shape[3]):
        raise ValueError(f"heads and dim must be at least 1; got {came}.")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads; got {came}.")


def check_mask(name: str, mask: Any, t: Array, kind: str = "bool") -> None:
    """Of the tokens of t [batch, heads, length, dim]."""
    if mask is None:
        return
    expected = [t.shape[0], t.shape[2]]
    holds = "True for each token that counts" if kind == "bool" else "the number of each token's sequence"
    if not hasattr(mask, "shape") or list(mask.shape) != expected:
        raise ValueError(f"{name} must have shape [batch, length] = {expected}, with {holds}; got {describe(mask)}.")
    right = mask.dtype == bool if kind == "bool" else jnp.issubdtype(mask.dtype, jnp.integer)
    if not right:
        raise TypeError(f"{name} must be {kind}, with {holds}; got {describe(mask)}. Use {name}.astype({kind!r}).")


def coefficient(name: str, value: Any, shape: tuple[int, int, int], dtype: Any, positive: bool = True) -> Array:
    """alpha, beta or a side of mix as an array [batch, heads, tokens, dim] in which any size may be 1."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value) or (positive and value <= 0):
            remedy = " lln.jax.match_moments finds one that fits the queries and keys." if positive else ""
            raise ValueError(
                f"{name} must be a number that is {'positive and ' if positive else ''}finite; got {value}.{remedy}"
            )
        return jnp.full((1, 1, 1, 1), value, dtype)
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(f"{name} must be a number or an array; got {describe(value)}.")
    batch, heads, dim = shape
    sizes = tuple(value.shape)
    if len(sizes) == 2 and (batch, heads) == (heads, dim) and value.size > 1:
        raise ValueError(
            f"{name} of shape {list(sizes)} may be [batch, heads] or [heads, dim] here; "
            "say which with [batch, heads, 1] or [1, heads, dim]."
        )
    forms = {
        (): (1, 1, 1, 1), (heads,): (1, heads, 1, 1), (batch, heads): (batch, heads, 1, 1),
        (heads, dim): (1, heads, 1, dim),
    }  # fmt: skip
    if sizes in forms:
        return value.reshape(forms[sizes]).astype(dtype)
    if len(sizes) == 3 and all(n in (1, m) for n, m in zip(sizes, shape, strict=True)):
        return value[:, :, None].astype(dtype)
    if len(sizes) == 4 and all(n in (1, m) for n, m in zip((*sizes[:2], sizes[3]), shape, strict=True)):
        return value.astype(dtype)  # each token its own: of packed sequences
    raise ValueError(
        f"{name} must be a number or an array of shape [heads], [batch, heads], [heads, dim] or [batch, heads, dim], "
        f"here with batch, heads, dim = {batch}, {heads}, {dim}; got {list(sizes)}."
    )


def check_directions(directions: Any, key: Array, read: str) -> Any:
    """[key heads, channels, dim], "signed" or None."""
    if directions is None:
        return None
    if read == "paper":
        raise ValueError(
            f"directions are channels of the evidence read, so they need read='evidence'; got {describe(directions)} "
            "with read='paper'. Set read='evidence', or leave directions out."
        )
    if isinstance(directions, str):
        check_choice("directions", directions, SIGNED, None)
        return directions
    heads, dim = key.shape[1], key.shape[3]
    sizes = tuple(getattr(directions, "shape", ()))
    if len(sizes) not in (2, 3) or sizes[-1] != dim or not sizes[-2] or (len(sizes) == 3 and sizes[0] != heads):
        raise ValueError(
            f"directions must be 'signed', None, or an array [key heads, channels, dim] or [channels, dim], here with "
            f"{heads} heads of {dim}; got {describe(directions)}."
        )
    return jnp.broadcast_to(directions, (heads, *sizes[-2:]))


def check_read(read: Any, alpha: Any, beta: Any) -> None:
    check_choice("read", read, "paper", "evidence")
    if beta is None or (alpha is None and read == "paper"):
        name = "beta" if beta is None else "alpha"
        raise TypeError(
            f"{name} is missing; give a positive number or an array, for example from lln.jax.match_moments."
        )
    if read == "evidence" and alpha is not None:
        raise ValueError(
            f"alpha must be left out with read='evidence', where scale sets the temperature; got {describe(alpha)}. "
            "Give alpha=None, or use read='paper'."
        )


def check_layout(
    query: Array, key: Array, block_size: Any, is_causal: bool, segment_ids: Any, with_state: bool
) -> None:
    """How queries and keys lie to each other."""
    for name, flag in (("is_causal", is_causal),):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False; got {describe(flag)}.")
    lengths = query.shape[2], key.shape[2]
    if is_causal and lengths[0] != lengths[1]:
        raise ValueError(
            f"is_causal needs query and key of equal length; got lengths {lengths[0]} and {lengths[1]}. Give what came "
            "before as state=, or use is_causal=False in cross attention."
        )
    if segment_ids is not None:
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"segment_ids: query and key must be the same tokens; got lengths {lengths[0]} and {lengths[1]}. Give "
                "cross attention of several sequences as a batch with key_mask."
            )
        if with_state:
            raise ValueError(
                "segment_ids: a state is of one sequence, and segment_ids mark several; leave out state and "
                "return_state, or give each sequence by itself."
            )
    if block_size is None:
        return
    check_count("block_size", block_size)
    if lengths[0] != lengths[1]:
        raise ValueError(
            "block_size must be None in cross attention, because blocks along the diagonal need query and key of one "
            "sequence."
        )
    if with_state and not is_causal:
        raise ValueError(
            "block_size with state or return_state is causal only, because an open block may still grow; "
            "set is_causal=True or block_size=None."
        )


def mix_weights(mix: Any, block_size: int | None, shape: tuple[int, int, int], dtype: Any) -> tuple[Any, Any]:
    """(factor of the linear part, factor of the block part), None where there are no blocks."""
    if block_size is None:
        if not isinstance(mix, (int, float)) or mix != 0.5:
            raise ValueError(
                f"mix weighs LLN against the blocks and needs block_size; got {describe(mix)} with block_size=None. "
                "Set block_size, for example 64, or leave mix out."
            )
        return None, None
    if isinstance(mix, str):
        raise ValueError(
            f"mix must be a number, an array or a pair of them in JAX; {mix!r} is supported only in PyTorch, by "
            "lln.lln_attention."
        )
    if isinstance(mix, (tuple, list)):
        if len(mix) != 2:
            raise ValueError(
                "mix must be a number, an array, or a pair (r, p), which gives r * lln + p * diag; got "
                f"{len(mix)} values."
            )
        r, p = (coefficient("mix", m, shape, dtype, positive=False) for m in mix)
        return r, p
    if isinstance(mix, (int, float)) and not 0.0 <= mix <= 1.0:
        raise ValueError(f"mix must lie between 0 and 1; got {mix}. A pair (r, p) gives r * lln + p * diag.")
    r = coefficient("mix", mix, shape, dtype, positive=False)
    return r, 1.0 - r


def check_state(
    state: Any, batch: int, key: Array, value: Array, channels: int, read: str, block_size: int | None
) -> None:
    if not isinstance(state, LLNState):
        raise TypeError(
            "state must be an lln.jax.LLNState, as return_state=True or LLNState.empty gives one; got "
            f"{describe(state)}."
        )
    if state.read != read:
        raise ValueError(
            f"state was made with read={state.read!r}, and this call has read={read!r}; use the same read for both."
        )
    expected = [batch, key.shape[1], channels, value.shape[3]]
    if list(state.mean_value.shape) != expected:
        raise ValueError(
            f"state must be of [batch, key heads, dim, value dim] = {expected}, as this call's keys and values are; "
            f"got one of {list(state.mean_value.shape)}. Another sequence begins with state=None or LLNState.empty."
        )
    held = None if state.block_key is None else state.block_key.shape[2]
    if held != block_size:
        raise ValueError(
            f"state was made with block_size={held}, and this call has block_size={block_size}; "
            "a sequence keeps one block_size from its start (LLNState.empty(..., block_size=...) begins one)."
        )
    if state.mean_value.dtype != compute_dtype(key.dtype):
        raise ValueError(
            f"state is for keys of another dtype than {key.dtype}; it holds {state.mean_value.dtype}. Keep one dtype "
            f"for all parts of a sequence: LLNState.empty(..., dtype='{key.dtype}') begins one."
        )
