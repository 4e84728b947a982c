"""Where a transformers model attends, and what it says about the sizes there."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.nn.attention import LLNAttention

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name under which transformers' modules look their function up


def uses_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention function up by name, as opposed to calling softmax itself."""
    kind: Any = type(module)
    return not isinstance(module, PreTrainedModel) and names_interface(kind)


@functools.cache
def names_interface(kind: Any) -> bool:
    methods = (inspect.unwrap(m) if callable(m) else m for base in kind.__mro__ for m in vars(base).values())
    return any(isinstance(m, types.FunctionType) and INTERFACE in m.__code__.co_names for m in methods)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules whose attention runs through transformers' interface, with their names; a shared one once."""
    return ((name, module) for name, module in model.named_modules() if uses_interface(module))


def check_class(model: PreTrainedModel, implementation: str) -> None:
    """The same as `check_model` before the model has any modules: some (Falcon, SAM) look the name up in a table of
    their own while they are made, and fail with nothing but a KeyError."""
    place = sys.modules.get(type(model).__module__)
    names = vars(place) if place else {}
    classes = [c for name, c in names.items() if "Attention" in name and isinstance(c, type)]
    here: list[Any] = [c for c in classes if issubclass(c, nn.Module) and c.__module__ == type(model).__module__]
    tables = [t for t in names.values() if isinstance(t, dict) and isinstance(t.get("eager"), type)]
    if tables or (here and not any(map(names_interface, here))):
        said = "some attention of {} ignores" if tables else "no attention of {} uses"
        raise ValueError(say_ignored(said.format(type(model).__name__), implementation))
    for kind in here:
        check_pairs(kind, type(model).__name__)


def check_pairs(kind: type, model: str) -> None:
    """ValueError where an attention class hides keys from single queries by what it computes itself (Doge)."""
    if hasattr(kind, "prepare_dynamic_mask"):
        raise ValueError(
            f"{kind.__name__} of {model} makes a mask of single query-key pairs, which linear attention cannot have "
            "because it never forms the pairs; use this model with transformers' own implementations."
        )


def say_ignored(what: str, implementation: str) -> str:
    return (
        f"attn_implementation={implementation!r}: {what} transformers' AttentionInterface, so it would go on to run "
        "softmax; use this model with transformers' own implementations."
    )


def check_model(model: PreTrainedModel, implementation: str) -> None:
    """ValueError where some attention of the model would go on to run softmax whatever it is told."""
    if not any(True for _ in attention_modules(model)):
        raise ValueError(say_ignored(f"no attention of {type(model).__name__} uses", implementation))
    for _, module in own_modules(model):
        check_pairs(type(module), type(model).__name__)
        inner = [m for m in module.modules() if "Attention" in type(m).__name__ and not isinstance(m, LLNAttention)]
        if inner == [module] and not uses_interface(module) and any(True for _ in module.parameters()):
            what = f"{type(module).__name__} of {type(model).__name__} does not use"
            raise ValueError(say_ignored(what, implementation))


def own_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Modules of the model that belong to no model inside it: those have a config, and a say, of their own."""
    for name, child in model.named_children():
        if not isinstance(child, PreTrainedModel):
            yield prefix + name, child
            yield from own_modules(child, f"{prefix}{name}.")


def own_attention(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Those of them whose attention runs through transformers' interface."""
    return ((name, module) for name, module in own_modules(model) if uses_interface(module))


def list_parts(model: nn.Module) -> list[PreTrainedModel]:
    """The model and the models inside it."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def configs(model: PreTrainedModel) -> list[Any]:
    """Every config object that says which attention runs somewhere in the model. An attention module may hold another
    one than the model around it: EncoderDecoderModel gives the models inside it new ones."""
    holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) or uses_interface(m)]
    return list({id(holder.config): holder.config for holder in holders}.values())


def find_first(holders: tuple[Any, ...], *names: str) -> Any:
    found = (getattr(holder, name, None) for holder in holders for name in names)
    return next((one for one in found if one is not None), None)


def read_sizes(module: Any) -> dict[str, Any]:
    """num_heads, num_key_heads, head_dim, value_dim and scale (or None) of a model's attention module, from the names
    that transformers uses. What comes in a call is compared with them."""
    config = module.config
    heads = find_first((module, config), "num_attention_heads", "num_heads", "n_heads", "n_head")
    dim = find_first((module,), "qk_head_dim", "head_dim", "attention_head_size", "head_size")
    if dim is None and heads is not None:
        dim = find_first((config,), "head_dim") or find_first((config,), "hidden_size", "d_model") // heads
    if not isinstance(heads, int) or not isinstance(dim, int):
        raise ValueError(f"lln: cannot tell how many heads of what size {type(module).__name__} has.")
    groups = find_first((module,), "num_key_value_groups", "n_rep")
    key_heads = find_first((module,), "num_key_value_heads", "num_kv_heads")
    if groups is not None:
        key_heads = heads // int(groups)  # some (VideoPrism) say 1.0
    scale = find_first((module,), "scaling", "scale")
    return {
        "num_heads": heads,
        "num_key_heads": key_heads or heads,
        "head_dim": dim,
        "value_dim": find_first((module,), "v_head_dim") or dim,
        "scale": float(scale) if isinstance(scale, (int, float)) else None,
    }


def rescale_query(query: Tensor, scale: float | None, scaling: float | None) -> Tensor:
    """Queries whose scores are to be multiplied with `scale`, from those that a call multiplies with `scaling`: some
    models (OPT) bring scaled queries and pass 1."""
    usual = query.shape[-1] ** -0.5 if scale is None else scale
    if scaling is None or math.isclose(scaling, usual, rel_tol=1e-6):
        return query
    return query * (scaling / usual)


def is_cross(module: Any, name: str) -> bool:
    """Whether a module attends to another sequence than its own."""
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return True
    if any(part in name.lower() for part in ("encoder_attn", "crossattention", "cross_attn", "cross_attention")):
        return True
    # Some (NLLB-MoE) do not call the self attention of their decoder causal either.
    called_self = "self" in name.rsplit(".", 1)[-1].lower()
    return getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True) and not called_self
