"""Mechanisms that learn, in models: their parameters are part of the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lln.hf.attach_peers import Peer, check_use
from lln.hf.find import is_cross, sizes
from lln.nn.weights import check_size
from lln.peers import mechanism, mechanisms
from lln.peers.registry import Mechanism


class LearnedPeer(nn.Module):
    """The module of a mechanism in one attention module of a model."""

    def __init__(self, host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        heads, key_heads, head_dim, _, scale = sizes(host)
        self.implementation, self.options, self.scale = implementation, dict(options), scale
        self.cross = is_cross(host, name)
        if self.cross:  # as for LLN+Diag: blocks need one sequence
            options = {k: v for k, v in options.items() if k not in ("block_size", "mix")}
        self.made_from = {
            "num_heads": heads, "num_key_heads": key_heads, "head_dim": head_dim, "scale": scale,
            "max_length": longest(host.config), **options,
        }  # fmt: skip
        like = next((p for p in host.parameters() if p.is_floating_point()), torch.empty(0))
        self.attention: Any = self.built(like.dtype).to(like.device)
        # transformers' own mark, see ModelAttention.
        for part in self.modules():
            part._is_hf_initialized = like.device.type != "meta"  # type: ignore[assignment]

    def built(self, dtype: torch.dtype) -> nn.Module:
        with torch.device("cpu"):  # whatever device (`meta`, while a model is loaded) is the default now
            return mechanism(self.implementation, dtype=dtype, **self.made_from)

    @torch.no_grad()
    def initialise(self) -> None:
        """Give what no checkpoint brought its first value: transformers leaves it uninitialised."""
        mine = dict(self.attention.named_parameters()) | dict(self.attention.named_buffers())
        fresh = self.built(next(iter(mine.values())).dtype)
        for name, tensor in (*fresh.named_parameters(), *fresh.named_buffers()):
            if not mine[name].is_meta and not getattr(mine[name], "_is_hf_initialized", False):
                mine[name].copy_(tensor)

    @property
    def entry(self) -> Mechanism:
        return mechanisms()[self.implementation]

    def check_lengths(self, host: str, length: int, keys: int) -> None:
        """Any lengths will do that the mechanism takes."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, key_mask: Tensor | None,
        query_mask: Tensor | None, cu_seqlens: Any, dropout: float,
    ) -> Tensor:  # fmt: skip
        """[B, H, N, E]; query_mask is for statistics, and there are none."""
        check_use(self.entry, self.options, self.cross, is_causal)
        self.attention.dropout = dropout
        out: Tensor = self.attention(query, key, value, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
        return out

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        """ValueError where output_attentions asks for what is too large or does not exist."""
        if not self.entry.matrix:
            raise ValueError(f"output_attentions: {self.implementation} has no attention matrix; leave it out.")
        check_size(query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        """P [B, H, N, M], by giving the mechanism the unit vectors for values"""
        units = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:2], -1, -1)
        return self.forward(query, key, units, **where, dropout=0.0)


def longest(config: Any) -> int | None:
    """The most tokens that a model of this config takes, where it says so."""
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        return int(positions)
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1  # and the class token
    return None


def peer_of(host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> Peer | LearnedPeer:
    """What an attention module of a model runs: a mechanism that learns stays the one that is there. ValueError where
    what another one has learned would be lost."""
    old = getattr(host, "lln_peer", None)
    if isinstance(old, LearnedPeer):
        if (old.implementation, old.options) == (implementation, dict(options)):
            return old
        raise ValueError(
            f"attn_implementation={implementation!r}: what {old.implementation} has learned in {name} would be lost; "
            "load or build the model anew."
        )
    if mechanisms()[implementation].parameters:
        return LearnedPeer(host, name, implementation, options)
    return Peer.of(host, name, implementation, options)
