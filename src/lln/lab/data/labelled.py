"""Sequences with a label, of stored sets: GLUE's sentences and pairs of them as tokens; of Long Range Arena texts and
pairs of documents as bytes, and images as grey pixels.

The generated tasks are in `listops` and `pathfinder`. Published lengths: Text 4000, ListOps 2000, Retrieval 4000 (each
document), Image 1024, Pathfinder 1024.
"""

from dataclasses import dataclass
from typing import Unpack

import numpy as np

from lln.lab.data import embedded
from lln.lab.data.examples import Sequences, choose_id_type, cut_evenly, flatten
from lln.lab.data.images import CIFAR10, load_images, to_grey
from lln.lab.data.made_once import build_arrays
from lln.lab.data.sources import KNOWN, Selection, read
from lln.lab.data.tokenizer import TextTokenizer
from lln.values import check_choice, check_count

GLUE, IMDB = "nyu-mll/glue", "stanfordnlp/imdb"
BYTE_VOCAB = 257  # a byte b is the token b + 1: 0 is padding


@dataclass(frozen=True)
class Task:
    name: str  # of the data set
    config: str | None
    columns: tuple[str, ...]  # one: sentences; two: pairs
    labels: tuple[str, ...]
    validation: tuple[str, ...] = ("validation",)  # what a model is scored on


def list_tasks() -> dict[str, Task]:
    found = {}
    for name in ("mnli", "qnli", "qqp", "sst2"):
        columns, labels, rows = KNOWN[f"{GLUE}/{name}"].values()
        scored = tuple(split for split in rows if split.startswith("validation"))
        found[name] = Task(GLUE, name, tuple(columns), tuple(labels), scored)
    chapters = tuple(embedded.list_chapters())
    return found | {
        "topics": Task("embedded/topics", None, ("sentence",), chapters),
        # Whether two texts belong together (embedded/pairs) takes longer to learn than a tiny model has.
        "pairs": Task("embedded/halves", None, ("text1", "text2"), chapters),
    }


def load_glue(
    task: str,
    split: str,
    tokenizer: TextTokenizer,
    *,
    length: int = 128,
    name: str | None = None,
    **selection: Unpack[Selection],
) -> Sequences:
    """Load a split of a task by its name in GLUE (mnli, qnli, qqp, sst2), or of an embedded task (topics, pairs).

    Splits are the Hub's: MNLI has validation_matched and validation_mismatched. Where the publisher keeps the labels
    (test), items have no `labels`. length: tokens at most, special ones included. name: another set with the same
    configurations and columns. selection: data_root, hold_out, limit and cache_dir, as in `read`.

    >>> import tempfile
    >>> from lln.lab.data.tokenizer import train_tokenizer
    >>> with tempfile.TemporaryDirectory() as cache:
    ...     tokenizer = train_tokenizer(read("embedded/prose", "test"), vocab_size=300, cache_dir=cache)
    ...     data = load_glue("topics", "test", tokenizer, length=16, limit=3, cache_dir=cache)
    >>> data.num_labels, [len(item["input_ids"]) for item in data]
    (4, [16, 16, 16])
    """
    known = list_tasks()
    check_choice("task", task, *known)
    if length < 8:
        raise ValueError(f"length must be at least 8, to leave room beside the special tokens; got {length}.")
    chosen = known[task]
    selection.setdefault("config", chosen.config)
    rows = read(name or chosen.name, split, **selection)
    hidden = split.startswith("test") and set(rows.column("label")) == {-1}
    identity = {"rows": rows.identity, "task": task, "tokenizer": tokenizer.identity, "length": length}

    def make() -> dict[str, np.ndarray]:
        encoded = tokenizer.encode_examples([rows.strings(column) for column in chosen.columns], length)
        return flatten(list(encoded), choose_id_type(tokenizer.vocab_size))

    arrays = build_arrays("glue", identity, make, rows.cache_dir)
    return Sequences(
        [(arrays["ids"], arrays["offsets"])],
        None if hidden else rows.labels("label", len(chosen.labels)),
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        length=length,
        label_names=list(chosen.labels),
        identity=identity,
        notes=rows.notes,
    )


def load_byte_text(split: str, *, name: str = IMDB, length: int = 4000, **selection: Unpack[Selection]) -> Sequences:
    """LRA Text: IMDB reviews as bytes, label 1 = positive; or `embedded/topics`. length: bytes at most, from the start.
    selection: data_root, hold_out and limit, as in `read`."""
    topics = name == "embedded/topics"
    names = embedded.list_chapters() if topics else ["negative", "positive"]
    return _load_bytes(name, split, ["sentence" if topics else "text"], names, length, selection)


def load_retrieval(
    split: str, *, name: str = "embedded/pairs", length: int = 4000, **selection: Unpack[Selection]
) -> Sequences:
    """LRA Retrieval: pairs of documents as bytes, label 1 = they belong together. A set with the columns text1, text2
    and label; the Hub has no official one. Items: `input_ids`, `pair_ids`, `labels`. Arguments as above."""
    return _load_bytes(name, split, ["text1", "text2"], ["apart", "together"], length, selection)


def load_pixels(
    split: str, *, name: str = CIFAR10, size: int | None = None, **selection: Unpack[Selection]
) -> Sequences:
    """LRA Image: the grey levels (0-255) of an image row by row as a sequence, 1024 tokens for CIFAR-10; also of
    `embedded/digits`, 64 tokens. Arguments as in `load_images`."""
    images = load_images(name, split, size=size, **selection)
    pixels = to_grey(images.pixels)  # [n, height, width]
    return Sequences(
        [cut_evenly(pixels)],
        images.labels,
        length=pixels[0].size,
        label_names=images.label_names,
        identity={**images.stored, "form": "grey pixels"},
        notes=images.notes,
    )


def _load_bytes(
    name: str, split: str, columns: list[str], label_names: list[str], length: int, selection: Selection
) -> Sequences:
    check_count("length", length)
    rows, parts = read(name, split, **selection), []
    for column in columns:
        texts = [np.frombuffer(text.encode()[:length], np.uint8) for text in rows.strings(column)]
        found = flatten(texts, np.uint16)
        parts.append((found["ids"] + np.uint16(1), found["offsets"]))
    return Sequences(
        parts,
        rows.labels("label", len(label_names)),
        vocab_size=BYTE_VOCAB,
        length=length,
        label_names=label_names,
        identity={"rows": rows.identity, "columns": columns, "length": length, "form": "bytes"},
        notes=rows.notes,
    )
