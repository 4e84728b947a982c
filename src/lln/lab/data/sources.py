"""Rows of a data set by its Hub id: from a local folder, from the Hub, or embedded. One function, `read`, for all.

A folder has the Hub's parquet layout: its card (README.md) says which files hold which split, or their names do.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from lln.files import hash_file, read_data
from lln.lab.core.errors import DataError, first_line, need
from lln.lab.core.seeds import fingerprint, permutation
from lln.lab.data import embedded
from lln.lab.data.made_once import SPLITS, Place

# Why files are found and read here and not by Hugging Face's `datasets`; all tried with version 5.2:
# - A run's identity is the SHA-256 of the files it read. `datasets` makes Arrow copies (189 MB beside 64 MB of parquet,
#   of all splits of a configuration where one was asked for) and reads those: with one of three files of a split
#   removed it still gave all 50 rows, from its cache; with an empty cache it gave 33 without a word.
# - Without a network it tries for 23 s before it refuses a Hub id (huggingface_hub: 0.3 s), and goes on without one
#   from the Arrow copy alone, whose files nobody can hash.
# - It fails at a parquet file without rows, and its import takes 0.8 s and 144 MB (pyarrow: 0.15 s and 66 MB).
# - Whoever has no `datasets` needs the code below all the same, for --data-root.

AAN = "aan"  # the pairs of papers of Long Range Arena's retrieval, which the Hub does not have
# By name and configuration, or by name where there is one: the columns of texts, what labels mean, how many rows there
# are on the Hub (a result from a partial set says so), what else a result must say, what to do where a set is missing.
KNOWN = read_data("known_sets")
# split-00000-of-00002.parquet, as the Hub names the pieces of a split
PIECE = re.compile(r"(?P<split>.+)-\d+-of-(?P<count>\d+)\.parquet")
Layout = dict[str, dict[str, list[str]]]  # patterns of files by configuration and split, relative to the set's folder


class Selection(TypedDict, total=False):
    """Which rows of a set, and from where: see `read`."""

    config: str | None
    data_root: Place
    hold_out: float
    limit: int | None
    cache_dir: Place


@dataclass(frozen=True)
class Rows:
    """Columns of one split.

    identity: everything that decides the rows, as JSON: the name, the SHA-256 of each file, what was selected.
    notes: what a result from these rows must say: how they differ from the published set, and the set's card.
    cache_dir: where what is made of these rows is kept, see `made_once`.
    """

    table: Any  # pyarrow.Table
    identity: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    cache_dir: Place = None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def find(self, *names: str) -> str:
        """The first of these columns that is there."""
        for name in names:
            if name in self.columns:
                return name
        wanted = " or ".join(map(repr, names))
        raise DataError(f"{self.title} has no column {wanted}; there are: {', '.join(self.columns)}.")

    def column(self, name: str) -> list[Any]:
        return list(self.table.column(self.find(name)).to_pylist())

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

    def take(self, chosen: np.ndarray, note: str, **changes: Any) -> Rows:
        """Some of the rows, in their order, with a note of it and what it changes of the identity."""
        rows = self.table.take(np.sort(chosen))
        return Rows(rows, {**self.identity, **changes}, [note, *self.notes], self.cache_dir)


def read(
    name: str,
    split: str,
    *,
    config: str | None = None,
    data_root: Place = None,
    hold_out: float = 0.0,
    limit: int | None = None,
    cache_dir: Place = None,
) -> Rows:
    """Read the rows of one split of the data set with this Hub id (or `embedded/...`).

    data_root: a folder that holds `<name>/` in the Hub's parquet layout; default LLN_DATA_ROOT, and without that the
    Hub. Embedded sets ignore it.
    hold_out: for a set without a validation split, the share of `train` that is its `validation`, and no longer in
    `train`. limit: at most so many rows, chosen at random. Both choices depend on the name of the set alone, so runs
    with different seeds see the same rows. cache_dir: see `Rows`.

    Raises DataError, in one sentence, for what is missing, cannot be read, or is half of a download.

    >>> rows = read("embedded/topics", "train", limit=3)
    >>> len(rows), rows.columns
    (3, ['sentence', 'label'])
    >>> [len(text.split()) for text in rows.strings("sentence")]
    [24, 24, 24]
    """
    if not 0.0 <= hold_out < 1.0:
        raise ValueError(f"hold_out must be at least 0 and below 1; got {hold_out}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all rows; got {limit}.")
    carve = hold_out > 0 and split in ("train", "validation")
    if carve and "validation" in list_splits(name, config=config, data_root=data_root):
        raise DataError(f"{name} has a validation split of its own, so hold_out must be 0; got {hold_out}.")
    stored = "train" if carve else split
    if name.startswith(embedded.PREFIX):
        columns = embedded.make_columns(name, stored)
        # By content: the help texts differ between versions of Python.
        identity = {"name": name, "config": None, "split": stored, "content": fingerprint(columns)}
        rows = Rows(need("pyarrow").table(columns), identity, [KNOWN[name]["note"]], cache_dir)
    else:
        rows = _read_parquet(name, stored, config, data_root, cache_dir)
    total, key = len(rows), (name, rows.identity["config"] or "")
    if carve:
        order, count = permutation(total, "hold out", *key), round(total * hold_out)
        if not 0 < count < total:
            raise DataError(f"hold_out = {hold_out} of {total} rows of {rows.title} leaves no rows on one side.")
        chosen = order[:count] if split == "validation" else order[count:]
        note = f"{rows.title} has no validation split here: {count} of {total} training rows are held out for it."
        rows = rows.take(chosen, note, split=split, stored_split="train", hold_out=hold_out)
    if limit is None or limit >= len(rows):
        return rows
    chosen = permutation(len(rows), "limit", *key, split)[:limit]
    return rows.take(chosen, f"{rows.title}: a random {limit} of {len(rows)} rows.", limit=limit)


def list_splits(name: str, *, config: str | None = None, data_root: Place = None) -> list[str]:
    """The splits that the set has: by its card or, in a local folder without one, by its files."""
    if name.startswith(embedded.PREFIX):
        return list(SPLITS)
    layout, _ = read_layout(_find_folder(name, resolve_root(data_root)))
    return sorted(_find_config(layout, name, config)) if layout else []


def resolve_root(data_root: Place) -> Path | None:
    """data_root, or else LLN_DATA_ROOT, or else None: the Hub."""
    chosen = data_root or os.environ.get("LLN_DATA_ROOT")
    if not chosen:
        return None
    root = Path(chosen).expanduser()
    if not root.is_dir():
        raise DataError(f"The data root {root} is not a folder (--data-root or LLN_DATA_ROOT).")
    return root


def read_layout(folder: Path) -> tuple[Layout, str]:
    """(which files hold which split, the card's prose): from the card's `configs`, as the Hub does; without them from
    the names of the files."""
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"The card {path} cannot be read: {reason}.") from None
    match = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    found: Layout = {}
    if match:
        yaml = need("yaml")
        try:
            head = yaml.safe_load(match[1])
        except yaml.YAMLError as error:
            raise DataError(f"The card {path} cannot be read: {first_line(error)}.") from None
        try:
            for config in (head.get("configs") or []) if isinstance(head, dict) else []:
                if files := config.get("data_files"):
                    if isinstance(files, str) or isinstance(files[0], str):
                        files = [{"split": "train", "path": files}]
                    paths = {str(entry["split"]): entry["path"] for entry in files}
                    kept = {k: [v] if isinstance(v, str) else list(map(str, v)) for k, v in paths.items()}
                    found[str(config["config_name"])] = kept
        except (AttributeError, KeyError, TypeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else "they are of another form than the Hub's"
            raise DataError(f"The card {path} cannot be read: of its configs, {why}.") from None
    for path in [] if found else sorted(folder.rglob("*.parquet")):
        relative, piece = path.relative_to(folder), PIECE.fullmatch(path.name)
        inner = relative.parts[0] if len(relative.parts) > 1 else "data"
        splits = found.setdefault("default" if inner == "data" else inner, {})
        splits.setdefault(piece["split"] if piece else path.stem, []).append(relative.as_posix())
    return found, text[match.end() if match else 0 :].strip()


def _find_folder(name: str, root: Path | None) -> Path:
    """The set's own folder in the root; without a root, a snapshot of the Hub that holds the card."""
    if name == AAN and not (root and (root / name).is_dir()):
        raise DataError(KNOWN[name]["missing"])
    if root is None:
        return _fetch(name, ["README.md"])
    if not (root / name).is_dir():
        raise DataError(f"{name} is not in the data root: expected the folder {root / name}.")
    return root / name


def _fetch(name: str, patterns: list[str], revision: str | None = None) -> Path:
    """A snapshot of the set in huggingface_hub's own cache; the folder's name is the commit."""
    advice = f"; without a network, name a folder that holds {name} with --data-root or LLN_DATA_ROOT"
    if instead := KNOWN.get(name, {}).get("instead"):
        runs, setting = instead
        advice += f", or take a set that needs no download: --set {setting} (`lln train`), --set {runs}.{setting} "
        advice += "(`lln reproduce`)"
    with ask_hub(f"{name} could not be fetched from the Hub", advice) as hub:
        return Path(hub.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))


