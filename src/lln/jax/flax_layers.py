"""LLN attention as flax.nnx modules: statistics of q and k, moment matching and the op; and the drop-in for flax's own.

Parameters have the names and shapes of the PyTorch modules where there is one (`lln.jax.torch_weights`); projections
those of flax.nnx.MultiHeadAttention.
"""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError(
        "LLNAttention and MultiHeadAttention of lln.jax need flax; install it with: pip install 'lln-attention[jax]'",
        name="flax",
    )

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lln.jax.arguments import describe
from lln.jax.arithmetic import compute_dtype, wide_dtype
from lln.jax.attending import lln_attention
from lln.jax.spreads import MATCHINGS, deviation, match_moments, match_samples, moments
from lln.kernels.paper_line import SIGMA_FLOOR
from lln.points import LENGTH
from lln.rules import check_choice, check_count

LECUN, ZEROS = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class Fixed(nnx.Variable):
    """An array that is neither learned nor measured: alpha or beta as given."""


class LLNAttention(nnx.Module):
    """A flax.nnx module that runs LLN or LLN+Diag attention and chooses alpha and beta from the spread of the queries
    and keys, as `lln.LLNAttention` does in PyTorch.

    Args:
        num_heads: query heads; head_dim: of queries and keys.
        num_key_heads: key and value heads, where fewer (grouped-query attention).
        value_dim: of the values, where not head_dim.
        matching: "paper", "variance" or "entropy", see `match_moments`.
        statistics: where sigma_q and sigma_k come from. "sample": each sample (packed: each sequence) and head for
            itself. "batch": one number over all of them. "running": for each key head a moving average, frozen after
            .eval(), for causal attention. "fixed": alpha and beta as given, or those of sigma = 1.
        alpha, beta: with "fixed": numbers, or arrays [heads] or [heads, dim].
        learnable: with "fixed": "head" or "channel" makes the logarithms of alpha and beta parameters.
        block_size: LLN+Diag with blocks of so many tokens; None: LLN alone.
        mix: of the linear part and the blocks: a number; "ratio" learns one number a head; "scales" learns two factors
            (r, p) a head and value channel.
        read: "paper", or "evidence" for weights that were trained with softmax, which has no alpha.
        directions: of the evidence read's channels: None, "signed", or with "fixed" a number of channels whose
            directions are learned, with beta in them.
        value_convolution: an odd width: a learned convolution of the values is added to the output; zero at first.
        scale: of the softmax that is imitated, and of the one in the blocks; default 1 / sqrt(head_dim).
        decoder: the queries belong to a causal decoder (cross attention), so statistics must not look at all of them.
        length: number of keys that "entropy" matching assumes with "running" and "fixed" statistics.
        momentum: weight of a new batch in the "running" averages.
        param_dtype: of the parameters.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from lln.jax import LLNAttention
        >>> attention = LLNAttention(4, 16, block_size=8)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 50, 16))
        >>> nnx.jit(attention)(q, k, v).shape
        (2, 4, 50, 16)
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, num_key_heads: int | None = None, value_dim: int | None = None,
        matching: str = "paper", statistics: str = "sample", alpha: Any = None, beta: Any = None,
        learnable: str | None = None, block_size: int | None = None, mix: float | str = 0.5, read: str = "paper",
        directions: int | str | None = None, value_convolution: int | None = None, scale: float | None = None,
        decoder: bool = False, length: int = LENGTH, momentum: float = 0.1, param_dtype: Any = "float32",
    ) -> None:  # fmt: skip
        check_choice("matching", matching, *MATCHINGS)
        check_choice("statistics", statistics, "sample", "batch", "running", "fixed")
        check_choice("learnable", learnable, None, "head", "channel")
        check_choice("read", read, "paper", "evidence")
        for name, number in (("num_heads", num_heads), ("head_dim", head_dim), ("length", length)):
            check_count(name, number)
        if isinstance(mix, str):
            check_choice("mix", mix, "ratio", "scales")
        if value_convolution is not None and check_count("value_convolution", value_convolution, 3) % 2 == 0:
            raise ValueError(f"value_convolution must be an odd int of 3 or more, or None; got {value_convolution}.")
        if num_heads % (num_key_heads or num_heads):
            raise ValueError(
                "num_heads must be a multiple of num_key_heads, so that each key head serves as many query heads; got "
                f"{num_heads} and {num_key_heads}."
            )
        if statistics != "fixed" and not (alpha is None and beta is None and learnable is None):
            raise ValueError(
                f"alpha, beta and learnable go with statistics='fixed'; got statistics={statistics!r}, which finds "
                "alpha and beta itself. Leave them out, or set statistics='fixed'."
            )
        directed = isinstance(directions, int)
        if directed and (statistics != "fixed" or read != "evidence" or beta is not None or learnable is not None):
            raise ValueError(
                f"directions={directions}: learned directions hold beta themselves; use read='evidence' and "
                "statistics='fixed', and leave out beta and learnable."
            )
        self.num_heads, self.head_dim, self.num_key_heads = num_heads, head_dim, num_key_heads or num_heads
        self.value_dim, self.block_size, self.mix, self.read = value_dim or head_dim, block_size, mix, read
        self.matching, self.statistics, self.directions = matching, statistics, directions
        self.scale, self.decoder, self.length, self.momentum = scale, decoder, length, momentum
        self.use_running_average = False  # .eval() sets it
        key_heads, usual = self.num_key_heads, match_moments(1.0, 1.0, head_dim, matching, scale, length=length)
        if statistics == "running":
            self.running_count = nnx.BatchStat(jnp.zeros((), jnp.int32))
            self.running_variance_q = nnx.BatchStat(jnp.ones(key_heads, jnp.float32))
            self.running_variance_k = nnx.BatchStat(jnp.ones(key_heads, jnp.float32))
        if statistics == "fixed":
            given = (("alpha", alpha, num_heads, usual[0]), ("beta", 1.0 if directed else beta, key_heads, usual[1]))
            self.numbers: dict[str, float] = {}
            for name, chosen, heads, value in given[read == "evidence" :]:
                self.keep_coefficient(name, value if chosen is None else chosen, heads, learnable, param_dtype)
        if mix == "ratio":
            self.mix_logit = nnx.Param(jnp.zeros(num_heads, param_dtype))
        if mix == "scales":
            self.lln_scale = nnx.Param(jnp.full((num_heads, self.value_dim), 0.5, param_dtype))
            self.block_scale = nnx.Param(jnp.full((num_heads, self.value_dim), 0.5, param_dtype))
        if value_convolution is not None:
            self.value_taps = nnx.Param(jnp.zeros((key_heads, self.value_dim, value_convolution), param_dtype))
        if directed:
            # Beyond the signed coordinates, some of them again with half and a quarter of the weight, and so on.
            axes, rounds = jnp.eye(head_dim) * usual[1], -(-directions // (2 * head_dim))  # type: ignore[operator]
            started = jnp.concatenate([sign * axes / 2**i for i in range(rounds) for sign in (1, -1)])[:directions]
            self.channel_directions = nnx.Param(jnp.tile(started, (key_heads, 1, 1)).astype(param_dtype))

    def keep_coefficient(self, name: str, given: Any, heads: int, learnable: str | None, dtype: Any) -> None:
        values = jnp.asarray(given, "float32")
        values = values.reshape((1, 1, 1) if not values.ndim else (1, heads, -1))
        if learnable is not None:  # the logarithm, so that it stays positive whatever the optimiser does
            shape = (1, heads, self.head_dim if learnable == "channel" else values.shape[-1])
            setattr(self, f"log_{name}", nnx.Param(jnp.log(jnp.broadcast_to(values, shape))[0].astype(dtype)))
        elif isinstance(given, (int, float)):
            self.numbers[name] = float(given)
        else:
            setattr(self, f"fixed_{name}", Fixed(values))

    def __call__(
        self, query: Array, key: Array, value: Array, *, is_causal: bool = False, key_mask: Array | None = None,
        query_mask: Array | None = None, segment_ids: Array | None = None, state: Any = None,
        return_state: bool = False,
    ) -> Any:  # fmt: skip
        """query [B, H, N, D], key [B, key heads, M, D], value [B, key heads, M, E] -> [B, H, N, E]: `lln_attention`.

        query_mask [B, N]: rows that count for sigma_q; default key_mask in self attention (N = M).
        Raises ValueError for statistics that would let a causal output see later tokens."""
        heads = self.num_heads, self.num_key_heads, self.head_dim
        if (query.shape[1], key.shape[1], query.shape[3]) != heads:
            raise ValueError(
                f"query and key must have {heads[0]} and {heads[1]} heads of {heads[2]}, as num_heads, num_key_heads "
                f"and head_dim of the layer say; got query {list(query.shape)} and key {list(key.shape)}."
            )
        if (is_causal or self.decoder) and self.statistics in ("sample", "batch"):
            raise ValueError(
                f"statistics={self.statistics!r} looks at all tokens, so a causal output would depend on later ones; "
                "use statistics='running' or 'fixed' for causal attention and in decoders."
            )
        if query_mask is None and query.shape[2] == key.shape[2]:
            query_mask = key_mask
        alpha, beta = self.find_coefficients(query, key, key_mask, query_mask, segment_ids)
        if self.read == "evidence":
            alpha = None
        mix: Any = self.mix
        if mix == "ratio":
            mix = jax.nn.sigmoid(self.mix_logit[...])
        elif mix == "scales":
            mix = self.lln_scale[...][None], self.block_scale[...][None]
        learned = isinstance(self.directions, int)
        found = lln_attention(
            query, key, value, alpha, beta, read=self.read, block_size=self.block_size, mix=mix, is_causal=is_causal,
            directions=self.channel_directions[...] if learned else self.directions, key_mask=key_mask,
            value_convolution=self.value_taps[...] if hasattr(self, "value_taps") else None, scale=self.scale,
            segment_ids=segment_ids, state=state, return_state=return_state,
        )  # fmt: skip
        if self.statistics == "running" and not self.use_running_average:
            self.update_averages(query, key, query_mask, key_mask)
        return found

    def find_coefficients(
        self, query: Array, key: Array, key_mask: Array | None, query_mask: Array | None, segment_ids: Array | None
    ) -> tuple[Any, Any]:
        """(alpha, beta) as `lln_attention` takes them; the evidence read uses beta alone."""
        dtype = compute_dtype(query.dtype)
        if self.statistics == "fixed":
            found: list[Any] = []
            for name in ("alpha", "beta"):
                if hasattr(self, f"log_{name}"):
                    found.append(jnp.exp(getattr(self, f"log_{name}")[...].astype(dtype))[None])
                elif hasattr(self, f"fixed_{name}"):
                    found.append(getattr(self, f"fixed_{name}")[...].astype(dtype))
                else:
                    found.append(self.numbers.get(name))
            return found[0], found[1]
        if self.statistics == "sample":
            return match_samples(
                query, key, self.matching, self.scale, key_mask=key_mask, query_mask=query_mask, segment_ids=segment_ids
            )
        length: Any = self.length
        if self.statistics == "running":
            variances = self.running_variance_q[...], self.running_variance_k[...]
            spreads = [jnp.sqrt(jnp.maximum(v.astype(wide_dtype()), SIGMA_FLOOR**2)) for v in variances]
        else:
            pooled = [self.pool(t, mask, True) for t, mask in ((query, query_mask), (key, key_mask))]
            spreads = [deviation(*one)[None] for one in pooled]
            length = pooled[1][0] / (self.head_dim * self.num_key_heads * key.shape[0])
        alpha, beta = match_moments(spreads[0], spreads[1], self.head_dim, self.matching, self.scale, length=length)
        alpha, beta = (jnp.broadcast_to(one, self.num_key_heads).astype(dtype) for one in (alpha, beta))
        return alpha.repeat(self.num_heads // self.num_key_heads), beta

    def pool(self, t: Array, mask: Array | None, over_heads: bool) -> tuple[Array, Array]:
        """(count, sum of squares around the mean) of the whole batch, [key heads] or []."""
        count, mean, squares = (x[..., 0, 0] for x in moments(t, self.num_key_heads, mask, None))  # [B, key heads]
        axes = (0, 1) if over_heads else (0,)
        count, squares = jnp.broadcast_to(count, mean.shape), jnp.broadcast_to(squares, mean.shape)
        centre = (count * mean).sum(axes) / jnp.maximum(count.sum(axes), 1)
        return count.sum(axes), (squares + count * (mean - centre) ** 2).sum(axes)

    def update_averages(self, query: Array, key: Array, query_mask: Array | None, key_mask: Array | None) -> None:
        """Bring this batch into the running averages, which the next call uses."""
        both = [self.pool(t, mask, False) for t, mask in ((query, query_mask), (key, key_mask))]
        # No tokens, or an overflow somewhere: then nothing changes.
        good = jnp.stack([(count > 1) & jnp.isfinite(squares) for count, squares in both]).all()
        # The first batch replaces the initial 1.
        weight = jnp.where(self.running_count[...] == 0, 1.0, self.momentum) * good
        for held, pooled in zip((self.running_variance_q, self.running_variance_k), both, strict=True):
            new = jnp.where(good, deviation(*pooled) ** 2, 1.0).astype(held[...].dtype)
            held[...] = held[...] + weight.astype(new.dtype) * (new - held[...])
        self.running_count[...] = self.running_count[...] + good


class MultiHeadAttention(nnx.Module):
    """Replace flax.nnx.MultiHeadAttention by LLN attention, in time and memory linear in the length. The projections
    have the same names, so that trained weights fit in both directions (`nnx.update(ours, nnx.state(theirs,
    nnx.Param))`).

    Args:
        num_heads: of queries; num_kv_heads: of keys and values, where fewer.
        in_features: of the inputs; qkv_features: of all heads together, default in_features.
        out_features: default in_features; in_kv_features: of keys and values, default in_features.
        dtype: of the computation; param_dtype: of the parameters.
        kernel_init, out_kernel_init, bias_init, use_bias: as flax has them.
        rngs: of the initial parameters.
        options: of `LLNAttention`: matching, statistics, block_size, mix, value_convolution and so on.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from lln.jax import MultiHeadAttention
        >>> attention = MultiHeadAttention(4, 32, matching="variance", rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (2, 50, 32))
        >>> nnx.jit(attention)(x).shape
        (2, 50, 32)
        >>> softmax = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(1))
        >>> nnx.update(attention, nnx.state(softmax, nnx.Param))
    """

    def __init__(
        self, num_heads: int, in_features: int, qkv_features: int | None = None, out_features: int | None = None,
        num_kv_heads: int | None = None, in_kv_features: int | None = None, *, dtype: Any = None,
        param_dtype: Any = jnp.float32, kernel_init: Any = LECUN,
        out_kernel_init: Any = None, bias_init: Any = ZEROS, use_bias: bool = True,
        rngs: nnx.Rngs, **options: Any,
    ) -> None:  # fmt: skip
        width = qkv_features or in_features
        if width % num_heads:
            raise ValueError(
                f"qkv_features, or in_features where it is left out, must be a multiple of num_heads; got {width} and "
                f"{num_heads}."
            )
        head_dim, kv_features = width // num_heads, in_kv_features or in_features
        key_heads = num_kv_heads or num_heads
        self.attention = LLNAttention(num_heads, head_dim, num_key_heads=key_heads, param_dtype=param_dtype, **options)
        shared: dict[str, Any] = {
            "dtype": dtype, "param_dtype": param_dtype, "use_bias": use_bias, "bias_init": bias_init, "rngs": rngs,
        }  # fmt: skip
        self.query = nnx.LinearGeneral(in_features, (num_heads, head_dim), kernel_init=kernel_init, **shared)
        self.key = nnx.LinearGeneral(kv_features, (key_heads, head_dim), kernel_init=kernel_init, **shared)
        self.value = nnx.LinearGeneral(kv_features, (key_heads, head_dim), kernel_init=kernel_init, **shared)
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim), out_features or in_features, axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init, **shared,
        )  # fmt: skip

    def __call__(
        self, inputs_q: Array, inputs_k: Array | None = None, inputs_v: Array | None = None, *,
        mask: Array | None = None, is_causal: bool = False, key_mask: Array | None = None,
        query_mask: Array | None = None, segment_ids: Array | None = None, state: Any = None,
        return_state: bool = False,
    ) -> Any:  # fmt: skip
        """inputs_q [B, N, features] -> [B, N, out features]; without inputs_k self attention, without inputs_v those of
        the keys.

        key_mask [B, M] and query_mask [B, N]: tokens that are there. mask [B, 1, 1, M], as flax has it, says the same
        of the keys; masks of pairs of queries and keys cannot be in linear attention. The others: of `lln_attention`.
        """
        itself = inputs_k is None and inputs_v is None
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        if mask is not None:
            if mask.ndim != 4 or mask.shape[1:3] != (1, 1):
                raise ValueError(
                    "mask must be [batch, 1, 1, key length], which hides keys from all queries and heads; linear "
                    f"attention forms no pairs that could be masked one by one; got {describe(mask)}. Use is_causal, "
                    "key_mask or segment_ids."
                )
            shown = jnp.broadcast_to(mask[:, 0, 0] != 0, inputs_k.shape[:2])
            key_mask = shown if key_mask is None else key_mask & shown
        q, k, v = (
            jnp.swapaxes(project(x), 1, 2)
            for project, x in ((self.query, inputs_q), (self.key, inputs_k), (self.value, inputs_v))
        )
        if query_mask is None:  # the padding of the keys is that of the queries only where both are one sequence
            query_mask = key_mask if itself else jnp.ones(inputs_q.shape[:2], bool)
        found = self.attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, query_mask=query_mask, segment_ids=segment_ids,
            state=state, return_state=return_state,
        )  # fmt: skip
        out, *more = found if return_state else (found,)
        out = self.out(jnp.swapaxes(out, 1, 2))
        return (out, *more) if return_state else out
