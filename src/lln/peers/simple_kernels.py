"""Linear attention with elementwise feature maps: the kernels that Fig. 2 of the paper sets beside LLN."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from lln.kernels.call import Call
from lln.peers.pieces import feature_attention
from lln.peers.registry import register


def elu_plus_one(x: Tensor) -> Tensor:
    return functional.elu(x) + 1.0


def square(x: Tensor) -> Tensor:
    return x * x


# By the names of Fig. 2.
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": functional.relu, "quadratic": square, "ELU": elu_plus_one
}  # fmt: skip


def attend_elementwise(feature_map: Callable[[Tensor], Tensor], call: Call) -> Tensor:
    """Linear attention with this feature map on queries and keys."""
    return feature_attention(call, feature_map)


for _name, _map in FEATURES.items():
    register(_name.lower())(functools.partial(attend_elementwise, _map))
