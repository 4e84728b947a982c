"""Data that needs no download: the documentation that Python carries with it, and scikit-learn's digits.

    embedded/prose    text                      for language models
    embedded/topics   sentence, label           which of four chapters 24 words come from (a new 24 every 8 words)
    embedded/pairs    text1, text2, label       1: both passages come from one chapter
    embedded/digits   image, label              8 x 8 grey digits

Every set has the splits train, validation and test.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np

from lln.training.errors import DataError, need
from lln.training.seeds import generator, permutation

PREFIX = "embedded/"
SPLITS = ("train", "validation", "test")
NOTES = {
    "embedded/prose": "Text: the help texts that come with this Python (pydoc_data.topics), without repetitions.",
    "embedded/topics": "Made from this Python's help texts: 24 words each, the label is the chapter. Not GLUE.",
    "embedded/pairs": "Made from this Python's help texts: 24 words each, label 1 = one chapter. Not GLUE, not AAN.",
    "embedded/digits": "scikit-learn's load_digits: 1,797 images of 8 x 8 pixels, the levels 0-16 stretched to 0-255.",
}
CLASSES, WORDS, STRIDE = 4, 24, 8
PAIRS = {"train": 4000, "validation": 500, "test": 500}
RUN = 8  # consecutive paragraphs stay in one split, so that a sequence reads on


def columns(name: str, split: str) -> tuple[dict[str, list[Any]], str]:
    """(columns, a hash of what they were made from: the help texts differ between versions of Python)"""
    if name not in NOTES:
        raise DataError(f"There is no embedded set {name!r}; there are: {', '.join(sorted(NOTES))}.")
    if split not in SPLITS:
        raise DataError(f"{name} has no split {split!r}; there are: {', '.join(SPLITS)}.")
    if name == "embedded/digits":
        return _digits(split)
    version = hashlib.sha256("\n\n".join(text for _, text in _paragraphs()).encode()).hexdigest()
    if name == "embedded/prose":
        chosen = [text for i, (_, text) in enumerate(_paragraphs()) if _split_of(i) == split]
        return {"text": chosen}, version
    if name == "embedded/topics":
        passages = _passages(split, STRIDE)
        return {"sentence": [text for text, _ in passages], "label": [label for _, label in passages]}, version
    return _pairs(_passages(split, WORDS), split), version  # passages that share no words


def chapters() -> list[str]:
    """The names of the classes of embedded/topics: the chapters with the most text of their own."""
    sizes: dict[str, int] = {}
    for topic, text in _paragraphs():
        sizes[topic] = sizes.get(topic, 0) + len(text)
    return sorted(sizes, key=lambda topic: (-sizes[topic], topic))[:CLASSES]


@cache
def _paragraphs() -> tuple[tuple[str, str], ...]:
    """(topic, paragraph), each paragraph once: many topics are parts of longer ones."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    found = []
    for topic in sorted(topics, key=lambda t: (-len(topics[t]), t)):
        for paragraph in topics[topic].split("\n\n"):
            text = " ".join(paragraph.split())
            if text and text not in seen:
                seen.add(text)
                found.append((topic, text))
    return tuple(found)


def _split_of(paragraph: int) -> str:
    return {8: "validation", 9: "test"}.get(paragraph // RUN % 10, "train")


def _passages(split: str, stride: int) -> list[tuple[str, int]]:
    """(words, chapter), cut from the split's own paragraphs, so no word of a passage is in two splits."""
    names = chapters()
    words: dict[str, list[list[str]]] = {name: [] for name in names}
    before: tuple[str, int] | None = None
    for i, (topic, text) in enumerate(_paragraphs()):
        if topic in words and _split_of(i) == split:
            if before == (topic, i - 1):
                words[topic][-1] += text.split()
            else:
                words[topic].append(text.split())
            before = (topic, i)
    found = [
        (" ".join(run[at : at + WORDS]), label)
        for label, name in enumerate(names)
        for run in words[name]
        for at in range(0, len(run) - WORDS + 1, stride)
    ]
    return [found[i] for i in permutation(len(found), "embedded/topics", split)]


def _pairs(passages: list[tuple[str, int]], split: str) -> dict[str, list[Any]]:
    draw = generator("embedded/pairs", split)
    by_label = [[text for text, label in passages if label == c] for c in range(CLASSES)]
    found: dict[str, list[Any]] = {"text1": [], "text2": [], "label": []}
    for i in range(PAIRS[split]):
        same = i % 2
        first = int(draw.integers(CLASSES))
        second = first if same else (first + 1 + int(draw.integers(CLASSES - 1))) % CLASSES
        a = int(draw.integers(len(by_label[first])))
        # Never a passage with itself, which would be told by its letters.
        b = (a + 1 + int(draw.integers(len(by_label[first]) - 1))) % len(by_label[first]) if same else None
        b = int(draw.integers(len(by_label[second]))) if b is None else b
        found["text1"].append(by_label[first][a])
        found["text2"].append(by_label[second][b])
        found["label"].append(same)
    return found


def _digits(split: str) -> tuple[dict[str, list[Any]], str]:
    bunch = need("sklearn.datasets").load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8).reshape(len(bunch.images), -1)  # [n, 64]
    version = hashlib.sha256(images.tobytes() + bunch.target.astype(np.int64).tobytes()).hexdigest()
    order = permutation(len(images), "embedded/digits")
    tenth = len(images) // 10
    parts = {"train": order[2 * tenth :], "validation": order[:tenth], "test": order[tenth : 2 * tenth]}
    chosen = parts[split]
    return {"image": list(images[chosen]), "label": [int(label) for label in bunch.target[chosen]]}, version
