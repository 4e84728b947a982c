"""The data of a config: what to train on, what to evaluate on, and what a guess would score."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from lln.lab.data.examples import Examples
from lln.lab.data.images import load_images
from lln.lab.data.labelled import list_tasks, load_byte_text, load_glue, load_pixels, load_retrieval
from lln.lab.data.listops import Grammar, load_listops
from lln.lab.data.made_once import Place
from lln.lab.data.needles import Planting, load_needles
from lln.lab.data.pathfinder import DIFFICULTY, load_pathfinder
from lln.lab.data.sources import list_splits, read
from lln.lab.data.text import Masking, load_text
from lln.lab.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from lln.lab.train.config import Config
from lln.lab.train.models import Sizes, read_start
from lln.lab.train.objective import Guesses, NeedleGuesses, Objective

Parts = tuple[Any, dict[str, Any], Any]  # examples to train on, by split those to evaluate on, and the first of these
HOLD_OUT = 0.1  # of the training split, for sets without a validation split
GENERATED = {"train": 96_000, "validation": 2_000, "test": 2_000}  # examples of ListOps and Pathfinder
NEEDLES = {"train": 2**16, "validation": 256, "test": 256}  # sequences; each epoch draws new ones


@dataclasses.dataclass(frozen=True)
class TaskData:
    train: Examples
    evaluations: dict[str, Examples]  # the first is the one that counts
    sizes: Sizes
    guess: dict[str, float]  # what a model scores that looks at nothing: a loss, or an accuracy
    tokenizer: TextTokenizer | None = None
    make_objective: Callable[[Any], Objective] = lambda model: Objective()

    @property
    def notes(self) -> list[str]:
        """What a result must say about its data, each sentence once."""
        return list(dict.fromkeys(note for part in (self.train, *self.evaluations.values()) for note in part.notes))

    @property
    def identity(self) -> dict[str, str]:
        parts = {"train": self.train, **self.evaluations}
        return {name: part.fingerprint for name, part in parts.items()}


def load(config: Config, data_root: Place = None, cache_dir: Place = None) -> TaskData:
    tasks = {"mlm": load_mlm, "glue": load_sentences, "image": load_pictures, "lra": load_lra, "needles": load_planted}
    return tasks[config.task](Sets(config, config.data.name, config.data.subset or None, data_root, cache_dir))


@dataclasses.dataclass(frozen=True)
class Sets:
    """What a config is trained and evaluated on, split by split."""

    config: Config
    name: str
    subset: str | None
    data_root: Place
    cache_dir: Place

    @property
    def drawn(self) -> dict[str, Any]:
        """What sets of which examples are drawn anew ask for."""
        return {"seed": self.config.seed, "config": self.subset}

    def list_splits(self) -> list[str]:
        return list_splits(self.name, config=self.subset, data_root=self.data_root)

    def find_tokenizer(self) -> TextTokenizer:
        """The one that `model.start` was trained with; else one trained on this data."""
        if start := self.config.model.start:
            read_start(start)
            return load_tokenizer(start)
        known = self.list_splits()
        split = "train" if "train" in known else known[0]
        source = read(self.name, split, config=self.subset, data_root=self.data_root)
        column = next(c for c in ("text", "sentence", *source.columns) if c in source.columns)
        return train_tokenizer(source, column, vocab_size=self.config.data.vocabulary, cache_dir=self.cache_dir)

    def read(self, load: Callable[..., Any], counts: dict[str, int] | None = None, **options: Any) -> Parts:
        """`make` of a stored set. Where it has no split to evaluate on, a part of `train` is held out."""
        known = self.list_splits()
        split = next((name for name in ("validation", "test") if name in known), None)
        stored = {"name": self.name, "data_root": self.data_root, "hold_out": 0.0 if split else HOLD_OUT}
        return self.make(load, [split or "validation"], counts, **stored, **options)

    def make(
        self, load: Callable[..., Any], splits: list[str], counts: dict[str, int] | None = None, **options: Any
    ) -> Parts:
        """(train, {split: evaluation}, the first evaluation) by a function that makes one split. counts: of sets that
        are as large as one likes, how many examples they have where the config says nothing."""
        found, d = {}, self.config.data
        for split in ("train", *splits):
            most = (d.train if split == "train" else d.evaluation) or None
            amount = {"limit": most} if counts is None else {"count": most or counts[split]}
            found[split] = load(split=split, cache_dir=self.cache_dir, **amount, **options)
        return found.pop("train"), found, found[splits[0]]


def load_mlm(sets: Sets) -> TaskData:
    d, tokenizer = sets.config.data, sets.find_tokenizer()
    masking = Masking(**d.options)
    train, held, first = sets.read(load_text, tokenizer=tokenizer, length=d.length, masking=masking, **sets.drawn)
    if d.windows:
        train = dataclasses.replace(train, tokens=train.placed.tokens, windows=True)
    sizes, guess = Sizes(tokenizer.vocab_size, padding=tokenizer.pad_id), {"loss": first.unigram_entropy()}
    return TaskData(train, held, sizes, guess, tokenizer, lambda model: Guesses(model.lm_head, masking.probability))


def load_planted(sets: Sets) -> TaskData:
    d, tokenizer = sets.config.data, sets.find_tokenizer()
    planting = Planting.from_options(d.options)
    given = {"tokenizer": tokenizer, "length": d.length, "planting": planting, **sets.drawn}
    train, held, first = sets.read(load_needles, NEEDLES, **given)
    sizes = Sizes(train.vocab_size, padding=tokenizer.pad_id)
    guess = {"accuracy": 1 / planting.values, "loss": math.log(planting.values)}

    def make_objective(model: Any) -> Objective:
        return NeedleGuesses(model.lm_head, train.questions / d.length, first.measure_distances())

    return TaskData(train, held, sizes, guess, tokenizer, make_objective)


def load_sentences(sets: Sets) -> TaskData:
    d, task = sets.config.data, list_tasks()[sets.config.data.subset]
    sets = dataclasses.replace(sets, name=task.name, subset=task.config)
    tokenizer, known = sets.find_tokenizer(), sets.list_splits()
    first, *others = task.validation
    splits = [first, *(split for split in others if split in known)]  # a mirror may have one of MNLI's two
    made = sets.make(load_glue, splits, task=d.subset, tokenizer=tokenizer, length=d.length, data_root=sets.data_root)
    return classify_sequences(made, sets.config, tokenizer)


def load_pictures(sets: Sets) -> TaskData:
    d = sets.config.data
    train, held, first = sets.read(load_images, size=d.length, **sets.drawn)
    if d.options.get("augment", False):
        train = dataclasses.replace(train, augment=True)
    sizes = Sizes(labels=train.num_labels, channels=train.pixels.shape[-1])
    return TaskData(train, held, sizes, {"accuracy": first.majority})


def load_lra(sets: Sets) -> TaskData:
    sets = dataclasses.replace(sets, subset=None)
    d, side, seed = sets.config.data, round(sets.config.data.length**0.5), sets.config.seed
    if d.subset == "listops":
        grammar = Grammar(**({"min_length": max(d.length // 4, 4), "max_length": d.length} | d.options))
        made = sets.make(load_listops, ["validation"], GENERATED, grammar=grammar, seed=seed)
    elif d.subset == "pathfinder":
        if side * side != d.length:
            raise ValueError(f"data.length of Pathfinder is a number of pixels, a square; got {d.length}.")
        options = {"size": side, "difficulty": "hard"} | d.options
        scene = dataclasses.replace(DIFFICULTY[options.pop("difficulty")], **options)
        made = sets.make(load_pathfinder, ["validation"], GENERATED, scene=scene, seed=seed)
    elif d.subset == "image":
        made = sets.read(load_pixels, size=side)
    else:
        made = sets.read({"text": load_byte_text, "retrieval": load_retrieval}[d.subset], length=d.length)
    return classify_sequences(made, sets.config)


def classify_sequences(made: Parts, config: Config, tokenizer: TextTokenizer | None = None) -> TaskData:
    train, held, first = made
    for part in (train, *held.values()):
        part.fixed = config.graph  # one graph is one shape
    sizes = Sizes(train.vocab_size, train.num_labels, padding=train.pad_id, pair=len(train.parts) == 2)
    return TaskData(train, held, sizes, {"accuracy": first.majority}, tokenizer)
