"""Long Range Arena's tasks on stored data: bytes of texts, bytes of pairs of documents, grey pixels.

The generated tasks are in `listops` and `pathfinder`. Published lengths: Text 4000, ListOps 2000, Retrieval 4000 (each
document), Image 1024, Pathfinder 1024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from lln.lab.data import embedded
from lln.lab.data.examples import Sequences, cut_evenly, flatten
from lln.lab.data.images import CIFAR10, load_images, to_grey
from lln.lab.data.made_once import Place
from lln.lab.data.sources import Selection, read

IMDB = "stanfordnlp/imdb"
BYTE_VOCAB = 257  # a byte b is the token b + 1: 0 is padding


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
    split: str,
    *,
    name: str = CIFAR10,
    size: int | None = None,
    cache_dir: Place = None,
    **selection: Unpack[Selection],
) -> Sequences:
    """LRA Image: the grey levels (0-255) of an image row by row as a sequence, 1024 tokens for CIFAR-10; also of
    `embedded/digits`, 64 tokens. Arguments as in `load_images`."""
    images = load_images(name, split, size=size, cache_dir=cache_dir, **selection)
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
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}.")
    rows = read(name, split, **selection)
    return Sequences(
        [encode_bytes(rows.strings(column), length) for column in columns],
        rows.labels("label", len(label_names)),
        vocab_size=BYTE_VOCAB,
        length=length,
        label_names=label_names,
        identity={"rows": rows.identity, "columns": columns, "length": length, "form": "bytes"},
        notes=rows.notes,
    )


def encode_bytes(texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] uint16, offsets [rows + 1]): the first `length` bytes of each text in UTF-8"""
    found = flatten([np.frombuffer(text.encode()[:length], np.uint8) for text in texts], np.uint16)
    return found["ids"] + np.uint16(1), found["offsets"]
