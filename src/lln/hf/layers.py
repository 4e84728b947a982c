"""Which layers of a model run LLN attention where some keep their softmax attention or their sliding windows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from lln.hf.cache import LLNCache, StateLayer
from lln.hf.find import attention_modules, find_attached, find_first, own_attention
from lln.hf.options import IMPLEMENTATIONS, LLN, Layers, read

Predicate = Callable[[int, nn.Module], bool]
Wanted = str | slice | Iterable[int] | Predicate | Mapping[int, str]
RUNS = "lln_runs"  # the attribute of an attention module that names what runs there, in models with more than one
FULL = "full_attention"
# What softmax attention does with single scores, by the name of the argument and of where a module or config keeps it.
DROPPED = {"softcap": "attn_logit_softcapping", "s_aux": "sinks"}


def find_index(name: str, module: Any) -> int:
    """The layer that an attention module is in, counted in the model that it belongs to."""
    if isinstance(held := getattr(module, "layer_idx", None), int):
        return held
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def find_kind(name: str, module: Any) -> str:
    """The kind of a module's layer, in the words of transformers' layer_types."""
    kinds, index = getattr(module.config, "layer_types", None), find_index(name, module)
    if kinds and index < len(kinds):
        return str(kinds[index])
    if getattr(module, "sliding_window", None) is not None:
        return "sliding_attention"
    if getattr(module.config, "sliding_window", None) is not None and names_window(type(module)):
        return "sliding_attention"
    return FULL


def names_window(kind: Any) -> bool:
    """Whether a class hands the window of its config on, as Mistral's does in every layer."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "sliding_window" in (*code.co_names, *code.co_consts)


def check_global(name: str, module: Any, implementation: str) -> None:
    """ValueError where a layer attends within a window."""
    kind = find_kind(name, module)
    if "sliding" in kind or "chunked" in kind:
        raise ValueError(
            f"attn_implementation={implementation!r}: {type(module).__name__} ({name}) attends within a sliding_window "
            f"or chunk ({kind}), which linear attention cannot, because it never forms the pairs; lln.hf.convert("
            "model, layers='full_attention') leaves such layers as they are, and a model without others must be used "
            "with transformers' own implementations."
        )


def name_implementation(layers: Mapping[int, str], given: str | None) -> str:
    """The implementation that a model is said to run where each layer has its own."""
    mine = [name for name in layers.values() if name in IMPLEMENTATIONS]
    if not mine or (given is not None and given not in mine):
        what = "name one of lln.hf.IMPLEMENTATIONS for some layer" if not mine else f"name {given!r} for some layer"
        raise ValueError(f"layers must {what}; got {dict(layers)!r}.")
    return given or next((name for name in ("lln_diag", "lln") if name in mine), mine[0])


class Plan:
    """Which layers of a model are to run one of ours: `chosen` and `others` of each config, by its id."""

    def __init__(self) -> None:
        self.chosen: dict[int, Layers | None] = {}  # as in `Options.layers`
        self.others: dict[int, str] = {}
        self.kept: set[str] = set()  # names of attention modules that stay as they are

    def change(self, config: Any) -> dict[str, Any] | None:
        """What changes in the options of a config; None where nothing of it is chosen."""
        if id(config) not in self.chosen:
            return None if self.chosen else {}
        return {"layers": self.chosen[id(config)], "others": self.others[id(config)]}


def plan_layers(model: PreTrainedModel, layers: Wanted, parts: list[PreTrainedModel]) -> Plan:
    """ValueError or TypeError where `layers` names none of the model's, or some that it has not."""
    plan, prefixes = Plan(), {id(part): name for name, part in model.named_modules()}
    hosts: dict[int, list[tuple[str, str, Any]]] = {}  # of a config: name in the model, name in the part, module
    for part in parts:
        held = hosts.setdefault(id(part.config), [])
        prefix = f"{prefixes[id(part)]}." if prefixes[id(part)] else ""
        held += [(prefix + name, name, module) for name, module in own_attention(part)]
        plan.others.setdefault(id(part.config), name_softmax(part))
    found = False
    for key, modules in hosts.items():
        own = choose(layers, [(name, module) for _, name, module in modules]) if modules else None
        if own is not None and not own.chosen:  # a part of the model that stays as it is
            plan.kept |= {name for name, _, _ in modules}
            continue
        plan.chosen[key] = None if own is None or own.all else own.layers
        if own is None:
            continue
        found = True
        plan.others[key] = own.others or plan.others[key]
        if not own.all:
            plan.kept |= {full for full, name, module in modules if find_index(name, module) not in own.chosen}
            warn_dropped([module for _, name, module in modules if find_index(name, module) in own.chosen])
    if not found:
        raise ValueError(f"layers={layers!r} names no layer that attends; {say_kinds(hosts)}.")
    return plan


def say_kinds(hosts: Mapping[int, list[tuple[str, str, Any]]]) -> str:
    """What layers there are to be named; where none is global there is nothing to name."""
    kinds = {find_kind(name, module) for modules in hosts.values() for _, name, module in modules}
    if FULL in kinds:
        return f"give indices, {FULL!r} or 'all'"
    held = " or ".join(map(repr, sorted(kinds))) or "without attention"
    return f"all are {held}, and linear attention needs layers without windows"


def read_plan(model: PreTrainedModel) -> Plan:
    """That of a model as it is."""
    plan = Plan()
    for name, module in attention_modules(model):
        if (runs := getattr(module, RUNS, None)) is not None:
            options = read(module.config)
            plan.kept |= set() if runs in IMPLEMENTATIONS else {name}
            if options is not None:
                plan.chosen[id(module.config)], plan.others[id(module.config)] = options.layers, options.others
    return plan


