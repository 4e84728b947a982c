"""LLN attention in timm's vision transformers: a layer for their `attn_layer=`, and `convert` for models that exist.

    model = timm.create_model("vit_small_patch16_224", attn_layer=lln.timm.make_layer("lln_diag"))
    model = lln.timm.convert(timm.create_model("vit_small_patch16_224", pretrained=True), "lln_diag", tile=8)

A layer is timm's own with its own parameters, so that weights load exactly; LLN attention stands in the place of the
softmax in the middle of it (`lln.nn.plug`). alpha and beta follow from the queries and keys of each image.
"""

from __future__ import annotations

import importlib.util
from typing import Any

if importlib.util.find_spec("timm") is None:
    raise ModuleNotFoundError("lln.timm needs timm; install it with: pip install 'lln-attention[timm]'", name="timm")

import timm.layers
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from lln.nn.image_grid import REMEDIES, Patches
from lln.nn.plug import check_plug, make_plug, needs_patches, stand_in
from lln.nn.tiles import TiledAttention

KINDS = (timm.layers.Attention, timm.layers.AttentionRope, EvaAttention)
# Attention of a few learned queries, which reads the tokens once and stays as it is.
POOLS = (timm.layers.AttentionPoolLatent,)


class Linearised(nn.Module):
    """What a layer of timm's becomes: the same with LLN attention in it."""

    implementation = "lln_diag"
    options: dict[str, Any] = {}  # noqa: RUF012 - of a class, and never changed
    kind: type[nn.Module]  # timm's
    num_heads: int
    head_dim: int
    lln: TiledAttention

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plug(self.make())

    def make(self) -> TiledAttention:
        return make_plug(self, self.implementation, self.num_heads, self.head_dim, self.options)

    def plug(self, attention: TiledAttention) -> None:
        self.fused_attn = True  # timm calls torch's function then, which `attention` stands in for
        self.lln = attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with stand_in(self.lln, self.kind.__name__):
            out: Tensor = super().forward(*args, **kwargs)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Classes that are made have no name by which pickle could find them.
        return restore, (self.kind, self.implementation, self.options), vars(self)


def make_class(kind: type[nn.Module], implementation: str, options: dict[str, Any]) -> type[Any]:
    name = ("LLN" if implementation == "lln" else "LLNDiag") + kind.__name__
    held = {"implementation": implementation, "options": dict(options), "kind": kind, "__module__": __name__}
    made: type[Any] = type(name, (Linearised, kind), held)
    return made


def restore(kind: type[nn.Module], implementation: str, options: dict[str, Any]) -> Any:
    made = make_class(kind, implementation, options)
    return object.__new__(made)


def make_layer(implementation: str = "lln_diag", **options: Any) -> type[Any]:
    """Make an attention class with LLN attention for the argument `attn_layer=` of timm's vision transformers.

    Masks that its forward gets must be padding, [batch, 1, 1, tokens]; others are refused.

    Args:
        implementation: "lln" or "lln_diag".
        options: options of `lln.LLNAttention`: block_size (64 for "lln_diag"), mix, overlap, matching, statistics,
            learnable, alpha, beta and so on. For `tile` and rows and columns of a value_convolution see `convert`.

    Returns:
        A subclass of `timm.layers.Attention` with the same constructor and parameters.

    Raises:
        ValueError or TypeError: the message names the option.

    Example:
        >>> import timm, torch, lln.timm
        >>> shape = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3)
        >>> layer = lln.timm.make_layer("lln_diag", block_size=4)
        >>> timm.models.VisionTransformer(attn_layer=layer, **shape)(torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 3])
    """
    check_plug(implementation, options)
    if asked := needs_patches(options):
        raise ValueError(
            f"{asked}: a single layer does not know how the patches lie in the image; build the model first, and then "
            f"call lln.timm.convert(model, {implementation!r}, {asked}={options[asked]!r})."
        )
    return make_class(timm.layers.Attention, implementation, options)


def convert(model: Any, implementation: str = "lln_diag", **options: Any) -> Any:
    """Let an existing timm model run LLN attention with the weights that it has.

    Args:
        model: a model of timm, changed in place: every `timm.layers.Attention`, `AttentionRope` and `EvaAttention` in
            it. Pooling heads, whose few queries read the tokens once, stay as they are.
        implementation: "lln" or "lln_diag".
        options: those of `make_layer`, and two more. tile: blocks are square tiles with at most this many patches a
            side, which share class and register tokens, for images of any size. value_convolution="3x3": a convolution
            over rows and columns of patches.

    Returns:
        The model.

    Raises:
        ValueError or TypeError: for other kinds of attention and wrong options. The model is unchanged then.

    Example:
        >>> import timm, torch, lln.timm
        >>> shape = dict(img_size=32, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3)
        >>> model = lln.timm.convert(timm.models.VisionTransformer(**shape), "lln_diag", tile=4)
        >>> model(torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 3])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a timm model; got {type(model).__name__}.")
    check_plug(implementation, options)
    layers = find_layers(model)
    for name, layer in layers:
        held = getattr(layer, "lln", None)
        if held is not None and held.state_dict():
            raise ValueError(f"model: what LLN attention has learned in {name} would be lost; build the model anew.")
    made = [make_plug(layer, implementation, layer.num_heads, layer.head_dim, options) for _, layer in layers]
    asked = needs_patches(options)
    patches = None if asked is None else find_patches(model, asked)
    for (_, layer), attention in zip(layers, made, strict=True):
        layer.__class__ = make_class(getattr(layer, "kind", type(layer)), implementation, options)
        attention.patches = patches
        layer.plug(attention)
    return model


def find_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """ValueError where some attention of the model would go on to run softmax."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, Linearised) or type(module) in KINDS:
            layers.append((name, module))
        elif hasattr(module, "fused_attn") and not isinstance(module, POOLS):  # by which timm's attention is known
            raise ValueError(
                f"model: {type(module).__name__} ({name}) of {type(model).__name__} is none of "
                f"{', '.join(kind.__name__ for kind in KINDS)}, so it would go on to run softmax; use this model with "
                "timm's own attention."
            )
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no attention of timm's own classes, so nothing can be converted; use "
            "it as it is."
        )
    return layers


def find_patches(model: Any, asked: str) -> Patches:
    """How the patches of a model lie: its convolution says how many rows and columns there are, whenever it runs."""
    convolution = getattr(getattr(model, "patch_embed", None), "proj", None)
    prefix = getattr(model, "num_prefix_tokens", None)
    if not isinstance(convolution, nn.Conv2d) or not isinstance(prefix, int):
        raise ValueError(
            f"{asked}: {type(model).__name__} has no patch_embed.proj that cuts an image into patches, or does not say "
            f"how many other tokens there are (num_prefix_tokens); {REMEDIES[asked]}."
        )
    for hook in convolution._forward_hooks.values():
        if isinstance(held := getattr(hook, "__self__", None), Patches):
            return held
    patches = Patches(type(model).__name__, prefix)
    convolution.register_forward_hook(patches.note)
    return patches
