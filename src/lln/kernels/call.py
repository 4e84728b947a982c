"""A checked call of the op: what every back end receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from lln.kernels.common import Dropout

PER_SEQUENCE = (
    "alpha",
    "beta",
    "lln_weight",
    "block_weight",
    "log_sum",
    "mean_value",
    "count",
    "start",
    "open_key",
    "open_value",
    "open_mask",
)


@dataclasses.dataclass(frozen=True)
class Call:
    query: Tensor  # [B, Hq, N, D]
    key: Tensor  # [B, Hk, M, D]
    value: Tensor  # [B, Hk, M, E]
    alpha: Tensor  # [B, Hq, D], any size may be 1; in the compute dtype, as beta and the weights
    beta: Tensor  # [B, Hk, D], likewise
    is_causal: bool
    key_mask: Tensor | None  # [B, M] bool
    dropout_p: float
    cu_query: Tensor | None  # [B + 1] offsets of packed sequences; the tensors above then have batch 1
    cu_key: Tensor | None
    log_sum: Tensor | None  # [B, Hk, D] of the incoming state, with mean_value
    mean_value: Tensor | None  # [B, Hk, D, E]
    # LLN+Diag. All are None without block_size.
    block_size: int | None
    scale: float
    lln_weight: Tensor | None  # [B, Hq, E], any size may be 1: factor of the linear part
    block_weight: Tensor | None  # of the block part
    count: Tensor | None  # [B] int64 of the incoming state: tokens since the first valid one
    start: Tensor | None  # [B] int64, see carry.block_start
    open_key: Tensor | None  # [B, Hk, block_size, D] of the incoming state, with open_value and open_mask
    open_value: Tensor | None  # [B, Hk, block_size, E]
    open_mask: Tensor | None  # [B, block_size] bool
    dropout: Dropout | None = None  # of the eager back end, which draws it

    def sequences(self) -> Iterator[Call]:
        """One call for each packed sequence; the call itself when nothing is packed."""
        if self.cu_query is None or self.cu_key is None:
            yield self
            return
        lengths_q, lengths_k = self.cu_query.diff().tolist(), self.cu_key.diff().tolist()
        # split, not narrow: its backward is one concatenation however many sequences there are.
        queries = self.query.split(lengths_q, -2)
        keys, values = self.key.split(lengths_k, -2), self.value.split(lengths_k, -2)
        masks = [None] * len(keys) if self.key_mask is None else self.key_mask.split(lengths_k, -1)
        per_sequence = {
            name: t.split(1) if t.shape[0] > 1 else [t] * len(keys)
            for name in PER_SEQUENCE
            if (t := getattr(self, name)) is not None
        }
        for i, (query, key, value, key_mask) in enumerate(zip(queries, keys, values, masks, strict=True)):
            yield dataclasses.replace(
                self,
                query=query,
                key=key,
                value=value,
                key_mask=key_mask,
                cu_query=None,
                cu_key=None,
                dropout=None if self.dropout is None else self.dropout.at(i),
                **{name: parts[i] for name, parts in per_sequence.items()},
            )

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
