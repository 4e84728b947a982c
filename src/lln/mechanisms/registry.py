"""Every mechanism by name, under one signature: what it declares about itself, and how a call of it is checked and run.

A mechanism is one short file in this folder. It registers either a function `attend(call, **options)` of a checked call
(no parameters of its own), or a module (with parameters), or both; what it cannot do it `refuses` with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lln.attention import CuSeqlens, Mix, autocast
from lln.checks import check_call, check_number, check_tensors
from lln.kernels.call import Call
from lln.kernels.common import autocast_enabled
from lln.kernels.eager import blocks_of, with_dropout

Attend = Callable[[Call], Tensor]  # [B, Hq, N, E] of a call, in any dtype
Feature = Literal["padding", "causal", "packing", "grouped", "cross"]
FEATURES: dict[str, str] = {  # as an error names what was asked for
    "padding": "key_mask",
    "causal": "is_causal=True",
    "packing": "cu_seqlens",
    "grouped": "fewer key heads than query heads",
    "cross": "cross attention, query and key of two sequences",
}
# Of every module on q, k, v; the rest are the mechanism's own.
COMMON = ("dropout", "scale", "block_size", "mix", "num_key_heads")


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What a mechanism says about itself.

    kind: "kernel" (feature maps: takes block_size), "attention" (other functions or modules of q, k, v), or "mixer" (a
    module on hidden states that replaces the whole attention block).
    parameters: whether it has to be built with `lln.mechanism` because there is always something to learn.
    refuses: what of FEATURES it cannot do, and why.
    """

    name: str
    title: str
    paper: str
    learned: str
    cost: str  # time of one head, forward: N queries, M keys, dims D and E, further letters from the options
    kind: Literal["kernel", "attention", "mixer"]
    refuses: Mapping[str, str]
    note: str
    function: Callable[..., Tensor] | None
    module: Callable[..., nn.Module] | None
    block_size: int | None  # the default; None: no blocks
    matrix: bool  # out = P v with a P that v has no part in
    whole: bool  # takes care of packing and blocks itself

    @property
    def parameters(self) -> bool:
        return self.function is None

    def supports(self, feature: Feature) -> bool:
        return feature not in self.refuses

    @property
    def options(self) -> dict[str, Any]:
        """Options of the function, with their defaults."""
        return {} if self.function is None else keywords(self.function)

    @property
    def module_options(self) -> dict[str, Any]:
        """Options of the module besides num_heads, head_dim and max_length, with their defaults."""
        if self.module is None:
            return self.options
        return {k: v for k, v in keywords(self.module).items() if k not in ("num_heads", "head_dim", "max_length")}

    def check(self, query: Tensor, key: Tensor, is_causal: bool, key_mask: Any, cu_seqlens: Any) -> None:
        asked = {
            "padding": key_mask is not None,
            "causal": is_causal,
            "packing": cu_seqlens is not None,
            "grouped": query.shape[1] != key.shape[1],
            "cross": isinstance(cu_seqlens, (tuple, list)) or query.shape[2] != key.shape[2],
        }
        for feature, wanted in asked.items():
            if wanted and feature in self.refuses:
                raise ValueError(f"{self.name} does not support {FEATURES[feature]}: {self.refuses[feature]}.")


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY}


REGISTRY: dict[str, Mechanism] = {}


def register(
    name: str,
    title: str,
    *,
    paper: str,
    cost: str,
    learned: str = "nothing",
    kind: Literal["kernel", "attention", "mixer"] = "attention",
    refuses: Mapping[str, str] | None = None,
    note: str = "",
    function: Callable[..., Tensor] | None = None,
    module: Callable[..., nn.Module] | None = None,
    block_size: int | None = None,
    matrix: bool = True,
    whole: bool = False,
) -> Mechanism:
    """The header of a mechanism's file."""
    assert name not in REGISTRY, name
    unknown = set(refuses or {}) - set(FEATURES)
    assert not unknown, unknown
    entry = Mechanism(
        name, title, paper, learned, cost, kind, MappingProxyType(dict(refuses or {})), note, function, module,
        block_size, matrix and kind != "mixer", whole,
    )  # fmt: skip
    REGISTRY[name] = entry
    return entry


def mechanisms() -> Mapping[str, Mechanism]:
    """Every mechanism by name, with what it says about itself: `for name, m in lln.mechanisms().items()`."""
    return MappingProxyType(REGISTRY)


def find(name: str) -> Mechanism:
    if isinstance(name, str) and name in REGISTRY:
        return REGISTRY[name]
    close = difflib.get_close_matches(str(name).lower().replace("-", "_"), REGISTRY, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"name must be one of {', '.join(REGISTRY)}; got {name!r}.{hint}")


