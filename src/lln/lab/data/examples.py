"""Data sets as maps from an index to tensors, the seeded order in which training sees them, and batches."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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

    def items(self, indices: np.ndarray, epochs: np.ndarray) -> list[dict[str, Tensor]]:
        """One dict an example, ready for a collator."""
        batch = {name: rows.unbind() for name, rows in self.make_batch(indices, epochs).items()}
        return [{name: rows[i] for name, rows in batch.items()} for i in range(len(indices))]

    def item(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        return self.items(np.array([index]), np.array([epoch]))[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):  # iterating over the set ends with this
            raise IndexError(f"index must lie between 0 and {len(self) - 1}; got {index}.")
        return self.item(index)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        """Many at once, which a DataLoader asks for where it can."""
        return self.items(np.array(indices), np.zeros(len(indices), np.int64))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)


class Stream(Dataset[dict[str, Tensor]]):
    """What training sees, by position: every example once an epoch, each epoch in an order of its own.

    Position p depends on (seed, p) alone, so a sequential sampler over a stream resumes anywhere (`start`) without
    reading what came before, and any number of processes that share a global batch see what one would.
    length: positions in all, steps * global batch; `start`: positions already used.
    """

    def __init__(self, examples: Examples, *, seed: int, length: int, start: int = 0) -> None:
        if len(examples) == 0:
            raise ValueError("examples must hold at least one example; got none.")
        if not 0 <= start <= length:
            raise ValueError(f"start must lie between 0 and length = {length}; got {start}.")
        self.examples, self.seed, self.length, self.start = examples, seed, length, start

    def __len__(self) -> int:
        return self.length - self.start

    def find_places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indices of the examples, the epochs they are seen in), each [positions] int64"""
        epochs, rest = np.divmod(self.start + positions, len(self.examples))
        indices = np.empty_like(rest)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _order(len(self.examples), self.seed, int(epoch))[rest[here]]
        return indices, epochs

    def __getitems__(self, positions: list[int]) -> list[dict[str, Tensor]]:
        return self.examples.items(*self.find_places(np.array(positions)))

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        if not 0 <= position < len(self):
            raise IndexError(f"position must lie between 0 and {len(self) - 1}; got {position}.")
        return self.__getitems__([position])[0]


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

    Items: `input_ids` [n], for pairs also `pair_ids` [m], and `labels` [] where labels are known.
    """

    parts: Sequence[tuple[np.ndarray, np.ndarray]]  # (all ids [total], offsets [rows + 1]), one or two of them
    labels: np.ndarray | None  # [rows]
    _: KW_ONLY
    vocab_size: int = 256
    pad_id: int = 0
    length: int  # the longest that a sequence may be
    label_names: list[str]
    identity: dict[str, Any]
    notes: list[str]

    def __len__(self) -> int:
        return len(self.parts[0][1]) - 1

    def read(self, indices: np.ndarray | slice) -> dict[str, Tensor]:
        """Padded to the longest that there may be, with the lengths."""
        chosen = np.arange(len(self))[indices]
        found: dict[str, Tensor] = {}
        for name, (ids, offsets) in zip(MASKS, self.parts, strict=False):
            lengths = offsets[chosen + 1] - offsets[chosen]
            rows = np.full((len(chosen), self.length), self.pad_id, np.int32)
            for row, index, length in zip(rows, chosen, lengths, strict=True):
                row[:length] = ids[offsets[index] : offsets[index] + length]
            found |= {name: torch.from_numpy(rows), f"{name} lengths": torch.from_numpy(lengths)}
        if self.labels is not None:
            found["labels"] = torch.from_numpy(self.labels[chosen])
        return found

    def finish(self, rows: dict[str, Tensor], index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        found = {"labels": rows["labels"]} if "labels" in rows else {}
        at = torch.arange(self.length, device=index.device)
        for name in (part for part in MASKS if part in rows):
            found |= {name: rows[name].long(), MASKS[name]: at < rows[f"{name} lengths"][:, None]}
        return found

    def items(self, indices: np.ndarray, epochs: np.ndarray) -> list[dict[str, Tensor]]:
        """As long as they are: a collator pads them to the longest of a batch."""
        found: list[dict[str, Tensor]] = [{} for _ in indices]
        for item, index in zip(found, indices.tolist(), strict=True):
            for name, (ids, offsets) in zip(MASKS, self.parts, strict=False):
                item[name] = torch.from_numpy(ids[offsets[index] : offsets[index + 1]].astype(np.int64))
            if self.labels is not None:
                item["labels"] = torch.tensor(int(self.labels[index]))
        return found


class Pad:
    """Makes a batch: pads `input_ids` and adds `attention_mask`, pads `pair_ids` and adds `pair_mask` (bool, True =
    attend), pads labels of tokens with -100, stacks the rest.

    length: pad to it (fixed shapes); without it to the longest of the batch, rounded up to a `multiple`.
    """

    def __init__(self, pad_id: int, *, length: int | None = None, multiple: int = 1) -> None:
        if multiple < 1:
            raise ValueError(f"multiple must be at least 1; got {multiple}.")
        self.pad_id, self.length, self.multiple = pad_id, length, multiple

    def __call__(self, items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {}
        for key in items[0]:
            rows = [item[key] for item in items]
            if key in MASKS:
                batch[key] = self._pad(rows, self.pad_id)
                batch[MASKS[key]] = self._pad([torch.ones_like(row, dtype=torch.bool) for row in rows], False)
            elif key == "labels" and rows[0].ndim == 1:
                batch[key] = self._pad(rows, IGNORE)
            else:
                batch[key] = torch.stack(rows)
        return batch

    def _pad(self, rows: list[Tensor], value: int) -> Tensor:
        longest = max(len(row) for row in rows)
        if self.length is not None and longest > self.length:
            raise ValueError(f"length = {self.length} is too short for a sequence of {longest} tokens.")
        width = self.length or -(-max(longest, 1) // self.multiple) * self.multiple
        padded = pad_sequence(rows, batch_first=True, padding_value=value)  # [batch, longest]
        return torch.nn.functional.pad(padded, (0, width - longest), value=value)


def flatten(rows: Sequence[Sequence[int] | np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """ids [total]: all of them, one behind the other; offsets [rows + 1]: where each begins, and the last ends"""
    ids = np.concatenate([np.asarray(row, dtype) for row in rows])
    return {"ids": ids, "offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64)}


def cut_evenly(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, offsets) of rows of one size [rows, ...]"""
    return rows.reshape(-1), np.arange(len(rows) + 1) * (rows.size // len(rows))


def choose_id_type(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    return np.uint16 if vocab_size <= 2**16 else np.int32
