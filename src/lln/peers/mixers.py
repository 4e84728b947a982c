"""Mechanisms that replace the whole attention block: modules on hidden states."""

from __future__ import annotations

from torch import Tensor, nn

from lln.checks import check_number, describe
from lln.kernels.call import Call
from lln.peers.calls import run
from lln.peers.registry import REGISTRY, Mechanism, positive_int

REFUSES = {
    "grouped": "it has no key heads, it mixes hidden states",
    "cross": "it mixes the hidden states of one sequence",
}


class Mixer(nn.Module):
    """hidden [B, N, num_heads * head_dim] -> the same shape, without norm and residual, which are the block's."""

    def __init__(self, entry: Mechanism, num_heads: int, head_dim: int, max_length: int | None, dropout: float) -> None:
        super().__init__()
        self.name, self.max_length = entry.name, max_length
        self.channels = positive_int("num_heads", num_heads) * positive_int("head_dim", head_dim)
        if max_length is not None:
            positive_int("max_length", max_length)
        if not 0.0 <= check_number("dropout", dropout) <= 1.0:
            raise ValueError(f"dropout must lie between 0 and 1; got {dropout}.")
        self.dropout = dropout

    def mix(self, call: Call) -> Tensor:
        """[B, 1, N, C] from the hidden states, which stand for query, key and value of one head."""
        raise NotImplementedError

    def forward(
        self,
        hidden: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """key_mask [B, N] bool, True = a token; cu_seqlens as in `lln.lln_attention`."""
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[2] != self.channels:
            raise ValueError(f"hidden must be [batch, length, {self.channels}]; got {describe(hidden)}.")
        one = hidden.unsqueeze(1)
        out = run(
            REGISTRY[self.name], self.mix, one, one, one, is_causal=is_causal, key_mask=key_mask,
            dropout_p=self.dropout if self.training else 0.0, cu_seqlens=cu_seqlens, scale=None, block_size=None,
            mix=0.5,
        )  # fmt: skip
        return out.squeeze(1)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """In the dtype of the weights: hidden states may be narrower, under autocast say."""
    out: Tensor = module(x.to(module.weight.dtype))
    return out