def check_options(name: str, given: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for option in given:
        if option not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes none"
            raise TypeError(f"{name} has no option {option!r}; besides the arguments of lln.attention it {takes}.")


def attention(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    block_size: int | None = None,
    mix: Mix = 0.5,
    **options: Any,
) -> Tensor:
    """Attention by the mechanism of this name, on query, key and value as `lln.lln_attention` takes them.

    Args:
        name: one of `lln.mechanisms()` without parameters; those with parameters are built by `lln.mechanism`.
        query, key, value, is_causal, key_mask, cu_seqlens: as in `lln.lln_attention`.
        dropout_p: dropout on P, or on the queries' features where there is no P.
        scale: of the scores of the softmax (also the one imitated), default 1 / sqrt(dim).
        block_size: kernel mechanisms: adds softmax attention inside blocks of so many tokens (ELU+Diag, ...).
        mix: out = mix * kernel + (1 - mix) * diag, or a pair; needs block_size.
        options: the mechanism's own: `lln.mechanisms()[name].options`.

    Returns:
        [batch, heads, length, value dim] in the dtype of query. A row with nothing to attend to is zero.

    Raises:
        ValueError or TypeError in one sentence, also for what the mechanism does not support.
    """
    entry = find(name)
    if entry.function is None:
        raise ValueError(
            f"{name} learns {entry.learned}, so it is a module: "
            f"build it with lln.mechanism({name!r}, num_heads=..., head_dim=..., max_length=...)."
        )
    check_options(name, options, entry.options)
    return run(
        entry, functools.partial(entry.function, **options), query, key, value, is_causal=is_causal, key_mask=key_mask,
        dropout_p=dropout_p, cu_seqlens=cu_seqlens, scale=scale, block_size=block_size, mix=mix,
    )  # fmt: skip


def attention_matrix(name: str, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
    """P [B, H, N, M] of the mechanism of this name, by giving it the unit vectors for values: quadratic in the length,
    for looking at. Arguments as for `lln.attention`.

    Raises:
        ValueError for mechanisms whose output is not P v with a P that v has no part in.
    """
    if not find(name).matrix:
        raise ValueError(f"{name} has no attention matrix: its output is not a P of query and key, times value.")
    units = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
    return attention(name, query, key, units.expand(*key.shape[:2], -1, -1), **arguments)


def run(
    entry: Mechanism,
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_mask: Tensor | None,
    dropout_p: float,
    cu_seqlens: CuSeqlens | None,
    scale: float | None,
    block_size: int | None,
    mix: Mix,
) -> Tensor:
    """A checked call, sequence by sequence where packed, with blocks where asked for."""
    block_size = check_blocks(entry, block_size, mix)
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value)
    entry.check(query, key, is_causal, key_mask, cu_seqlens)
    call = check_call(
        query, key, value, 1.0, 1.0, block_size, mix, is_causal, key_mask, dropout_p, cu_seqlens, None, False, scale
    )
    device = query.device.type
    narrow = torch.autocast(device, enabled=False) if autocast_enabled(device) else contextlib.nullcontext()
    with narrow:
        if entry.whole:
            return attend(call).to(query.dtype)
        return one_by_one(lambda sequence: with_blocks(attend, sequence), call).to(query.dtype)


def check_blocks(entry: Mechanism, block_size: int | None, mix: Mix) -> int | None:
    if block_size is not None and entry.kind != "kernel":
        kernels = ", ".join(m.name for m in REGISTRY.values() if m.kind == "kernel")
        raise ValueError(f"block_size goes with kernel mechanisms ({kernels}); got {block_size!r} with {entry.name}.")
    return entry.block_size if block_size is None else block_size


def one_by_one(attend: Attend, call: Call) -> Tensor:
    """Packed sequences each for itself; where there is no query or no key, no mechanism is asked."""

    def part(sequence: Call) -> Tensor:
        if sequence.query.shape[2] and sequence.key.shape[2]:
            return attend(sequence)
        nothing = sequence.query[..., :1].expand(*sequence.query.shape[:3], sequence.value.shape[3])
        return nothing.masked_fill(torch.ones_like(nothing, dtype=torch.bool), 0.0)

    outs = [part(sequence) for sequence in with_dropout(call).sequences()]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -2)


def with_blocks(attend: Attend, call: Call) -> Tensor:
    out = attend(call)
    if call.block_size is None or call.lln_weight is None:
        return out
    blocks = blocks_of(call)
    return out.to(blocks.dtype) * call.lln_weight.unsqueeze(-2) + blocks


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
        ValueError or TypeError in one sentence.
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


def positive_int(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int; got {value!r}.")
    return value