class Choice:
    """What `layers` means for the attention modules of one config."""

    def __init__(self, layers: Layers, others: str | None = None, *, all: bool = False) -> None:
        self.layers, self.others, self.all = layers, others, all
        self.chosen = {int(index) for index in layers}


def choose(layers: Wanted, modules: list[tuple[str, Any]]) -> Choice:
    indices = [find_index(name, module) for name, module in modules]
    known, count = sorted(set(indices)), max(indices) + 1
    if isinstance(layers, str):
        kinds = [find_kind(name, module) for name, module in modules]
        if layers == "all":
            return Choice(known, all=True)
        if layers not in (*kinds, FULL):
            raise ValueError(f"layers must be 'all' or one of {', '.join(map(repr, sorted({*kinds, FULL})))}; "
                             f"got {layers!r}.")  # fmt: skip
        return Choice(sorted({index for index, kind in zip(indices, kinds, strict=True) if kind == layers}))
    if isinstance(layers, slice):
        wanted = range(count)[layers]
        return Choice([index for index in known if index in wanted])
    if isinstance(layers, Mapping):
        named = {str(check_index(index, count)): check_name(name) for index, name in layers.items()}
        softmax = {name for name in named.values() if name not in (*IMPLEMENTATIONS, "softmax")}
        if len(softmax) > 1:
            raise ValueError(f"layers may name one softmax implementation; got {', '.join(sorted(softmax))}.")
        mine = {index: name for index, name in named.items() if name in IMPLEMENTATIONS}
        return Choice(mine, next(iter(softmax), None))
    if callable(layers):
        said: dict[int, bool] = {}
        for index, (_, module) in zip(indices, modules, strict=True):
            if said.setdefault(index, bool(layers(index, module))) != bool(layers(index, module)):
                raise ValueError(f"layers must give all attention modules of layer {index} the same implementation.")
        return Choice([index for index in known if said[index]])
    if not isinstance(layers, Iterable):
        raise TypeError(
            "layers must be indices, a slice, 'full_attention', 'all', a function of (index, module) or "
            f"{{index: implementation}}; got {layers!r}."
        )
    return Choice(sorted({check_index(index, count) for index in layers}))


def check_index(index: Any, count: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool):
        raise TypeError(f"layers must be indices of layers; got {index!r}.")
    if not -count <= index < count:
        raise ValueError(f"layers must lie between 0 and {count - 1}; got {index}.")
    return index % count


def check_name(name: Any) -> str:
    if name not in (*IMPLEMENTATIONS, "softmax", "sdpa", "eager", "flash_attention_2", "flex_attention"):
        raise ValueError(f"layers: {name!r} is no attention implementation; use 'softmax' or one of "
                         f"{', '.join(IMPLEMENTATIONS)}.")  # fmt: skip
    return str(name)


def name_softmax(part: Any) -> str:
    """The implementation that layers without ours run."""
    held, runs = read(part.config), part.config._attn_implementation
    if held is not None and held.layers is not None:
        return held.others
    if runs is not None and runs not in IMPLEMENTATIONS:
        return str(runs)
    return "sdpa" if getattr(part, "_supports_sdpa", False) else "eager"


def warn_dropped(modules: list[Any]) -> None:
    found = [name for name in DROPPED.values() if any(keeps(module, name) for module in modules)]
    if found:
        warnings.warn(
            f"{type(modules[0]).__name__} changes single scores ({', '.join(found)}), which LLN attention does not "
            "form: in the layers that run it they are left out.",
            stacklevel=4,
        )


def keeps(module: Any, name: str) -> bool:
    return find_first((module, module.config), name) is not None


def find_running(model: nn.Module) -> dict[str, Any]:
    """What runs in the place of softmax, by the name of the attention module: its `.lln` or `.lln_peer`."""
    found = {}
    for name, module in attention_modules(model):
        runs = getattr(module, RUNS, None) or module.config._attn_implementation
        if runs in IMPLEMENTATIONS:
            found[name] = find_attached(module, "lln" if runs in LLN else "lln_peer")
    return found


def check_runs(caller: str, model: PreTrainedModel, implementations: Collection[str]) -> None:
    """ValueError where no part of the model runs one of these."""
    runs = {attention.implementation for attention in find_running(model).values()}
    if runs.isdisjoint(implementations):
        held = next(iter(runs), model.config._attn_implementation)
        raise ValueError(f"{caller}: the model runs {held!r}; first lln.hf.convert(model, 'lln_diag').")


def make_cache(config: Any) -> LLNCache:
    """Make the cache of a model in which only some layers run LLN attention: these layers keep states, and the others
    keys and values (those of their window, if they have one).

    Example:
        >>> import transformers, lln.hf
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2))
        >>> model = lln.hf.convert(model, "lln", layers=[1], statistics="fixed")
        >>> [type(layer).__name__ for layer in make_cache(model.config).layers]
        ['DynamicLayer', 'StateLayer']
    """
    text = config.get_text_config(decoder=True)
    options, layers = read(text), DynamicCache(config=text).layers
    cache = LLNCache()
    if options is None or options.layers is None:
        return cache
    owns = [options.of_layer(index) for index in range(len(layers))]
    cache.layers = [
        StateLayer() if own is not None and own.implementation in LLN else layer
        for own, layer in zip(owns, layers, strict=True)
    ]
    cache.layer_class_to_replicate = None  # type: ignore[assignment]
    return cache
