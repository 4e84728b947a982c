"""TransNormer T1 and T2: in early layers attention inside blocks (diag), later linear attention with a norm in place of
the sum of weights (norm).

         diag                                    norm
    T1   RMSNorm(relu(q k^T) v) in blocks        RMSNorm(elu(q) (elu(k)^T v))
    T2   softmax(q k^T) v in blocks              RMSNorm((1 + elu(q)) ((1 + elu(k))^T v))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.carry import block_start
from lln.kernels.common import drop
from lln.kernels.eager import attend_block_part
from lln.kernels.features import FeatureMap
from lln.peers.pieces import feature_attention, group_heads
from lln.peers.registry import register
from lln.peers.simple_kernels import elu_plus_one
from lln.peers.windows import align, cut_blocks, visible_blocks
from lln.values import check_choice, check_count

Part = Literal["norm", "diag"]


def rms_norm(t: Tensor) -> Tensor:
    return t * (t.square().mean(-1, keepdim=True) + 1e-8).rsqrt()


def transnormer(
    feature_map: FeatureMap, attend_blocks: Callable[[Call, int], Tensor], call: Call, *, part: Part = "norm",
    block: int = 64,
) -> Tensor:  # fmt: skip
    """part: "norm", or "diag" for early layers; block: tokens of a block of "diag"."""
    check_count("block", block)
    check_choice("part", part, "norm", "diag")
    if part == "norm":
        return rms_norm(feature_attention(call, feature_map, normalise=False))
    if call.query.shape[2] != call.key.shape[2]:
        raise ValueError("part='diag' needs query and key of one sequence; cross attention has part='norm' only.")
    return attend_blocks(call, block)


def rectify_blocks(call: Call, block: int) -> Tensor:
    def rectify(call: Call, mask: Tensor) -> Tensor:
        q, k, v = group_heads(call)
        size = min(block, k.shape[-2])
        weight = functional.relu(cut_blocks(q, size) * call.scale @ cut_blocks(k, size).transpose(-1, -2))
        weight = weight * visible_blocks(mask, size).transpose(-1, -2)
        weight = drop(weight.tril() if call.is_causal else weight, call.dropout)[0]
        out = rms_norm(weight @ cut_blocks(v, size))
        return out.flatten(-3, -2)[..., : q.shape[-2], :].flatten(1, 2)

    return align(call, rectify)


def softmax_blocks(call: Call, block: int) -> Tensor:
    start = block_start(call.key, call.key_mask, None, None, block)
    return attend_block_part(call.change(block_size=block, start=start, block_weight=None))


register("transnormer_t1")(functools.partial(transnormer, functional.elu, rectify_blocks))
register("transnormer_t2")(functools.partial(transnormer, elu_plus_one, softmax_blocks))
