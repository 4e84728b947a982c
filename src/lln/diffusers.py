"""LLN attention in diffusers' image transformers and UNets: a processor around each attention's own, set by `convert`.

    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(...)
    lln.diffusers.convert(pipe.transformer, "lln_diag")

Self attention (DiT, UNet) and the joint attention of text and image (SD3, Flux) become linear; cross attention stays as
it is. The processor that was there goes on to do everything else (`lln.nn.plug`): projections, norms, rotary positions.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

if importlib.util.find_spec("diffusers") is None:
    raise ModuleNotFoundError(
        "lln.diffusers needs diffusers; install it with: pip install 'lln-attention[diffusers]'", name="diffusers"
    )

from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import nn

from lln.nn.image_grid import REMEDIES
from lln.nn.plug import check_plug, make_plug, needs_patches, stand_in

CROSS = ("attn2", "cross_attn", "cross_attention")  # how modules are called that do not say themselves


class Processor:
    """An attention processor that runs another one, `inner`, with the LLN attention that its module keeps as `.lln`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
        # A mask comes for each head, and diffusers has made them of one.
        with stand_in(attn.lln, f"{type(self.inner).__name__} of {type(attn).__name__}", heads_alike=True):
            return self.inner(attn, *args, **kwargs)

    def __reduce__(self) -> Any:  # its class has no name by which pickle could find it
        return make_processor, (self.inner,)

    def __repr__(self) -> str:
        return f"Processor({type(self.inner).__name__})"


def make_processor(inner: Any) -> Processor:
    """With the signature of `inner`, by which diffusers knows which arguments a processor takes.

    >>> make_processor(AttnProcessor2_0())
    Processor(AttnProcessor2_0)
    """
    made: Processor = make_class(type(inner))(inner)  # type: ignore[arg-type]  # a type has a hash
    return made


@functools.cache
def make_class(kind: type) -> type[Processor]:
    def call(self: Processor, attn: Any, *args: Any, **kwargs: Any) -> Any:
        return Processor.__call__(self, attn, *args, **kwargs)

    call.__signature__ = inspect.signature(kind.__call__)  # type: ignore[attr-defined]
    return type(f"LLN{kind.__name__}", (Processor,), {"__call__": call})


def convert(model: Any, implementation: str = "lln_diag", **options: Any) -> Any:
    """Replace the self attention and joint attention of a diffusers model by LLN attention.

    Masks must be padding, the same for all queries; the converted model refuses others in its forward.

    Args:
        model: a transformer or UNet of diffusers, such as `pipe.transformer` or `pipe.unet`; changed in place.
        implementation: "lln" or "lln_diag", whose blocks are tokens in the model's order: rows of the image, and of the
            text where the two attend jointly.
        options: options of `lln.LLNAttention`: block_size (64 for "lln_diag"), mix, overlap, matching, statistics,
            learnable, alpha, beta and so on.

    Returns:
        The model.

    Raises:
        ValueError or TypeError: for a model without such attention, or a wrong option; the model is unchanged then.

    Example:
        >>> import diffusers, torch, lln.diffusers
        >>> model = diffusers.DiTTransformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=8, in_channels=4,
        ...     num_layers=1, norm_num_groups=1, sample_size=8
        ... )
        >>> model = lln.diffusers.convert(model, "lln_diag", block_size=4)
        >>> step, label = torch.tensor([5]), torch.tensor([1])
        >>> model(torch.randn(1, 4, 8, 8), timestep=step, class_labels=label).sample.shape
        torch.Size([1, 4, 8, 8])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a model of diffusers, such as pipe.transformer or pipe.unet of a pipeline; got "
            f"{type(model).__name__}."
        )
    check_plug(implementation, options)
    if asked := needs_patches(options):
        raise ValueError(
            f"{asked} is not supported in models of diffusers, because it is not known how their patches lie among the "
            f"tokens; {REMEDIES[asked]}."
        )
    layers = [(name, module) for name, module in find_attention(model) if not is_cross(name, module)]
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no self attention or joint attention of diffusers, so nothing can be "
            "converted; use it as it is."
        )
    made = []
    for name, module in layers:
        check_layer(name, module)
        heads = module.heads
        made.append(make_plug(module, implementation, heads, module.inner_dim // heads, options))
    for (_, module), attention in zip(layers, made, strict=True):
        module.lln = attention
        if not isinstance(module.processor, Processor):
            # The older one computes softmax by itself; the newer one asks torch for it, and is the usual one.
            inner = AttnProcessor2_0() if type(module.processor) is AttnProcessor else module.processor
            module.set_processor(make_processor(inner))
    return model


def find_attention(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "set_processor")
            and hasattr(module, "processor")]  # fmt: skip


def is_cross(name: str, module: Any) -> bool:
    """Whether it attends to another sequence than its own."""
    said = getattr(module, "is_cross_attention", None)
    return bool(said) if said is not None else name.rsplit(".", 1)[-1] in CROSS


def check_layer(name: str, module: Any) -> None:
    """ValueError where LLN attention cannot have a place."""
    who = f"model: {type(module).__name__} ({name})"
    if not isinstance(getattr(module, "heads", None), int) or not isinstance(getattr(module, "inner_dim", None), int):
        raise ValueError(f"{who} does not say how many heads it has and of which size; leave this model unconverted.")
    if getattr(module, "add_k_proj", None) is not None and getattr(module, "add_q_proj", None) is None:
        raise ValueError(
            f"{who} attends from queries of the image alone to keys of the image and of a text, which LLN attention "
            "does not support; leave this model unconverted."
        )
    held = getattr(module, "lln", None)
    if held is not None and held.state_dict():
        raise ValueError(f"model: what LLN attention has learned in {who} would be lost; build the model anew.")
    if isinstance(module, Attention) and not module.scale_qk:
        raise ValueError(
            f"{who} does not divide its scores by the root of the head size, which is not supported; leave this model "
            "unconverted."
        )
