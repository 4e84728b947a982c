"""LLN attention in JAX: pure functions, and flax.nnx modules whose weights convert to and from PyTorch's.

    from lln.jax import lln_attention                # needs jax alone, and no torch
    from lln.jax import MultiHeadAttention           # needs flax, too

Install both with: pip install 'lln-attention[jax]'. Arrays are [batch, heads, length, dim], as on the PyTorch side.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError("lln.jax needs jax; install it with: pip install 'lln-attention[jax]'", name="jax")

from lln.jax.attending import fold_keys, lln_attention
from lln.jax.holding import LLNState, gather_states
from lln.jax.neighbours import convolve_values
from lln.jax.spreads import match_moments, match_samples

if TYPE_CHECKING:
    from lln.jax.flax_layers import LLNAttention, MultiHeadAttention
    from lln.jax.torch_weights import read_torch_weights, write_torch_weights

__all__ = [
    "LLNAttention",
    "LLNState",
    "MultiHeadAttention",
    "convolve_values",
    "fold_keys",
    "gather_states",
    "lln_attention",
    "match_moments",
    "match_samples",
    "read_torch_weights",
    "write_torch_weights",
]

_OFFERS = {
    "LLNAttention": "flax_layers",
    "MultiHeadAttention": "flax_layers",
    "read_torch_weights": "torch_weights",
    "write_torch_weights": "torch_weights",
}

if not TYPE_CHECKING:  # flax is imported where its modules are asked for

    def __getattr__(name: str) -> Any:
        if name not in _OFFERS:
            raise AttributeError(f"module 'lln.jax' has no attribute {name!r}")
        found = getattr(importlib.import_module(f"lln.jax.{_OFFERS[name]}"), name)
        globals()[name] = found
        return found
