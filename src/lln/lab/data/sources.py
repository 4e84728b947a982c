"""Rows of a data set by its Hub id: from a local folder, from the Hub, or embedded. One function, `read`, for all."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lln.files import hash_file
from lln.lab.core.errors import DataError, first_line, need
from lln.lab.core.seeds import fingerprint, permutation
from lln.lab.data import embedded
from lln.lab.data.hub import find_files, list_splits

# Rows on the Hub, so that a result from a partial set says so.
PUBLISHED = {
    "nyu-mll/glue/sst2": {"train": 67349, "validation": 872, "test": 1821},
    "nyu-mll/glue/qnli": {"train": 104743, "validation": 5463, "test": 5463},
    "nyu-mll/glue/qqp": {"train": 363846, "validation": 40430, "test": 390965},
    "nyu-mll/glue/mnli": {
        "train": 392702,
        "validation_matched": 9815,
        "validation_mismatched": 9832,
        "test_matched": 9796,
        "test_mismatched": 9847,
    },
    "Salesforce/wikitext/wikitext-103-v1": {"train": 1801350, "validation": 3760, "test": 4358},
    "stanfordnlp/imdb/plain_text": {"train": 25000, "test": 25000, "unsupervised": 50000},
    "uoft-cs/cifar10/plain_text": {"train": 50000, "test": 10000},
    "microsoft/cats_vs_dogs/default": {"train": 23410},
}
ONLY_CONFIG = {"stanfordnlp/imdb": "plain_text", "uoft-cs/cifar10": "plain_text", "microsoft/cats_vs_dogs": "default"}


@dataclass(frozen=True)
class Rows:
    """Columns of one split.

    identity: everything that decides the rows, as JSON: the name, the SHA-256 of each file, what was selected.
    notes: what a result from these rows must say: how they differ from the published set, and the set's card.
    """

    table: Any  # pyarrow.Table
    identity: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def column(self, name: str) -> list[Any]:
        if name not in self.columns:
            raise DataError(f"{self.title} has no column {name!r}; there are: {', '.join(self.columns)}.")
        return list(self.table.column(name).to_pylist())

    def strings(self, name: str) -> list[str]:
        values = self.column(name)
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise DataError(f"{self.title}: column {name!r} must hold text; row {row} holds {value!r}.")
        return values

    def labels(self, name: str, classes: int | None = None) -> np.ndarray:
        """[rows] int64, each from 0 to classes - 1"""
        values = self.column(name)
        if not all(isinstance(value, int) for value in values):
            raise DataError(f"{self.title}: column {name!r} must hold whole numbers.")
        labels = np.array(values, np.int64)
        wrong = np.flatnonzero((labels < 0) | (labels >= (classes if classes is not None else np.inf)))
        if len(wrong):
            allowed = f"0 to {classes - 1}" if classes is not None else "0 or more"
            came = int(labels[wrong[0]])
            kept = " (-1: the publisher keeps the label, so nothing can be trained or scored)" if came == -1 else ""
            raise DataError(f"{self.title}: column {name!r} must hold {allowed}; row {wrong[0]} holds {came}{kept}.")
        return labels

    @property
    def title(self) -> str:
        parts = (self.identity["name"], self.identity["config"], self.identity["split"])
        return " ".join(part for part in parts if part)


def read(
    name: str,
    split: str,
    *,
    config: str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    hold_out: float = 0.0,
    limit: int | None = None,
) -> Rows:
    """The rows of one split of the set with this Hub id (or `embedded/...`).

    data_root: a folder that holds `<name>/` in the Hub's parquet layout; default LLN_DATA_ROOT, and without that the
    Hub. Embedded sets ignore it.
    hold_out: for a set without a validation split, the share of `train` that is its `validation`, and no longer in
    `train`. limit: at most so many rows, chosen at random. Both choices depend on the name of the set alone, so runs
    with different seeds see the same rows.
    """
    if not 0.0 <= hold_out < 1.0:
        raise ValueError(f"hold_out must be at least 0 and below 1; got {hold_out}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all rows; got {limit}.")
    carved = hold_out > 0 and split in ("train", "validation")
    if carved and "validation" in splits(name, config=config, data_root=data_root):
        raise DataError(f"{name} has a validation split of its own, so hold_out must be 0; got {hold_out}.")
    stored = "train" if carved else split
    here = name.startswith(embedded.PREFIX)
    rows = _embedded(name, stored) if here else _parquet(name, stored, config, data_root)
    if carved:
        rows = _carve(rows, split, hold_out)
    return rows if limit is None or limit >= len(rows) else _limit(rows, limit)


def splits(name: str, *, config: str | None = None, data_root: str | os.PathLike[str] | None = None) -> list[str]:
    """The names of the splits that this set has."""
    if name.startswith(embedded.PREFIX):
        return list(embedded.SPLITS)
    return list_splits(name, config, data_root)


def _embedded(name: str, split: str) -> Rows:
    columns = embedded.columns(name, split)
    # By content: the help texts differ between versions of Python.
    identity = {"name": name, "config": None, "split": split, "content": fingerprint(columns)}
    return Rows(need("pyarrow").table(columns), identity, [embedded.NOTES[name]])


def _parquet(name: str, split: str, config: str | None, data_root: str | os.PathLike[str] | None) -> Rows:
    parquet = need("pyarrow.parquet")
    folder, files, card = find_files(name, split, config, data_root)
    try:
        table = need("pyarrow").concat_tables([parquet.read_table(path) for path in files])
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise DataError(f"A parquet file of {name} in {folder} cannot be read ({reason}).") from None
    if table.num_rows == 0:
        raise DataError(f"{name} split {split!r} has no rows in {folder}.")
    hashes = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    identity = {"name": name, "config": config, "split": split, "files": hashes}
    published = PUBLISHED.get(f"{name}/{config or ONLY_CONFIG.get(name)}", {})
    notes = [f"Card of {name}: {card}"] if card else []
    if published and published.get(split) != table.num_rows:
        title = " ".join(part for part in (name, config, split) if part)
        there = published.get(split, "no such split")
        notes.insert(0, f"{title}: {table.num_rows} rows; the published set has {there}.")
    return Rows(table, identity, notes)


def _carve(rows: Rows, split: str, hold_out: float) -> Rows:
    order = permutation(len(rows), "hold out", rows.identity["name"], rows.identity["config"] or "")
    count = round(len(rows) * hold_out)
    if not 0 < count < len(rows):
        raise DataError(f"hold_out = {hold_out} of {len(rows)} rows of {rows.title} leaves no rows on one side.")
    chosen = np.sort(order[:count] if split == "validation" else order[count:])
    note = f"{rows.title} has no validation split here: {count} of {len(rows)} training rows are held out for it."
    identity = {**rows.identity, "split": split, "stored_split": "train", "hold_out": hold_out}
    return Rows(rows.table.take(chosen), identity, [note, *rows.notes])


def _limit(rows: Rows, limit: int) -> Rows:
    name, config, split = (rows.identity[part] or "" for part in ("name", "config", "split"))
    chosen = np.sort(permutation(len(rows), "limit", name, config, split)[:limit])
    note = f"{rows.title}: a random {limit} of {len(rows)} rows."
    return Rows(rows.table.take(chosen), {**rows.identity, "limit": limit}, [note, *rows.notes])
