"""The kernels that Fig. 2 sets beside softmax and LLN."""

from __future__ import annotations

import torch
from torch import Tensor

KERNELS = ("ReLU", "quadratic", "ELU")


def features(name: str, t: Tensor) -> Tensor:
    """The feature map of queries and keys alike, element by element."""
    if name == "ReLU":
        return t.relu()
    if name == "quadratic":
        return t.square()
    if name == "ELU":
        return torch.nn.functional.elu(t) + 1
    raise ValueError(f"name must be one of {', '.join(KERNELS)}; got {name!r}.")
