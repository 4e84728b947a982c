"""Calls and masks of models in which some layers run LLN attention and others their own softmax attention.

transformers makes one mask for all layers of a kind. Here it has the form that LLN attention takes, of all keys, and on
it the one that the other layers would have had: they call the same function with the same tensors as ever.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from lln.hf.cache import TAG, StateLayer
from lln.hf.layers import DROPPED, FULL

SOFTMAX_MASK = "lln_softmax_mask"  # the attribute of a mask that holds softmax's, which may be None
INTERFACE = AttentionInterface()


def is_mixed(config: Any) -> bool:
    held = getattr(config, "lln", None)
    return isinstance(held, dict) and held.get("layers") is not None


def attend_softmax(
    name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """What the module would do if the model ran the implementation of that name."""
    if isinstance(getattr(key, TAG, None), StateLayer):
        raise ValueError(
            f"past_key_values: {type(module).__name__} runs {name!r}, which needs keys and values, and LLNCache() "
            "keeps states in all layers; use lln.hf.make_cache(model.config)."
        )
    mask = getattr(attention_mask, SOFTMAX_MASK, attention_mask)
    if isinstance(mask, Tensor) and mask.ndim < 4:
        raise ValueError(
            f"attention_mask: softmax's mask was lost on its way to {type(module).__name__}, as when layers lie on "
            "several devices; use lln.hf.convert without layers=, or a model that lies on one device."
        )
    function = INTERFACE.get_interface(name, find_eager(type(module)))
    return function(module, query, key, value, mask, **kwargs)


def find_eager(kind: type) -> Any:
    """The plain softmax of the file that a module's class, or one that it is derived from, is in."""
    places = (sys.modules.get(base.__module__) for base in kind.__mro__)
    return next((f for place in places if (f := getattr(place, "eager_attention_forward", None)) is not None), None)


def narrow(mask: Any, key: Tensor) -> Any:
    """Of a mask of all keys what a layer with a state is given: that of the new ones."""
    if mask is None or mask.ndim != 2 or not isinstance(getattr(key, TAG, None), StateLayer):
        return mask
    new = key.shape[2]
    return (mask[:, mask.shape[1] - new :] if mask.shape[1] > new else mask).contiguous()[:, None, None]


def drop_scores(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without what softmax does with single scores: whoever names the layers that run LLN attention takes it away."""
    return {name: value for name, value in kwargs.items() if name not in DROPPED}


def needs_softmax(config: Any) -> bool:
    """Whether a layer that sees all tokens has softmax attention."""
    chosen, kinds = {int(index) for index in config.lln["layers"]}, getattr(config, "layer_types", None)
    return not kinds or any(kind == FULL and index not in chosen for index, kind in enumerate(kinds))


def make_softmax_mask(config: Any, given: dict[str, Any]) -> Any:
    """The mask that transformers would have made without LLN attention."""
    if not isinstance(given["q_offset"], int):
        raise ValueError(
            "past_key_values: a model with LLN attention in some layers has no static cache; leave "
            "cache_implementation out, or use lln.hf.make_cache(model.config)."
        )
    if given.get("local_size") is None and given["kv_offset"]:  # the sizes are those of a state
        given = given | {"kv_length": given["kv_offset"] + given["kv_length"], "kv_offset": 0}
    return ALL_MASK_ATTENTION_FUNCTIONS[config.lln["others"]](**given)
