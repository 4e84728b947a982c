"""Where the patches of a transformers image model lie among its tokens, for what needs neighbours of an image."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lln.hf.find import list_parts, own_modules
from lln.nn.image_grid import REMEDIES, Patches

# Parameters that stand before the patches as tokens. Those of MASKS take the place of patches.
TOKENS = ("cls_token", "class_token", "class_embedding", "distillation_token", "register_tokens")
MASKS = ("mask_token",)


def find_patches(model: PreTrainedModel, part: PreTrainedModel, asked: str) -> Patches | None:
    """Of `part`, which is `model` or a model inside it: made by it, or by what is around it (Dinov2Encoder is a model
    of its own). None where nothing there makes patches. ValueError where its tokens are no whole image in order;
    asked: the option that needs them."""
    around = [one for one in reversed(list_parts(model)) if any(inner is part for inner in one.modules())]
    for one in around:
        own = [one, *(module for _, module in own_modules(one))]
        if made := [module for module in own if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]:
            return read_patches(one, own, made, asked)
    return None


def read_patches(model: PreTrainedModel, own: list[Any], convolutions: list[Any], asked: str) -> Patches:
    """own: the modules of the model that belong to no model inside it."""
    name, first, remedy = type(model).__name__, convolutions[0], REMEDIES[asked]
    if len(convolutions) != 1 or not isinstance(first, nn.Conv2d):
        raise ValueError(f"{asked}: {name} has other convolutions than one that cuts an image into patches; {remedy}.")
    if getattr(model.config, "mask_ratio", None) is not None:  # ViTMAE
        raise ValueError(f"{asked}: {name} drops patches at random and changes their order; {remedy}.")
    for hook in first._forward_hooks.values():
        if isinstance(held := getattr(hook, "__self__", None), Patches):
            return held
    prefix = 0
    for holder in own:
        for token, parameter in holder.named_parameters(recurse=False):
            if token in TOKENS:
                prefix += parameter.shape[-2] if parameter.ndim > 1 else 1
            elif "token" in token and token not in MASKS:
                raise ValueError(f"{asked}: where {token} of {name} stand among the patches is not known; {remedy}.")
    patches = Patches(name, prefix)
    first.register_forward_hook(patches.note)
    return patches