@contextlib.contextmanager
def ask_hub(refusal: str, advice: str = "") -> Iterator[Any]:
    """Yields huggingface_hub; where it finds nothing, a DataError: this refusal, the Hub's reason and the advice."""
    hub = need("huggingface_hub")
    try:
        yield hub
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise DataError(f"{refusal} ({first_line(error)}){advice}.") from None


def _find_config(layout: Layout, name: str, config: str | None) -> dict[str, list[str]]:
    """The splits of a configuration; None: the only one, or `default`."""
    there = ", ".join(sorted(layout))
    if config is None and "default" not in layout and len(layout) > 1:
        raise DataError(f"{name} has several configurations, so one must be named: {there}.")
    chosen = config or ("default" if "default" in layout else next(iter(layout)))
    if chosen not in layout:
        raise DataError(f"{name} has no configuration {config!r}; there are: {there}.")
    return layout[chosen]


def _find_files(name: str, split: str, config: str | None, data_root: Place) -> tuple[Path, list[Path], str]:
    """(folder of the set, parquet files of the split in order, the card's prose)"""
    root = resolve_root(data_root)
    folder = _find_folder(name, root)
    layout, card = read_layout(folder)
    if root is None:
        # Where the card names no files, nothing is there yet that could show them: their usual names.
        usual = [f"{config}/{split}-*.parquet" if config not in (None, "default") else f"*{split}-*.parquet"]
        folder = _fetch(name, _find_config(layout, name, config).get(split, usual) if layout else usual, folder.name)
        layout, card = read_layout(folder)
    if not layout:
        raise DataError(f"{name} has no parquet file in {folder}.")
    splits = _find_config(layout, name, config)
    if split not in splits:
        of = f" of {config}" if config else ""
        raise DataError(f"{name} has no split {split!r}{of}; in {folder} there are: {', '.join(sorted(splits))}.")
    files = sorted({path for pattern in splits[split] for path in folder.glob(pattern) if path.suffix == ".parquet"})
    if not files:
        raise DataError(f"{name} has no split {split!r} here: no file {' or '.join(splits[split])} in {folder}.")
    counts = {piece and int(piece["count"]) for piece in (PIECE.fullmatch(path.name) for path in files)}
    if len(counts) == 1 and len(files) != (count := counts.pop() or len(files)):
        # Half a download must not pass for the whole set.
        raise DataError(f"{files[0].parent} holds {len(files)} of {count} files of this split: {files[0].name}, ...")
    return folder, files, card


def _read_parquet(name: str, split: str, config: str | None, data_root: Place, cache_dir: Place) -> Rows:
    parquet = need("pyarrow.parquet")
    folder, files, card = _find_files(name, split, config, data_root)
    try:
        table = need("pyarrow").concat_tables([parquet.read_table(path) for path in files])
    except (OSError, ValueError) as error:
        raise DataError(f"A parquet file of {name} in {folder} cannot be read ({first_line(error)}).") from None
    if table.num_rows == 0:
        raise DataError(f"{name} split {split!r} has no rows in {folder}.")
    hashes = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    identity = {"name": name, "config": config, "split": split, "files": hashes}
    rows = Rows(table, identity, [f"Card of {name}: {card}"] if card else [], cache_dir)
    published = KNOWN.get(f"{name}/{config}", KNOWN.get(name, {})).get("rows")
    if published and published.get(split) != len(rows):
        there = published.get(split, "no such split")
        rows.notes.insert(0, f"{rows.title}: {len(rows)} rows; the published set has {there}.")
    return rows
