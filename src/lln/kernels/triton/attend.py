"""The Triton back end: a checked call handed to the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
    # On the device, so that a CUDA graph draws anew at each replay.
    seed = torch.randint(2**62, (), device=call.query.device) if call.dropout_p else None
    step = plan.value_part(dim, dtype)
    if width <= step:
        return attend_part(call, None, seed)
    # Attention is linear in the values.
    parts = [attend_part(call, slice(i, i + step), seed) for i in range(0, width, step)]
    outs, log_sums, means = zip(*parts, strict=True)
    return torch.cat(outs, -1), log_sums[0], torch.cat(means, -1)


def attend_part(call: Call, part: slice | None, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """With some of the values' channels, None for all."""
    from lln.kernels.triton.op import apply

    def cut(t: Tensor | None) -> Tensor | None:
        return t if t is None or part is None or t.shape[-1] == 1 else t[..., part]

    cu_query, cu_key = (t if t is None else t.contiguous() for t in (call.cu_query, call.cu_key))
    return apply(  # in the order of Arguments
        call.query, call.key, call.value if part is None else call.value[..., part], call.alpha, call.beta,
        cut(call.lln_weight), cut(call.block_weight), call.key_mask,
        cu_query, cu_key,
        call.log_sum, call.mean_value if part is None or call.mean_value is None else call.mean_value[..., part],
        call.start, call.open_key,
        call.open_value if part is None or call.open_value is None else call.open_value[..., part],
        call.open_mask, seed, call.block_size, call.is_causal, call.scale, call.dropout_p,
    )  # fmt: skip


def with_eager_blocks(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks that do not fit into a program, or a scale that is not positive: the linear part here, the blocks by the
    eager back end."""
    fields = ("block_size", "lln_weight", "block_weight", "start", "open_key", "open_value", "open_mask")
    none: dict[str, Any] = dict.fromkeys(fields)
    linear, log_sum, mean = attend(dataclasses.replace(call, **none))
    outs = []
    for sequence, part in zip(eager.with_dropout(call).sequences(), rows_of_sequences(call, linear), strict=True):
        assert sequence.lln_weight is not None
        part = part * sequence.lln_weight.unsqueeze(-2)
        outs.append((part + eager.blocks_of(sequence) if part.shape[-2] else part).to(call.query.dtype))
    return torch.cat(outs, -2), log_sum, mean


def rows_of_sequences(call: Call, t: Tensor) -> Sequence[Tensor]:
    return [t] if call.cu_query is None else t.split(call.cu_query.diff().tolist(), -2)
