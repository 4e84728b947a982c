"""FLASH: a gated attention unit whose attention is quadratic (squared ReLU) inside chunks and linear between them.

out = W (u * (A v + Q K^T v))      A = relu(q k^T / c + b)^2 in chunks of c       q, k, Q, K: scaled and shifted z
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.common import compute_dtype, drop
from lln.peers.modules import Mixer, apply_linear
from lln.peers.registry import register
from lln.peers.windows import align, cut_blocks
from lln.values import check_count


@register("flash")
class Flash(Mixer):
    """FLASH as a module, in the place of the whole attention block (see `Mixer`).

    Args:
        sizes: num_heads, head_dim, max_length; the hidden states have num_heads * head_dim channels.
        chunk: tokens of a chunk, c.
        expansion: channels of u and v, over those of the hidden states.
        key_dim: channels of z, which queries and keys are made of.
        dropout: probability in training.

    Shape:
        - hidden: [batch, length, num_heads * head_dim], and the same for the output

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("flash", num_heads=4, head_dim=16, chunk=16, key_dim=8)
        >>> module(torch.randn(2, 50, 64), is_causal=True).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self, *sizes: Any, chunk: int = 256, expansion: int = 2, key_dim: int = 128, dropout: float = 0.0
    ) -> None:
        super().__init__(*sizes, dropout=dropout)
        self.chunk = check_count("chunk", chunk)
        width = self.channels * check_count("expansion", expansion)
        self.to_uv = nn.Linear(self.channels, 2 * width)
        self.to_z = nn.Linear(self.channels, check_count("key_dim", key_dim))
        self.scale = nn.Parameter(0.02 * torch.randn(4, key_dim))  # of q, k, Q, K
        self.shift = nn.Parameter(torch.zeros(4, key_dim))
        self.bias = nn.Parameter(torch.zeros(2 * chunk - 1))  # b, by the distance i - j
        self.to_out = nn.Linear(width, self.channels, bias=False)

    def attend(self, call: Call) -> Tensor:
        return align(call, self.gate_chunks)

    def gate_chunks(self, call: Call, mask: Tensor) -> Tensor:
        x = call.query  # [B, 1, N, C]
        dtype, length = compute_dtype(x.dtype), x.shape[2]
        size = min(self.chunk, length)
        u, v = functional.silu(apply_linear(self.to_uv, x)).to(dtype).chunk(2, -1)
        z = functional.silu(apply_linear(self.to_z, x)).to(dtype)
        q, k, far_q, far_k = (z * s + t for s, t in zip(self.scale.to(dtype), self.shift.to(dtype), strict=True))
        v = cut_blocks(v.masked_fill(~mask[:, None, :, None], 0.0), size)  # [B, 1, n, c, E]
        row = torch.arange(size, device=x.device)
        b = self.bias.to(dtype)[row[:, None] - row + self.chunk - 1]
        a = functional.relu(cut_blocks(q, size) @ cut_blocks(k, size).transpose(-1, -2) / self.chunk + b).square()
        near = drop(a.tril() if call.is_causal else a, call.dropout, 1)[0] @ v
        state = cut_blocks(far_k, size).transpose(-1, -2) @ v  # [B, 1, n, S, E]; a hidden token's v is 0
        if call.is_causal:
            state = (state.cumsum(2) - state) / self.chunk  # of the chunks before
        else:
            state = state.sum(2, keepdim=True) / mask.sum(-1).clamp_min(1)[:, None, None, None, None]
        far = drop(cut_blocks(far_q, size), call.dropout, 2)[0] @ state
        mixed = (near + far).flatten(2, 3)[:, :, :length]
        return apply_linear(self.to_out, u * mixed)
