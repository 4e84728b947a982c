"""config.lln: which attention a model runs and how, as plain values that are saved in config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lln.checks import MATCHINGS, STATISTICS
from lln.matching.moments import LENGTH
from lln.nn.module_options import check_options
from lln.nn.value_convolution import read_width
from lln.peers import mechanisms
from lln.peers.registry import check_names
from lln.values import check_choice, check_count, describe

LLN = ("lln", "lln_diag")
Layers = list[int] | dict[str, str]


def list_free_names() -> tuple[str, ...]:
    """What can be registered. transformers treats any name with "flash" in it as flash attention, and a name that it
    (or somebody else) has given away already keeps its meaning."""
    functions = dict(ALL_ATTENTION_FUNCTIONS.items())
    taken = {"eager", "softmax", *ALL_MASK_ATTENTION_FUNCTIONS.keys(), *functions}
    taken -= {name for name, function in functions.items() if getattr(function, "is_lln", False)}
    found = (m.name for m in mechanisms().values() if m.kind != "mixer" and m.name not in LLN)
    return tuple(name for name in found if name not in taken and "flash" not in name)


PEERS = list(list_free_names())
IMPLEMENTATIONS = [*LLN, *PEERS]  # `lln.register` adds to both
BLOCK_SIZE = 64
NEAR = "value_convolution"  # the option that all implementations take
# What goes with "lln_diag" and not with "lln", and the values by which nothing is asked for.
OF_BLOCKS = {"block_size": None, "mix": 0.5, "overlap": False, "tile": None}


def take_new_names() -> list[str]:
    """Of mechanisms that were registered since the last call."""
    new = [name for name in list_free_names() if name not in PEERS]
    PEERS.extend(new)
    IMPLEMENTATIONS.extend(new)
    return new


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that `config.lln` of a converted model holds. Options that it does not hold have these defaults.

    Args:
        implementation: "lln", "lln_diag" or another of `lln.hf.IMPLEMENTATIONS`; a name of transformers' own (say
            "sdpa") where the model runs that one at the moment.
        matching: "paper", "entropy" (recommended for new models) or "variance", see `lln.match_moments`; "data": alpha
            and beta were found on data and are kept with the weights.
        statistics: where the spread of queries and keys comes from, see `lln.LLNAttention`. One name for all attention
            modules, or {"encoder": name, "decoder": name}, where "decoder" means causal attention and attention to
            another sequence. "auto": "sample" for encoders, "fixed" (that of sigma = 1) for decoders.
        block_size: of "lln_diag".
        tile: of "lln_diag" in image models, in place of block_size: blocks are tiles of at most so many patches a side,
            which class, distillation and register tokens share. None: consecutive tokens.
        mix: of "lln_diag": a number, "ratio", "scales" (learned) or "evidence", see `lln.LLNAttention`.
        learnable: None, "head" or "channel": alpha and beta are parameters. With "fixed" statistics.
        coefficients: None, "head" or "channel": alpha and beta are given numbers that are kept with the weights. With
            "fixed" statistics.
        read: "paper", or "evidence" for weights that were trained with softmax, see `lln.lln_attention`.
        directions: of the evidence read's channels: None, "signed" or the number of learned ones, see
            `lln.LLNAttention`. Learned ones with "fixed" statistics.
        feature_map: None, or "linear": a learned map of queries and keys, see `lln.LLNAttention`. With "fixed"
            statistics.
        value_convolution: None, the odd width of a learned convolution of the values over tokens, or "3x3" over rows
            and columns of patches, which is added to attention's output, see `lln.LLNAttention`. Cross attention has
            none.
        convolution: deprecated, use value_convolution: None, or the odd width of a learned convolution over the tokens
            of queries, keys and values, see `lln.LLNAttention`. Cross attention has none.
        overlap: of "lln_diag": windows that overlap in place of blocks, see `lln.LLNAttention`.
        length: number of keys that "entropy" matching assumes where it does not see them all.
        momentum: weight of a new batch in "running" statistics.
        layers: None: every layer runs `implementation`. Otherwise the indices of those that do, or {index: name} with
            an implementation of each, the index as a string; all other layers are the model's own.
        others: the implementation of transformers that those other layers run.
        mechanisms: of the other implementations, by name: {"performer": {"features": 64}}. What a mechanism takes is in
            `lln.mechanisms()[name].options`; all take value_convolution, and kernel mechanisms block_size and mix, as
            `lln.attention` does: {"elu": {"block_size": 64}} is ELU+Diag.

    Example:
        >>> Options(implementation="lln", statistics="running").statistics_of("decoder")
        'running'
        >>> Options(mix=2)
        Traceback (most recent call last):
        ValueError: mix must lie between 0 and 1; got 2.
    """

    implementation: str = "lln_diag"
    matching: str = "paper"
    statistics: str | dict[str, str] = "auto"
    block_size: int = BLOCK_SIZE
    mix: float | str = 0.5
    learnable: str | None = None
    coefficients: str | None = None
    read: str = "paper"
    directions: int | str | None = None
    feature_map: str | None = None
    value_convolution: int | str | None = None
    convolution: int | None = None
    overlap: bool = False
    length: int = LENGTH
    momentum: float = 0.1
    tile: int | None = None
    mechanisms: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    layers: Layers | None = None
    others: str = "sdpa"

    def __post_init__(self) -> None:
        if not isinstance(self.implementation, str):
            raise TypeError(f"lln: implementation must be a name; got {self.implementation!r}.")
        check_choice("lln: matching", self.matching, *MATCHINGS, "data")
        check_choice("lln: coefficients", self.coefficients, None, "head", "channel")
        if self.block_size is None:
            raise ValueError("lln: block_size must be a positive int; LLN without blocks is implementation='lln'.")
        parts = self.statistics if isinstance(self.statistics, dict) else dict.fromkeys(KINDS, self.statistics)
        allowed = ("auto", *STATISTICS)
        if set(parts) != set(KINDS) or not all(isinstance(p, str) and p in allowed for p in parts.values()):
            raise ValueError(
                f"lln: statistics must be one of {', '.join(map(repr, allowed))}, or "
                f"{{'encoder': name, 'decoder': name}}; got {self.statistics!r}."
            )
        if parts["decoder"] in ("sample", "batch") and isinstance(self.statistics, dict):
            raise ValueError(
                f"lln: statistics={parts['decoder']!r} looks at all tokens, so a decoder's output would depend on "
                "later ones; use 'running' or 'fixed' for the decoder."
            )
        asked = {"matching='data'": self.matching == "data"}
        asked |= {name: getattr(self, name) is not None for name in ("learnable", "coefficients", "feature_map")}
        asked["directions"] = isinstance(self.directions, int)
        for what, wanted in asked.items():
            if wanted and "fixed" not in map(self.statistics_of, KINDS):
                raise ValueError(f"lln: {what} goes with statistics='fixed'; got statistics={self.statistics!r}.")
        if self.matching == "data" and self.coefficients is None and self.learnable is None:
            raise ValueError(
                "lln: matching='data' needs alpha and beta; use lln.hf.convert(model, matching='data', ...)."
            )
        check_options(
            learnable=self.learnable, block_size=self.block_size, mix=self.mix, read=self.read,
            directions=self.directions, feature_map=self.feature_map,
            value_convolution=self.value_convolution,
            convolution=self.convolution, overlap=self.overlap, momentum=self.momentum, length=self.length,
        )  # fmt: skip
        if self.tile is not None:
            check_count("lln: tile", self.tile)
            if self.overlap:
                raise ValueError("lln: tile and overlap are two ways to lay out blocks; leave one of them out.")
            if self.mix == "evidence":
                raise ValueError("lln: mix='evidence' goes with blocks of consecutive tokens; use 'scales' with tile.")
        check_layers(self.layers, self.others)
        if not isinstance(self.mechanisms, dict):
            raise TypeError(f"lln: mechanisms must be a dict from names to their options; got {self.mechanisms!r}.")
        for name, options in self.mechanisms.items():
            check_peer(name, options)

    def statistics_of(self, kind: str) -> str:
        """The statistics of attention modules of this kind, "encoder" or "decoder"."""
        chosen = self.statistics[kind] if isinstance(self.statistics, dict) else self.statistics
        if chosen != "auto":
            return chosen
        return "sample" if kind == "encoder" else "fixed"

    def of_layer(self, index: int) -> Options | None:
        """The options of one layer, with its own implementation; None if the layer keeps the model's own attention.

        Example:
            >>> options = Options("lln", layers=[0, 2])
            >>> options.of_layer(2).implementation, options.of_layer(1)
            ('lln', None)
        """
        if isinstance(self.layers, dict):
            name = self.layers.get(str(index))
            return None if name is None else dataclasses.replace(self, implementation=name)
        return self if self.layers is None or index in self.layers else None

    @property
    def keeps_values(self) -> bool:
        """Whether anything of it lives among the weights."""
        learned = [self.learnable, self.coefficients, self.feature_map, self.convolution]
        learned.append(self.value_convolution)
        learned += [self.directions] if isinstance(self.directions, int) else []
        mixes = isinstance(self.mix, str) and self.implementation != "lln"
        return mixes or "running" in map(self.statistics_of, KINDS) or any(one is not None for one in learned)


