"""The LLN attention that every attention module of a model has as its `.lln`."""

from __future__ import annotations

import dataclasses
import warnings
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lln.hf.attach_learned import peer_of
from lln.hf.find import check_model, is_cross, own_modules, sizes, uses_interface
from lln.hf.options import Options, read, runs_lln, runs_ours, write
from lln.matching.moments import match_moments
from lln.nn.attention import LLNAttention
from lln.nn.weights import check_weights, dense_weights


class ModelAttention(LLNAttention):
    """LLNAttention of one attention module of a model, made from the model's options."""

    def __init__(self, host: Any, name: str, options: Options) -> None:
        """Of `host`, the model's own attention module, on its device and in its dtype."""
        self.cross = is_cross(host, name)
        decodes = self.cross or getattr(host, "is_causal", False) or getattr(host, "is_decoder", False)
        self.kind = "decoder" if decodes else "encoder"
        self.options, self.implementation = options, options.implementation
        statistics = options.statistics_of(self.kind)
        if self.kind == "decoder" and statistics in ("sample", "batch"):
            raise ValueError(
                f"lln: statistics={statistics!r} looks at all tokens, so the output of {type(host).__name__} ({name}) "
                "would depend on later ones; use 'running' or 'fixed', or {'encoder': ..., 'decoder': ...}."
            )
        heads, key_heads, head_dim, value_dim, scale = sizes(host)
        made: dict[str, Any] = {
            "num_heads": heads,
            "head_dim": head_dim,
            "num_key_heads": key_heads,
            "value_dim": value_dim,
            "matching": "paper" if options.matching == "data" else options.matching,
            "statistics": statistics,
            "learnable": options.learnable if statistics == "fixed" else None,
            "feature_map": options.feature_map if statistics == "fixed" else None,
            "block_size": None if self.cross else options.blocks,
            "convolution": None if self.cross else options.convolution,
            "scale": scale,
            "decoder": self.kind == "decoder",
            "length": options.length,
            "momentum": options.momentum,
        }
        if made["block_size"] is not None:
            made |= {"mix": options.mix, "overlap": options.overlap}
        self.made_from = made, options.coefficients if statistics == "fixed" else None
        like = next((p for p in host.parameters() if p.is_floating_point()), torch.empty(0))
        with torch.device("cpu"):  # whatever device (`meta`, while a model is loaded) is the default now
            super().__init__(**made, **self._start(), dtype=like.dtype)
        self.to(like.device)
        # transformers' own mark. Without it a model that is built around this one would initialise what is here again;
        # one that is being loaded is still empty (`meta`) and has to be.
        self._is_hf_initialized = like.device.type != "meta"

    def _start(self) -> dict[str, Any]:
        """alpha and beta to begin with where they are kept among the weights: those of sigma = 1."""
        made, kept = self.made_from
        if kept is None:
            return {}
        usual: tuple[Any, Any] = match_moments(
            1.0, 1.0, made["head_dim"], made["matching"], made["scale"], length=made["length"]
        )
        width = [made["head_dim"]] if kept == "channel" else []
        heads = made["num_heads"], made["num_key_heads"]
        pair = (torch.full([h, *width], v, dtype=torch.float64) for h, v in zip(heads, usual, strict=True))
        return dict(zip(("alpha", "beta"), pair, strict=True))

    def check_lengths(self, host: str, length: int, keys: int) -> None:
        if self.statistics in ("sample", "batch"):
            raise ValueError(
                f"{host} attends from {length} queries to {keys} keys, so statistics={self.statistics!r} cannot know "
                "which queries are padding; use lln.hf.convert(model, statistics='running') or 'fixed'."
            )

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        """ValueError where output_attentions asks for what is too large or does not exist."""
        check_weights(self, query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        """P [B, H, N, M]"""
        return dense_weights(self, query, key, **where)

    @property
    def is_guess(self) -> bool:
        """Whether alpha and beta are those of sigma = 1 because nobody said anything else."""
        chosen = self.options.statistics
        chosen = chosen if isinstance(chosen, str) else chosen[self.kind]
        return self.kind == "decoder" and chosen == "auto" and self.options.coefficients is None

    @torch.no_grad()
    def initialise(self) -> None:
        """Give what no checkpoint brought its first value: transformers leaves it uninitialised."""
        made, _ = self.made_from
        with torch.device("cpu"):
            fresh = LLNAttention(**made, **self._start())
        for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
            mine: Tensor = getattr(self, name)
            if not mine.is_meta and not getattr(mine, "_is_hf_initialized", False):
                mine.copy_(tensor)

    @torch.no_grad()
    def take(self, other: ModelAttention) -> None:
        """Keep what `other` has learned or measured, where this module has the same."""
        other.commit()
        for name, tensor in (*other.named_parameters(), *other.named_buffers()):
            mine = getattr(self, name, None)
            if isinstance(mine, Tensor) and mine.shape == tensor.shape:
                mine.copy_(tensor)
        # What was given or found may become what is learned, and one number a head one a channel.
        mine, theirs = (self.held("alpha"), self.held("beta")), (other.held("alpha"), other.held("beta"))
        moved = ("log_alpha" in self._parameters) != ("log_alpha" in other._parameters)
        moved |= any(a is not None and b is not None and a.shape != b.shape for a, b in zip(mine, theirs, strict=True))
        wider = all(
            a is not None and b is not None and b.shape[1] in (1, a.shape[1]) for a, b in zip(mine, theirs, strict=True)
        )
        if moved and wider:
            self.set_coefficients(*theirs)

    def held(self, name: str) -> Tensor | None:
        """alpha or beta [heads, 1 or dim] where it is kept among the weights."""
        if f"log_{name}" in self._parameters:
            learned: Tensor = getattr(self, f"log_{name}")
            return learned.detach().exp()
        given: Tensor | None = self._buffers.get(f"fixed_{name}")
        return None if given is None else given[0]

    @torch.no_grad()
    def set_coefficients(self, alpha: Any, beta: Any) -> None:
        """alpha and beta, numbers or tensors [heads] or [heads, dim], into the buffers or parameters that keep them."""
        for name, given in (("alpha", alpha), ("beta", beta)):
            learned = f"log_{name}" in self._parameters
            kept: Tensor = getattr(self, f"log_{name}" if learned else f"fixed_{name}")
            if not isinstance(given, (Real, Tensor)):
                raise TypeError(f"{name} must be a number or a tensor; got {given!r}.")
            values = torch.as_tensor(given, dtype=torch.float64, device=kept.device)
            if not bool((values > 0).all() & values.isfinite().all()):
                raise ValueError(f"{name} must be positive and finite; got {given!r}.")
            target = kept if learned else kept[0]  # [heads, 1 or dim]
            values = values[:, None] if values.ndim == 1 else values
            fits = values.ndim == 2 and values.shape[0] == len(target) and values.shape[1] in (1, target.shape[1])
            if values.ndim and not fits:
                raise ValueError(
                    f"{name} must be a number or a tensor [heads] or [heads, dim] = {list(target.shape)}; "
                    f"got {list(values.shape)}."
                )
            target.copy_((values.log() if learned else values).expand(target.shape))


def attach(model: PreTrainedModel, *, fresh: bool) -> None:
    """Give every attention module of the model the `.lln` that its config asks for, and say in the config what runs.

    fresh: the model is just being made or converted, so values among the weights are still to come. Otherwise
    ValueError where the config says that there are some and they are not there."""
    guessed = False
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
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
            peers = {module: peer_of(module, name, implementation, held) for name, module in hosts}
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
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or not runs_lln(part.config):
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
