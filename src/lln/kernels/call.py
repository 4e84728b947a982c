"""A checked call of the op: what every back end receives, and the one record of what the GPU operator takes."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor

from lln.kernels.common import Dropout


class Mark(enum.Enum):
    SEQUENCE = enum.auto()  # has a row for each sequence, or one for all
    VALUE = enum.auto()  # its last dimension is the values' channels, or one for all of them
    EAGER = enum.auto()  # is not for the operator


SEQUENCE, VALUE, EAGER = Mark


@dataclasses.dataclass(frozen=True)
class Call:
    """The fields that are not EAGER are the operator's arguments, in this order, tensors first: a new one is a line."""

    query: Tensor  # [B, Hq, N, D]
    key: Tensor  # [B, Hk, M, D]
    value: Annotated[Tensor, VALUE]  # [B, Hk, M, E]
    alpha: Annotated[Tensor, SEQUENCE]  # [B, Hq, D], any size may be 1; in the compute dtype, as beta and the weights
    beta: Annotated[Tensor, SEQUENCE]  # [B, Hk, D], likewise
    lln_weight: Annotated[Tensor | None, SEQUENCE, VALUE]  # LLN+Diag: [B, Hq, E], any size may be 1, of the linear part
    block_weight: Annotated[Tensor | None, SEQUENCE, VALUE]  # of the block part
    key_mask: Tensor | None  # [B, M] bool
    cu_query: Tensor | None  # [B + 1] offsets of packed sequences; query, key, value and key_mask then have batch 1
    cu_key: Tensor | None
    log_sum: Annotated[Tensor | None, SEQUENCE]  # [B, Hk, D] of the incoming state, with mean_value
    mean_value: Annotated[Tensor | None, SEQUENCE, VALUE]  # [B, Hk, D, E]
    start: Annotated[Tensor | None, SEQUENCE]  # LLN+Diag: [B] int64, see carry.block_start
    open_key: Annotated[Tensor | None, SEQUENCE]  # [B, Hk, block_size, D] of the incoming state, with the next two
    open_value: Annotated[Tensor | None, SEQUENCE, VALUE]  # [B, Hk, block_size, E]
    open_mask: Annotated[Tensor | None, SEQUENCE]  # [B, block_size] bool
    seed: Tensor | None  # [] int64 of the kernels' dropout, on the device
    block_size: int | None  # LLN+Diag
    is_causal: bool
    scale: float
    dropout_p: float
    read: Annotated[str, EAGER] = "paper"  # or "evidence", with its own fields of the state and its directions
    directions: Annotated[Tensor | str | None, EAGER] = None  # of the channels [Hk, M, D]; "signed": keys and negatives
    mean_key: Annotated[Tensor | None, SEQUENCE, EAGER] = None  # [B, Hk, M, D] of the incoming state
    entropy: Annotated[Tensor | None, SEQUENCE, EAGER] = None  # [B, Hk, M]
    count: Annotated[Tensor | None, SEQUENCE, EAGER] = None  # [B] int64 of the state: tokens since the first valid one
    joint: Annotated[bool, EAGER] = False  # mix="evidence": blocks and what lies outside them, see evidence_mix
    overlap: Annotated[bool, EAGER] = False  # of them: windows that overlap in place of blocks
    offset: Annotated[Tensor | None, SEQUENCE, EAGER] = None  # of them: [B, Hq, 1], added to the evidence
    dropout: Annotated[Dropout | None, EAGER] = None  # of the eager back end, which draws it

    def arguments(self) -> tuple[Any, ...]:
        """Of the operator; Call(*arguments) is the call again."""
        if torch.compiler.is_compiling():
            return tuple(getattr(self, name) for name in FIELDS)
        return ARGUMENTS(self)

    def change(self, **fields: Any) -> Call:
        """With these fields in place of its own; torch 2.6 can trace neither dataclasses.replace nor {} | {}."""
        return Call(**{name: fields[name] if name in fields else getattr(self, name) for name in MARKS})

    def narrow(self, channels: slice) -> Call:
        """With some of the values' channels alone."""
        held = {name: getattr(self, name) for name in list_marked(VALUE)}
        cut = {n: t if t is None or t.shape[-1] == 1 else t[..., channels] for n, t in held.items()}
        return self.change(**cut)

    def sequences(self) -> Iterator[Call]:
        """One call for each packed sequence; the call itself when nothing is packed."""
        if self.cu_query is None or self.cu_key is None:
            yield self
            return
        lengths_q, lengths_k = self.cu_query.diff().tolist(), self.cu_key.diff().tolist()
        # split, not narrow: its backward is one concatenation however many sequences there are.
        split: dict[str, Sequence[Tensor]] = {"query": self.query.split(lengths_q, -2)}
        split |= {"key": self.key.split(lengths_k, -2), "value": self.value.split(lengths_k, -2)}
        if self.key_mask is not None:
            split["key_mask"] = self.key_mask.split(lengths_k, -1)
        for name in list_marked(SEQUENCE):
            if (t := getattr(self, name)) is not None:
                split[name] = t.split(1) if t.shape[0] > 1 else [t] * len(lengths_k)
        for i in range(len(lengths_k)):
            parts: dict[str, Any] = {name: tensors[i] for name, tensors in split.items()}
            dropout = None if self.dropout is None else self.dropout.make_stream(i)
            yield self.change(cu_query=None, cu_key=None, dropout=dropout, **parts)

    def block_mask(self) -> Tensor:
        """Valid keys of [open block, new rows], [B, block_size + M]."""
        assert self.block_size is not None
        batch, device = self.key.shape[0], self.key.device
        opened, new = self.open_mask, self.key_mask
        if opened is None:
            opened = torch.zeros(batch, self.block_size, dtype=torch.bool, device=device)
        if new is None:
            new = torch.ones(batch, self.key.shape[-2], dtype=torch.bool, device=device)
        return torch.cat([opened, new], -1)


MARKS: dict[str, tuple[Mark, ...]] = {
    name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(Call, include_extras=True).items()
}


def list_marked(mark: Mark) -> list[str]:
    """The names of the fields of a call that have this mark, in their order."""
    return [name for name, marks in MARKS.items() if mark in marks]


FIELDS = [name for name, marks in MARKS.items() if EAGER not in marks]  # the operator's arguments
ARGUMENTS: Callable[[Call], tuple[Any, ...]] = operator.attrgetter(*FIELDS)
KINDS = {Tensor: "Tensor", Tensor | None: "Tensor?", int | None: "SymInt?", bool: "bool", float: "float"}
TYPES = {name: KINDS[hint] for name, hint in get_type_hints(Call).items() if name in FIELDS}
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in TYPES.items())
TENSORS = sum(kind.startswith("Tensor") for kind in TYPES.values())  # so many of them come first
