"""What a model's attention modules run in the place of softmax, `.lln` or `.lln_peer`, and how they come by it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.checks import coefficient
from lln.hf.find import (
    attention_modules,
    check_model,
    configs,
    find_attached,
    is_causal,
    is_cross,
    list_attending,
    list_parts,
    own_attention,
    read_sizes,
)
from lln.hf.layers import RUNS, check_global, find_index
from lln.hf.options import LLN, NEAR, Options, read, runs_lln, runs_ours, write
from lln.hf.packing import watch_positions
from lln.hf.patches import find_patches
from lln.hf.towers import check_masks
from lln.matching.moments import match_moments
from lln.nn.attention import LLNAttention
from lln.nn.image_grid import Patches, require_patches
from lln.nn.tiles import TiledAttention
from lln.nn.weights import check_size, check_weights, dense_weights
from lln.peers import attention, mechanism, mechanisms
from lln.peers.registry import Mechanism
from lln.ranks import Ranks

CAUSAL = "lln_causal"  # the attribute of an attention module that says whether it attends causally


class Attached(nn.Module):
    """What all of them have. It is made for `host`, the model's own attention module, which has a `name` there."""

    build: Callable[..., nn.Module] | None  # makes what it keeps among the model's weights, as it was in the beginning
    prefix = ""  # of the names that those have here
    _is_hf_initialized: bool
    collects = True  # whether transformers' recorder of outputs is looked at, see `interface.collect_nothing`

    def settle(self, device: torch.device) -> None:
        self.to(device)
        # transformers' own mark. Without it a model that is built around this one would initialise what is here again;
        # one that is being loaded is still empty (`meta`) and has to be.
        for part in self.modules():
            part._is_hf_initialized = device.type != "meta"  # type: ignore[assignment]

    @torch.no_grad()
    def initialise(self) -> list[str]:
        """Give what no checkpoint brought its first value: transformers leaves it uninitialised. Returns the names of
        that which a checkpoint has as a rule."""
        missing: list[str] = []
        if self.build is not None:
            kept = self.state_dict()
            mine = dict(self.named_parameters()) | dict(self.named_buffers())
            with torch.device("cpu"):
                fresh = self.build()
            for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
                held = mine[self.prefix + name]
                if not held.is_meta and not getattr(held, "_is_hf_initialized", False):
                    held.copy_(tensor)
                    missing += [name] if self.prefix + name in kept else []
        return missing


def first_weight(host: nn.Module) -> Tensor:
    """Whose dtype and device those of an attached module are."""
    return next((p for p in host.parameters() if p.is_floating_point()), torch.empty(0))


