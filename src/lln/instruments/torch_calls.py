"""Softmax attention of timm and diffusers, watched where their modules call torch's own attention function."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lln.instruments.observation import Observation, Pattern, default_scale, observe_softmax, read_mask
from lln.instruments.watchers import Look, Remove, replace_forward
from lln.nn.attention import LLNAttention
from lln.nn.torch_masks import HIDDEN

LIBRARIES = ("timm", "diffusers")


def calls_torch_function(module: nn.Module) -> bool:
    """Whether it is an attention module of these libraries that has not become LLN attention."""
    known = hasattr(module, "fused_attn") or (hasattr(module, "processor") and hasattr(module, "set_processor"))
    ours = isinstance(getattr(module, "lln", None), LLNAttention)
    return known and not ours and type(module).__module__.split(".")[0] in LIBRARIES


def watch_torch_function(model: nn.Module, look: Look) -> Iterator[Remove]:
    for name, module in model.named_modules():
        if calls_torch_function(module):
            yield replace_forward(module, functools.partial(run_watched, look, name, module))


class Watch(TorchFunctionMode):
    """While it is active, `look` is shown what torch's attention function is asked."""

    def __init__(self, look: Look, layer: str, cross: bool) -> None:
        super().__init__()
        self.look, self.layer, self.cross, self.calls = look, layer, cross, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            self.look.show(observe_call, self.layer, self.cross, args, kwargs or {})
        return result


def run_watched(look: Look, name: str, module: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    if not look.is_active():
        return original(*args, **kwargs)
    watch = Watch(look, name, bool(getattr(module, "is_cross_attention", False)))
    with watch:
        result = original(*args, **kwargs)
    if not watch.calls:
        raise ValueError(
            f"record: {name} ({type(module).__name__}) does not call torch's scaled_dot_product_attention, where it "
            "could be observed; make it do so (timm.layers.set_fused_attn(True), diffusers' AttnProcessor2_0)."
        )
    return result


def observe_call(look: Look, layer: str, cross: bool, args: Any, kwargs: Any) -> list[Observation]:
    def read(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Observation:  # fmt: skip
        rows, keys, pattern = query.shape[2], key.shape[2], Pattern(is_causal)
        if attn_mask is not None:
            mask = attn_mask.view(*[1] * (4 - attn_mask.ndim), *attn_mask.shape)
            if mask.is_floating_point():
                mask = mask.masked_fill(mask <= HIDDEN, -torch.inf)
            pattern = read_mask(look.take_first(mask), rows, keys, not cross and rows == keys, is_causal)
        q, k = look.take_first(query), look.take_first(key)
        return observe_softmax(layer, q, k, default_scale(q) if scale is None else scale, pattern, cross=cross)

    return [read(*args, **kwargs)]
