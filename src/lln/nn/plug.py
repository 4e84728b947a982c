"""LLN attention in models of other libraries, whose attention modules call torch's own attention function.

`stand_in` catches that one call while a module's own forward runs, and gives the attended values of LLN attention back.
So whatever a library does around it (norms of queries and keys, rotary positions, gates, heads, residuals) stays as it
is, and its weights keep their places. A module that does not make the call, or makes it twice, is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lln.nn.attention import LLNAttention
from lln.nn.drop_in import read_padding
from lln.nn.tiles import TiledAttention
from lln.nn.torch_masks import can_read
from lln.values import check_choice, check_count, suggest

IMPLEMENTATIONS = ("lln", "lln_diag")
BLOCK_SIZE = 64
OF_BLOCKS = ("block_size", "mix", "overlap", "tile")
# Of LLNAttention; the others follow from the module that it serves.
OPTIONS = {
    *OF_BLOCKS, "matching", "statistics", "alpha", "beta", "learnable", "read", "directions", "feature_map",
    "value_convolution", "convolution", "length", "momentum", "backend",
}  # fmt: skip


def check_plug(implementation: str, options: dict[str, Any]) -> None:
    """ValueError or TypeError for options that do not exist or do not go together. What LLNAttention itself refuses it
    says when it is made.

    >>> check_plug("lln", {"tile": 8})
    Traceback (most recent call last):
    ValueError: tile goes with implementation='lln_diag'; got implementation='lln'.
    """
    check_choice("implementation", implementation, *IMPLEMENTATIONS)
    for name in options:
        if name not in OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise TypeError(f"{implementation} has no option {name!r}; there are {known}.{suggest(name, OPTIONS)}")
        if name in OF_BLOCKS and implementation == "lln":
            raise ValueError(f"{name} goes with implementation='lln_diag'; got implementation='lln'.")
    if options.get("tile") is None:
        return
    check_count("tile", options["tile"])
    for name in ("block_size", "overlap"):
        if options.get(name):
            raise ValueError(f"tile takes the place of {name}; give only one of them.")
    if options.get("mix") == "evidence":
        raise ValueError("mix='evidence' goes with blocks of consecutive tokens; use 'scales' with tile.")


def needs_patches(options: dict[str, Any]) -> str | None:
    """The option that needs to know how the patches of an image lie.

    >>> needs_patches({"value_convolution": "3x3"}), needs_patches({"value_convolution": 5})
    ('value_convolution', None)
    """
    if options.get("tile") is not None:
        return "tile"
    return "value_convolution" if isinstance(options.get("value_convolution"), str) else None


def make_plug(
    host: nn.Module, implementation: str, num_heads: int, head_dim: int, options: dict[str, Any]
) -> TiledAttention:
    """The LLN attention of a module of another library, on its device and in its dtype.

    >>> make_plug(nn.Linear(8, 8), "lln_diag", 2, 4, {"block_size": 16})
    TiledAttention(heads=2, head_dim=4, matching='paper', statistics='sample', block_size=16, mix=0.5)
    """
    check_plug(implementation, options)
    made = dict(options)
    tile = made.pop("tile", None)
    if implementation == "lln_diag":
        made["block_size"] = tile**2 if tile is not None else made.get("block_size") or BLOCK_SIZE
    if (made.get("alpha") is not None or made.get("learnable") is not None) and "statistics" not in made:
        made["statistics"] = "fixed"
    like = next((p for p in host.parameters() if p.is_floating_point()), None)
    if like is not None:
        made |= {"device": like.device, "dtype": like.dtype}
    attention = TiledAttention(num_heads, head_dim, **made)
    attention.tile = tile
    return attention.train(host.training)


class StandIn(TorchFunctionMode):
    """While it is active, torch's attention function gives what `attention` gives. See `stand_in`."""

    def __init__(self, attention: LLNAttention, host: str, heads_alike: bool) -> None:
        super().__init__()
        self.attention, self.host, self.heads_alike, self.calls = attention, host, heads_alike, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.attend(*args, **(kwargs or {}))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        attention = self.attention
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{self.host} attends from {query.shape[2]} tokens to {key.shape[2]} others, which is cross attention "
                "and cannot be converted; leave this module unconverted."
            )
        usual = query.shape[-1] ** -0.5 if attention.scale is None else attention.scale
        if scale is not None and scale != usual:
            query = query * (scale / usual)
        mask = attn_mask
        if mask is not None and self.heads_alike and mask.ndim == 4 and mask.shape[1] == query.shape[1] > 1:
            if can_read(mask) and not bool((mask == mask[:, :1]).all()):
                raise ValueError(f"attn_mask: {self.host} hides other keys from each head, which LLN attention cannot.")
            mask = mask[:, :1]
        key_mask = None if mask is None else read_padding(mask, key)
        out = attention(query, key, value, is_causal=is_causal, key_mask=key_mask, dropout=dropout_p)
        assert isinstance(out, Tensor)
        return out


@contextlib.contextmanager
def stand_in(attention: LLNAttention, host: str, *, heads_alike: bool = False) -> Iterator[None]:
    """Let `attention` do what torch's attention function is asked for, once. ValueError where it is not asked, or more
    than once: softmax attention of another kind may have run then.

    host: the class that is told. heads_alike: masks that come for each head say the same for all of them.

    >>> import torch
    >>> x, attention = torch.randn(1, 2, 6, 4), LLNAttention(2, 4)
    >>> with stand_in(attention, "Host"):
    ...     found = F.scaled_dot_product_attention(x, x, x)
    >>> torch.equal(found, attention(x, x, x))
    True
    """
    mode = StandIn(attention, host, heads_alike)
    with mode:
        yield
    if mode.calls != 1:
        times = "not at all" if not mode.calls else f"{mode.calls} times"
        raise ValueError(
            f"{host} must call torch's attention function exactly once, so that LLN attention can replace it, and it "
            f"did so {times}; leave this module unconverted."
        )
