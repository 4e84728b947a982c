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


def elementwise(feature_map: Callable[[Tensor], Tensor], call: Call) -> Tensor:
    return feature_attention(call, feature_map)


for _name, _title, _map, _paper, _note in (
    ("elu", "ELU+1", elu_plus_one, "Katharopoulos et al. 2020, arXiv 2006.16236", ""),
    (
        "relu",
        "ReLU",
        functional.relu,
        "Choromanski et al. 2020, arXiv 2009.14794 (generalised kernel)",
        "a query without a feature in common with any key gives zeros",
    ),
    (
        "quadratic",
        "Quadratic",
        square,
        "Fig. 2 of Nahshan, Kampeas and Haleva 2024, arXiv 2311.13541",
        "features are the squares of the channels",
    ),
):
    register(
        _name,
        _title,
        paper=_paper,
        cost="(N + M) D E",
        kind="kernel",
        note=_note,
    )(functools.partial(elementwise, _map))
