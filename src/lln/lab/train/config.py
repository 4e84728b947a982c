"""What a training run is asked to do, completely: plain values that are printed, stored and compared."""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from typing import Any

from lln.peers import mechanisms

TASKS = ("mlm", "glue", "image", "lra", "needles")
LEARNED, SINUSOIDAL, NONE = POSITIONS = ("learned", "sinusoidal", "none")
BLOCK_SIZE = 64  # of kernels with blocks, where a preset says nothing


@dataclasses.dataclass(frozen=True)
class Attention:
    name: str = "lln_diag"  # "softmax", or any attn_implementation of lln.hf
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of config.lln: matching, statistics, ...
    preset: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)  # see choose_attention

    @property
    def label(self) -> str:
        """As tables show it and `--attentions` reads it: with those options that are not the preset's own."""
        shown, with_blocks = self.name, f"{self.name.removesuffix('_diag')}_diag"
        usual, blocks = (choose_attention(name, self.preset) for name in (shown, with_blocks))
        if blocks.name == shown and blocks.options.get("block_size") == self.options.get("block_size"):
            shown, usual = with_blocks, blocks  # elu with blocks is elu_diag
        own = {k: v for k, v in sorted(self.options.items()) if usual.options.get(k) != v}
        return ":".join([shown, *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in own.items())])


def choose_attention(name: str, preset: dict[str, Any]) -> Attention:
    """An attention with what the options of a preset, which are LLN's and its blocks', mean to it. `elu_diag` and the
    like are kernels with blocks.

    >>> choose_attention("elu_diag", {"block_size": 32})
    Attention(name='elu', options={'block_size': 32})
    >>> choose_attention("elu_diag", {"block_size": 32}).label
    'elu_diag'
    """
    blocks = {k: v for k, v in preset.items() if k == "block_size"}
    base, options = name.removesuffix("_diag"), dict[str, Any]()
    if name == "lln_diag":
        options = preset
    elif name == "lln":
        options = {k: v for k, v in preset.items() if k not in blocks}
    elif name == "block_diagonal":
        options = blocks
    elif base != name and base in mechanisms() and mechanisms()[base].mixes:
        name, options = base, {"block_size": BLOCK_SIZE} | blocks
    return Attention(name, options, preset)


@dataclasses.dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    inner: int  # width of the feed-forward layers
    pre_norm: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.1
    patch: int = 0  # of images
    initial: float = 0.0  # standard deviation of the first weights; 0: the architecture's own
    positions: str = LEARNED  # or, of language models, "sinusoidal" or "none"
    start: str = ""  # folder with a trained model to begin from: for fine-tuning


@dataclasses.dataclass(frozen=True)
class Data:
    name: str  # a Hub id, or "embedded": what needs no download
    subset: str = ""
    length: int = 0  # tokens of a sequence, or pixels along the side of an image
    vocabulary: int = 0  # of a tokenizer that is trained on the data
    train: int = 0  # examples used, 0 for all
    evaluation: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optimisation:
    steps: int  # updates of the weights
    batch: int  # examples an update, over all processes
    rate: float  # the highest learning rate
    warmup: int = 0
    schedule: str = "linear"  # after the warm-up: linear, cosine or constant
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-6
    clip: float = 0.0  # largest norm of the gradient, 0 for none
    accumulation: int = 1  # forward passes an update; `batch` counts all of them


