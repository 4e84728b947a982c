"""Where a transformers model attends, and what it says about the sizes there."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.nn.attention import LLNAttention

Model = TypeVar("Model", bound=nn.Module)
CAUSAL_MASK = "create_causal_mask"  # the function of transformers
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name under which transformers' modules look their function up

# Modules that read the attention mask themselves, in softmax's form, or change scores, and what they do.
READERS = {
    "DogeAttention": "adds scores of its own to single query-key pairs",
    "LasrEncoderConvolutionModule": "looks for hidden tokens in a mask of query-key pairs",
} | dict.fromkeys(
    ("AXK2Indexer", "DeepseekV32Indexer", "GlmMoeDsaIndexer", "HYV4Indexer", "MistralLarge4TextIndexer"),
    "chooses other keys for every query",
) | dict.fromkeys(
    ("T5Attention", "MT5Attention", "UMT5Attention", "Pop2PianoAttention", "SwitchTransformersAttention",
     "UdopAttention", "Pix2StructTextAttention"),
    "adds a position_bias to the scores of single query-key pairs",
)  # fmt: skip


def find_model(model: Any) -> PreTrainedModel:
    """The transformers model that is meant: itself, or the one inside a SentenceTransformer, a PeftModel or another
    module around it. TypeError where there is none, or more than one."""
    found = list_outermost(model) if isinstance(model, nn.Module) else []
    if len(found) == 1:
        return found[0]
    if found:
        raise TypeError(
            f"model must be one transformers model, or hold one; {type(model).__name__} holds {len(found)} "
            f"({', '.join(type(one).__name__ for one in found)}): give them one by one."
        )
    raise TypeError(f"model must be a transformers model, or hold one; got {type(model).__name__}.")


def list_outermost(module: nn.Module) -> list[PreTrainedModel]:
    """Models in a module that are in no other model; a shared one once."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return list({id(one): one for child in module.children() for one in list_outermost(child)}.values())


def uses_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention function up by name, as opposed to calling softmax itself."""
    kind: Any = type(module)
    return not isinstance(module, PreTrainedModel) and names_interface(kind)


@functools.cache
def names_interface(kind: Any) -> bool:
    methods = (inspect.unwrap(m) if callable(m) else m for base in kind.__mro__ for m in vars(base).values())
    codes = (m.__code__ for m in methods if isinstance(m, types.FunctionType) and INTERFACE in m.__code__.co_names)
    # Kosmos-2.5 looks for a function among the interface's attributes, where there is none, and always runs softmax.
    return any("get_interface" in code.co_names or "getattr" not in code.co_names for code in codes)


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
        check_pairs(kind, type(model).__name__, implementation)


def check_pairs(kind: type, model: str, implementation: str) -> None:
    """ValueError where a class hides keys from single queries by what it computes itself."""
    if (does := READERS.get(kind.__name__)) is not None:
        raise ValueError(
            f"attn_implementation={implementation!r}: {kind.__name__} of {model} {does}, and linear attention forms no "
            "such pairs; use this model with transformers' own implementations."
        )


def say_ignored(what: str, implementation: str) -> str:
    return (
        f"attn_implementation={implementation!r}: {what} transformers' AttentionInterface, so it would go on to run "
        "softmax; use this model with transformers' own implementations."
    )


def list_attending(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside it, without those that have no attention (DETR's ResNet)."""
    return [part for part in list_parts(model) if any(is_attention(module) for module in part.modules())]


def check_models(model: PreTrainedModel, implementation: str) -> None:
    """`check_model` of a model and those inside it."""
    parts = list_attending(model)
    if not parts:
        raise ValueError(
            f"attn_implementation={implementation!r}: {type(model).__name__} has no attention; use it as it is."
        )
    for part in parts:
        check_model(part, implementation)


def is_attention(module: nn.Module) -> bool:
    """By its name, which nearly always says so."""
    kind = type(module).__name__
    return "Attention" in kind or "Attn" in kind or uses_interface(module)


def is_linear(name: str, module: nn.Module, holders: Mapping[str, nn.Module]) -> bool:
    """Whether the cost of an attention is linear as it is, so that it may stay: from a few places that it chooses
    (deformable attention), or from one query that pools all keys (SigLIP's head). holders: modules by their names."""
    around = holders.get(name.rpartition(".")[0])
    return "Deformable" in type(module).__name__ or "Pool" in type(around).__name__


