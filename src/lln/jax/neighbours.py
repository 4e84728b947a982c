"""A depthwise convolution of the values over the tokens, added to what attention gives: a direct way to the neighbours.

out_i = sum_j P_ij v_j + sum_w taps_w * v_(i + w - left)        left = (W - 1) / 2, causal: W - 1
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from lln.jax.arguments import describe
from lln.jax.arithmetic import compute_dtype
from lln.jax.segments import number_runs


def convolve_values(
    value: Array, taps: Array, *, is_causal: bool = False, key_mask: Array | None = None,
    segment_ids: Array | None = None, past: Array | None = None,
) -> Array:  # fmt: skip
    """Convolve the values over the tokens, as `lln_attention(..., value_convolution=taps)` does before it adds the
    result to its output.

    Args:
        value: [batch, key heads, length, value dim].
        taps: the weights of the convolution, [key heads, value dim, width] with an odd width.
        is_causal: the window covers earlier tokens only. Default False: it is symmetric.
        key_mask: [batch, length] bool, True = attend. Hidden tokens neither give nor get anything.
        segment_ids: [batch, length] ints: packed sequences, which the convolution keeps apart.
        past: [batch, key heads, width - 1, value dim]: the values before these; only with is_causal.

    Returns:
        [batch, key heads, length, value dim] in float32 (float64 for float64).

    Examples:
        >>> import jax.numpy as jnp
        >>> from lln.jax import convolve_values
        >>> ones = jnp.ones((1, 1, 4, 1))
        >>> convolve_values(ones, jnp.ones((1, 1, 3)), is_causal=True).flatten().tolist()
        [1.0, 2.0, 3.0, 3.0]
    """
    check_taps(value, taps)
    dtype, width, length = compute_dtype(value.dtype), taps.shape[-1], value.shape[2]
    each = taps.astype(dtype)[:, None]  # [H, 1, E, W]
    left = width - 1 if is_causal else width // 2
    shown = hide(value.astype(dtype), key_mask)
    beside = (0 if past is not None else left, width - 1 - left)
    wide = jnp.pad(shown, ((0, 0), (0, 0), beside, (0, 0)))
    if past is not None:
        wide = jnp.concatenate([past.astype(dtype), wide], 2)
    runs = runs_wide = None
    if segment_ids is not None:
        runs = number_runs(segment_ids)
        runs_wide = jnp.pad(runs, ((0, 0), (left, width - 1 - left)), constant_values=-1)
    out = jnp.zeros_like(shown)
    for at in range(width):
        other = wide[:, :, at : at + length]
        if runs is not None and runs_wide is not None:
            other = jnp.where((runs == runs_wide[:, at : at + length])[:, None, :, None], other, 0.0)
        out += each[..., at] * other
    return hide(out, key_mask)


def hide(value: Array, key_mask: Array | None) -> Array:
    return value if key_mask is None else jnp.where(key_mask[:, None, :, None], value, 0.0)


def keep_last(value: Array, width: int, key_mask: Array | None, past: Array | None) -> Array:
    """The last `width` values, zeros where there are none: what a causal convolution of width + 1 taps goes on from."""
    if past is None:
        past = jnp.zeros((*value.shape[:2], width, value.shape[3]), value.dtype)
    joined = jnp.concatenate([past, hide(value, key_mask)], 2)
    return joined[:, :, joined.shape[2] - width :]


def check_taps(value: Array, taps: Any) -> None:
    """ValueError where these are not the values that the taps are for."""
    shape: Any = getattr(taps, "shape", ())
    if len(shape) != 3 or tuple(shape[:2]) != (value.shape[1], value.shape[3]) or shape[2] % 2 == 0 or shape[2] < 3:
        raise ValueError(
            "value_convolution must be an array [key heads, value dim, width] = "
            f"[{value.shape[1]}, {value.shape[3]}, an odd number of 3 or more] here; got {describe(taps)}."
        )


def check_past(state: Any, value: Array, taps: Array, lengths: tuple[int, int], is_causal: bool, cut: bool) -> None:
    """ValueError where the queries are not the tokens of the values, or a sequence cannot be cut here."""
    check_taps(value, taps)
    if lengths[0] != lengths[1]:
        raise ValueError(
            "value_convolution runs over the tokens of one sequence, so cross attention has none; got lengths "
            f"{lengths[0]} and {lengths[1]}. Use value_convolution=None."
        )
    if cut and not is_causal:
        raise ValueError(
            "value_convolution looks at later tokens too without is_causal=True, so a sequence cannot be cut; "
            "leave out state and return_state, or use is_causal=True."
        )
    if state is not None:
        expected = [value.shape[0], value.shape[1], taps.shape[-1] - 1, value.shape[3]]
        held = None if state.last_value is None else list(state.last_value.shape)
        if held != expected:
            raise ValueError(
                f"state must hold the last values {expected} for this value_convolution; it has {held} "
                f"(LLNState.empty(..., value_convolution={taps.shape[-1]}) begins a sequence)."
            )