@dataclasses.dataclass(frozen=True)
class Config:
    task: str
    preset: str
    attention: Attention
    model: Model
    data: Data
    optimisation: Optimisation
    seed: int = 0
    precision: str = "float32"  # or "bfloat16", "float16": autocast
    checkpointing: bool = False  # activations computed again in the backward pass
    compile: bool = False  # with torch.compile; in a graph, its layers
    graph: bool = False  # the whole step as one CUDA graph
    fsdp: bool = False  # weights, gradients and moments spread over the processes
    log_every: int = 10  # steps
    evaluate_every: int = 100
    save_every: int = 100
    record_every: int = 0  # temperature, entropy and so on of every layer; 0 for never

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        del found["attention"]["preset"]
        for name, usual in (("positions", LEARNED), ("initial", 0.0)):
            if found["model"][name] == usual:  # left out: runs from before there was a choice are the same runs
                del found["model"][name]
        return found

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}.")
        if self.precision not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"precision must be float32, bfloat16 or float16; got {self.precision!r}.")
        if self.save_every % self.log_every:
            # A mean over steps on both sides of a checkpoint would differ after going on from it.
            raise ValueError(f"save_every must be a multiple of log_every; got {self.save_every} and {self.log_every}.")
        if self.compile and self.record_every and not self.graph:
            raise ValueError(
                "record_every must be 0 with compile: a compiled model shows nothing of its inside; or use graph=yes, "
                "which records in steps that are not compiled."
            )
        o = self.optimisation
        if o.steps < 1 or o.batch < 1 or o.accumulation < 1 or o.batch % o.accumulation:
            raise ValueError(
                f"steps, batch and accumulation must be positive and batch a multiple of accumulation; got {o.steps}, "
                f"{o.batch} and {o.accumulation}."
            )
        if o.schedule not in ("linear", "cosine", "constant"):
            raise ValueError(f"schedule must be linear, cosine or constant; got {o.schedule!r}.")
        if self.model.initial < 0:
            raise ValueError(f"model.initial must be positive, or 0 for the usual; got {self.model.initial}.")
        if self.model.positions not in POSITIONS:
            raise ValueError(f"model.positions must be one of {', '.join(POSITIONS)}; got {self.model.positions!r}.")
        if self.model.positions != LEARNED and self.task in ("image", "lra"):
            raise ValueError(f"model.positions must be learned in models of {self.task}; got {self.model.positions!r}.")
        if self.model.width % self.model.heads:
            raise ValueError(
                f"model.width must be a multiple of model.heads; got {self.model.width} and {self.model.heads}."
            )


def change(config: Config, changes: dict[str, str]) -> Config:
    """The config with other values, given as text under names like `optimisation.rate` or `seed`."""
    for name, text in changes.items():
        config = changed(config, name.split("."), text, name)
    return dataclasses.replace(config)  # checked now: on the way two changes that go together need not fit


def changed(holder: Any, path: list[str], text: str, name: str) -> Any:
    """A dataclass or dict with one value in it set from text."""
    if isinstance(holder, dict):
        return holder | {".".join(path): loose(text)}
    names = [field.name for field in dataclasses.fields(holder) if field.compare]
    if path[0] not in names:
        raise ValueError(f"{name}: there is no such option; {path[0]!r} is none of {', '.join(names)}.")
    held = getattr(holder, path[0])
    if dataclasses.is_dataclass(held) or isinstance(held, dict):
        if len(path) == 1:
            inner = ["anything"] if isinstance(held, dict) else [field.name for field in dataclasses.fields(held)]
            raise ValueError(f"{name} is a group of options; say which one: {name}.{inner[0]}, ...")
        value = changed(held, path[1:], text, name)
    elif len(path) > 1:
        raise ValueError(f"{name}: {path[0]} has no options of its own.")
    else:
        kind = typing.get_type_hints(type(holder))[path[0]]
        value = parsed(text, kind, name)
    found = copy.copy(holder)
    object.__setattr__(found, path[0], value)
    return found


def loose(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parsed(text: str, kind: Any, name: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        if typing.get_origin(kind) is tuple:
            first, second = text.split(",")
            return float(first), float(second)
        return kind(text)
    except (KeyError, ValueError):
        what = {bool: "yes or no", int: "a whole number", float: "a number"}.get(kind, "two numbers, like .9,.98")
        raise ValueError(f"{name} must be {what}; got {text!r}.") from None
