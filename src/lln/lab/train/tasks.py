"""The data of a config: what to train on, what to evaluate on, and what a guess would score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from lln.lab.data.examples import Examples, Pad
from lln.lab.data.glue import list_tasks, load_glue
from lln.lab.data.images import load_images
from lln.lab.data.listops import Grammar, load_listops
from lln.lab.data.lra import load_byte_text, load_pixels, load_retrieval
from lln.lab.data.made_once import Place
from lln.lab.data.masking import Masking
from lln.lab.data.needles import Needles, Planting, load_needles
from lln.lab.data.pathfinder import DIFFICULTY, Scene, load_pathfinder
from lln.lab.data.sources import list_splits, read
from lln.lab.data.text import load_text
from lln.lab.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from lln.lab.train.config import Config
from lln.lab.train.models import Sizes, read_start

Collate = Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
HOLD_OUT = 0.1  # of the training split, for sets without a validation split
GENERATED = {"train": 96_000, "validation": 2_000, "test": 2_000}  # examples of ListOps and Pathfinder
NEEDLES = {"train": 2**16, "validation": 256}  # sequences; each epoch draws new ones


@dataclasses.dataclass(frozen=True)
class TaskData:
    train: Examples
    evaluations: dict[str, Examples]  # the first is the one that counts
    collate: Collate
    sizes: Sizes
    guess: dict[str, float]  # what a model scores that looks at nothing: a loss, or an accuracy
    tokenizer: TextTokenizer | None = None
    guessed: float | None = None  # of language models: the share of tokens that are to be guessed

    @property
    def notes(self) -> list[str]:
        """What a result must say about its data, each sentence once."""
        return list(dict.fromkeys(note for part in (self.train, *self.evaluations.values()) for note in part.notes))

    @property
    def identity(self) -> dict[str, str]:
        parts = {"train": self.train, **self.evaluations}
        return {name: part.fingerprint for name, part in parts.items()}


def load(config: Config, data_root: Place = None, cache_dir: Place = None) -> TaskData:
    return {"mlm": mlm, "glue": glue, "image": image, "lra": lra, "needles": needles}[config.task](
        config, data_root, cache_dir
    )


def limits(config: Config) -> dict[str, int | None]:
    """How many examples of each split are used."""
    d = config.data
    return {"train": d.train or None, "validation": d.evaluation or None, "test": d.evaluation or None}


def pieces(name: str, subset: str | None, data_root: Place) -> tuple[str, float]:
    """(the split that is evaluated on, the share of `train` that is held out where there is none)"""
    known = list_splits(name, config=subset, data_root=data_root)
    for split in ("validation", "test"):
        if split in known:
            return split, 0.0
    return "validation", HOLD_OUT


def tokenizer_of(config: Config, name: str, subset: str | None, data_root: Place, cache_dir: Place) -> TextTokenizer:
    """The one that `model.start` was trained with; else one trained on this data."""
    if config.model.start:
        read_start(config.model.start)
        return load_tokenizer(config.model.start)
    known = list_splits(name, config=subset, data_root=data_root)
    source = read(name, "train" if "train" in known else known[0], config=subset, data_root=data_root)
    column = next(c for c in ("text", "sentence", *source.columns) if c in source.columns)
    return train_tokenizer(source, column, vocab_size=config.data.vocabulary, cache_dir=cache_dir)


def mlm(config: Config, data_root: Place, cache_dir: Place) -> TaskData:
    d, subset = config.data, config.data.subset or None
    tokenizer = tokenizer_of(config, d.name, subset, data_root, cache_dir)
    split, hold_out = pieces(d.name, subset, data_root)
    most = limits(config)

    def part(which: str) -> Any:
        return load_text(
            d.name, which, tokenizer, length=d.length, config=subset, masking=Masking(**d.options), seed=config.seed,
            data_root=data_root, hold_out=hold_out, limit=most[which], cache_dir=cache_dir,
        )  # fmt: skip

    train, evaluation = part("train"), part(split)
    sizes = Sizes(vocabulary=tokenizer.vocab_size, padding=tokenizer.pad_id)
    guess = {"loss": evaluation.unigram_entropy()}
    return TaskData(train, {split: evaluation}, default_collate, sizes, guess, tokenizer, train.masking.probability)


def needles(config: Config, data_root: Place, cache_dir: Place) -> TaskData:
    d, subset = config.data, config.data.subset or None
    tokenizer = tokenizer_of(config, d.name, subset, data_root, cache_dir)
    split, hold_out = pieces(d.name, subset, data_root)
    counts = {"train": d.train or NEEDLES["train"], split: d.evaluation or NEEDLES["validation"]}

    def part(which: str) -> Needles:
        return load_needles(
            d.name, which, tokenizer, length=d.length, count=counts[which], planting=Planting.from_options(d.options),
            seed=config.seed, config=subset, data_root=data_root, hold_out=hold_out, cache_dir=cache_dir,
        )  # fmt: skip

    train, evaluation = part("train"), part(split)
    sizes = Sizes(vocabulary=train.vocab_size, padding=tokenizer.pad_id)
    guess = {"accuracy": 1 / train.planting.values, "loss": math.log(train.planting.values)}
    share = train.questions / d.length
    return TaskData(train, {split: evaluation}, default_collate, sizes, guess, tokenizer, share)


def glue(config: Config, data_root: Place, cache_dir: Place) -> TaskData:
    d = config.data
    task = list_tasks()[d.subset]
    tokenizer = tokenizer_of(config, task.name, task.config, data_root, cache_dir)
    most = limits(config)

    def part(which: str) -> Any:
        return load_glue(
            d.subset, which, tokenizer, length=d.length, data_root=data_root,
            limit=most[which.partition("_")[0]], cache_dir=cache_dir,
        )  # fmt: skip

    train = part("train")
    known = list_splits(task.name, config=task.config, data_root=data_root)  # a mirror may have one of MNLI's two
    evaluations = {w: part(w) for w in task.validation if w in known or w == task.validation[0]}
    sizes = Sizes(vocabulary=tokenizer.vocab_size, labels=train.num_labels, padding=tokenizer.pad_id)
    first = next(iter(evaluations.values()))
    return TaskData(
        train,
        evaluations,
        Pad(tokenizer.pad_id, length=d.length if config.graph else None),
        sizes,
        {"accuracy": first.majority},
        tokenizer,
    )


def image(config: Config, data_root: Place, cache_dir: Place) -> TaskData:
    d = config.data
    split, hold_out = pieces(d.name, d.subset or None, data_root)
    most = limits(config)

    def part(which: str) -> Any:
        augment = which == "train" and bool(d.options.get("augment", False))
        return load_images(
            d.name, which, size=d.length, config=d.subset or None, augment=augment, seed=config.seed,
            data_root=data_root, hold_out=hold_out, limit=most[which], cache_dir=cache_dir,
        )  # fmt: skip

    train, evaluation = part("train"), part(split)
    sizes = Sizes(labels=train.num_labels, channels=train.pixels.shape[-1])
    return TaskData(train, {split: evaluation}, default_collate, sizes, {"accuracy": evaluation.majority})


def lra(config: Config, data_root: Place, cache_dir: Place) -> TaskData:
    d = config.data
    most = limits(config)
    make = {"listops": listops, "pathfinder": pathfinder, "text": text, "retrieval": retrieval, "image": pixels}
    loader, split = make[d.subset](config, data_root, cache_dir)
    train, evaluation = loader("train", most["train"]), loader(split, most[split])
    length = train.length if config.graph else None
    sizes = Sizes(
        vocabulary=train.vocab_size, labels=train.num_labels, padding=train.pad_id, pair=len(train.parts) == 2
    )
    return TaskData(
        train, {split: evaluation}, Pad(train.pad_id, length=length), sizes, {"accuracy": evaluation.majority}
    )


Loader = Callable[[str, int | None], Any]


def listops(config: Config, data_root: Place, cache_dir: Place) -> tuple[Loader, str]:
    d = config.data
    grammar = Grammar(**({"min_length": max(d.length // 4, 4), "max_length": d.length} | d.options))
    return (
        lambda which, most: load_listops(
            which, count=most or GENERATED[which], grammar=grammar, seed=config.seed, cache_dir=cache_dir
        ),
        "validation",
    )


def pathfinder(config: Config, data_root: Place, cache_dir: Place) -> tuple[Loader, str]:
    d = config.data
    side = round(d.length**0.5)
    if side * side != d.length:
        raise ValueError(f"data.length of Pathfinder is a number of pixels, a square; got {d.length}.")
    options = dict(d.options)
    scene: Scene = dataclasses.replace(DIFFICULTY[options.pop("difficulty", "hard")], **({"size": side} | options))
    return (
        lambda which, most: load_pathfinder(
            which, count=most or GENERATED[which], scene=scene, seed=config.seed, cache_dir=cache_dir
        ),
        "validation",
    )


def of_a_set(config: Config, data_root: Place, load: Callable[..., Any], **options: Any) -> tuple[Loader, str]:
    """Sequences made of a stored set."""
    name = config.data.name
    split, hold_out = pieces(name, None, data_root)
    return (
        lambda which, most: load(which, name=name, data_root=data_root, hold_out=hold_out, limit=most, **options),
        split,
    )


def text(config: Config, data_root: Place, cache_dir: Place) -> tuple[Loader, str]:
    return of_a_set(config, data_root, load_byte_text, length=config.data.length)


def retrieval(config: Config, data_root: Place, cache_dir: Place) -> tuple[Loader, str]:
    return of_a_set(config, data_root, load_retrieval, length=config.data.length)


def pixels(config: Config, data_root: Place, cache_dir: Place) -> tuple[Loader, str]:
    return of_a_set(config, data_root, load_pixels, size=round(config.data.length**0.5), cache_dir=cache_dir)
