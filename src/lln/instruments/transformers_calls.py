"""What a call of a transformers attention function says about softmax attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.hf.find import is_cross, uses_interface
from lln.hf.interface import REFUSED
from lln.hf.mixed import is_mixed
from lln.hf.watch import SOFTMAX, Call, watch
from lln.instruments.observation import Observation, Pattern, default_scale, make_bias, observe_softmax, read_mask
from lln.instruments.watchers import Look, Remove, split_sequences

KNOWN = ("eager", "sdpa", "flex_attention", SOFTMAX)
UNKNOWN = ("softcap", "s_aux", "indices", "block_indices", "cache")  # arguments that change P as no map here knows it


def watch_transformers(model: nn.Module, look: Look) -> Iterator[Remove]:
    """Nothing where no attention of the model uses transformers' interface."""

    def show_call(call: Call, go: Callable[[], Any]) -> Any:
        look.show(observe_call, call)
        return go()

    if (remove := watch(model, show_call)) is not None:
        yield remove


def is_watched(module: nn.Module) -> bool:
    """Whether a module's attention is seen by its calls, or is that of the modules inside it."""
    return isinstance(module, PreTrainedModel) or uses_interface(module)


def observe_call(look: Look, call: Call) -> list[Observation]:
    """One Observation, or of packed sequences one for each."""
    name, mask, given = call.layer, call.mask, call.given
    flash = call.implementation.startswith("flash_attention")
    who = f"record: {name} ({type(call.module).__name__})"
    if call.implementation not in KNOWN and not flash:
        raise ValueError(
            f"{who} runs attn_implementation={call.implementation!r}, which is not known to be softmax or LLN; use "
            "'sdpa' or 'eager'."
        )
    for option in UNKNOWN:
        if given.get(option) is not None:
            what = f"{REFUSED.get(option, 'pages of keys')} ({option}), which the instruments do not know"
            if not is_mixed(getattr(call.module, "config", None)):
                raise ValueError(f"{who} uses {what}; it cannot be recorded.")
            # Else nobody could look at LLN attention in the layers beside it.
            warnings.warn(f"{who} keeps softmax attention with {what}; this layer is left out.", stacklevel=2)
            return []
    scaling = given.get("scaling")
    scale = default_scale(call.query) if scaling is None else float(scaling)
    # Whether it is causal without a mask that says so. Plain softmax ("eager") has nothing but its mask.
    said = given.get("is_causal")
    causal = bool(getattr(call.module, "is_causal", True) if said is None else said)
    causal &= not (call.implementation == "eager" or call.query.shape[2] == 1 or getattr(mask, "ndim", 0) == 4)
    rows, keys, cross = call.query.shape[2], call.key.shape[2], is_cross(call.module, name)
    if flash and given.get("cu_seq_lens_q") is not None:
        offsets = given["cu_seq_lens_q"], given.get("cu_seq_lens_k", given["cu_seq_lens_q"])
        return [
            observe_softmax(name, q, k, scale, Pattern(causal), cross=cross)
            for q, k in split_sequences(call.query, call.key, offsets, look.samples)
        ]
    if flash and given.get("sliding_window") is not None:
        raise ValueError(f"{who} hides keys by a window that only its kernel sees; use attn_implementation='sdpa'.")
    query, key = look.take_first(call.query), look.take_first(call.key)
    if isinstance(mask, Tensor):
        mask = look.take_first(mask)
    if (bias := given.get("position_bias")) is not None:
        # The bias of a model's positions and its mask as one that is added to the scores, [B, heads, rows, keys].
        if mask is None and causal:
            mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=bias.device).tril(keys - rows)
        if mask is not None:
            mask = make_bias(mask[:, None, None] if mask.ndim == 2 else mask)[..., :keys]
        mask = look.take_first(bias) if mask is None else look.take_first(bias) + mask
    pattern = Pattern(causal) if mask is None else read_mask(mask, rows, keys, not cross, causal)
    return [observe_softmax(name, query, key, scale, pattern, cross=cross)]
