"""Weights of `lln.MultiheadAttention` and `lln.LLNAttention` of PyTorch into the flax.nnx modules, and back; by way of
NumPy, so that nothing of torch is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lln.jax.flax_layers import LLNAttention, MultiHeadAttention

LEARNED = (
    "log_alpha", "log_beta", "fixed_alpha", "fixed_beta", "mix_logit", "lln_scale", "block_scale", "channel_directions",
    "value_taps", "running_count", "running_variance_q", "running_variance_k",
)  # fmt: skip


def read_torch_weights(module: Any, weights: Mapping[str, Any]) -> None:
    """Copy the weights of the PyTorch counterpart, built with the same options, into a module.

    Args:
        module: a `MultiHeadAttention` for the state_dict of `lln.MultiheadAttention` (or torch.nn.MultiheadAttention),
            or an `LLNAttention` for that of `lln.LLNAttention`.
        weights: the state_dict: tensors, or arrays.

    Raises:
        ValueError: a weight is missing, has another shape, or has no place in the module.

    Examples:
        >>> import torch, lln
        >>> from flax import nnx
        >>> from lln.jax import MultiHeadAttention, read_torch_weights
        >>> theirs = lln.MultiheadAttention(32, 4, batch_first=True)
        >>> ours = MultiHeadAttention(4, 32, rngs=nnx.Rngs(0))
        >>> read_torch_weights(ours, theirs.state_dict())
        >>> x = torch.randn(2, 10, 32)
        >>> bool(abs(nnx.jit(ours)(x.numpy()) - theirs(x, x, x)[0].detach().numpy()).max() < 1e-5)
        True
    """
    places = find_places(module)
    given = {name: as_numpy(value) for name, value in weights.items()}
    if missing := sorted(set(places) - set(given)):
        raise ValueError(
            f"weights: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; build the PyTorch module "
            "with the same options as this one."
        )
    if more := sorted(set(given) - set(places)):
        raise ValueError(
            f"weights: there is no place for {', '.join(more)}; build this module with the same options as the PyTorch "
            "module."
        )
    for name, (parts, heads) in places.items():
        split = np.split(given[name], len(parts)) if len(parts) > 1 else [given[name]]
        for held, value in zip(parts, split, strict=True):
            held[...] = jnp.asarray(fit(name, value, held[...].shape, heads), held[...].dtype)


def write_torch_weights(module: Any) -> dict[str, Any]:
    """Return the weights of a module as the state_dict of its PyTorch counterpart, in NumPy arrays.

    Examples:
        >>> import torch, lln
        >>> from flax import nnx
        >>> from lln.jax import MultiHeadAttention, write_torch_weights
        >>> weights = write_torch_weights(MultiHeadAttention(4, 32, rngs=nnx.Rngs(0)))
        >>> lln.MultiheadAttention(32, 4).load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
        <All keys matched successfully>
    """
    found = {}
    for name, (parts, heads) in find_places(module).items():
        arrays = []
        for held in parts:
            value = np.asarray(held[...])
            if heads == "in":  # [features, heads, dim] -> [heads * dim, features]
                value = value.reshape(value.shape[0], -1).T
            elif heads == "out":  # [heads, dim, features] -> [features, heads * dim]
                value = value.reshape(-1, value.shape[-1]).T
            elif heads == "bias":
                value = value.reshape(-1)
            arrays.append(value)
        whole = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        found[name] = np.array(whole, "int64" if whole.dtype.kind == "i" else whole.dtype, order="C")  # as torch counts
    return found


def find_places(module: Any) -> dict[str, tuple[list[Any], str]]:
    """By the name in PyTorch, the variables that it is made of, and how a projection lies."""
    if isinstance(module, LLNAttention):
        return {name: ([getattr(module, name)], "") for name in LEARNED if hasattr(module, name)}
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(f"module must be a MultiHeadAttention or an LLNAttention of lln.jax; got {module!r}.")
    three = module.query, module.key, module.value
    if len({layer.kernel[...].shape for layer in three}) == 1:
        places: dict[str, tuple[list[Any], str]] = {"in_proj_weight": ([layer.kernel for layer in three], "in")}
    else:
        places = {f"{n}_proj_weight": ([layer.kernel], "in") for n, layer in zip("qkv", three, strict=True)}
    places["out_proj.weight"] = ([module.out.kernel], "out")
    if module.out.bias is not None:
        places["in_proj_bias"] = ([layer.bias for layer in three], "bias")
        places["out_proj.bias"] = ([module.out.bias], "bias")
    return places | {f"attention.{name}": place for name, place in find_places(module.attention).items()}


def fit(name: str, value: Any, shape: tuple[int, ...], heads: str) -> Any:
    """A weight of PyTorch in the shape that flax has it in."""
    transposed = value.T if heads in ("in", "out") else value
    expected = shape
    if heads:
        first, last, size = shape[0], shape[-1], math.prod(shape)
        expected = {"in": (first, size // first), "out": (size // last, last), "bias": (size,)}[heads]
    if transposed.shape != expected:
        raise ValueError(
            f"weights: {name} must have shape {list(expected[::-1] if heads in ('in', 'out') else expected)} for this "
            f"module; got {list(value.shape)}. Build both modules with the same sizes."
        )
    return transposed.reshape(shape)


def as_numpy(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    return np.asarray(value)
