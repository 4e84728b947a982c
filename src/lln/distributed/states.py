"""States of several ranks as plain tensors: picked apart, put side by side along the batch, merged all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels.common import make_finite
from lln.state import LLNState

Fields = tuple[Tensor, ...]  # of a state: log_sum, mean_value, and with the evidence read mean_key, entropy


def list_fields(state: LLNState) -> Fields:
    held = state.log_sum, state.mean_value, state.mean_key, state.entropy
    return tuple(t for t in held if t is not None)


def make_state(fields: Fields) -> LLNState:
    names = ("log_sum", "mean_value", "mean_key", "entropy")
    return LLNState(**dict(zip(names, fields, strict=False)))  # type: ignore[arg-type]


def take(fields: Fields, part: slice) -> Fields:
    return tuple(t[part] for t in fields)


def join(states: list[Fields]) -> Fields:
    """One after another along the batch."""
    return states[0] if len(states) == 1 else tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def make_empty(like: Fields, part: slice) -> Fields:
    log_sum, *rest = take(like, part)
    return torch.full_like(log_sum, -torch.inf), *(torch.zeros_like(t) for t in rest)


def merge(states: list[Fields]) -> Fields:
    """The state of the keys of all, in one step however many they are: `LLNState.merge` takes two."""
    if len(states) == 1:
        return states[0]
    log_sums, *means = (torch.stack(parts) for parts in zip(*states, strict=True))
    top = make_finite(log_sums.detach().amax(0))
    below = log_sums - top  # <= 0
    total = below.exp().sum(0)
    none, log_total = total == 0, total.clamp_min(0.5).log()  # of a channel that has keys the largest weight is 1
    log_sum, log_shares = (top + log_total).masked_fill(none, -torch.inf), below - log_total
    shares = log_shares.exp()
    merged = [(shares.to(t.dtype).unsqueeze(-1) * t).sum(0) for t in means[:2]]
    if len(means) == 3:  # by the chain rule of entropy; an empty part has no share, and 0 ln 0 = 0
        finite = log_shares.masked_fill(log_shares == -torch.inf, 0.0)
        merged.append((shares * (means[2] - finite)).sum(0))
    return log_sum, *merged
