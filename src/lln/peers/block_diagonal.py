"""Softmax attention inside consecutive blocks and nothing else: the Diag of LLN+Diag alone."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.eager import blocks_of
from lln.peers.dispatch import run_each
from lln.peers.registry import register


@register("block_diagonal")
def block_diagonal(call: Call) -> Tensor:
    return run_each(blocks_of, dataclasses.replace(call, block_weight=None))
