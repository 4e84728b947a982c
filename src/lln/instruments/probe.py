"""Attention modules that keep their queries and keys to themselves, found by the names of their linear layers.

Nothing says how such a module attends, so it is run once more on the same input, without dropout, and watched: what its
query and key layers give must, put through softmax with the mask that came, give what the module made of its values.
Otherwise it attends in some other way (rotated positions, windows), and nothing is recorded about it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lln.instruments.known_modules import Look, Remove
from lln.instruments.observation import Observation, Pattern, observe_softmax, read_mask
from lln.nn.attention import LLNAttention

NAMES = (
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
)
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
MASKS = ("attention_mask", "attn_mask", "mask")
ERRORS = {torch.float16: 2e-2, torch.bfloat16: 5e-2}  # relative, of what the observed queries and keys give; else:
ERROR = 1e-3


def linear_layers(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """Of queries, keys and values."""
    children = dict(module.named_children())
    for names in NAMES:
        found = [children.get(name) for name in names]
        if all(isinstance(one, nn.Linear) for one in found) and count_heads(module) is not None:
            return tuple(found)  # type: ignore[return-value]
    return None


def count_heads(module: Any) -> int | None:
    found = (getattr(module, name, None) for name in HEADS)
    return next((heads for heads in found if isinstance(heads, int)), None)


def watch_linear(model: nn.Module, look: Look, skip: Container[nn.Module]) -> list[Remove]:
    """Every module with such layers, but for those that others watch."""
    removes: list[Remove] = []
    for name, module in model.named_modules():
        layers = linear_layers(module)
        if layers is None or module in skip or any(isinstance(m, LLNAttention) for m in module.modules()):
            continue

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name, layers: Any = layers) -> None:
            if look.active():
                look.see(observe(name, module, layers, look, args, kwargs))

        removes.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    return removes


@torch.no_grad()
def observe(layer: str, module: nn.Module, layers: Any, look: Look, args: Any, kwargs: Any) -> Observation:
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    if any(value is not None and "past" in name for name, value in given.items()):
        raise ValueError(f"record: {layer} reads keys from a cache that cannot be looked into; use use_cache=False.")
    with watch_layers(module) as (inputs, outputs):
        result = module.forward(*args, **kwargs)
    if not all(one in outputs for one in layers):
        raise ValueError(f"record: {layer} ({type(module).__name__}) did not use its query and key layers.")
    heads = count_heads(module) or 1
    q, k, v = (look.first(outputs[one]).unflatten(-1, (heads, -1)).transpose(1, 2) for one in layers)
    scale = next((s for s in (getattr(module, n, None) for n in ("scaling", "scale")) if isinstance(s, float)), None)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    made = [look.first(t) for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
    made += [look.first(t) for one, t in inputs.items() if one not in layers]
    for pattern in list_patterns(given, look, q.shape[2], k.shape[2]):
        seen = observe_softmax(layer, q, k, scale, pattern, cross=q.shape[2] != k.shape[2])
        wanted = (seen.softmax_map().dense() @ v.to(torch.float64)).transpose(1, 2).flatten(2)  # [B, N, H E]
        live = seen.softmax_map().live[..., None]
        if any(near(t, wanted, live) for t in made):
            return seen
    raise ValueError(
        f"record: {layer} ({type(module).__name__}) cannot be observed: softmax attention of what its query and key "
        "layers give is not what it computes."
    )


def list_patterns(given: dict[str, Any], look: Look, rows: int, keys: int) -> Iterator[Pattern]:
    """What the masks may mean, likely ones first."""
    masks = [look.first(given[name]) for name in MASKS if isinstance(given.get(name), Tensor)]
    bias = given.get("position_bias")
    if isinstance(bias, Tensor):
        shown = (m if m.is_floating_point() else torch.where(m.bool(), 0.0, -torch.inf) for m in masks)
        yield read_mask(sum(shown, look.first(bias)), rows, keys, rows == keys, False)
        return
    for causal in (False, True) if rows == keys else (False,):
        yield read_mask(masks[0], rows, keys, rows == keys, causal) if masks else Pattern(causal)


def near(found: Tensor, wanted: Tensor, live: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    error = torch.where(live, found - wanted, 0.0).norm() / torch.where(live, wanted, 0.0).norm()
    return bool(error < ERRORS.get(found.dtype, ERROR))


@contextlib.contextmanager
def watch_layers(module: nn.Module) -> Iterator[tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]]:
    """Inputs and outputs of the linear layers inside, while the module is in eval."""
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def hook(one: nn.Module, args: Any, output: Tensor) -> None:
        inputs[one], outputs[one] = args[0], output

    modes = {one: one.training for one in module.modules()}
    handles = [one.register_forward_hook(hook) for one in modes if isinstance(one, nn.Linear)]
    try:
        module.eval()
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()
        for one, mode in modes.items():
            one.training = mode
