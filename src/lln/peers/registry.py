"""Every mechanism by name: what `data/mechanisms.json` says of it, the fields of `Mechanism`, and what runs it.

A mechanism is one short file in this folder. `@register(name)` stands before a function of a checked call and of its
options, which has the mechanism's name (`def performer(call, *, features=None, ...)`, no parameters of its own), or
before the class of a module, whose method `attend(call)` does the same (with parameters), and is told the function
where there are both; what a mechanism cannot do it `refuses`, with the reason.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from lln.files import read_data
from lln.rules import suggest

Made = TypeVar("Made", bound=Callable[..., Any])
Feature = Literal["padding", "causal", "packing", "grouped", "cross"]
FEATURES: dict[str, str] = {  # as an error names what was asked for
    "padding": "key_mask",
    "causal": "is_causal=True",
    "packing": "cu_seqlens",
    "grouped": "fewer key heads than query heads",
    "cross": "cross attention, query and key of two sequences",
}
# Of every module on q, k, v; the rest are the mechanism's own.
COMMON = ("dropout", "scale", "block_size", "mix", "num_key_heads", "value_convolution", "value_dim")


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """The description of a mechanism: its name, title, paper, cost, options and what it does not support. A description
    that contradicts itself is a ValueError.

    kind: "kernel" (linear attention by feature maps, which takes block_size), "attention" (any other function or module
    of q, k and v), or "mixer" (a module on hidden states that replaces the whole attention block).
    parameters: whether it must be built with `lln.mechanism`, because there is always something to learn.
    refuses: the features that it does not support, each with the reason. refuses_in_models: those that it does not
    support inside a model, where generation passes queries one by one.

    Examples:
        >>> import lln
        >>> linformer = lln.mechanisms()["linformer"]
        >>> linformer.title, linformer.kind, linformer.parameters
        ('Linformer', 'attention', True)
        >>> linformer.module_options
        {'rank': 256, 'share': False}
        >>> linformer.supports("causal"), linformer.refuses["causal"]
        (False, 'each projected key mixes all positions, later ones too')
    """

    name: str
    title: str
    _: dataclasses.KW_ONLY
    paper: str
    cost: str  # time of one head, forward: N queries, M keys, dims D and E, further letters from the options
    learned: str = "nothing"
    kind: Literal["kernel", "attention", "mixer"] = "attention"
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refuses_in_models: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""
    function: Callable[..., Tensor] | None = None
    module: Callable[..., nn.Module] | None = None
    block_size: int | None = None  # the default; None: no blocks
    mixes: bool = True  # a kernel mechanism: whether there is a kernel beside the blocks
    matrix: bool = True  # not a mixer: out = P v with a P that v has no part in
    whole: bool = False  # takes care of packing and blocks itself

    def __post_init__(self) -> None:
        unknown = [feature for feature in self.refuses if feature not in FEATURES]
        if unknown:
            raise ValueError(f"refuses may name only {', '.join(FEATURES)}; got {unknown[0]!r}.")
        if self.function is None and self.module is None:
            raise ValueError(f"{self.name} must have a function or a module; got neither.")
        for name, value in (
            ("refuses", dict(self.refuses)),
            ("mixes", self.mixes and self.kind == "kernel"),
            ("matrix", self.matrix and self.kind != "mixer"),
        ):
            object.__setattr__(self, name, value)

    @property
    def parameters(self) -> bool:
        return self.function is None

    def supports(self, feature: Feature) -> bool:
        return feature not in self.refuses

    @property
    def options(self) -> dict[str, Any]:
        """Options of the function, with their defaults."""
        return {} if self.function is None else read_keywords(self.function)

    @property
    def module_options(self) -> dict[str, Any]:
        """Options of the module besides num_heads, head_dim and max_length, with their defaults."""
        if self.module is None:
            return self.options
        return {k: v for k, v in read_keywords(self.module).items() if k not in ("num_heads", "head_dim", "max_length")}

    def check(self, query: Tensor, key: Tensor, is_causal: bool, key_mask: Any, cu_seqlens: Any) -> None:
        asked = {
            "padding": key_mask is not None,
            "causal": is_causal,
            "packing": cu_seqlens is not None,
            "grouped": query.shape[1] != key.shape[1],
            "cross": isinstance(cu_seqlens, (tuple, list)) or query.shape[2] != key.shape[2],
        }
        for feature, wanted in asked.items():
            if wanted:
                self.refuse(feature)

    def refuse(self, feature: str) -> None:
        """ValueError with the reason where the mechanism cannot do this."""
        if feature in self.refuses:
            raise ValueError(f"{self.name} does not support {FEATURES[feature]}: {self.refuses[feature]}.")


def read_keywords(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY}


DECLARED: dict[str, dict[str, Any]] = read_data("mechanisms")  # in the order of the documentation's table
REGISTRY: dict[str, Mechanism] = {}
LISTENERS: list[Callable[[], None]] = []  # told of each that a user adds: lln.hf, which tells transformers


def register(name: str, **runs: Any) -> Callable[[Made], Made]:
    """Let the function, or the class of modules, that follows run the mechanism of this name. runs: the `module` or the
    `function` where there are both."""
    if name in REGISTRY:
        raise ValueError(f"name must be new; there is a mechanism {name!r} already.")

    def add(made: Made) -> Made:
        way = "module" if isinstance(made, type) else "function"
        declared = {field: value for field, value in DECLARED[name].items() if field != "file"}
        REGISTRY[name] = Mechanism(name, **declared, **(runs | {way: made}))
        if isinstance(made, type):
            made.name = name  # type: ignore[attr-defined]
        return made

    return add


def mechanisms() -> Mapping[str, Mechanism]:
    """Return all mechanisms by name, each with its description: paper, cost, options and what it does not support.

    Examples:
        >>> import lln
        >>> [name for name, m in lln.mechanisms().items() if m.kind == "mixer"]
        ['flash', 'tnn']
    """
    return MappingProxyType(REGISTRY)


def find(name: str) -> Mechanism:
    if isinstance(name, str) and name in REGISTRY:
        return REGISTRY[name]
    raise ValueError(f"name must be one of {', '.join(REGISTRY)}; got {name!r}.{suggest(name, REGISTRY)}")


def check_names(name: str, given: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for option in given:
        if option not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes none"
            raise TypeError(f"{name} has no option {option!r}; besides the arguments of lln.attention it {takes}.")
