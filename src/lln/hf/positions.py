"""Let a pretrained model take longer texts or larger pictures than it has places for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from lln.hf.attach import find_longest
from lln.hf.find import Model, find_model
from lln.hf.places import (
    LEARNED,
    ROTARY,
    Change,
    find_grids,
    find_places,
    is_relative,
    name_tensors,
    read_pair,
    walk,
)
from lln.values import check_listed

METHODS = (*LEARNED, *ROTARY)
BUCKETS = ("relative_attention_bias", "rel_embeddings")  # whose last row serves all larger distances


@torch.no_grad()
def extend_positions(
    model: Model,
    length: int | None = None,
    *,
    image_size: int | Sequence[int] | None = None,
    method: str | None = None,
) -> Model:
    """Let a transformers model take longer texts, or larger pictures, than it was pretrained for.

    Everything that limits the model is changed in place: weights, buffers and config. dtype, device, requires_grad and
    tied weights stay as they are, and a saved model is loaded with its new length. Set the model_max_length of the
    tokenizer, or the size of the image processor, yourself. Make optimisers afterwards, because parameters are new.

    Learned positions (BERT, RoBERTa, GPT-2, OPT, BART, ...): method="repeat", the default, repeats the pretrained rows
    one after another, as Longformer's conversion does. Neighbours stay as far apart as heads have learned, except where
    a repetition begins, and inputs of the old length give the same output to the last bit. "interpolate" spreads the
    rows evenly over the new length. Every position is then different, but neighbours are nearer together than in
    training, so the model needs training.

    Rotary positions (Llama, Mistral, Qwen, ModernBERT, ...): method="yarn", the default, slows down the frequencies
    that make less than one turn in the old length, leaves the fast ones, which tell neighbours apart, as they are, and
    moves gradually from one to the other in between. "linear" slows down all of them, and needs training. A model that
    is scaled already keeps its method ("llama3", "yarn", ...) and is scaled further. Layers with a sliding window and a
    rotation of their own stay as they are. Scaling by the input's length ("dynamic") is not offered, because a cache or
    an LLN state holds keys that were rotated before. Scaled rotation changes the output for short inputs as well.

    Sinusoidal positions continue by their formula, without a method. Patch positions (ViT, DeiT, DINOv2, CLIP, ...) are
    resampled bicubically, as ViT does in every call with interpolate_pos_encoding=True. Class and distillation tokens
    keep their positions.

    Extend the positions before you call `lln.hf.convert`, so that it measures the final model.

    Args:
        model: a transformers model, or a module that holds one (see `lln.hf.convert`); changed in place.
        length: the new number of tokens, special tokens included, for encoder and decoder alike.
        image_size: for image models instead of `length`: pixels of a side, or (height, width); a multiple of the patch
            size.
        method: "repeat" or "interpolate" for learned positions, "yarn" or "linear" for rotary ones; see above.

    Returns:
        The model, unchanged if it has that many positions already.

    Raises:
        ValueError or TypeError: the message names the argument, and the model is unchanged. Among others for a length
        below the model's own, and for models without a limit or with one that cannot be extended.

    Example:
        >>> import torch, transformers, lln.hf
        >>> shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = transformers.BertModel(transformers.BertConfig(**shape, max_position_embeddings=8))
        >>> model = lln.hf.extend_positions(model, 20)
        >>> model.config.max_position_embeddings, model(torch.zeros(1, 20, dtype=int)).last_hidden_state.shape
        (20, torch.Size([1, 20, 16]))
    """
    body = find_model(model)
    if (length is None) == (image_size is None):
        raise TypeError("give length for a model of text or image_size for one of pictures, and not both.")
    if method is not None:
        check_listed("method", method, METHODS)
    if image_size is not None:
        if method is not None:
            raise ValueError(f"method goes with length; leave it out with image_size, got {method!r}.")
        plans = plan_pictures(body, check_size(image_size))
    else:
        if not is_count(length):
            raise ValueError(f"length must be a positive whole number of tokens; got {length!r}.")
        plans = plan_texts(body, length, method)
    if plans:
        check_peers(body)
    settings = [(twin, values) for config, values, _ in plans for twin in find_twins(body, config, values)]
    for _, _, change in plans:
        change()
    for config, values in settings:
        for name, value in values.items():
            setattr(config, name, value)
    return model


Plan = tuple[Any, dict[str, Any], Change]  # a config, its new values, and the change of the model


def plan_texts(model: PreTrainedModel, length: int, method: str | None) -> list[Plan]:
    places = list(find_places(model))
    if not places:
        raise ValueError(f"length: {say_nothing_to_extend(model)}")
    now = min(one.count for one in places)
    if length < now:
        raise ValueError(
            f"length must be at least the {now} tokens that {type(model).__name__} has places for; got {length}. "
            "Shorter inputs need no change."
        )
    return [(one.config, *one.plan(length, method)) for one in places if one.count < length]


def plan_pictures(model: PreTrainedModel, size: tuple[int, int]) -> list[Plan]:
    grids = list(find_grids(model))
    name = type(model).__name__
    if not grids:
        if bounded := next((path for path, _ in name_tensors(model) if "relative_position" in path), None):
            other = f"its relative positions ({bounded}) are bounded by its window, so make pictures smaller"
        elif any(find_places(model)):
            other = "give length instead"
        else:
            other = "if it computes them for each picture, it takes larger ones as it is; else use one like ViT or CLIP"
        raise ValueError(f"image_size: {name} has no table of patch positions that can be resampled; {other}.")
    for grid in grids:
        if any(new < old for new, old in zip(size, grid.size, strict=True)):
            raise ValueError(
                f"image_size must be at least the {grid.size} of {name}; got {size}. Make smaller pictures larger."
            )
    return [(grid.config, *grid.plan(size)) for grid in grids if grid.size != size]


def find_twins(model: PreTrainedModel, config: Any, values: dict[str, Any]) -> list[Any]:
    """The config and its copies inside the model, which say the same."""
    held = {id(one): one for _, _, one in walk(model)} | {id(config): config}
    same = [one for one in held.values() if type(one) is type(config)]
    return [one for one in same if all(getattr(one, name) == getattr(config, name) for name in values)]


def check_peers(model: PreTrainedModel) -> None:
    """ValueError where an attention that lln.hf.convert attached has weights for each place."""
    lengths = {find_longest(config) for _, _, config in walk(model)} - {None}
    for path, tensor in name_tensors(model):
        if ".lln_peer." in path and not path.endswith(".value_taps") and lengths & set(tensor.shape):
            raise ValueError(
                f"model: {path} of {type(model).__name__} has a row for each of its places; extend the positions "
                "first, and then let lln.hf.convert give the model this attention."
            )


def say_nothing_to_extend(model: PreTrainedModel) -> str:
    """Why a model has no places that can be extended, and what to do."""
    name = type(model).__name__
    if any(find_grids(model)):
        return f"the places of {name} are those of a picture's patches; give image_size instead."
    paths = [path for path, _ in name_tensors(model)]
    if buckets := next((path for path in paths if any(known in path for known in BUCKETS)), None):
        return (
            f"the relative positions of {name} ({buckets}) are not bounded, as the last one serves all larger "
            "distances; it takes longer inputs as it is."
        )
    if bounded := next((path for path in paths if is_relative(path)), None):
        return (
            f"the relative positions of {name} ({bounded}) are bounded, and nothing was learned about larger "
            "distances; use a model with learned or rotary positions."
        )
    if any("alibi" in known for _, module, _ in walk(model) for known in dir(module)):
        return f"the biases by distance (ALiBi) of {name} are not bounded; it takes longer inputs as it is."
    return (
        f"no positions that could be extended were found in {name}; use a model with learned, sinusoidal or rotary "
        "positions, or extend this one by what its own class offers."
    )


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_size(image_size: Any) -> tuple[int, int]:
    sides = [image_size] if isinstance(image_size, int) else list(image_size)
    if len(sides) not in (1, 2) or not all(map(is_count, sides)):
        raise ValueError(f"image_size must be a positive whole number of pixels or two; got {image_size!r}.")
    return read_pair(image_size if isinstance(image_size, int) else sides)
