"""NaLaFormer: linear attention whose features' power grows with the norm of the query, so that long queries attend to
few keys, as with softmax (Meng et al. 2026, arXiv 2506.21137).

    f(q) = [relu(d)^p, relu(-d)^p]      d = q / |q|      p = power (1/2 + tanh |q|)
    f(k) = [relu(k)^power, relu(-k)^power]

with power = 3: norm and direction of the query apart, in the form that the authors released; the first version of the
paper compares the parts by cosines. Rotary positions, gate and convolution of the values belong to the block around it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lln.kernels.call import Call
from lln.peers.pieces import feature_attention
from lln.peers.registry import register
from lln.values import check_positive

SMALL = 1e-30  # beside the square of a norm, which may be 0


@register("nalaformer")
def nalaformer(call: Call, *, power: float = 3.0) -> Tensor:
    """power: of the keys' features; that of the queries' lies between a half and one and a half of it."""
    check_positive("power", power)

    def map_query(q: Tensor) -> Tensor:
        norm = (q.square().sum(-1, keepdim=True) + SMALL).sqrt()
        return split_signs(q / norm).pow(power * (0.5 + torch.tanh(norm)))

    return feature_attention(call, map_query, lambda k: split_signs(k).pow(power))


def split_signs(x: Tensor) -> Tensor:
    return torch.cat([functional.relu(x), functional.relu(-x)], -1)
