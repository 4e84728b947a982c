"""timm for tests, also beside a torchvision whose operators cannot be loaded (a CUDA build of it, a CPU build of
torch): timm needs none of them, but torchvision describes two at import."""

import contextlib
import importlib.util

import torch


def prepare_torchvision() -> None:
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


prepare_torchvision()