def check_model(model: PreTrainedModel, implementation: str) -> None:
    """ValueError where some attention of the model would go on to run softmax whatever it is told."""
    for _, module in own_modules(model):
        check_pairs(type(module), type(model).__name__, implementation)
    if not any(True for _ in attention_modules(model)):
        raise ValueError(say_ignored(f"no attention of {type(model).__name__} uses", implementation))
    holders = dict(own_modules(model))
    for name, module in holders.items():
        inner = [m for m in module.modules() if "Attention" in type(m).__name__ and not isinstance(m, LLNAttention)]
        if is_linear(name, module, holders):
            continue
        if inner == [module] and not uses_interface(module) and any(True for _ in module.parameters()):
            what = f"{type(module).__name__} of {type(model).__name__} does not use"
            raise ValueError(say_ignored(what, implementation))


def find_attached(module: Any, name: str) -> Any:
    """What an attention module has as `lln` or `lln_peer`, None where it has no such."""
    held = module._modules.get(name)
    return held if held is None or type(held).__module__.startswith("lln.") else find_active(held)


def find_active(held: Any) -> Any:
    """What runs of a module that peft has put a wrapper around (modules_to_save): its copy for the active adapter. Else
    the module itself."""
    if not isinstance(copies := getattr(held, "modules_to_save", None), nn.ModuleDict):
        return held
    active: str | None = None if held.disable_adapters else next(iter(held.active_adapters), None)
    original = held.original_module
    found: Any = original if active is None or active not in copies else copies[active]
    if hasattr(original, "patches"):  # the model's own notes, which a copy of them does not follow
        found.patches = original.patches
    return found


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
        width = find_first((config,), "hidden_size", "d_model")
        dim = find_first((config,), "head_dim") or (width // heads if isinstance(heads, int) and width else None)
    if not isinstance(heads, int) or not isinstance(dim, int):
        raise ValueError(f"lln: cannot tell how many heads of what size {type(module).__name__} has.")
    groups = find_first((module,), "num_key_value_groups", "n_rep")
    key_heads = find_first((module,), "num_key_value_heads", "num_kv_heads")
    if groups is not None:
        key_heads = heads // int(groups)  # some (VideoPrism) say 1.0
    scale = find_first((module,), "scaling", "scale")
    beside = hasattr(module, "q_pos_sine_proj")  # positions, as wide as the rest of queries and keys (Conditional DETR)
    return {
        "num_heads": heads,
        "num_key_heads": key_heads or heads,
        "head_dim": 2 * dim if beside else dim,
        "value_dim": find_first((module,), "v_head_dim") or dim,
        "scale": float(scale) if isinstance(scale, (int, float)) else None,
    }


def rescale_query(query: Tensor, scale: float | None, scaling: float | None) -> Tensor:
    """Queries whose scores are to be multiplied with `scale`, from those that a call multiplies with `scaling`: some
    models (OPT) bring scaled queries and pass 1."""
    usual = query.shape[-1] ** -0.5 if scale is None else scale
    return query if scaling is None or is_same_scale(scaling, usual) else query * (scaling / usual)


def is_same_scale(scaling: float, usual: float) -> bool:
    """Written out: math.isclose breaks the graph of torch.compile(dynamic=True), where numbers may be symbols."""
    return abs(scaling - usual) <= 1e-6 * max(abs(scaling), abs(usual))


def is_causal(module: Any, name: str, part: nn.Module) -> bool:
    """Whether a module attends causally: it says so itself, or (CLIP's text) the module of the model `part` that makes
    its masks knows causal ones alone."""
    if getattr(module, "is_causal", False) or getattr(module, "is_decoder", False):
        return True
    pieces = name.split(".")
    around = [part] + [part.get_submodule(".".join(pieces[:at])) for at in range(1, len(pieces))]
    kinds: list[Any] = [type(holder) for holder in around]
    made = {name for kind in kinds for name in names_masks(kind)}
    return made == {CAUSAL_MASK}


@functools.cache
def names_masks(kind: Any) -> frozenset[str]:
    """The functions for masks that the forward of a class calls."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(() if code is None else {CAUSAL_MASK, "create_bidirectional_mask"} & set(code.co_names))


def is_cross(module: Any, name: str) -> bool:
    """Whether a module attends to another sequence than its own."""
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return True
    if any(part in name.lower() for part in ("encoder_attn", "crossattention", "cross_attn", "cross_attention")):
        return True
    # Some (NLLB-MoE) do not call the self attention of their decoder causal either.
    called_self = "self" in name.rsplit(".", 1)[-1].lower()
    return getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True) and not called_self
