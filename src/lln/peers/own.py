"""Attention of your own under a name, beside the mechanisms that come with the package: `lln.register`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from lln.kernels.call import Call
from lln.peers.modules import AttentionModule
from lln.peers.registry import COMMON, DECLARED, LISTENERS, REGISTRY, Mechanism
from lln.values import check_choice, describe

Own = TypeVar("Own", bound=Callable[..., Any])
GIVEN = ("is_causal", "key_mask", "dropout_p", "scale")  # what attention may take besides query, key and value
NEEDED = {"padding": "key_mask", "causal": "is_causal"}  # which features are those arguments


def register(
    name: str,
    *,
    title: str | None = None,
    kind: Literal["attention", "kernel"] = "attention",
    refuses: Mapping[str, str] | None = None,
    matrix: bool = True,
    cost: str = "not stated",
    paper: str = "your own",
) -> Callable[[Own], Own]:
    """Register your own attention under a name that the rest of the package then accepts: `lln.attention`,
    `lln.mechanism`, `attn_implementation=` of transformers (with `lln.hf`), `lln compare`, `lln train`, `lln.testing`.

    Use it as a decorator of a function, or of a class of modules if there is something to learn. The function, or the
    `forward` of the module, is called with

    - query [batch, heads, length, dim], key [batch, heads, key length, dim] and value [batch, heads, key length, value
      dim]: key and value have as many heads as the query, and packed sequences come one by one;
    - of these four, those that it names: `is_causal`, `key_mask` ([batch, key length] bool, True = attend, or None),
      `dropout_p` and `scale` (of the scores, as softmax has it).

    It returns [batch, heads, length, value dim]. Further keyword-only arguments with defaults are its options. A module
    has its options in the constructor, which is called with num_heads, head_dim and, if it has that argument,
    max_length. Registering a name of yours again replaces it, so that a cell of a notebook can run twice.

    Args:
        name: lower case letters, digits and underscores. transformers accepts no name that contains "flash".
        title: the name that tables and charts show; default: the name.
        kind: "kernel" for linear attention, which can be combined with blocks of softmax attention (`block_size`);
            "attention" (default) for all other kinds.
        refuses: what it does not support, with the reason: "padding", "causal", "packing", "grouped" or "cross".
            Padding and causality are refused automatically if the function does not take `key_mask` or `is_causal`.
        matrix: whether the output is P times value, with a P that does not depend on value. Default True.
        cost: time of one head, shown in tables.
        paper: where it comes from, shown in tables.

    Raises:
        ValueError or TypeError: the message names the argument, what came, and what is allowed.

    Examples:
        >>> import lln, torch
        >>> @lln.register("mean_of_values", refuses={"causal": "the mean has all tokens in it"})
        ... def average(query, key, value, *, key_mask=None, sharpness=1.0):
        ...     weights = torch.ones(key.shape[:3]) if key_mask is None else key_mask[:, None].double()
        ...     mean = (weights.unsqueeze(-1) * value).sum(2, keepdim=True) / weights.sum(-1)[..., None, None].clamp(1)
        ...     return mean.expand(*query.shape[:3], -1)
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> out = lln.attention("mean_of_values", query, key, value, sharpness=2.0)
        >>> torch.allclose(out[:, :, 0], value.mean(2), atol=1e-6)
        True
        >>> lln.attention("mean_of_values", query, key, value, is_causal=True)
        Traceback (most recent call last):
        ValueError: mean_of_values does not support is_causal=True: the mean has all tokens in it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name must be lower case letters, digits and underscores; got {describe(name)}.")
    if name in DECLARED:
        raise ValueError(f"name must be one that lln does not use itself; got {name!r}.")
    check_choice("kind", kind, "attention", "kernel")

    def add(own: Own) -> Own:
        made: Any = own
        is_class = isinstance(made, type)
        if not callable(made) or (is_class and not issubclass(made, nn.Module)):
            raise TypeError(f"{name} must be a function or a class of torch.nn.Module; got {describe(made)}.")
        takes, options = read_arguments(name, made.forward if is_class else made)
        reasons = {
            feature: f"its {'forward' if is_class else 'function'} takes no {argument}"
            for feature, argument in NEEDED.items()
            if argument not in takes
        }
        runs: dict[str, Any] = {"function": OwnFunction(name, made, takes, options)}
        if is_class:
            runs = {"module": OwnClass(name, made, takes)}
        REGISTRY[name] = Mechanism(
            name, title or name, kind=kind, refuses=reasons | dict(refuses or {}), matrix=matrix, cost=cost,
            paper=paper, learned="its parameters" if is_class else "nothing", **runs,
        )  # fmt: skip
        for tell in LISTENERS:
            tell()
        return own

    return add


