"""The queries and keys that transformers' models hand to their attention functions, shown to recorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lln.hf.find import attention_modules, is_cross, uses_interface
from lln.hf.options import IMPLEMENTATIONS
from lln.hf.softmax_calls import NAME as MEASURE
from lln.instruments.known_modules import Look, Remove, sequences
from lln.instruments.observation import Observation, Pattern, default_scale, observe_softmax, read_mask

SOFTMAX = ("eager", "sdpa", "flex_attention", MEASURE)
REFUSED = {
    "softcap": "caps single query-key scores",
    "s_aux": "adds attention sinks to its rows",
    "indices": "chooses keys for every query",
    "block_indices": "chooses keys for every query",
    "cache": "pages its keys",
}


class Watcher:
    """One recorded model."""

    def __init__(self, model: nn.Module, look: Look) -> None:
        self.look = look
        self.names = {id(module): name for name, module in model.named_modules()}

    def call(
        self, implementation: str, module: Any, query: Tensor, key: Tensor, mask: Any, given: dict[str, Any]
    ) -> None:
        name = self.names.get(id(module))
        if name is not None and self.look.active():
            for seen in observe(name, implementation, module, self.look, query, key, mask, given):
                self.look.see(seen)


# One wrapper serves all recorders, and it is there only while somebody records.
WATCHERS: list[Watcher] = []
plain_get_interface: Callable[..., Any] | None = None


def get_interface(interface: AttentionInterface, attn_implementation: str, default: Any) -> Any:
    """In place of AttentionInterface.get_interface: the function it gives, with a look at what it is called with."""
    assert plain_get_interface is not None
    function = plain_get_interface(interface, attn_implementation, default)
    if attn_implementation in IMPLEMENTATIONS or torch.compiler.is_compiling():
        return function  # its LLNAttention shows itself

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *more: Any, **given: Any):  # type: ignore[no-untyped-def]
        for watcher in tuple(WATCHERS):
            watcher.call(attn_implementation, module, query, key, attention_mask, given)
        return function(module, query, key, value, attention_mask, *more, **given)

    return attend


def watch_transformers(model: nn.Module, look: Look) -> list[Remove]:
    """Empty where no attention of the model uses transformers' interface."""
    global plain_get_interface
    if not any(True for _ in attention_modules(model)):
        return []
    watcher = Watcher(model, look)
    if not WATCHERS:
        plain_get_interface = AttentionInterface.get_interface
        AttentionInterface.get_interface = get_interface
    WATCHERS.append(watcher)

    def remove() -> None:
        WATCHERS.remove(watcher)
        if not WATCHERS:
            AttentionInterface.get_interface = plain_get_interface

    return [remove]


def observe(
    name: str, implementation: str, module: Any, look: Look, query: Tensor, key: Tensor, mask: Any,
    given: dict[str, Any],
) -> list[Observation]:  # fmt: skip
    flash = implementation.startswith("flash_attention")
    who = f"record: {name} ({type(module).__name__})"
    if implementation not in SOFTMAX and not flash:
        raise ValueError(f"{who} runs attn_implementation={implementation!r}, which is not known to be softmax or LLN.")
    for option, what in REFUSED.items():
        if given.get(option) is not None:
            raise ValueError(f"{who} {what} ({option}), which the instruments do not know; it cannot be recorded.")
    scaling = given.get("scaling")
    scale = default_scale(query) if scaling is None else float(scaling)
    causal = says_causal(implementation, module, query, mask, given.get("is_causal"))
    rows, keys, cross = query.shape[2], key.shape[2], is_cross(module, name)
    if flash and given.get("cu_seq_lens_q") is not None:
        offsets = given["cu_seq_lens_q"], given.get("cu_seq_lens_k", given["cu_seq_lens_q"])
        return [
            observe_softmax(name, q, k, scale, Pattern(causal), cross=cross)
            for q, k in sequences(query, key, offsets, look.samples)
        ]
    if flash and given.get("sliding_window") is not None:
        raise ValueError(f"{who} hides keys by a window that only its kernel sees; use attn_implementation='sdpa'.")
    query, key = look.first(query), look.first(key)
    if isinstance(mask, Tensor):
        mask = look.first(mask)
    bias = given.get("position_bias")
    if bias is not None:
        mask = with_bias(look.first(bias), mask, causal, rows, keys)
    pattern = Pattern(causal) if mask is None else read_mask(mask, rows, keys, not cross, causal)
    return [observe_softmax(name, query, key, scale, pattern, cross=cross)]


def says_causal(implementation: str, module: Any, query: Tensor, mask: Any, said: bool | None) -> bool:
    """Whether attention is causal without a mask that says so. Plain softmax ("eager") has nothing but its mask."""
    if implementation == "eager" or query.shape[2] == 1 or (mask is not None and getattr(mask, "ndim", 0) == 4):
        return False
    return bool(getattr(module, "is_causal", True) if said is None else said)


def with_bias(bias: Tensor, mask: Tensor | None, causal: bool, rows: int, keys: int) -> Tensor:
    """The bias of a model's positions and its mask as one that is added to the scores, [B, heads, rows, keys]."""
    added = bias
    if mask is not None:
        mask = mask[..., :keys]
        mask = mask[:, None, None] if mask.ndim == 2 else mask
        return added + (mask if mask.is_floating_point() else torch.where(mask.bool(), 0.0, -torch.inf))
    if causal:
        later = torch.ones(rows, keys, dtype=torch.bool, device=bias.device).triu(1 + keys - rows)
        added = added.masked_fill(later, -torch.inf)
    return added


def watched_elsewhere(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) or uses_interface(module)
