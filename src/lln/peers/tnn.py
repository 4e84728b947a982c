"""TNN: a gated Toeplitz unit. Tokens are mixed by t_(i-j), one sequence of numbers a channel, made from the distance by
a small network and decaying with it; no token looks at another.

    out = W (u * T v)      T_ij = lambda^|i-j| rpe(i - j)
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
from lln.peers.transnormer import rms_norm
from lln.values import check_count, check_number


@register("tnn")
class TNN(Mixer):
    """TNN as a module, in the place of the whole attention block (see `Mixer`).

    Args:
        sizes: num_heads, head_dim, max_length; the hidden states have num_heads * head_dim channels.
        decay: lambda, by which t falls with the distance.
        expansion: channels of u and v, over those of the hidden states.
        rpe_dim, rpe_layers: width and depth of the network that makes t from the distance.
        dropout: probability in training.

    Shape:
        - hidden: [batch, length, num_heads * head_dim], and the same for the output

    Examples:
        >>> import lln, torch
        >>> module = lln.mechanism("tnn", num_heads=4, head_dim=16, rpe_dim=8)
        >>> module(torch.randn(2, 50, 64), is_causal=True).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self, *sizes: Any, decay: float = 0.99, expansion: int = 3, rpe_dim: int = 64, rpe_layers: int = 3,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(*sizes, dropout=dropout)
        if not 0.0 < check_number("decay", decay) <= 1.0:
            raise ValueError(f"decay must lie between 0 and 1, and not be 0; got {decay}.")
        self.decay = decay
        width = self.channels * check_count("expansion", expansion)
        self.to_uv = nn.Linear(self.channels, 2 * width)
        self.to_out = nn.Linear(width, self.channels, bias=False)
        self.position = nn.Linear(1, check_count("rpe_dim", rpe_dim))
        widths = [rpe_dim] * check_count("rpe_layers", rpe_layers) + [width]
        self.layers = nn.ModuleList(nn.Linear(rpe_dim, size) for size in widths)

    def coefficients(self, distance: Tensor) -> Tensor:
        """t of these distances i - j: [len, width]."""
        t = apply_linear(self.position, distance.unsqueeze(-1))
        for layer in self.layers:
            t = layer(functional.relu(rms_norm(t)))
        return t * self.decay ** distance.abs().unsqueeze(-1).to(t.dtype)

    def attend(self, call: Call) -> Tensor:
        x, length, device = call.query, call.query.shape[2], call.query.device
        dtype = compute_dtype(x.dtype)
        u, v = functional.silu(apply_linear(self.to_uv, x)).to(dtype).chunk(2, -1)
        if call.key_mask is not None:
            v = v.masked_fill(~call.key_mask[:, None, :, None], 0.0)
        # A circle of 2 N: distances 0 .. N - 1, one that no pair has, then -(N - 1) .. -1.
        distance = torch.arange(2 * length, device=device)
        distance = torch.where(distance < length, distance, distance - 2 * length)
        t = self.coefficients(distance).to(dtype)
        unused = distance == -length if not call.is_causal else distance < 0
        t = t.masked_fill(unused[:, None], 0.0)
        spectrum = torch.fft.rfft(t, dim=0) * torch.fft.rfft(v, n=2 * length, dim=2)
        mixed = torch.fft.irfft(spectrum, n=2 * length, dim=2)[:, :, :length]
        return apply_linear(self.to_out, u * drop(mixed, call.dropout)[0])
