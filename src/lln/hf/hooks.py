"""What transformers does not do for an attention that has options: remember it when a model is saved, find it again
when one is loaded, initialise what no checkpoint brought, and say when a name alone harms a trained model. Each hook
runs the method it stands in for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from lln.hf import claims
from lln.hf.attach import Attached, ModelAttention, attach, check_patches, check_saved, undo_refused
from lln.hf.cache import LLNCache
from lln.hf.find import (
    attention_modules,
    check_class,
    check_model,
    check_models,
    find_attached,
    list_attending,
    list_parts,
)
from lln.hf.layers import RUNS, make_cache
from lln.hf.mixed import is_mixed
from lln.hf.options import IMPLEMENTATIONS, LLN, read, runs_lln, runs_ours, write
from lln.hf.saving import Folder, drop_marks, explain, is_mark, mark
from lln.hf.towers import check_masks


def install() -> None:
    """Put the hooks in place, once."""
    for place, hooks in HOOKS.items():
        for name, hook in hooks.items():
            original = getattr(place, name)
            if not getattr(original, "is_lln_hook", False):
                setattr(place, name, wrap(hook, original))


def wrap(hook: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, self, *args, **kwargs)

    run_hook.is_lln_hook = True  # type: ignore[attr-defined]
    return run_hook


def choose(original: Any, model: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Where nobody names an implementation, the one in config.lln runs."""
    held = read(model.config)
    if is_mark(attn_implementation):  # the config was read before lln.hf was imported
        attn_implementation = None
    if attn_implementation is not None and attn_implementation.removeprefix("paged|") in IMPLEMENTATIONS:
        attn_implementation = attn_implementation.removeprefix("paged|")  # as transformers does, with a warning
    leaves = False
    if kwargs.get("is_init_check"):
        model.lln_by_name = held is None and attn_implementation in LLN
    if held is not None and held.implementation in IMPLEMENTATIONS:
        if attn_implementation is None:
            attn_implementation = held.implementation
        elif attn_implementation not in IMPLEMENTATIONS:
            leaves = bool(kwargs.get("is_init_check"))
        elif attn_implementation == "lln" and held.implementation == "lln_diag" and isinstance(held.mix, str):
            raise ValueError(
                f"attn_implementation='lln': the learned mix={held.mix!r} that config.lln names would be lost; load "
                "the model as it is, and lln.hf.convert(model, 'lln', mix=0.5) drops it."
            )
    if attn_implementation in IMPLEMENTATIONS and kwargs.get("is_init_check"):
        check_class(model, attn_implementation)
    try:
        found = original(model, attn_implementation, *args, **kwargs)
    except ValueError as problem:
        if f'attn_implementation="{attn_implementation}"` is not supported' not in str(problem):
            raise
        raise ValueError(f"{problem} lln adds: {', '.join(map(repr, IMPLEMENTATIONS))}.") from problem
    if leaves and held is not None:
        warnings.warn(
            f"config.lln names {held.implementation!r}, but attn_implementation={attn_implementation!r} was asked for, "
            "and that is what runs.",
            stacklevel=4,
        )
        write(model.config, dataclasses.replace(held, implementation=attn_implementation or found))
    return found


