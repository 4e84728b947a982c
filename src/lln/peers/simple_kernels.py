"""Linear attention with elementwise feature maps: the kernels that Fig. 2 of the paper sets beside LLN."""

from __future__ import annotations

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


def elu(call: Call) -> Tensor:
    return feature_attention(call, elu_plus_one)


def relu(call: Call) -> Tensor:
    return feature_attention(call, functional.relu)


def quadratic(call: Call) -> Tensor:
    return feature_attention(call, square)


register(
    "elu",
    "ELU+1",
    paper="Katharopoulos et al. 2020, arXiv 2006.16236",
    cost="(N + M) D E",
    kind="kernel",
    function=elu,
)
register(
    "relu",
    "ReLU",
    paper="Choromanski et al. 2020, arXiv 2009.14794 (generalised kernel)",
    cost="(N + M) D E",
    kind="kernel",
    function=relu,
    note="a query without a feature in common with any key gives zeros",
)
register(
    "quadratic",
    "Quadratic",
    paper="Fig. 2 of Nahshan, Kampeas and Haleva 2024, arXiv 2311.13541",
    cost="(N + M) D E",
    kind="kernel",
    function=quadratic,
    note="features are the squares of the channels",
)
