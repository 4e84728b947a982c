"""What a training run is asked to do, completely: plain values that are printed, stored and compared."""

import copy
import dataclasses
import json
import typing
from pathlib import Path
from typing import Annotated, Any

from lln.lab.core.limits import LAST_SEED, LONGEST, MOST, STEPS
from lln.lab.core.ranges import OneOf, Range, check_ranges
from lln.lab.data.embedded import PREFIX as EMBEDDED
from lln.peers import mechanisms
from lln.rules import suggest

TASKS = ("mlm", "glue", "image", "lra", "needles")
PRECISIONS, SCHEDULES = ("float32", "bfloat16", "float16"), ("linear", "cosine", "constant")
LEARNED, SINUSOIDAL, NONE = POSITIONS = ("learned", "sinusoidal", "none")
BY_WIDTH, OF_ARCHITECTURE, OF_TORCH = INITIALISATIONS = ("width", "architecture", "torch")
# What the tasks had before there was a choice; the others the architecture's.
INITIALISED = {"lra": BY_WIDTH, "needles": BY_WIDTH}
BLOCK_SIZE = 64  # of kernels with blocks, where a preset says nothing
TOKENISED = ("mlm", "glue", "needles")  # tasks that are read by a tokenizer
# Options that other tasks would pass over in silence.
ONLY = {"model.patch": ("image",), "model.pre_norm": TOKENISED, "data.vocabulary": TOKENISED}

# Ranges that several options have.
Steps = Annotated[int, Range(least=1, most=STEPS)]
StepsOrNever = Annotated[int, Range(most=STEPS)]
Share = Annotated[float, Range(most=1)]
Positive = Annotated[float, Range(positive=True)]
NotNegative = Annotated[float, Range()]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The attention of a model, and its options.

    Args:
        name: "softmax", or any attn_implementation of `lln.hf`.
        options: its options, as `config.lln` holds them (see `lln.hf.Options`): matching, statistics, ...
        preset: the options that the recipe's preset has for LLN+Diag; those of them that a label need not say.

    Examples:
        >>> Attention("lln_diag", {"block_size": 32, "matching": "entropy"}, preset={"block_size": 32}).label
        'lln_diag:matching=entropy'
    """

    name: str = "lln_diag"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    preset: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def label(self) -> str:
        """As tables show it and `--attentions` reads it: with those options that are not the preset's own."""
        shown, with_blocks = self.name, f"{self.name.removesuffix('_diag')}_diag"
        usual, blocks = (choose_attention(name, self.preset) for name in (shown, with_blocks))
        if blocks.name == shown and blocks.options.get("block_size") == self.options.get("block_size"):
            shown, usual = with_blocks, blocks  # elu with blocks is elu_diag
        own = {k: v for k, v in sorted(self.options.items()) if usual.options.get(k) != v}
        return ":".join([shown, *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in own.items())])


def need(*rules: tuple[bool, str]) -> None:
    """ValueError with the sentence of the first rule that does not hold."""
    for holds, sentence in rules:
        if not holds:
            raise ValueError(sentence)


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
    """The sizes of a model and its first weights.

    Args:
        layers, width, heads: how many layers and heads, and channels of the hidden states.
        inner: width of the feed-forward layers.
        pre_norm: whether the norms come before attention and feed-forward rather than after them.
        dropout, attention_dropout: of the hidden states, and of P.
        patch: pixels along the side of a patch, of images.
        initialisation: how the first weights are drawn: "width": with a standard deviation of 1 / sqrt(width), so that
            queries and keys begin with a spread near 1; "architecture": as transformers does, .02 as a rule, with which
            attention begins flat in models that are not wide; "torch": linear layers and convolutions as torch makes
            them. "": what the task had before there was a choice.
        initial: standard deviation of the first weights, in the place of the rule's; 0: the rule's own.
        positions: "learned" or, of language models, "sinusoidal" or "none".
        start: folder with a trained model to begin from, for fine-tuning.
        untrained: of a control: the sizes and the tokenizer of the model in `start`, and new weights.

    Examples:
        >>> Model(layers=2, width=64, heads=2, inner=128).positions
        'learned'
    """

    layers: Annotated[int, Range(least=1, most=1000)]
    width: Annotated[int, Range(least=1, most=2**16)]
    heads: Annotated[int, Range(least=1, most=2**12)]
    inner: Annotated[int, Range(least=1, most=MOST)]
    pre_norm: bool = False
    dropout: Share = 0.1
    attention_dropout: Share = 0.1
    patch: Annotated[int, Range(most=2**12)] = 0
    initial: NotNegative = 0.0
    initialisation: Annotated[str, OneOf(("", *INITIALISATIONS))] = ""
    positions: Annotated[str, OneOf(POSITIONS)] = LEARNED
    start: str = ""
    untrained: bool = False


