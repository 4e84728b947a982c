"""The attention that an attention module of a model runs in the place of softmax: its `.lln` or its `.lln_peer`."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lln.hf.find import is_cross, read_sizes
from lln.hf.options import Options
from lln.matching.moments import match_moments
from lln.nn.attention import LLNAttention
from lln.nn.weights import check_size, check_weights, dense_weights
from lln.peers import attention, mechanism, mechanisms
from lln.peers.registry import Mechanism

# What only a model asks for, by mechanism: it shows its queries one by one while it writes.
IN_MODELS = {
    ("cosformer", "cross"): "the position of a query in its sequence does not reach the attention",
    ("cosformer", "causal"): "weights depend on the length, so on how many tokens follow, unless max_length is given",
    ("convolved_softmax", "causal"): "the convolution reaches back to queries that no cache keeps",
}


class Attached(nn.Module):
    """What all of them have. It is made for `host`, the model's own attention module, which has a `name` there."""

    implementation: str
    cross: bool  # whether the host attends to another sequence than its own
    scale: float | None
    _is_hf_initialized: bool
    collects = True  # whether transformers' recorder of outputs is looked at, see `interface.nothing_collected`

    @property
    def kept(self) -> nn.Module | None:
        """Whose parameters and buffers are part of the model's weights."""
        return self

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        """What `kept` was in the beginning, on the CPU."""
        raise NotImplementedError

    def settle(self, device: torch.device) -> None:
        self.to(device)
        # transformers' own mark. Without it a model that is built around this one would initialise what is here again;
        # one that is being loaded is still empty (`meta`) and has to be.
        for part in self.modules():
            part._is_hf_initialized = device.type != "meta"  # type: ignore[assignment]

    @torch.no_grad()
    def initialise(self) -> None:
        """Give what no checkpoint brought its first value: transformers leaves it uninitialised."""
        if self.kept is None:
            return
        mine, fresh = dict(self.kept.named_parameters()) | dict(self.kept.named_buffers()), self.build()
        for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
            if not mine[name].is_meta and not getattr(mine[name], "_is_hf_initialized", False):
                mine[name].copy_(tensor)

    def check_lengths(self, host: str, length: int, keys: int) -> None:
        """ValueError where it cannot attend from so many queries to so many keys."""

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        """ValueError where output_attentions asks for what is too large or does not exist."""
        raise NotImplementedError

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        """P [B, H, N, M]"""
        raise NotImplementedError


def first_weight(host: nn.Module) -> Tensor:
    """Whose dtype and device those of an attached module are."""
    return next((p for p in host.parameters() if p.is_floating_point()), torch.empty(0))


class ModelAttention(Attached, LLNAttention):
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
        heads, key_heads, head_dim, value_dim, scale = read_sizes(host)
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
        like = first_weight(host)
        with torch.device("cpu"):  # whatever device (`meta`, while a model is loaded) is the default now
            super().__init__(**made, **self._start(), dtype=like.dtype)
        self.settle(like.device)

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        with torch.device("cpu"):
            return LLNAttention(**self.made_from[0], **self._start(), dtype=dtype)

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
        check_weights(self, query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
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


class Peer(Attached):
    """Another mechanism in one attention module of a model. What it learns, if anything, is in `attention`."""

    def __init__(self, host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        heads, key_heads, head_dim, _, scale = read_sizes(host)
        self.implementation, self.options, self.scale = implementation, dict(options), scale
        self.cross = is_cross(host, name)
        if self.cross:  # as for LLN+Diag: blocks need one sequence
            options = {k: v for k, v in options.items() if k not in ("block_size", "mix")}
        self.used, like = dict(options), first_weight(host)
        self.made_from = {
            "num_heads": heads, "num_key_heads": key_heads, "head_dim": head_dim, "scale": scale,
            "max_length": find_longest(host.config), **options,
        }  # fmt: skip
        self.attention: Any = self.build(like.dtype) if self.entry.parameters else None
        if self.attention is None:
            with torch.device("cpu"):  # one token, to hear now and not in the first call what is wrong with the options
                token = torch.zeros(1, 1, 1, head_dim)
                attention(implementation, token, token, token, **self.options)
        self.settle(like.device)

    @property
    def entry(self) -> Mechanism:
        return mechanisms()[self.implementation]  # by name, so that models can be copied and pickled

    @property
    def kept(self) -> nn.Module | None:
        held: nn.Module | None = self.attention
        return held

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        dtype = first_weight(self.attention).dtype if dtype is None else dtype
        with torch.device("cpu"):
            return mechanism(self.implementation, dtype=dtype, **self.made_from)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, key_mask: Tensor | None,
        query_mask: Tensor | None, cu_seqlens: Any, dropout: float,
    ) -> Tensor:  # fmt: skip
        """[B, H, N, E]; query_mask is for statistics, and there are none."""
        if self.cross:
            self.entry.refuse("cross")
        for feature, asked in (("cross", self.cross), ("causal", is_causal and not self.options.get("max_length"))):
            if asked and (why := IN_MODELS.get((self.implementation, feature))):
                raise ValueError(f"{self.implementation} does not support {feature} attention in models: {why}.")
        where: dict[str, Any] = {"is_causal": is_causal, "key_mask": key_mask, "cu_seqlens": cu_seqlens}
        if self.attention is None:
            given = self.used | {"dropout_p": dropout, "scale": self.scale}
            return attention(self.implementation, query, key, value, **where, **given)
        self.attention.dropout = dropout
        out: Tensor = self.attention(query, key, value, **where)
        return out

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        if not self.entry.matrix:
            raise ValueError(f"output_attentions: {self.implementation} has no attention matrix; leave it out.")
        check_size(query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        # By giving the mechanism the unit vectors for values.
        units = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        return self.forward(query, key, units, **where, dropout=0.0)


def find_longest(config: Any) -> int | None:
    """The most tokens that a model of this config takes, where it says so."""
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        return int(positions)
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1  # and the class token
    return None