def read_arguments(name: str, function: Callable[..., Any]) -> tuple[frozenset[str], list[inspect.Parameter]]:
    """(which of GIVEN it takes, its options)"""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    places = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < 3 or any(p.default is p.empty for p in places[3:] if p.name not in GIVEN):
        raise TypeError(
            f"{name} must take query, key and value, and have defaults for all else but {', '.join(GIVEN)}."
        )
    anything = any(p.kind is p.VAR_KEYWORD for p in found)
    names = {p.name for p in found}
    takes = frozenset(given for given in GIVEN if anything or given in names)
    return takes, [p for p in found if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN]


def attend_own(name: str, function: Callable[..., Tensor], takes: frozenset[str], call: Call, **options: Any) -> Tensor:
    """A checked call, given to a function of query, key and value."""
    if call.dropout_p and "dropout_p" not in takes:
        raise ValueError(
            f"{name} takes no dropout_p, so it cannot drop {call.dropout_p:g} of its weights; give it that argument, "
            "or set the dropout of attention to 0 (of lln train: --set model.attention_dropout=0)."
        )
    values = {
        "is_causal": call.is_causal, "key_mask": call.key_mask, "dropout_p": call.dropout_p, "scale": call.scale
    }  # fmt: skip
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (t.repeat_interleave(group, 1) if group > 1 else t for t in (call.key, call.value))
    given = {argument: value for argument, value in values.items() if argument in takes}
    out = function(call.query, key, value, **given, **options)
    wanted = (*call.query.shape[:3], call.value.shape[3])
    if not isinstance(out, Tensor) or out.shape != wanted:
        raise ValueError(f"{name} must return [batch, heads, length, value dim] = {list(wanted)}; got {describe(out)}.")
    return out


class OwnFunction:
    """A function of query, key and value as the registry keeps one: of a checked call."""

    def __init__(
        self, name: str, function: Callable[..., Tensor], takes: frozenset[str], options: list[inspect.Parameter]
    ) -> None:
        self.name, self.function, self.takes = name, function, takes
        call = inspect.Parameter("call", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = inspect.Signature([call, *options])

    def __call__(self, call: Call, **options: Any) -> Tensor:
        return attend_own(self.name, self.function, self.takes, call, **options)


class OwnClass:
    """A class of modules on query, key and value as the registry keeps one."""

    def __init__(self, name: str, made: type[nn.Module], takes: frozenset[str]) -> None:
        self.name, self.made, self.takes = name, made, takes
        found = inspect.signature(made).parameters.values()
        self.takes_length = any(p.name == "max_length" or p.kind is p.VAR_KEYWORD for p in found)
        more = inspect.Parameter("common", inspect.Parameter.VAR_KEYWORD)
        self.__signature__ = inspect.Signature([*(p for p in found if p.kind is p.KEYWORD_ONLY), more])

    def __call__(self, num_heads: int, head_dim: int, max_length: int | None, **options: Any) -> OwnModule:
        common = {option: options.pop(option) for option in COMMON if option in options}
        where = {"max_length": max_length} if self.takes_length else {}
        made = self.made(num_heads, head_dim, **where, **options)
        return OwnModule(self.name, made, self.takes, num_heads, head_dim, max_length, **common)


class OwnModule(AttentionModule):
    """A module of your own, `inner`, with what every mechanism has around it. `lln.mechanism` builds it.

    Args:
        name: that it was registered with.
        inner: your module.
        takes: which of is_causal, key_mask, dropout_p and scale its forward takes.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> @lln.register("scaled_values", refuses={"cross": "each token keeps to itself"})
        ... class Scaled(torch.nn.Module):
        ...     def __init__(self, num_heads, head_dim, *, start=1.0):
        ...         super().__init__()
        ...         self.factor = torch.nn.Parameter(torch.full((num_heads, 1, 1), start))
        ...     def forward(self, query, key, value, *, key_mask=None, is_causal=False, dropout_p=0.0):
        ...         return self.factor * value
        >>> module = lln.mechanism("scaled_values", num_heads=4, head_dim=8, start=3.0)
        >>> query, key, value = torch.randn(3, 2, 4, 10, 8)
        >>> torch.equal(module(query, key, value), 3 * value)
        True
    """

    def __init__(self, name: str, inner: nn.Module, takes: frozenset[str], *sizes: Any, **common: Any) -> None:
        self.name = name
        super().__init__(*sizes, **common)
        self.inner, self.takes = inner, takes

    def attend(self, call: Call) -> Tensor:
        return attend_own(self.name, self.inner, self.takes, call)