@dataclasses.dataclass(frozen=True)
class Data:
    """The data that a model is trained and evaluated on.

    Args:
        name: a Hub id, "embedded/..." for a set that needs no download, or "generated".
        subset: the configuration of a set, or the task of GLUE or Long Range Arena.
        length: tokens of a sequence, or pixels along the side of an image.
        vocabulary: tokens of a tokenizer that is trained on the data.
        train, evaluation: examples used, 0 for all.
        windows: of language models: train on pieces of the text from random places on, each epoch others, rather than
            on the same ones, whose edges and blocks always fall on the same tokens.
        options: of sets that are generated: how hard they are.

    Examples:
        >>> Data("embedded/prose", length=64, vocabulary=1024).train
        0
    """

    name: str
    subset: str = ""
    length: Annotated[int, Range(most=LONGEST)] = 0
    vocabulary: Annotated[int, Range(most=MOST)] = 0
    train: StepsOrNever = 0
    evaluation: StepsOrNever = 0
    windows: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optimisation:
    """The settings of AdamW, which trains the weights.

    Args:
        steps: updates of the weights.
        batch: examples an update, over all processes.
        rate: the highest learning rate.
        warmup: steps over which the rate rises to it.
        schedule: of the rate after the warm-up: "linear", "cosine" or "constant".
        decay: of the weights; gains, offsets and the like have none.
        betas, epsilon: AdamW's.
        clip: largest norm of the gradient, 0 for none.
        accumulation: forward passes an update; `batch` counts all of them.

    Examples:
        >>> Optimisation(steps=100, batch=32, rate=1e-3).schedule
        'linear'
    """

    steps: Steps
    batch: Annotated[int, Range(least=1, most=MOST)]
    rate: Positive
    warmup: StepsOrNever = 0
    schedule: Annotated[str, OneOf(SCHEDULES)] = "linear"
    decay: NotNegative = 0.01
    betas: Annotated[tuple[float, float], Range(below=1)] = (0.9, 0.98)
    epsilon: Positive = 1e-6
    clip: NotNegative = 0.0
    accumulation: Annotated[int, Range(least=1, most=MOST)] = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a training run. Settings that contradict each other are a ValueError with one sentence.

    >>> config = Config(
    ...     task="image", preset="mine", attention=Attention("lln"), data=Data("embedded/digits", length=8),
    ...     model=Model(layers=1, width=16, heads=2, inner=32, patch=2),
    ...     optimisation=Optimisation(steps=10, batch=4, rate=1e-3),
    ... )
    >>> config.attention.label, config.to_dict()["optimisation"]["schedule"]
    ('lln', 'linear')
    """

    task: Annotated[str, OneOf(TASKS)]
    preset: str
    attention: Attention
    model: Model
    data: Data
    optimisation: Optimisation
    seed: Annotated[int, Range(most=LAST_SEED)] = 0
    precision: Annotated[str, OneOf(PRECISIONS)] = "float32"  # or "bfloat16", "float16": autocast
    checkpointing: bool = False  # activations computed again in the backward pass
    compile: bool = False  # with torch.compile; in a graph, its layers
    graph: bool = False  # the whole step as one CUDA graph
    fsdp: bool = False  # weights, gradients and moments spread over the processes
    log_every: Steps = 10
    evaluate_every: Steps = 100
    save_every: Steps = 100
    record_every: StepsOrNever = 0  # temperature, entropy and so on of every layer; 0 for never

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        del found["attention"]["preset"]
        # Left out: runs from before there was a choice are the same runs.
        usual: dict[str, tuple[Any, ...]] = {"positions": (LEARNED,), "initial": (0.0,), "untrained": (False,)}
        usual["initialisation"] = ("", INITIALISED.get(self.task, OF_ARCHITECTURE))
        for part, known in (("model", usual), ("data", {"windows": (False,)})):
            for name, values in known.items():
                if found[part][name] in values:
                    del found[part][name]
        return found

    def __post_init__(self) -> None:
        check_ranges(self)
        o, m = self.optimisation, self.model
        need(
            (  # a mean over steps on both sides of a checkpoint would differ after going on from it
                self.save_every % self.log_every == 0,
                f"save_every must be a multiple of log_every; got {self.save_every} and {self.log_every}.",
            ),
            (
                not (self.compile and self.record_every) or self.graph,
                "record_every must be 0 with compile: a compiled model shows nothing of its inside; or use graph=yes, "
                "which records in steps that are not compiled.",
            ),
            (
                o.batch % o.accumulation == 0,
                "optimisation.batch must be a multiple of optimisation.accumulation; got "
                f"{o.batch} and {o.accumulation}.",
            ),
            (
                self.task != "image" or (m.patch > 0 and self.data.length % m.patch == 0),
                f"model.patch must divide data.length; got {m.patch} and {self.data.length}.",
            ),
            (
                not (self.data.windows and self.task != "mlm"),
                f"data.windows goes with mlm, whose text has no places of its own; got it with {self.task}.",
            ),
            (
                not m.untrained or m.start != "",
                "model.untrained needs model.start: it takes the sizes and the tokenizer of that model, not its "
                "weights.",
            ),
            (
                m.positions == LEARNED or self.task not in ("image", "lra"),
                f"model.positions must be learned in models of {self.task}; got {m.positions!r}.",
            ),
            (m.width % m.heads == 0, f"model.width must be a multiple of model.heads; got {m.width} and {m.heads}."),
        )


def change(config: Config, changes: dict[str, str]) -> Config:
    """Return the config with other values, which are given as text under names like `optimisation.rate` or `seed`.

    >>> from lln.lab.recipes import recipe
    >>> small = change(recipe("mlm"), {"optimisation.betas": ".9,.95", "attention.options.matching": "entropy"})
    >>> small.optimisation.betas, small.attention.options
    ((0.9, 0.95), {'block_size': 32, 'matching': 'entropy'})
    >>> change(recipe("mlm"), {"optimisation.steps": "many"})
    Traceback (most recent call last):
    ValueError: optimisation.steps must be a whole number; got 'many'.
    """
    for name, text in changes.items():
        if name in ("task", "preset"):
            raise ValueError(f"{name} cannot be set: it says which recipe this is, and is named before its options.")
        if name in ONLY and config.task not in ONLY[name]:
            raise ValueError(f"{name} goes with {', '.join(ONLY[name])}, not with {config.task}; got {text!r}.")
        given = str(find_home(name, text)) if name == "model.start" else text
        config = set_option(config, name.split("."), given, name)
    if changes.get("data.subset") and config.data.name.startswith(EMBEDDED) and config.task not in ("glue", "lra"):
        raise ValueError(f"data.subset: {config.data.name} is one set and has no others; got {config.data.subset!r}.")
    return dataclasses.replace(config)  # checked now: on the way two changes that go together need not fit


def find_home(name: str, text: str) -> Path:
    """A path where ~ is the home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{name}: there is no such home folder; got {text!r}.") from None


def set_option(holder: Any, path: list[str], text: str, name: str) -> Any:
    """A dataclass or dict with one value in it set from text."""
    if isinstance(holder, dict):
        return holder | {".".join(path): parse_json(text)}
    first, *rest = path
    names = [field.name for field in dataclasses.fields(holder) if field.compare]
    if first not in names:
        hint = suggest(first, names)
        raise ValueError(f"{name}: there is no such option; {first!r} is none of {', '.join(names)}.{hint}")
    held = getattr(holder, first)
    group = isinstance(held, dict) or dataclasses.is_dataclass(held)
    if group and not rest:
        inner = "anything" if isinstance(held, dict) else dataclasses.fields(held)[0].name
        raise ValueError(f"{name} is a group of options; say which one: {name}.{inner}, ...")
    if rest and not group:
        raise ValueError(f"{name}: {first} has no options of its own.")
    found = copy.copy(holder)
    kind = typing.get_type_hints(type(holder))[first]
    object.__setattr__(found, first, set_option(held, rest, text, name) if rest else parse_text(text, kind, name))
    return found


def parse_json(text: str) -> Any:
    """What the text is as JSON, and where it is none, the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_text(text: str, kind: Any, name: str) -> Any:
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
