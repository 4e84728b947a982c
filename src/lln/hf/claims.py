"""What config.lln says that a model keeps among its weights, and whether it is there.

A process without lln.hf drops what LLN attention has measured or learned when it loads a model, and keeps config.lln.
So whoever saves a model with such values says so in its config, and whoever finds no values then says that.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lln.hf.attach import Attached
from lln.hf.find import list_parts, own_attention
from lln.hf.layers import RUNS, find_index
from lln.hf.options import IMPLEMENTATIONS, Options, read, runs_ours, write

VALUES = "lln_values"  # the attribute of a config whose model was saved with such values
HELD = ("lln", "lln_peer")  # where an attention module has them


def claims_values(config: Any) -> bool:
    """Whether there must be values: they were saved, or cannot but have been found before."""
    options = read(config)
    return options is not None and (bool(getattr(config, VALUES, False)) or options.coefficients is not None)


def list_hosts(model: PreTrainedModel) -> Iterator[tuple[Any, Options, list[tuple[str, Any]]]]:
    """Each config of the model with its options, and the attention modules that these are for, with their names."""
    found: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}
    for part in list_parts(model):
        found.setdefault(id(part.config), (part.config, []))[1].extend(own_attention(part))
    for config, hosts in found.values():
        if (options := read(config)) is not None:
            yield config, options, [(n, m) for n, m in hosts if options.of_layer(find_index(n, m)) is not None]


def has_values(module: nn.Module) -> bool:
    return any(True for name in HELD if name in module._modules for _ in getattr(module, name).state_dict())


def note_values(model: PreTrainedModel) -> None:
    """Before a model is saved: let its configs say whether there are values, and nothing that is not so."""
    for config, options, hosts in list_hosts(model):
        vars(config).pop(VALUES, None)
        if any(has_values(module) for _, module in hosts):
            setattr(config, VALUES, True)
        elif hosts and not runs_ours(config) and options.implementation in IMPLEMENTATIONS:
            # It was loaded before `import lln.hf`, and runs softmax.
            if options.keeps_values:
                warnings.warn(
                    f"{say_missing(*hosts[0])}, because the model was loaded before `import lln.hf`. It is saved as "
                    "the softmax model that it is, without config.lln.",
                    stacklevel=4,
                )
                config.lln = None
            else:
                write(config, dataclasses.replace(options, implementation=config._attn_implementation or "sdpa"))


def check_values(model: PreTrainedModel) -> None:
    """ValueError where config.lln says that there are values, and the modules that had them are not there."""
    for _, options, hosts in list_hosts(model):
        bare = [(name, module) for name, module in hosts if not any(held in module._modules for held in HELD)]
        if bare and options.keeps_values:
            raise ValueError(
                f"{say_missing(*bare[0])}, because the model was loaded before `import lln.hf`; import it first and "
                "load again, or set config.lln to None to begin anew."
            )


def say_missing(name: str, module: nn.Module) -> str:
    return f"config.lln says that {type(module).__name__} ({name}) keeps values among its weights, and they are missing"


def initialise(model: PreTrainedModel, attached: Attached) -> None:
    """Give what no checkpoint brought its first value. ValueError where config.lln says that a checkpoint holds it, and
    the model is to run it; where softmax is asked for, that is said, and `forget` takes the rest."""
    missing = attached.initialise()
    if not missing or not claims_values(model.config) or not is_loaded(model):
        return
    name = next((n for n, m in model.named_modules() if m is attached), "").rpartition(".")[0]
    what = (
        f"{say_missing(name, model.get_submodule(name))} ({', '.join(missing)}): a process that had not imported "
        "lln.hf saved the model without them"
    )
    if runs_ours(model.config):
        raise ValueError(
            f"{what}. Load what was saved before that; or load this with attn_implementation='sdpa', which forgets "
            "config.lln, and use lln.hf.convert."
        )
    if not vars(model).get("lln_forgets"):
        warnings.warn(f"{what}. The model runs softmax, as asked for, and config.lln is forgotten.", stacklevel=2)
        model.lln_forgets = True


def is_loaded(model: PreTrainedModel) -> bool:
    """Whether any weight came from a checkpoint: transformers leaves its mark on those, not on what it has drawn. A
    config's name_or_path would not tell, since a new model can be made from the config of a trained one."""
    return any(getattr(parameter, "_is_hf_initialized", False) for parameter in model.parameters())


def forget(model: PreTrainedModel) -> None:
    """Take away what `initialise` has found to be empty."""
    if not vars(model).pop("lln_forgets", False):
        return
    for _, module in own_attention(model):
        for name in (*HELD, RUNS):
            module._modules.pop(name, None)
            vars(module).pop(name, None)
    model.config.lln = None
    vars(model.config).pop(VALUES, None)


def warn_of_adapter(model: nn.Module, body: PreTrainedModel) -> None:
    """Where peft has wrapped a model before it was converted: it saves its adapter, and nothing that came later."""
    wrapped = hasattr(model, "peft_config")
    late = [m for m in body.modules() if isinstance(m, Attached) and m.state_dict()] if wrapped else []
    if late and not any(isinstance(getattr(m, "modules_to_save", None), nn.ModuleDict) for m in body.modules()):
        warnings.warn(
            f"the values that LLN attention keeps in {type(body).__name__} are no part of its adapter, and peft "
            "would not save them; convert the model first, and wrap it with modules_to_save=['lln'].",
            stacklevel=3,
        )


def tell_dropped(model: nn.Module, incompatible: Any) -> None:
    """After `load_state_dict(..., strict=False)`, as peft calls it: weights of LLN attention that found no place."""
    dropped = [key for key in incompatible.unexpected_keys if any(f".{name}." in key for name in HELD)]
    if dropped:
        warnings.warn(
            f"the weights hold what LLN attention has learned ({dropped[0]}, ...), and {type(model).__name__} has no "
            "place for it; first lln.hf.convert the model with the options that it had then.",
            stacklevel=2,
        )
