"""Models of several parts, of which some can attend linearly and others cannot: which are converted, and why not all.

Where tokens of an image or of a prompt see each other in the middle of a causal text (PaliGemma, Gemma 3), the model
around the text lays a pattern of single pairs over its mask. Its other parts, as the tower that looks at the image,
have no such pattern.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from lln.hf.find import check_class, check_model, is_causal, list_attending, list_parts, own_attention, read_sizes

# What a model hands to transformers' functions for masks to let single pairs see each other, or not.
OVERLAYS = {"block_sequence_ids", "create_causal_mask_mapping", "or_mask_function", "and_mask_function"}
# What makes the mask of images that lie in one row, or of an image's tiles, without those functions (Pixtral, Mllama).
OWN_MASKS = {"generate_block_attention_mask", "_prepare_aspect_ratio_attention_mask"}


def list_words(part: PreTrainedModel) -> frozenset[str]:
    """What the code of a model's forward names."""
    kind: Any = type(part)
    return words_of(kind)


@functools.cache
def words_of(kind: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None:
        return frozenset()
    words = {*code.co_names, *code.co_varnames}
    for one in code.co_consts:
        words |= {one} if isinstance(one, str) else set(one) if isinstance(one, tuple) else set()
    return frozenset(word for word in words if isinstance(word, str))


def find_patterned(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model in `model` that lays a pattern over the mask of a text beside other parts. Of text alone (Gemma 3's
    text model) it depends on the config, and calls are looked at one by one."""
    parts = (part for part in list_parts(model) if not OVERLAYS.isdisjoint(list_words(part)))
    return next((part for part in parts if len(list_parts(part)) > 1), None)


def list_texts(patterned: PreTrainedModel) -> Iterator[PreTrainedModel]:
    for part in list_parts(patterned):
        if part is patterned or any(is_causal(module, name, part) for name, module in own_attention(part)):
            yield part


def find_reason(part: PreTrainedModel, implementation: str) -> str | None:
    """Why a part of a model cannot attend linearly, by itself; None where it can."""
    try:
        check_class(part, implementation)  # or it could not be loaded again
        check_model(part, implementation)
        check_masks(part, implementation)
        for _, module in own_attention(part):
            read_sizes(module)
    except ValueError as error:
        return str(error)
    return None


def check_masks(part: PreTrainedModel, implementation: str) -> None:
    """ValueError where a part would be refused in its first call, for what it does to masks."""
    if find_patterned(part) is part:
        raise ValueError(
            f"attn_implementation={implementation!r}: {type(part).__name__} lets tokens of an image or a prompt see "
            "each other in the middle of a causal text, and linear attention forms no pairs that could be masked one "
            "by one; lln.hf.convert(model) leaves the text as it is."
        )
    if not OWN_MASKS.isdisjoint(list_words(part)):
        raise ValueError(
            f"attn_implementation={implementation!r}: {type(part).__name__} keeps images or their tiles apart by a "
            "mask of single pairs, which linear attention does not form; lln.hf.convert of a model around it leaves it "
            "as it is."
        )


def find_unable(model: PreTrainedModel, implementation: str) -> dict[int, str]:
    """Why parts of a model have to go on with softmax, by their ids."""
    parts = list_attending(model)
    found = {id(part): reason for part in parts if (reason := find_reason(part, implementation))}
    if (patterned := find_patterned(model)) is not None:
        found |= {id(part): found[id(patterned)] for part in list_texts(patterned)}
    for part in parts:  # what is around such a part and attends nowhere itself only says which masks are made
        inner = next((found[id(one)] for one in list_parts(part) if id(one) in found), None)
        if inner is not None and not any(True for _ in own_attention(part)):
            found.setdefault(id(part), inner)
    configs = {id(part.config): found[id(part)] for part in reversed(parts) if id(part) in found}
    return {id(part): configs[id(part.config)] for part in parts if id(part.config) in configs}


def list_able(model: PreTrainedModel, implementation: str) -> list[PreTrainedModel]:
    """The parts of a model that are converted. Of others there is a warning; ValueError where that is all."""
    parts = list_attending(model)
    if not parts:
        raise ValueError(f"model: {type(model).__name__} has no attention; use it as it is.")
    unable = find_unable(model, implementation)
    able = [part for part in parts if id(part) not in unable]
    if not any(True for part in able for _ in own_attention(part)):
        raise ValueError(next(unable[id(part)] for part in parts if id(part) in unable))
    if unable:
        left = [part for part in parts if id(part) in unable and any(True for _ in own_attention(part))]
        names, those = (", ".join(sorted({type(part).__name__ for part in some})) for some in (able, left))
        reasons = " ".join(dict.fromkeys(drop_remedy(unable[id(part)]) for part in left or parts if id(part) in unable))
        warnings.warn(
            f"LLN attention goes into {names}; {those or 'the rest'} keeps its softmax attention. {reasons}",
            stacklevel=3,
        )
    return able


def drop_remedy(refusal: str) -> str:
    """What a refusal says of a part, less the argument that it names and what to do, where just that has been done.

    >>> drop_remedy("attn_implementation='lln': SamModel has none; use it as it is.")
    'SamModel has none.'
    """
    return refusal.partition(": ")[2].partition("; ")[0].removesuffix(".") + "."
