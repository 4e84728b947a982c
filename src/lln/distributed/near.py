"""The block part of LLN+Diag alone, of rows whose blocks are whole: by torch's kernels where those do, else eager."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from lln.kernels.call import Call
from lln.kernels.eager import attend_block_part, draw_dropout


def attend_near(call: Call) -> Tensor:
    """[B, Hq, N, E] without the weight of the blocks: in the dtype of the queries where torch's kernels run, else in
    the compute dtype."""
    plain = call.start is None and call.cu_query is None and not call.dropout_p
    if plain and call.query.is_cuda and call.query.dtype in (torch.bfloat16, torch.float16):
        return attend_by_torch(call)
    outs = [attend_block_part(sequence) for sequence in draw_dropout(call).sequences()]
    return outs[0] if len(outs) == 1 else torch.cat(outs, -2)


def attend_by_torch(call: Call) -> Tensor:
    """Each block as a sequence of its own; the last may be shorter."""
    assert call.block_size is not None
    length = call.query.shape[2]
    whole = length - length % call.block_size
    outs = [attend_parts(call, slice(0, whole), call.block_size)] if whole else []
    if whole < length:
        outs.append(attend_parts(call, slice(whole, length), length - whole))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def attend_parts(call: Call, rows: slice, size: int) -> Tensor:
    def cut(t: Tensor) -> Tensor:
        parts: Tensor = t[:, :, rows].unflatten(2, (-1, size))
        return parts.transpose(1, 2).flatten(0, 1)  # [B n, H, size, D]

    query, key, value = cut(call.query), cut(call.key), cut(call.value)
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=grouped
    )
    together: Tensor = out.unflatten(0, (call.query.shape[0], -1))
    return together.transpose(1, 2).flatten(2, 3)
