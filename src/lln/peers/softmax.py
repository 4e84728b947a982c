"""Softmax attention, what everything else is measured against; also with a convolution of the values beside it, and on
convolved queries, keys and values, which shows what these do without LLN."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lln.kernels.call import Call
from lln.nn.convolution import check_value, convolve, warn_convolution
from lln.nn.module_options import check_convolution
from lln.nn.value_convolution import Width
from lln.peers.modules import AttentionModule
from lln.peers.registry import register


@register("softmax")
def softmax(call: Call) -> Tensor:
    q, k, v = call.query, call.key, call.value
    attend = functools.partial(
        scaled_dot_product_attention, q, k, v, dropout_p=call.dropout_p, scale=call.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    if call.key_mask is None:
        return attend(is_causal=call.is_causal)
    mask = call.key_mask[:, None, None, :]  # [B, 1, 1, M]
    if call.is_causal:
        mask = mask & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    alive = mask.any(-1, keepdim=True)
    return attend(attn_mask=mask | ~alive) * alive  # a row without any key would be NaN in some kernels


@register("value_convolved_softmax")
class ValueConvolvedSoftmax(AttentionModule):
    """Softmax attention and beside it a learned convolution of the values, by a name of its own that models can run:
    `lln.mechanism("softmax", value_convolution=5)` is the same.

    Args:
        value_convolution: its odd width, see `lln.nn.value_convolution`. It starts at zero, which is softmax attention.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("value_convolved_softmax", num_heads=4, head_dim=16, value_convolution=3)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, *sizes: Any, value_convolution: Width = 5, **common: Any) -> None:
        super().__init__(*sizes, value_convolution=value_convolution, **common)

    def attend(self, call: Call) -> Tensor:
        return softmax(call)


@register("convolved_softmax")
class ConvolvedSoftmax(AttentionModule):
    """Softmax attention on convolved queries, keys and values, as a module that learns the convolution. Deprecated for
    `value_convolved_softmax`.

    Args:
        convolution: its odd width, see `lln.nn.convolution`. It starts at zero, which is softmax attention.
        sizes, common: as of `AttentionModule`.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]; value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("convolved_softmax", num_heads=4, head_dim=16, convolution=3)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> module(query, key, value, is_causal=True).shape
        torch.Size([2, 4, 50, 16])
    """

    def __init__(self, *sizes: Any, convolution: int = 5, **common: Any) -> None:
        super().__init__(*sizes, **common)
        check_convolution(convolution)
        warn_convolution()
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
        return softmax(call.change(**near))
