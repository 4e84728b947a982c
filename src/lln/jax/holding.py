"""LLNState in JAX: all that LLN attention needs to know of the keys and values it has seen, and how states merge."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lln.jax.arithmetic import compute_dtype, make_finite, product, share, take_log, wide_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LLNState:
    """Everything that LLN attention needs to know of the keys and values it has seen: for B sequences with H key heads
    of dimension D and values of dimension E. It is a pytree of arrays, so jit, vmap, scan and collectives accept it.

    `lln_attention(..., return_state=True)` and `LLNState.empty` make it, and `lln_attention(..., state=...)` takes it.
    All calls of one sequence must have the same beta, which cannot be checked while JAX traces. log_sum is float64 with
    `jax_enable_x64`. Otherwise it is float32, and after 100,000 merges of one token it is off by about 1e-3.

    Examples:
        >>> import jax
        >>> from lln.jax import LLNState, fold_keys, lln_attention
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 10, 8))
        >>> @jax.jit
        ... def attend(q, k, v):
        ...     parts = [fold_keys(k[:, :, i : i + 5], v[:, :, i : i + 5], 1.5) for i in (0, 5)]
        ...     both = parts[0].merge(parts[1])  # as if all keys had come at once
        ...     return lln_attention(q, k[:, :, :0], v[:, :, :0], 1.5, 1.5, state=both)
        >>> bool(abs(attend(q, k, v) - lln_attention(q, k, v, 1.5, 1.5)).max() < 1e-5)
        True
    """

    log_sum: Array  # [B, H, C], C channels: D of the paper's read
    mean_value: Array  # [B, H, C, E]
    count: Array | None = None  # [B] int32, tokens since the first valid one; this and the next three with block_size
    block_key: Array | None = None  # [B, H, block_size, D]; the first count % block_size rows are the open block
    block_value: Array | None = None  # [B, H, block_size, E]
    block_mask: Array | None = None  # [B, block_size] bool, which of the rows hold a key that may be attended to
    mean_key: Array | None = None  # [B, H, C, D]; this and entropy only with the evidence read
    entropy: Array | None = None  # [B, H, C]
    last_value: Array | None = None  # [B, H, W - 1, E]: the last values, only with a value convolution of W taps

    @classmethod
    def empty(
        cls, batch: int, heads: int, head_dim: int, value_dim: int | None = None, *, block_size: int | None = None,
        read: str = "paper", channels: int | None = None, value_convolution: int | None = None, dtype: Any = "float32",
    ) -> LLNState:  # fmt: skip
        """Make the state of a sequence that has no tokens yet. heads counts key heads, and dtype is that of the keys to
        come. channels is the number of channels of the evidence read if it is not head_dim. value_convolution is the
        width of the convolution, if the calls have one.

        >>> LLNState.empty(1, 2, 8).mean_value.shape
        (1, 2, 8, 8)
        """
        value_dim, shape = value_dim or head_dim, (batch, heads, channels or head_dim)
        wide, computed = wide_dtype(), compute_dtype(jnp.dtype(dtype))
        more: dict[str, Array] = {}
        if read == "evidence":
            more["mean_key"] = jnp.zeros((*shape, head_dim), computed)
            more["entropy"] = jnp.zeros(shape, wide)
        if block_size is not None:
            more["count"] = jnp.zeros(batch, jnp.int32)
            more["block_key"] = jnp.zeros((batch, heads, block_size, head_dim), dtype)
            more["block_value"] = jnp.zeros((batch, heads, block_size, value_dim), dtype)
            more["block_mask"] = jnp.zeros((batch, block_size), bool)
        if value_convolution is not None:
            more["last_value"] = jnp.zeros((batch, heads, value_convolution - 1, value_dim), dtype)
        return cls(jnp.full(shape, -jnp.inf, wide), jnp.zeros((*shape, value_dim), computed), **more)

    @property
    def read(self) -> str:
        """ "paper" or "evidence": how queries read it.

        >>> LLNState.empty(1, 2, 8, read="evidence").read
        'evidence'
        """
        return "paper" if self.mean_key is None else "evidence"

    def merge(self, other: LLNState) -> LLNState:
        """Return the state of the keys of both states, in any order and grouping. An empty state changes nothing.

        >>> state = LLNState.empty(1, 2, 8)
        >>> state.merge(state).log_sum.shape
        (1, 2, 8)
        """
        if self.read != other.read:
            raise ValueError(
                f"LLNState.merge: one state is for read={self.read!r}, the other for {other.read!r}; use one for both."
            )
        if self.block_key is not None or other.block_key is not None:
            raise ValueError(
                "LLNState.merge: states with an open block (block_size) do not merge, because where a block starts "
                "depends on all that came before; pass the earlier state as lln_attention(..., state=...) with the "
                "later tokens."
            )
        if self.last_value is not None or other.last_value is not None:
            raise ValueError(
                "LLNState.merge: states with the last values of a convolution (value_convolution) do not merge; pass "
                "the earlier state as lln_attention(..., state=...) with the later tokens."
            )
        return merge(self, other)


def join_logs(
    sum_1: Array, entropy_1: Array | None, sum_2: Array, entropy_2: Array | None
) -> tuple[Array, Array | None]:
    """(L, H) of two sets of keys from (L, H) of each, by the chain rule of entropy, whose terms are all >= 0. H may be
    left out."""
    top = lax.stop_gradient(make_finite(jnp.maximum(sum_1, sum_2)))
    first, second = sum_1 - top, sum_2 - top  # <= 0
    total = jnp.exp(first) + jnp.exp(second)  # 1 to 2, or 0 where there is no key
    log_sum = take_log(total, top)
    if entropy_1 is None or entropy_2 is None:
        return log_sum, None
    log_total = jnp.log(jnp.maximum(total, 0.5))
    entropy = jnp.zeros_like(log_sum)
    for part, held in ((first, entropy_1), (second, entropy_2)):
        log_share = part - log_total
        # An empty part has no share, and 0 ln 0 = 0, also in the gradient.
        entropy += jnp.exp(log_share) * (held - jnp.where(log_share == -jnp.inf, 0.0, log_share))
    return log_sum, jnp.where(total == 0, 0.0, entropy)


def merge(first: LLNState, second: LLNState) -> LLNState:
    log_sum, entropy = join_logs(first.log_sum, first.entropy, second.log_sum, second.entropy)
    weight = share(second.log_sum, log_sum, first.mean_value.dtype)[..., None]
    # S1 + w (S2 - S1) rather than (1 - w) S1 + w S2: the rounding of 1 - w would drift over many merges.
    value = first.mean_value + weight * (second.mean_value - first.mean_value)
    key = None
    if first.mean_key is not None and second.mean_key is not None:
        key = first.mean_key + weight * (second.mean_key - first.mean_key)
    return LLNState(log_sum, value, mean_key=key, entropy=entropy)


def fold(x: Array, k: Array | None, v: Array) -> LLNState:
    """The state of all rows: x [B, H, M, C], v [B, H, M, E], and with the evidence read k [B, H, M, D]."""
    wide = wide_dtype()
    top = lax.stop_gradient(make_finite(x.max(-2, keepdims=True)))
    below = x - top  # <= 0
    weights = jnp.exp(below).astype(v.dtype)
    total = weights.sum(-2)
    held = jnp.maximum(total, 0.5)  # the largest weight of a channel that has keys is 1
    value = product("bhmc,bhme->bhce", weights, v) / held[..., None]
    log_sum = take_log(total.astype(wide), top[..., 0, :].astype(wide))
    if k is None:
        return LLNState(log_sum, value)
    key = product("bhmc,bhmd->bhcd", weights, k) / held[..., None]
    lost = (weights * jnp.where(below == -jnp.inf, 0.0, below)).sum(-2) / held  # <= 0, so that nothing cancels
    entropy = jnp.where(total > 0, jnp.log(held.astype(wide)) - lost.astype(wide), 0.0)
    return LLNState(log_sum, value, mean_key=key, entropy=entropy)


def gather_states(state: LLNState, axis_name: str, *, before: bool = False) -> LLNState:
    """Merge the states of all devices along a mesh axis, inside jax.shard_map. With before=True it merges those of the
    devices before this one, from which causal attention continues.

    It is one all_gather of C * (E + 1) numbers for each head, with C channels and values of dimension E, whatever the
    length. It is differentiable.

    Examples:
        >>> import jax
        >>> from jax.sharding import PartitionSpec
        >>> from lln.jax import fold_keys, gather_states, lln_attention
        >>> automatic = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((1,), ("length",), axis_types=automatic)  # as many devices as there are
        >>> def attend(q, k, v):  # each device's own part of the length
        ...     everywhere = gather_states(fold_keys(k, v, 2.0), "length")
        ...     return lln_attention(q, k[:, :, :0], v[:, :, :0], 2.0, 2.0, state=everywhere)
        >>> split = PartitionSpec(None, None, "length")
        >>> sharded = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=split))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 16, 8))
        >>> bool(abs(sharded(q, k, v) - lln_attention(q, k, v, 2.0, 2.0)).max() < 1e-5)
        True
    """
    if state.block_key is not None or state.last_value is not None:
        raise ValueError(
            "gather_states: states with an open block (block_size) or last values (value_convolution) do not merge; "
            "gather those of a call without them (lln.jax.fold_keys)."
        )
    every = lax.all_gather(state, axis_name)
    here = lax.axis_index(axis_name)
    parts = [jax.tree.map(lambda t, at=at: t[at], every) for at in range(every.log_sum.shape[0])]
    if before:
        parts = [keep_if(at < here, part) for at, part in enumerate(parts)]
    found: LLNState = parts[0]
    for part in parts[1:]:
        found = merge(found, part)
    return found


def keep_if(wanted: Array, state: LLNState) -> LLNState:
    """The state, or an empty one."""
    kept: LLNState = jax.tree.map(lambda t: jnp.where(wanted, t, 0), state)
    return dataclasses.replace(kept, log_sum=jnp.where(wanted, state.log_sum, -jnp.inf))
