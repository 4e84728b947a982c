"""The Triton back end: a checked call handed to the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels import eager
from lln.kernels.call import Call
from lln.kernels.triton import plan


def attend(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out [B, Hq, N, E], log_sum [B, Hk, D], mean_value [B, Hk, D, E]) of a checked call."""
    dim, width, dtype = call.query.shape[-1], call.value.shape[-1], call.query.dtype
    size = call.block_size
    if call.is_causal and call.key_mask is not None and not plan.masks_fit(dim, dtype):
        return eager.attend(call)
    if size is not None and (call.scale < 1e-30 or not plan.blocks_fit(size, dim, width, dtype)):
        return with_eager_blocks(call)
    from lln.kernels.triton.op import apply

    if call.dropout_p:
        # On the device, so that a CUDA graph draws anew at each replay.
        call = call.change(seed=torch.randint(2**62, (), device=call.query.device))
    step = plan.value_part(dim, dtype)
    if width <= step:
        return apply(*call.arguments())
    # Attention is linear in the values.
    parts = [apply(*call.narrow(slice(i, i + step)).arguments()) for i in range(0, width, step)]
    outs, log_sums, means = zip(*parts, strict=True)
    return torch.cat(outs, -1), log_sums[0], torch.cat(means, -1)


def with_eager_blocks(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks that do not fit into a program, or a scale that is not positive: the linear part here, the blocks by the
    eager back end."""
    fields = ("block_size", "lln_weight", "block_weight", "start", "open_key", "open_value", "open_mask")
    none: dict[str, Any] = dict.fromkeys(fields)
    linear, log_sum, mean = attend(call.change(**none))
    rows = [linear] if call.cu_query is None else linear.split(call.cu_query.diff().tolist(), -2)
    outs = []
    for sequence, part in zip(eager.with_dropout(call).sequences(), rows, strict=True):
        assert sequence.lln_weight is not None
        part = part * sequence.lln_weight.unsqueeze(-2)
        outs.append((part + eager.blocks_of(sequence) if part.shape[-2] else part).to(call.query.dtype))
    return torch.cat(outs, -2), log_sum, mean
