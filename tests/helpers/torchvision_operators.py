"""A torchvision whose operators cannot be loaded (one built for CUDA beside a torch that is not) fails at import, since
it describes two of them. timm needs torchvision, but none of its operators."""

import torch


def name_operators() -> None:
    """Give these two a name where they have none."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
