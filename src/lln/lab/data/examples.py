"""Data sets as maps from indices to batches of tensors, and the seeded order in which training sees them."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lln.lab.core.seeds import fingerprint, permutation

IGNORE = -100  # what torch's cross entropy skips
MASKS = {"input_ids": "attention_mask", "pair_ids": "pair_mask"}  # of each part of an example


class Examples(Dataset[dict[str, Tensor]]):
    """A data set. `examples[i]` and `examples.item(i, epoch)` are dicts of tensors that depend on (i, epoch) alone.

    identity: everything that decides the content, as JSON; `fingerprint` is its hash, for the run's own identity.
    notes: sentences that a result from this data must carry.

    A set says how examples are stored (`read`) and what a model sees of them (`finish`): tensors in, tensors out, so
    that batches can be made where the stored examples are, on a GPU too.
    """

    identity: dict[str, Any]
    notes: list[str]

    def read(self, indices: np.ndarray | slice) -> dict[str, Tensor]:
        """Stored examples, one a row: each [B, ...], in small dtypes."""
        raise NotImplementedError

    def finish(self, rows: dict[str, Tensor], index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        """A batch for a model, of stored examples, their indices [B] and the epochs [B] they are seen in."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def make_batch(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        return self.finish(self.read(indices), torch.from_numpy(indices), torch.from_numpy(epochs))

    def item(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        """One example, without padding."""
        found = {name: rows[0] for name, rows in self.make_batch(np.array([index]), np.array([epoch])).items()}
        for name, mask in MASKS.items():
            if mask in found:
                found[name] = found[name][found.pop(mask)]
        return found

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):  # iterating over the set ends with this
            raise IndexError(f"index must lie between 0 and {len(self) - 1}; got {index}.")
        return self.item(index)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch, which a DataLoader asks for where it can; its collate_fn then has nothing to do: dict."""
        return self.make_batch(np.array(indices), np.zeros(len(indices), np.int64))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)


class Stream(Examples):
    """What training sees, by position: every example once an epoch, each epoch in an order of its own.

    Position p depends on (seed, p) alone, so one may begin anywhere without reading what came before, and any number of
    processes that share a global batch see what one would. length: positions in all, steps * global batch.
    """

    def __init__(self, examples: Examples, *, seed: int, length: int) -> None:
        if len(examples) == 0:
            raise ValueError("examples must hold at least one example; got none.")
        self.examples, self.seed, self.length = examples, seed, length

    def __len__(self) -> int:
        return self.length

    def find_places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indices of the examples, the epochs they are seen in), each [positions] int64"""
        epochs, rest = np.divmod(positions, len(self.examples))
        indices = np.empty_like(rest)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _order(len(self.examples), self.seed, int(epoch))[rest[here]]
        return indices, epochs

    def make_batch(self, indices: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        """Of positions; which epochs they are in they say themselves."""
        return self.examples.make_batch(*self.find_places(indices))


@lru_cache(maxsize=4)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(n, "order", seed, epoch)


class Labelled(Examples):
    """Examples of classes."""

    labels: np.ndarray | None  # [examples]; None where they are not public
    label_names: list[str]

    @property
    def num_labels(self) -> int:
        return len(self.label_names)

    @property
    def majority(self) -> float:
        """The accuracy of always naming the most frequent class."""
        if self.labels is None:
            raise ValueError("the labels of this split are not public.")
        return float(np.bincount(self.labels).max() / len(self.labels))


@dataclass(eq=False)
class Sequences(Labelled):
    """Sequences of different lengths, or pairs of them, with a label each.

    Items: `input_ids` [n], for pairs also `pair_ids` [m], and `labels` [] where labels are known. Batches are padded
    and have `attention_mask` and `pair_mask` (bool, True = attend).
    """

    parts: Sequence[tuple[np.ndarray, np.ndarray]]  # (all ids [total], offsets [rows + 1]), one or two of them
    labels: np.ndarray | None  # [rows]
    _: KW_ONLY
    vocab_size: int = 256
    pad_id: int = 0
    length: int  # the longest that a sequence may be
    fixed: bool = False  # batches have this length, else that of their longest sequence
    label_names: list[str]
    identity: dict[str, Any]
    notes: list[str]

    def __len__(self) -> int:
        return len(self.parts[0][1]) - 1

    def read(self, indices: np.ndarray | slice) -> dict[str, Tensor]:
        """Padded, with the lengths."""
        chosen = np.arange(len(self))[indices]
        found: dict[str, Tensor] = {}
        for name, (ids, offsets) in zip(MASKS, self.parts, strict=False):
            lengths = offsets[chosen + 1] - offsets[chosen]
            width = self.length if self.fixed else max(int(lengths.max()), 1)
            rows = np.full((len(chosen), width), self.pad_id, np.int32)
            for row, index, length in zip(rows, chosen, lengths, strict=True):
                row[:length] = ids[offsets[index] : offsets[index] + length]
            found |= {name: torch.from_numpy(rows), f"{name} lengths": torch.from_numpy(lengths)}
        if self.labels is not None:
            found["labels"] = torch.from_numpy(self.labels[chosen])
        return found

    def finish(self, rows: dict[str, Tensor], index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        found = {"labels": rows["labels"]} if "labels" in rows else {}
        for name in (part for part in MASKS if part in rows):
            at = torch.arange(rows[name].shape[1], device=index.device)
            found |= {name: rows[name].long(), MASKS[name]: at < rows[f"{name} lengths"][:, None]}
        return found


class Pad:
    """Makes a batch of examples, as in the last release: sets of this one give DataLoaders batches that are padded.

    Pads `input_ids` and `pair_ids` and adds their masks (bool, True = attend), pads labels of tokens with -100, stacks
    the rest. length: pad to it (fixed shapes); without it to the longest of the batch, rounded up to a `multiple`.
    """

    def __init__(self, pad_id: int, *, length: int | None = None, multiple: int = 1) -> None:
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1; got {multiple}.")
        self.pad_id, self.length, self.multiple = pad_id, length, multiple

    def __call__(self, items: Sequence[dict[str, Tensor]] | dict[str, Tensor]) -> dict[str, Tensor]:
        """Of examples, or of a batch that a set has made already, which is then as wide as was asked for."""
        columns = items if isinstance(items, dict) else {name: [item[name] for item in items] for name in items[0]}
        fill = {**dict.fromkeys(MASKS, self.pad_id), **dict.fromkeys(MASKS.values(), False), "labels": IGNORE}
        batch: dict[str, Tensor] = {}
        for name, rows in columns.items():
            is_padded = name in fill and rows[0].ndim == 1
            batch[name] = self._pad(rows, fill[name]) if is_padded else torch.stack(list(rows))
            if name in MASKS and MASKS[name] not in columns:
                batch[MASKS[name]] = self._pad([torch.ones_like(row, dtype=torch.bool) for row in rows], False)
        return batch

    def _pad(self, rows: Sequence[Tensor] | Tensor, value: int) -> Tensor:
        longest = max(len(row) for row in rows)
        if self.length is not None and longest > self.length:
            raise ValueError(f"length = {self.length} is too short for a sequence of {longest} tokens.")
        width = self.length or -(-max(longest, 1) // self.multiple) * self.multiple
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=value) for row in rows])


def flatten(rows: Sequence[Sequence[int] | np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """ids [total]: all of them, one behind the other; offsets [rows + 1]: where each begins, and the last ends"""
    ids = np.concatenate([np.asarray(row, dtype) for row in rows])
    return {"ids": ids, "offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64)}


def cut_evenly(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, offsets) of rows of one size [rows, ...]"""
    return rows.reshape(-1), np.arange(len(rows) + 1) * (rows.size // len(rows))


def choose_id_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    return np.uint16 if vocab_size <= 2**16 else np.int32