class ModelAttention(Attached, TiledAttention):
    """LLNAttention of one attention module of a model, made from the model's options."""

    ranks: Ranks | None = None  # who shares its sequences, see `spreading`

    def __init__(self, host: Any, name: str, options: Options) -> None:
        """Of `host`, the model's own attention module, on its device and in its dtype."""
        self.cross = is_cross(host, name)
        decodes = self.cross or getattr(host, CAUSAL, False)
        self.kind = "decoder" if decodes else "encoder"
        self.options, self.implementation = options, options.implementation
        self.tile = options.tile if self.implementation == "lln_diag" else None
        if self.tile is not None and self.kind == "decoder":
            raise ValueError(f"tile: {type(host).__name__} ({name}) does not attend within one image; use block_size.")
        statistics = options.statistics_of(self.kind)
        if self.kind == "decoder" and statistics in ("sample", "batch"):
            raise ValueError(
                f"lln: statistics={statistics!r} looks at all tokens, so the output of {type(host).__name__} ({name}) "
                "would depend on later ones; use 'running' or 'fixed', or {'encoder': ..., 'decoder': ...}."
            )
        fixed = statistics == "fixed"
        taken = ["length", "momentum", "read", *(("learnable", "feature_map") if fixed else ())]
        taken += ["directions"] if fixed or not isinstance(options.directions, int) else []
        if not self.cross:
            taken += [NEAR, "convolution"]
            taken += ["block_size", "mix", "overlap"] if self.implementation == "lln_diag" else []
        made = read_sizes(host) | {
            "matching": "paper" if options.matching == "data" else options.matching,
            "statistics": statistics,
            "decoder": self.kind == "decoder",
            **{name: getattr(options, name) for name in taken},
        }
        if self.tile is not None:
            made["block_size"] = self.tile**2
        like = first_weight(host)
        with torch.device("cpu"):  # whatever device (`meta`, while a model is loaded) is the default now
            if options.coefficients is not None and fixed:  # kept among the weights, at first those of sigma = 1
                usual: tuple[Any, Any] = match_moments(
                    1.0, 1.0, made["head_dim"], made["matching"], made["scale"], length=made["length"]
                )
                width = [made["head_dim"]] if options.coefficients == "channel" else []
                pairs = zip(("alpha", "beta"), ("num_heads", "num_key_heads"), usual, strict=True)
                for name, heads, value in list(pairs)[options.read == "evidence" :]:
                    made[name] = torch.full([made[heads], *width], value, dtype=torch.float64)
            super().__init__(**made, dtype=like.dtype)
        self.build = functools.partial(LLNAttention, **made)
        self.settle(like.device)

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        """ValueError where output_attentions asks for what is too large or does not exist."""
        check_weights(self, query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        """P [B, H, N, M]"""
        with self.hold():
            return dense_weights(self, query, key, **where)

    @property
    def is_guess(self) -> bool:
        """Whether alpha and beta are those of sigma = 1 because nobody said anything else."""
        chosen = self.options.statistics
        chosen = chosen if isinstance(chosen, str) else chosen[self.kind]
        return self.kind == "decoder" and chosen == "auto" and self.options.coefficients is None

    @torch.no_grad()
    def take(self, other: ModelAttention) -> None:
        """Keep what `other` has learned or measured, where this module has the same."""
        other.commit()
        for name, tensor in (*other.named_parameters(), *other.named_buffers()):
            mine = getattr(self, name, None)
            if isinstance(mine, Tensor) and mine.shape == tensor.shape:
                mine.copy_(tensor)
        # What was given or found may become what is learned, and one number a head one a channel.
        pairs = list(zip(self.stored, other.stored, strict=False))
        moved = self.learns != other.learns or any(mine.shape != theirs.shape for mine, theirs in pairs)
        same = self.read == other.read
        if pairs and same and moved and all(theirs.shape[1] in (1, mine.shape[1]) for mine, theirs in pairs):
            held = [theirs.exp() if other.learns else theirs for _, theirs in pairs]
            self.set_coefficients(held[0], held[-1])

    @property
    def learns(self) -> bool:
        """Whether alpha and beta are parameters."""
        return "log_beta" in self._parameters

    @property
    def stored(self) -> list[Tensor]:
        """What keeps alpha and beta among the weights, [heads, 1 or dim] each: their logarithms where they are learned;
        nothing where they are not kept, and of the evidence read beta alone."""
        if self.learns:
            found = (self._parameters.get(name) for name in ("log_alpha", "log_beta"))
            return [parameter.detach() for parameter in found if parameter is not None]
        return [kept[0] for name in ("alpha", "beta") if (kept := self._buffers.get(f"fixed_{name}")) is not None]

    @torch.no_grad()
    def set_coefficients(self, alpha: Any, beta: Any) -> None:
        """alpha and beta, numbers or tensors [heads] or [heads, dim], into the buffers or parameters that keep them; of
        the evidence read beta alone."""
        both = (("alpha", alpha), ("beta", beta))[self.read == "evidence" :]
        for (name, given), target in zip(both, self.stored, strict=True):
            if isinstance(given, Tensor):
                given = given.to(target.device, torch.float64)
                given = given.squeeze(1) if given.shape[1:] == (1,) else given  # one number a head
            values = coefficient(name, given, (1, *target.shape), torch.float64, target.device)
            if not bool((values > 0).all() & values.isfinite().all()):
                raise ValueError(f"{name} must be positive and finite; got {given!r}.")
            target.copy_((values.log() if self.learns else values)[0].expand(target.shape))


class Peer(Attached):
    """Another mechanism in one attention module of a model. What it learns, if anything, is in `attention`."""

    prefix = "attention."

    def __init__(self, host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        sizes = read_sizes(host)
        self.implementation, self.options, self.scale = implementation, dict(options), sizes["scale"]
        self.cross = is_cross(host, name)
        if self.cross:  # as for LLN+Diag: blocks and neighbours need one sequence
            options = {k: v for k, v in options.items() if k not in ("block_size", "mix", NEAR)}
        self.used, like = dict(options), first_weight(host)
        self.attention: Any = None
        self.build = None
        with torch.device("cpu"):
            if self.entry.parameters or options.get(NEAR) is not None:
                made = sizes | {"max_length": find_longest(host.config), **options}
                if options.get(NEAR) is None:
                    del made["value_dim"]
                self.build = functools.partial(mechanism, implementation, dtype=like.dtype, **made)
                self.attention = self.build()
            else:  # one token, to hear now and not in the first call what is wrong with the options
                token = torch.zeros(1, 1, 1, sizes["head_dim"])
                attention(implementation, token, token, token, **self.options)
        self.settle(like.device)

    @property
    def entry(self) -> Mechanism:
        return mechanisms()[self.implementation]  # by name, so that models can be copied and pickled

    @property
    def asks_for_patches(self) -> str | None:
        return None if self.attention is None else self.attention.asks_for_patches

    @property
    def patches(self) -> Patches | None:
        return None if self.attention is None else self.attention.patches

    @patches.setter
    def patches(self, patches: Patches | None) -> None:
        if self.attention is not None:
            self.attention.patches = patches

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, query_mask: Tensor | None, dropout: float,
        alone: bool = False, **where: Any,
    ) -> Tensor:  # fmt: skip
        """[B, H, N, E]. where: is_causal, key_mask and cu_seqlens; query_mask is for statistics, and there are none.
        alone: P times the values, without what the module takes from their neighbours."""
        if self.cross:
            self.entry.refuse("cross")
        causal = where["is_causal"] and not self.options.get("max_length")
        for feature, asked in (("cross", self.cross), ("causal", causal)):
            if asked and (why := self.entry.refuses_in_models.get(feature)):
                raise ValueError(f"{self.implementation} does not support {feature} attention in models: {why}.")
        if self.attention is None:
            given = self.used | {"dropout_p": dropout, "scale": self.scale}
            return attention(self.implementation, query, key, value, **where, **given)
        self.attention.dropout = dropout
        run = self.attention.attend_alone if alone else self.attention
        out: Tensor = run(query, key, value, **where)
        return out

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        if not self.entry.matrix:
            raise ValueError(f"output_attentions: {self.implementation} has no attention matrix; leave it out.")
        check_size(query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        # By giving the mechanism the unit vectors for values.
        units = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        return self.forward(query, key, units, **where, dropout=0.0, alone=True)


def find_longest(config: Any) -> int | None:
    """The most tokens that a model of this config takes, where it says so."""
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        return int(positions)
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1  # and the class token
    return None


def attach(model: PreTrainedModel, *, fresh: bool) -> None:
    """Give every attention module of the model the `.lln` that its config asks for, and say in the config what runs.

    fresh: the model is just being made or converted, so values among the weights are still to come. Otherwise
    ValueError where the config says that there are some and they are not there."""
    guessed = False
    for part in list_attending(model):
        options, implementation = read(part.config), part.config._attn_implementation
        ours = runs_ours(part.config)
        if ours:
            check_model(part, implementation)
            check_masks(part, implementation)
        elif options is None:
            continue
        options = options or Options()
        if ours and isinstance(options.layers, dict) and implementation not in options.layers.values():
            raise ValueError(
                f"attn_implementation={implementation!r}: config.lln names an implementation for each layer; use "
                f"lln.hf.convert(model, {implementation!r}, layers=...)."
            )
        options = dataclasses.replace(options, implementation=implementation or options.implementation)
        write(part.config, options)
        hosts = list(own_attention(part))
        if hosts and ours:
            watch_positions(part)
        for name, module in hosts:
            follow(part, module)
            setattr(module, CAUSAL, is_causal(module, name, part))
            own = options.of_layer(find_index(name, module))
            if options.layers is None:
                vars(module).pop(RUNS, None)
            else:
                setattr(module, RUNS, options.others if own is None else own.implementation)
            if own is None:
                for held in ("lln", "lln_peer"):
                    module._modules.pop(held, None)
                continue
            if ours:
                check_global(name, module, own.implementation)
            guessed |= attach_own(module, name, own, ours, fresh) and ours
            for held in (find_attached(module, "lln"), find_attached(module, "lln_peer")):
                if isinstance(held, (ModelAttention, Peer)) and (asked := held.asks_for_patches) is not None:
                    held.patches = find_patches(model, part, asked)
    if guessed:
        warnings.warn(
            f"{type(model).__name__} has causal or cross attention, and the spread of its queries and keys is not "
            "known: alpha and beta are those of a spread of 1. lln.hf.convert(model, statistics='running', "
            "batches=...) measures it; statistics='fixed' says that this is meant.",
            stacklevel=2,
        )


def attach_own(module: Any, name: str, options: Options, ours: bool, fresh: bool) -> bool:
    """Give one attention module what these options, its own, ask for. Whether its coefficients have become a guess."""
    if options.implementation in LLN:
        return attach_one(module, name, options, fresh)
    if ours:
        implementation = options.implementation
        module.lln_peer = find_peer(module, name, implementation, options.mechanisms.get(implementation, {}))
    if options.keeps_values:  # another attention runs now, but what LLN has learned or measured stays with the model
        kind = "lln_diag" if isinstance(options.mix, str) else "lln"
        attach_one(module, name, dataclasses.replace(options, implementation=kind), fresh)
    return False


def check_patches(model: PreTrainedModel) -> None:
    """ValueError where an option needs patches and the model has none. Not while models are made: what makes patches
    may be in a model around the one that attends."""
    for module in model.modules():
        if isinstance(module, (ModelAttention, Peer)) and (asked := module.asks_for_patches) is not None:
            require_patches(module.patches, asked)


@contextlib.contextmanager
def undo_refused(model: PreTrainedModel) -> Iterator[None]:
    """After a refusal all is as it was: what configs say, and what runs."""
    gone = object()
    holders = (*configs(model), *(module for _, module in attention_modules(model)))
    names = ("lln", "lln_peer", RUNS, "_attn_implementation_internal")
    before = [(holder, name, getattr(holder, name, gone)) for holder in holders for name in names]
    try:
        yield
    except (ValueError, TypeError):
        for holder, name, was in before:
            if was is not gone:
                setattr(holder, name, was)
            elif hasattr(holder, name):
                delattr(holder, name)
        raise


def find_peer(host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> Peer:
    """What an attention module of a model runs: a mechanism that learns stays the one that is there. ValueError where
    what another one has learned would be lost."""
    old = find_attached(host, "lln_peer")
    if not isinstance(old, Peer) or old.attention is None:
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
    old = find_attached(module, "lln")
    if isinstance(old, ModelAttention):
        if old.options == options or not runs_lln(module.config):
            return False
        if old is not module.lln:
            raise ValueError(
                f"peft keeps what {name} has learned (modules_to_save), and it would be lost; convert the model before "
                "peft wraps it, or call merge_and_unload() of the PeftModel first."
            )
        if isinstance(old.mix, str) and old.mix == options.mix and options.implementation == "lln":
            raise ValueError(
                f"attn_implementation={options.implementation!r}: the learned mix={old.mix!r} of {name} would be lost; "
                f"lln.hf.convert(model, {options.implementation!r}, mix=0.5) drops it."
            )
        for what in ("convolution", NEAR):
            width = getattr(old, what)
            if width is not None and getattr(options, what) != width:
                raise ValueError(
                    f"{what}={getattr(options, what)!r}: what {name} has learned with a width of {width} would be "
                    "lost; load or build the model anew."
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
    for part in (part for part in list_parts(model) if runs_lln(part.config)):
        options = read(part.config)
        for name, module in own_attention(part):
            held, own = find_attached(module, "lln"), options and options.of_layer(find_index(name, module))
            if isinstance(held, ModelAttention) and held.options != own:
                raise ValueError(
                    f"config.lln was changed by hand and is not what {name} runs; use lln.hf.convert(model, ...) to "
                    f"change options, or model.set_attn_implementation({part.config._attn_implementation!r}) to run "
                    "what config.lln says."
                )
