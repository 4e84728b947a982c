"""Packed sequences: a call whose positions begin anew holds several sequences, which must not see each other.

transformers keeps them apart in some models, and only in calls without a cache. Here a hook on every model that attends
with ours looks at the positions before the model does, and puts what it finds in the place of the attention mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.hf.masks import OFFSETS
from lln.hf.mixed import is_mixed
from lln.hf.options import runs_ours

NAMES = ("position_ids", "attention_mask", "past_key_values")
ARGUMENTS: dict[type, tuple[str, ...]] = {}  # of the models that were watched


def watch_positions(part: PreTrainedModel) -> None:
    """Put the hook on a model, once."""
    list_arguments(type(part))  # now: a compiler looks at the hook, and would follow what finds them
    if keep_apart not in part._forward_pre_hooks.values():
        part.register_forward_pre_hook(keep_apart, with_kwargs=True)


def keep_apart(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The arguments of a call in which packed sequences stay apart; None where the call has none."""
    kind: Any = type(part)
    names = ARGUMENTS.get(kind) or list_arguments(kind)
    given = dict(zip(names, args, strict=False)) | kwargs
    positions, mask, past = (given.get(name) for name in NAMES)
    if not isinstance(positions, Tensor) or positions.ndim > 2 or positions.shape[-1] < 2 or not runs_ours(part.config):
        return None
    if isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.ndim != 2):
        return None  # made before, by a model around this one; some (Gemma 4) hand on one for each kind of layer
    begins = find_begins(positions.expand(count_rows(given, positions), -1), mask)
    if torch.compiler.is_compiling():
        # How many there are cannot be known in a graph, so the program stops instead of going on.
        torch._assert_async(~begins.any(), "lln: packed sequences inside torch.compile; pass cu_seq_lens_q instead.")
        return None
    if not bool(begins.any()):
        return None
    check_packed(part, names, positions, mask, past)
    first = torch.nn.functional.pad(begins, (1, 0), value=True)  # of every row, too
    starts = first.flatten().nonzero().flatten().to(torch.int32)
    offsets = torch.nn.functional.pad(starts, (0, 1), value=first.numel())
    given["attention_mask"] = offsets.view(OFFSETS)[None, None, None]
    if "use_cache" in names:
        given["use_cache"] = False  # nothing can follow several sequences at once
    return (), given


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether the positions in a batch of a model's arguments begin anew within a row."""
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or (mask is not None and mask.ndim != 2):
        return False
    return bool(find_begins(positions, mask).any())


def find_begins(positions: Tensor, mask: Tensor | None) -> Tensor:
    """[B, N - 1] bool: where a token does not follow the one before it. With a mask only where positions go back from
    one visible token to the next: padding has whatever positions it has."""
    steps = positions.diff(dim=-1)
    if mask is None:
        return steps != 1
    seen = mask[:, -positions.shape[-1] :].bool()
    return (steps <= 0) & seen[:, 1:] & seen[:, :-1]


def count_rows(given: dict[str, Any], positions: Tensor) -> int:
    """Of the batch: positions may be one row for all."""
    found = (given.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((len(one) for one in found if isinstance(one, Tensor)), len(positions))


def check_packed(part: Any, names: tuple[str, ...], positions: Tensor, mask: Tensor | None, past: Any) -> None:
    """ValueError where the sequences could not be as each would be alone."""
    name = type(part).__name__
    if "position_ids" not in names:
        raise ValueError(
            f"position_ids: {name} takes none, so packed sequences would have positions of each other; give each a row "
            "of its own."
        )
    if is_mixed(part.config):
        raise ValueError(
            "position_ids: they begin anew within a row, and the layers with softmax attention would not keep packed "
            "sequences apart; give each a row of its own."
        )
    if mask is not None:
        raise ValueError(
            "attention_mask: these position_ids begin anew within a row, and packed sequences are told apart where "
            "there is no mask; leave attention_mask out, or give each sequence a row of its own."
        )
    if past is not None:
        raise ValueError("past_key_values: packed sequences cannot go into a cache; leave one of them out.")
    start, lowest = find_start(part), int(positions.min())
    if lowest < start:
        raise ValueError(
            f"position_ids: {name} counts its tokens from {start} on, and these begin at {lowest}; add {start} to "
            f"them, as DataCollatorWithFlattening(position_ids_start={start}) does."
        )


def find_start(part: nn.Module) -> int:
    """The position of a model's first token: RoBERTa and its kin count from behind the padding's."""
    for module in part.modules():
        table = getattr(module, "position_embeddings", None)
        own = getattr(module, "padding_idx", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None and own is not None:
            return int(own) + 1
    return 0


def list_arguments(kind: Any) -> tuple[str, ...]:
    """Of a model's forward, in their order."""
    if kind not in ARGUMENTS:
        ARGUMENTS[kind] = tuple(inspect.signature(kind.forward).parameters)[1:]
    return ARGUMENTS[kind]
