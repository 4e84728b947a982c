"""LLN attention over sequences that lie on several processes: what crosses the network is a state, whatever the length.

mesh = torch.distributed.init_device_mesh("cuda", (8,))
with lln.distributed.context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
    loss = model(tokens)
"""

from __future__ import annotations

from lln.distributed.context import (
    attend_across,
    context_parallel,
    shard,
    split_evenly,
    split_heads,
    sum_gradients,
    unshard,
)

__all__ = [
    "attend_across",
    "context_parallel",
    "shard",
    "split_evenly",
    "split_heads",
    "sum_gradients",
    "unshard",
]
