"""Data that needs no download: the documentation that Python carries with it, and scikit-learn's digits.

    embedded/prose    text                      for language models
    embedded/topics   sentence, label           which of four chapters 24 words come from (a new 24 every 8 words)
    embedded/halves   text1, text2, label       the same, with the 24 words cut in two
    embedded/pairs    text1, text2, label       1: the second has three quarters of the first's words, mixed
    embedded/passages text1, text2, label       the same, with 128 words: about 800 bytes
    embedded/digits   image, label              8 x 8 grey digits

Every set has the splits train, validation and test.
"""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from lln.lab.core.errors import DataError, need
from lln.lab.core.seeds import generator, permutation
from lln.lab.data.made_once import SPLITS, choose_split

PREFIX = "embedded/"
CLASSES, WORDS, STRIDE = 4, 24, 8
PASSAGE = 128  # words
PAIRS = {"train": 4000, "validation": 500, "test": 500}
RUN = 8  # consecutive paragraphs stay in one split, so that a sequence reads on


def make_columns(name: str, split: str) -> dict[str, list[Any]]:
    if name not in SETS:
        raise DataError(f"There is no embedded set {name!r}; there are: {', '.join(sorted(SETS))}.")
    if split not in SPLITS:
        raise DataError(f"{name} has no split {split!r}; there are: {', '.join(SPLITS)}.")
    return SETS[name](split)


def list_chapters() -> list[str]:
    """The names of the classes of embedded/topics: the chapters with the most text of their own."""
    sizes: dict[str, int] = {}
    for topic, text in list_paragraphs():
        sizes[topic] = sizes.get(topic, 0) + len(text)
    return sorted(sizes, key=lambda topic: (-sizes[topic], topic))[:CLASSES]


@cache
def list_paragraphs() -> tuple[tuple[str, str], ...]:
    """(topic, paragraph), each paragraph once: many topics are parts of longer ones."""
    from pydoc_data.topics import topics

    found: dict[str, str] = {}
    for topic in sorted(topics, key=lambda t: (-len(topics[t]), t)):
        for paragraph in topics[topic].split("\n\n"):
            if text := " ".join(paragraph.split()):
                found.setdefault(text, topic)
    return tuple((topic, text) for text, topic in found.items())


def _join_runs(split: str) -> list[tuple[str, list[str]]]:
    """(topic, words): the split's paragraphs, joined where they follow each other, so no paragraph is in two splits"""
    kept = [(i, *paragraph) for i, paragraph in enumerate(list_paragraphs()) if choose_split(i // RUN) == split]
    groups = itertools.groupby(enumerate(kept), key=lambda place: (place[1][1], place[1][0] - place[0]))
    return [(topic, [word for _, (*_, text) in group for word in text.split()]) for (topic, _), group in groups]


def _cut_runs(split: str, length: int, stride: int) -> list[tuple[str, str]]:
    """(topic, so many words), beginning every `stride` words of a run. Different paragraphs may share a sentence: what
    has the same half as something of an earlier split is left out."""
    earlier = [_cut_runs(other, length, stride) for other in SPLITS[: SPLITS.index(split)]]
    taken = {half for cuts in earlier for _, text in cuts for half in _halve(text)}
    found = []
    for topic, words in _join_runs(split):
        texts = (" ".join(words[at : at + length]) for at in range(0, len(words) - length + 1, stride))
        found += [(topic, text) for text in texts if taken.isdisjoint(_halve(text))]
    return found


def _halve(text: str) -> tuple[str, str]:
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


def _make_prose(split: str) -> dict[str, list[Any]]:
    return {"text": [text for i, (_, text) in enumerate(list_paragraphs()) if choose_split(i // RUN) == split]}


def _make_topics(split: str) -> dict[str, list[Any]]:
    names = list_chapters()
    found = [(text, names.index(topic)) for topic, text in _cut_runs(split, WORDS, STRIDE) if topic in names]
    order = permutation(len(found), "embedded/topics", split)
    return {"sentence": [found[i][0] for i in order], "label": [found[i][1] for i in order]}


def _make_halves(split: str) -> dict[str, list[Any]]:
    found = _make_topics(split)
    first, second = zip(*map(_halve, found["sentence"]), strict=True)
    return {"text1": list(first), "text2": list(second), "label": found["label"]}


def _make_pairs(split: str, name: str = "embedded/pairs", length: int = WORDS) -> dict[str, list[Any]]:
    draw = generator(name, split)
    passages = [text for _, text in _cut_runs(split, length, length)]
    found: dict[str, list[Any]] = {"text1": [], "text2": [], "label": []}
    for number in range(PAIRS[split]):
        first = int(draw.integers(len(passages)))
        other = (first + 1 + int(draw.integers(len(passages) - 1))) % len(passages)
        words = passages[first if number % 2 else other].split()
        kept = draw.permutation(length)[: length * 3 // 4]
        found["text1"].append(passages[first])
        found["text2"].append(" ".join(words[i] for i in kept))
        found["label"].append(number % 2)
    return found


def _make_digits(split: str) -> dict[str, list[Any]]:
    bunch = need("sklearn.datasets").load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8).reshape(len(bunch.images), -1)  # [n, 64]
    order = permutation(len(images), "embedded/digits")
    tenth = len(images) // 10
    chosen = {"train": order[2 * tenth :], "validation": order[:tenth], "test": order[tenth : 2 * tenth]}[split]
    return {"image": images[chosen].tolist(), "label": bunch.target[chosen].tolist()}


# How the columns of a split are made; the note that a result must carry is in data/known_sets.json.
SETS: dict[str, Callable[[str], dict[str, list[Any]]]] = {
    "embedded/prose": _make_prose,
    "embedded/topics": _make_topics,
    "embedded/halves": _make_halves,
    "embedded/pairs": _make_pairs,
    "embedded/passages": partial(_make_pairs, name="embedded/passages", length=PASSAGE),
    "embedded/digits": _make_digits,
}