KINDS = ("encoder", "decoder")
NAMES = tuple(field.name for field in dataclasses.fields(Options))


def check_layers(layers: Any, others: Any) -> None:
    """ValueError where config.lln does not say which layers run what."""
    listed = isinstance(layers, list) and all(type(index) is int and index >= 0 for index in layers)
    named = isinstance(layers, dict) and all(
        isinstance(index, str) and index.isdecimal() and name in IMPLEMENTATIONS for index, name in layers.items()
    )
    if layers is not None and not (layers and (listed or named)):
        raise ValueError(
            "lln: layers must be a list of indices or {index as a string: one of lln.hf.IMPLEMENTATIONS}; got "
            f"{layers!r}."
        )
    if not isinstance(others, str) or others in IMPLEMENTATIONS:
        raise ValueError(f"lln: others must be an implementation of transformers' own; got {others!r}.")


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
    check_names(name, options, {**blocks, NEAR: None, **own})
    if options.get(NEAR) is not None:
        read_width(options[NEAR])
    for option, value in options.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"lln: {option} of {name} must be a plain value that a config can keep; got "
                            f"{describe(value)}.")  # fmt: skip


def read(config: Any) -> Options | None:
    """The options in a transformers config, or None where it has none."""
    held = getattr(config, "lln", None)
    if held is None:
        return None
    if not isinstance(held, dict):
        raise TypeError(f"config.lln must be a dict of options; got {held!r}.")
    if unknown := sorted(set(held) - set(NAMES)):
        raise ValueError(f"config.lln: unknown option {unknown[0]!r}; allowed are {', '.join(NAMES)}.")
    return Options(**held)


def write(config: Any, options: Options) -> None:
    config.lln = dataclasses.asdict(options)


def runs_lln(config: Any) -> bool:
    """Whether "lln" or "lln_diag" runs, which have an LLNAttention in every attention module."""
    return getattr(config, "_attn_implementation", None) in LLN


def runs_ours(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) in IMPLEMENTATIONS
