"""Long Range Arena's tasks on stored data: bytes of texts, bytes of pairs of documents, grey pixels.

The generated tasks are in `listops` and `pathfinder`. Published lengths: Text 4000, ListOps 2000, Retrieval 4000 (each
document), Image 1024, Pathfinder 1024.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from lln.lab.data import embedded
from lln.lab.data.examples import Sequences, flatten
from lln.lab.data.images import CIFAR10, decode, grey, image_labels
from lln.lab.data.sources import Rows, read

IMDB = "stanfordnlp/imdb"
BYTE_PAD, BYTE_VOCAB = 0, 257  # a byte b is the token b + 1


def byte_ids(texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [total] uint16, offsets [rows + 1]): the first `length` bytes of each text in UTF-8"""
    rows = [np.frombuffer(text.encode()[:length], np.uint8) for text in texts]
    flat, offsets = flatten(rows, np.uint16)
    return flat + np.uint16(1), offsets


def load_byte_text(
    split: str,
    *,
    name: str = IMDB,
    length: int = 4000,
    data_root: str | os.PathLike[str] | None = None,
    hold_out: float = 0.0,
    limit: int | None = None,
) -> Sequences:
    """LRA Text: IMDB reviews as bytes, label 1 = positive; or `embedded/topics`. Options as in `read`."""
    rows = read(name, split, data_root=data_root, hold_out=hold_out, limit=limit)
    names = embedded.chapters() if name == "embedded/topics" else ["negative", "positive"]
    column = "sentence" if name == "embedded/topics" else "text"
    return _byte_sequences(rows, [column], names, length)


def load_retrieval(
    split: str,
    *,
    name: str = "embedded/pairs",
    length: int = 4000,
    data_root: str | os.PathLike[str] | None = None,
    hold_out: float = 0.0,
    limit: int | None = None,
) -> Sequences:
    """LRA Retrieval: pairs of documents as bytes, label 1 = they belong together. A set with the columns text1, text2
    and label; the Hub has no official one. Items: `input_ids`, `pair_ids`, `labels`."""
    rows = read(name, split, data_root=data_root, hold_out=hold_out, limit=limit)
    return _byte_sequences(rows, ["text1", "text2"], ["apart", "together"], length)


def load_pixels(
    split: str,
    *,
    name: str = CIFAR10,
    size: int | None = None,
    data_root: str | os.PathLike[str] | None = None,
    hold_out: float = 0.0,
    limit: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Sequences:
    """LRA Image: the grey levels (0-255) of an image row by row as a sequence, 1024 tokens for CIFAR-10; also of
    `embedded/digits`, 64 tokens."""
    rows = read(name, split, data_root=data_root, hold_out=hold_out, limit=limit)
    labels, names = image_labels(rows)
    pixels, identity = decode(rows, size, cache_dir)
    length = pixels.shape[1] * pixels.shape[2]
    return Sequences(
        [(grey(pixels).reshape(-1), np.arange(len(rows) + 1) * length)],
        labels,
        vocab_size=256,
        pad_id=0,  # no sequence is padded: all have one length
        length=length,
        label_names=names,
        identity={**identity, "form": "grey pixels"},
        notes=rows.notes,
    )


def _byte_sequences(rows: Rows, columns: list[str], names: Sequence[str], length: int) -> Sequences:
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}.")
    return Sequences(
        [byte_ids(rows.strings(column), length) for column in columns],
        rows.labels("label", len(names)),
        vocab_size=BYTE_VOCAB,
        pad_id=BYTE_PAD,
        length=length,
        label_names=names,
        identity={"rows": rows.identity, "columns": columns, "length": length, "form": "bytes"},
        notes=rows.notes,
    )
