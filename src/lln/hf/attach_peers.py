"""The other attentions of `lln.mechanisms()` as attn_implementation: those on q, k, v."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lln.checks import describe
from lln.hf.find import is_cross, sizes
from lln.nn.weights import check_size
from lln.peers import attention, attention_matrix, mechanisms
from lln.peers.registry import Mechanism, check_options

LLN = ("lln", "lln_diag")


def free_names() -> tuple[str, ...]:
    """What can be registered. transformers treats any name with "flash" in it as flash attention, and a name that it
    (or somebody else) has given away already keeps its meaning."""
    functions = dict(ALL_ATTENTION_FUNCTIONS.items())
    taken = {"eager", "softmax", *ALL_MASK_ATTENTION_FUNCTIONS.keys(), *functions}
    taken -= {name for name, function in functions.items() if getattr(function, "is_lln", False)}
    found = (m.name for m in mechanisms().values() if m.kind != "mixer" and m.name not in LLN)
    return tuple(name for name in found if name not in taken and "flash" not in name)


PEERS = free_names()
# What only a model asks for, by mechanism: it shows its queries one by one while it writes.
IN_MODELS = {
    ("cosformer", "cross"): "the position of a query in its sequence does not reach the attention",
    ("cosformer", "causal"): "weights depend on the length, so on how many tokens follow, unless max_length is given",
    ("convolved_softmax", "causal"): "the convolution reaches back to queries that no cache keeps",
}


def check_peer(name: str, options: Mapping[str, Any]) -> None:
    """ValueError or TypeError where config.lln could not keep these options of the mechanism `name`."""
    if name not in PEERS:
        raise ValueError(f"lln: mechanisms must be among {', '.join(PEERS)}; got {name!r}.")
    if not isinstance(options, dict):
        raise TypeError(f"lln: mechanisms[{name!r}] must be a dict of options; got {options!r}.")
    entry = mechanisms()[name]
    blocks = {"block_size": None, "mix": 0.5} if entry.kind == "kernel" else {}
    if not entry.mixes:
        blocks.pop("mix", None)
    own = {"max_length": None, **entry.module_options} if entry.parameters else entry.options
    check_options(name, options, {**blocks, **own})
    for option, value in options.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"lln: {option} of {name} must be a plain value that a config can keep; got "
                            f"{describe(value)}.")  # fmt: skip


def check_use(entry: Mechanism, options: Mapping[str, Any], cross: bool, is_causal: bool) -> None:
    """ValueError for what a mechanism cannot know from q, k, v alone."""
    if cross:
        entry.refuse("cross")
    for feature, asked in (("cross", cross), ("causal", is_causal and not options.get("max_length"))):
        if asked and (why := IN_MODELS.get((entry.name, feature))):
            raise ValueError(f"{entry.name} does not support {feature} attention in models: {why}.")


@dataclasses.dataclass(frozen=True)
class Peer:
    """A mechanism in one attention module of a model. It learns and keeps nothing."""

    implementation: str
    options: dict[str, Any]
    scale: float | None
    cross: bool

    @classmethod
    def of(cls, host: Any, name: str, implementation: str, options: Mapping[str, Any]) -> Peer:
        _, _, head_dim, _, scale = sizes(host)
        cross = is_cross(host, name)
        with torch.device("cpu"):  # one token, to hear now and not in the first call what is wrong with the options
            token = torch.zeros(1, 1, 1, head_dim)
            attention(implementation, token, token, token, **options)
        if cross:  # as for LLN+Diag: blocks need one sequence
            options = {k: v for k, v in options.items() if k not in ("block_size", "mix")}
        return cls(implementation, dict(options), scale, cross)

    @property
    def entry(self) -> Mechanism:
        return mechanisms()[self.implementation]

    def check_lengths(self, host: str, length: int, keys: int) -> None:
        """Any lengths will do that the mechanism takes."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, key_mask: Tensor | None,
        query_mask: Tensor | None, cu_seqlens: Any, dropout: float,
    ) -> Tensor:  # fmt: skip
        """[B, H, N, E]; query_mask is for statistics, and there are none."""
        check_use(self.entry, self.options, self.cross, is_causal)
        return attention(
            self.implementation, query, key, value, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens,
            dropout_p=dropout, scale=self.scale, **self.options,
        )  # fmt: skip

    def check_weights(self, query: Tensor, key: Tensor) -> None:
        """ValueError where output_attentions asks for what is too large."""
        check_size(query, key, "output_attentions", "leave it out")

    def weights(self, query: Tensor, key: Tensor, where: dict[str, Any]) -> Tensor:
        """P [B, H, N, M]"""
        known = {k: v for k, v in where.items() if k != "query_mask"}
        return attention_matrix(self.implementation, query, key, scale=self.scale, **known, **self.options)
