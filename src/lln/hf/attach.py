"""Give a model's attention modules what they run, as the model's config says."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from lln.hf.attached import ModelAttention, Peer
from lln.hf.find import attention_modules, check_model, configs, list_parts, own_modules, uses_interface
from lln.hf.options import Options, read, runs_lln, runs_ours, write


def attach(model: PreTrainedModel, *, fresh: bool) -> None:
    """Give every attention module of the model the `.lln` that its config asks for, and say in the config what runs.

    fresh: the model is just being made or converted, so values among the weights are still to come. Otherwise
    ValueError where the config says that there are some and they are not there."""
    guessed = False
    for part in list_parts(model):
        options, implementation = read(part.config), part.config._attn_implementation
        if runs_ours(part.config):
            check_model(part, implementation)
            options = dataclasses.replace(options or Options(), implementation=implementation)
        elif options is None:
            continue
        elif implementation is not None:
            options = dataclasses.replace(options, implementation=implementation)
        hosts = [(name, module) for name, module in own_modules(part) if uses_interface(module)]
        peers = {}
        if runs_ours(part.config) and not runs_lln(part.config):
            held = options.mechanisms.get(implementation, {})
            peers = {module: find_peer(module, name, implementation, held) for name, module in hosts}
        write(part.config, options)
        for _, module in hosts:
            follow(part, module)
        for module, peer in peers.items():
            module.lln_peer = peer
        if not runs_lln(part.config):
            # Another attention runs now, but what LLN has learned or measured stays with the model.
            if not options.keeps_values:
                continue
            options = dataclasses.replace(options, implementation="lln_diag" if isinstance(options.mix, str) else "lln")
        for name, module in hosts:
            guessed |= attach_one(module, name, options, fresh) and runs_lln(part.config)
    if guessed:
        warnings.warn(
            f"{type(model).__name__} has causal or cross attention, and the spread of its queries and keys is not "
            "known: alpha and beta are those of a spread of 1. lln.hf.convert(model, statistics='running', "
            "batches=...) measures it; statistics='fixed' says that this is meant.",
            stacklevel=2,
        )


@contextlib.contextmanager
def undo_refused(model: PreTrainedModel) -> Iterator[None]:
    """After a refusal all is as it was: what configs say, and what runs."""
    before = [(config, getattr(config, "lln", None), config._attn_implementation) for config in configs(model)]
    old = [(module, getattr(module, "lln", None)) for _, module in attention_modules(model)]
    try:
        yield
    except (ValueError, TypeError):
        for config, _, implementation in before:
            config._attn_implementation_internal = implementation
        for holder, was in (*((config, options) for config, options, _ in before), *old):
            if was is not None:
                holder.lln = was
            elif hasattr(holder, "lln"):
                del holder.lln
        raise


def find_peer(host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> Peer:
    """What an attention module of a model runs: a mechanism that learns stays the one that is there. ValueError where
    what another one has learned would be lost."""
    old = getattr(host, "lln_peer", None)
    if not isinstance(old, Peer) or old.kept is None:
        return Peer(host, name, implementation, options)
    if (old.implementation, old.options) == (implementation, dict(options)):
        return old
    raise ValueError(
        f"attn_implementation={implementation!r}: what {old.implementation} has learned in {name} would be lost; "
        "load or build the model anew."
    )


def follow(part: PreTrainedModel, module: Any) -> None:
    """Let an attention module look up what its model runs where its config is another object. A config of a part of the
    model (`vision_config`) has a say of its own, unless the whole model runs one of ours."""
    own = any(module.config is getattr(part.config, name, None) for name in part.config.sub_configs)
    if module.config is not part.config and (runs_ours(part.config) or not own):
        module.config._attn_implementation_internal = part.config._attn_implementation


def attach_one(module: Any, name: str, options: Options, fresh: bool) -> bool:
    """Whether its coefficients have become a guess: a decoder's that nobody has chosen."""
    old = getattr(module, "lln", None)
    if isinstance(old, ModelAttention):
        if old.options == options or not runs_lln(module.config):
            return False
        if isinstance(old.mix, str) and old.mix == options.mix and options.blocks is None:
            raise ValueError(
                f"attn_implementation={options.implementation!r}: the learned mix={old.mix!r} of {name} would be lost; "
                f"lln.hf.convert(model, {options.implementation!r}, mix=0.5) drops it."
            )
        if old.convolution is not None and options.convolution != old.convolution:
            raise ValueError(
                f"convolution={options.convolution!r}: what {name} has learned with a width of {old.convolution} would "
                "be lost; load or build the model anew."
            )
    new = ModelAttention(module, name, options)
    if isinstance(old, ModelAttention):
        new.take(old)
    elif not fresh and any(True for _ in new.state_dict()):
        raise ValueError(
            f"config.lln says that {type(module).__name__} ({name}) keeps values among its weights, and they are "
            "missing, because the model was loaded before `import lln.hf`; import it first and load again."
        )
    new.train(module.training)
    module.lln = new
    return new.is_guess and not (isinstance(old, ModelAttention) and old.is_guess)


def check_saved(model: PreTrainedModel) -> None:
    """ValueError where config.lln no longer says what runs, so that a saved model would come back as another one."""
    for part in list_parts(model):
        if not runs_lln(part.config):
            continue
        options = read(part.config)
        for name, module in own_modules(part):
            attention = getattr(module, "lln", None)
            if isinstance(attention, ModelAttention) and attention.options != options:
                raise ValueError(
                    f"config.lln was changed by hand and is not what {name} runs; use lln.hf.convert(model, ...) to "
                    f"change options, or model.set_attn_implementation({part.config._attn_implementation!r}) to run "
                    "what config.lln says."
                )
