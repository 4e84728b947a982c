"""Softmax attention on convolved queries, keys and values: what a convolution does without LLN."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lln.checks import check_convolution
from lln.kernels.call import Call
from lln.nn.convolution import check_value, convolve
from lln.peers.modules import AttentionModule
from lln.peers.registry import register
from lln.peers.softmax import softmax


@register("convolved_softmax")
class ConvolvedSoftmax(AttentionModule):
    """convolution: its odd width, see `lln.nn.convolution`. It starts at zero, which is softmax attention."""

    def __init__(self, *sizes: Any, convolution: int = 5, value_dim: int | None = None, **common: Any) -> None:
        super().__init__(*sizes, **common)
        check_convolution(convolution)
        self.value_dim = value_dim or self.head_dim
        self.conv_q = nn.Parameter(torch.zeros(self.num_heads, self.head_dim, convolution))
        self.conv_k = nn.Parameter(torch.zeros(self.num_key_heads, self.head_dim, convolution))
        self.conv_v = nn.Parameter(torch.zeros(self.num_key_heads, self.value_dim, convolution))

    def attend(self, call: Call) -> Tensor:
        check_value(call.value, self.value_dim, False)
        named = {"query": self.conv_q, "key": self.conv_k, "value": self.conv_v}
        near: dict[str, Any] = {
            name: convolve(getattr(call, name), kernel, is_causal=call.is_causal, mask=call.key_mask)
            for name, kernel in named.items()
        }
        return softmax(dataclasses.replace(call, **near))