def attach_after_init(original: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    result = original(model, *args, **kwargs)
    with undo_refused(model):  # a config is used again after a refusal
        attach(model, fresh=True)
        if getattr(model, "lln_by_name", False) and runs_ours(model.config):
            check_inside(model)
    model.register_load_state_dict_post_hook(claims.tell_dropped)
    return result


def check_inside(model: PreTrainedModel) -> None:
    """ValueError where a model inside, with a config that transformers hands no implementation to (MaskFormer's
    backbone), would go on to run softmax because it can run nothing else."""
    for part in list_attending(model):
        if not runs_ours(part.config):
            check_model(part, model.config._attn_implementation)


def switch(original: Any, model: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    """A model that cannot switch to ours is left as it was: transformers itself would warn and go on with softmax."""
    if isinstance(attn_implementation, dict):
        check_places(model, attn_implementation)
    named = attn_implementation.values() if isinstance(attn_implementation, dict) else [attn_implementation]
    by_name = any(name in LLN for name in named) and all(read(part.config) is None for part in list_parts(model))
    if attn_implementation in IMPLEMENTATIONS:
        check_models(model, attn_implementation)
        for part in list_parts(model):
            check_masks(part, attn_implementation)
    with undo_refused(model):
        result = original(model, attn_implementation, *args, **kwargs)
        known = [id(config) for config in list_configs(model.config)]
        for part in list_parts(model):  # transformers 5.4 forgets those whose config the model around them replaced
            concerns = attn_implementation in IMPLEMENTATIONS or runs_ours(part.config)
            if isinstance(attn_implementation, str) and concerns and id(part.config) not in known:
                part.config._attn_implementation_internal = model.config._attn_implementation
        attach(model, fresh=False)
        check_patches(model)
    if by_name and claims.is_loaded(model):
        warn_of_harm()
    return result


def check_places(model: PreTrainedModel, chosen: dict[str, Any]) -> None:
    """ValueError where one of ours is chosen for a part that the model does not have: transformers says nothing."""
    known = ["", *model.config.sub_configs]
    for place, name in chosen.items():
        if name in IMPLEMENTATIONS and place not in known:
            raise ValueError(
                f"attn_implementation={{{place!r}: {name!r}}}: {type(model).__name__} has no such part; it has "
                f"{', '.join(map(repr, known))} (the model itself is '')."
            )


@functools.cache  # once a process
def warn_of_harm() -> None:
    warnings.warn(
        "attn_implementation puts LLN attention into a model that was loaded from a softmax checkpoint, which makes "
        "the model worse. Convert the model instead, with `lln convert MODEL OUT --calibration TEXTS`, or with "
        "lln.hf.convert(model, ...) and then lln.hf.distill(model, batches). If you mean the change as it is, call "
        "lln.hf.convert(model, ...) alone: it does not warn.",
        stacklevel=2,
    )


def list_configs(config: Any) -> Iterator[Any]:
    """It and those inside it."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from list_configs(inner)


def initialise(original: Any, model: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs for every module when a checkpoint has been loaded, and when a model is built around others."""
    if runs_ours(model.config):
        align(module)
    if module is model and getattr(model, "lln_by_name", False) and claims.is_loaded(model):
        warn_of_harm()
    if module is model:
        claims.forget(model)
    if not isinstance(module, Attached):
        return original(model, module, *args, **kwargs)
    if not module._is_hf_initialized:
        claims.initialise(model, module)
        module._is_hf_initialized = True
    return None


def align(module: nn.Module) -> None:
    """On a CPU a safetensors file is mapped into memory with its tensors wherever the header ends, and matrix products
    of such tensors round differently: a model would not give the same bits again after it was saved and loaded."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def save(original: Any, model: PreTrainedModel, save_directory: Folder, *args: Any, **kwargs: Any) -> Any:
    check_saved(model)
    claims.note_values(model)
    result = original(model, save_directory, *args, **kwargs)
    explain(model, save_directory)
    return result


def read_config(original: Any, config: PreTrainedConfig, **attributes: Any) -> Any:
    """What is refused without lln.hf is not with it: config.lln alone says what runs."""
    return original(config, **drop_marks(attributes))


def write_config(original: Any, config: PreTrainedConfig, json_file_path: Folder, *args: Any, **kwargs: Any) -> Any:
    result = original(config, json_file_path, *args, **kwargs)
    mark(config, Path(json_file_path))
    return result


def upload(original: Any, model: PreTrainedModel, working_dir: Folder, *args: Any, **kwargs: Any) -> Any:
    """To the Hub. transformers has just put a README.md of its own in the place of ours."""
    explain(model, working_dir)
    return original(model, working_dir, *args, **kwargs)


def give_cache(original: Any, model: Any, generation_config: Any, model_kwargs: Any, mode: Any, *more: Any) -> Any:
    """generate's own cache is an LLNCache where the model's decoder runs LLN throughout."""
    given, how = model_kwargs.get("past_key_values"), generation_config.cache_implementation
    encoded = bool(model.config.is_encoder_decoder)
    if isinstance(given, LLNCache) and makes_cross_cache(type(model)):
        raise ValueError(
            f"past_key_values must be left out: {type(model).__name__} makes a cache of its own for the keys and "
            "values of its encoder, and LLNCache cannot take its place."
        )
    if given is None and generation_config.use_cache is not False and how != "dynamic" and decodes_with_lln(model):
        if how not in (None, "static"):
            raise ValueError(
                f"cache_implementation={how!r}: LLN attention has a state of fixed size in the place of keys and "
                "values; leave it out, or use 'static' to compile, or 'dynamic' to keep all keys and values."
            )
        static, text = how == "static", model.config.get_text_config(decoder=True)
        mixed = is_mixed(text)
        if mixed and static:
            raise ValueError(
                "cache_implementation='static': a model with LLN attention in some layers has no static cache; leave "
                "cache_implementation out."
            )
        layers = text.num_hidden_layers if static else 0
        cache, other = (make_cache(model.config) if mixed else LLNCache(layers, static=static) for _ in range(2))
        model_kwargs["past_key_values"] = EncoderDecoderCache(cache, other) if encoded else cache
        if mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant:
            cache.activate_past_recording()
        return None
    if isinstance(given, LLNCache) and mode == GenerationMode.ASSISTED_GENERATION:
        given.activate_past_recording()
    if isinstance(given, LLNCache) and encoded:
        model_kwargs["past_key_values"] = EncoderDecoderCache(given, LLNCache(static=given.static))
    return original(model, generation_config, model_kwargs, mode, *more)


def decodes_with_lln(model: PreTrainedModel) -> bool:
    """Whether all that a cache is for is LLN attention with a state, which overlapping blocks have with one mix."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["full_attention"]
    found = [module for _, module in attention_modules(model) if getattr(module, "is_causal", False)]
    if is_mixed(model.config.get_text_config(decoder=True)):  # other layers have caches of their own
        found, kinds = [m for m in found if getattr(m, RUNS, None) in IMPLEMENTATIONS], ["full_attention"]
    if makes_cross_cache(type(model)):
        return False
    if any(hasattr(module, "kv_b_proj") for module in found):
        return False  # DeepSeek's caches hold what keys and values are made from anew in every step
    held = [find_attached(module, "lln") for module in found if runs_lln(module.config)]
    mine = [lln for lln in held if isinstance(lln, ModelAttention) and lln.has_state]
    return bool(mine) and len(mine) == len(found) and set(kinds) == {"full_attention"}


def makes_cross_cache(kind: Any) -> bool:
    """Whether a model makes the cache of its cross attention anew, by its class and with transformers' arguments, as
    T5Gemma does."""
    code = getattr(inspect.unwrap(kind._prepare_cache_for_generation), "__code__", None)
    return code is not None and {"cross_attention_cache", "is_updated"} <= set(code.co_names)


HOOKS: dict[type, dict[str, Callable[..., Any]]] = {
    PreTrainedModel: {
        "_check_and_adjust_attn_implementation": choose,
        "post_init": attach_after_init,
        "set_attn_implementation": switch,
        "_initialize_weights": initialise,
        "save_pretrained": save,
        "_upload_modified_files": upload,
    },
    PreTrainedConfig: {"__post_init__": read_config, "to_json_file": write_config},
    GenerationMixin: {"_prepare_cache_for_generation": give_cache},
}
