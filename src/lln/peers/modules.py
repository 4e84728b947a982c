"""A mechanism on q, k, v as a module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lln.checks import check_number
from lln.functional import CuSeqlens
from lln.kernels.call import Call
from lln.peers.calls import Attend, check_blocks, run
from lln.peers.registry import COMMON, REGISTRY, Mechanism, check_options, find, positive_int


class AttentionModule(nn.Module):
    """A mechanism on q, k, v as a module, with `forward` as `lln.attention`'s. Those that learn derive from it.

    Args:
        num_heads, head_dim: of the queries.
        num_key_heads: key and value heads, where fewer.
        max_length: the most keys, for mechanisms whose parameters or constants depend on it.
        dropout: probability in training.
        scale, block_size, mix: as in `lln.attention`.
    """

    def __init__(
        self,
        entry: Mechanism,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        num_key_heads: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        block_size: int | None = None,
        mix: float = 0.5,
        attend: Attend | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("num_heads", num_heads), ("head_dim", head_dim)):
            positive_int(name, number)
        for name, optional in (("max_length", max_length), ("num_key_heads", num_key_heads)):
            if optional is not None:
                positive_int(name, optional)
        if num_heads % (num_key_heads or num_heads):
            raise ValueError(f"num_heads must be a multiple of num_key_heads; got {num_heads} and {num_key_heads}.")
        if not 0.0 <= check_number("dropout", dropout) <= 1.0:
            raise ValueError(f"dropout must lie between 0 and 1; got {dropout}.")
        check_blocks(entry, block_size, mix)
        self.name, self.num_heads, self.head_dim, self.max_length = entry.name, num_heads, head_dim, max_length
        self.num_key_heads = num_key_heads or num_heads
        self.dropout, self.scale, self.block_size, self.mix = dropout, scale, block_size, mix
        self._attend = attend

    @property
    def entry(self) -> Mechanism:
        return REGISTRY[self.name]  # by name, so that modules can be copied and pickled

    def attend(self, call: Call) -> Tensor:
        """Attention of one sequence's call (of a batch of them when nothing is packed)."""
        assert self._attend is not None
        return self._attend(call)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> Tensor:
        sizes = tuple(getattr(t, "shape", ())[1::2] for t in (query, key))
        if sizes != ((self.num_heads, self.head_dim), (self.num_key_heads, self.head_dim)):
            raise ValueError(
                f"query and key must have {self.num_heads} and {self.num_key_heads} heads of {self.head_dim}; "
                f"got query {list(query.shape)} and key {list(key.shape)}."
            )
        return run(
            self.entry, self.attend, query, key, value, is_causal=is_causal, key_mask=key_mask,
            dropout_p=self.dropout if self.training else 0.0, cu_seqlens=cu_seqlens, scale=self.scale,
            block_size=self.block_size, mix=self.mix,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.name}, num_heads={self.num_heads}, head_dim={self.head_dim}"


def mechanism(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """A module of the mechanism of this name.

    On q, k, v (`forward(query, key, value, *, is_causal, key_mask, cu_seqlens)`), or, where the mechanism's kind is
    "mixer", on hidden states of num_heads * head_dim channels (`forward(hidden, *, is_causal, key_mask)`).

    Args:
        name: one of `lln.mechanisms()`.
        num_heads, head_dim: of the queries.
        max_length: the longest sequence; needed where parameters or constants depend on it.
        options: dropout, scale, num_key_heads, block_size and mix (those on q, k, v), and the mechanism's own:
            `lln.mechanisms()[name].module_options`.

    Raises:
        ValueError or TypeError: in one sentence.
    """
    entry = find(name)
    if entry.module is not None:
        allowed = {**entry.module_options, **(dict.fromkeys(COMMON) if takes_common(entry.module) else {})}
        check_options(name, options, allowed)
        built = entry.module(num_heads, head_dim, max_length, **options)
    else:
        check_options(name, options, {**entry.options, **dict.fromkeys(COMMON)})
        own = {k: v for k, v in options.items() if k in entry.options}
        shared = {k: v for k, v in options.items() if k not in own}
        function = entry.function
        assert function is not None
        if "max_length" in entry.options:
            own["max_length"] = max_length
        attend = functools.partial(function, **own)
        built = AttentionModule(entry, num_heads, head_dim, max_length, attend=attend, **shared)
    return built.to(device=device, dtype=dtype)


def takes_common(module: Callable[..., nn.Module]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(module).parameters.values())
