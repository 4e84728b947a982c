"""The eager back end: any device, plain PyTorch, the reference for every faster one.

`attend` puts the pieces together: fold and read (bidirectional), the causal recurrence, the evidence read, softmax in
blocks. Packed sequences are split apart and handled one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.kernels import evidence, evidence_mix
from lln.kernels.blocks import Blocks
from lln.kernels.call import Call
from lln.kernels.carry import sequence_lengths
from lln.kernels.causal import Causal
from lln.kernels.common import Dropout, compute_dtype, is_known, run, split_heads
from lln.kernels.composed import compose_blocks, compose_causal, compose_fold, compose_read
from lln.kernels.fold import Fold, Read, make_empty, merge


def attend(call: Call) -> tuple[Tensor, ...]:
    """(out [B, Hq, N, E], log_sum [B, Hk, D], mean_value [B, Hk, D, E]) of a checked call; with the evidence read also
    (mean_key, entropy)."""
    results = [attend_unpacked(sequence) for sequence in draw_dropout(call).sequences()]
    if len(results) == 1:
        return results[0]
    outs, *states = zip(*results, strict=True)
    return torch.cat(outs, -2), *(torch.cat(parts) for parts in states)


def draw_dropout(call: Call) -> Call:
    if not call.dropout_p:
        return call
    # Drawn on the host: no wait for the device, torch.manual_seed repeats it, checkpointing restores it.
    return call.change(dropout=Dropout(call.dropout_p, int(torch.randint(2**62, (), device="cpu"))))


def attend_unpacked(call: Call) -> tuple[Tensor, ...]:
    if call.joint:
        out, *state = evidence_mix.attend(call)
        return out.to(call.query.dtype), *state
    out, *state = evidence.attend(call) if call.read == "evidence" else attend_linearly(call)
    if call.block_size is not None and call.query.shape[-2]:
        out = out + attend_block_part(call)
    return out.to(call.query.dtype), *state


def attend_linearly(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The linear part by the paper's read."""
    heads = call.key.shape[1]
    q = call.query.unflatten(1, (heads, -1))
    k, v = call.key.unsqueeze(2), call.value.unsqueeze(2)
    alpha, weight = group_by_key_head(call.alpha, heads), group_by_key_head(call.lln_weight, heads)
    beta = call.beta[:, :, None, None]
    hidden = None if call.key_mask is None else ~call.key_mask[:, None, None, :, None]
    # The two parts of LLN+Diag are added before they are rounded to a narrow dtype.
    dtype = q.dtype if call.block_size is None else compute_dtype(q.dtype)

    state = None
    if call.log_sum is not None and call.mean_value is not None:
        state = call.log_sum.unsqueeze(2), call.mean_value.unsqueeze(2)
    if call.is_causal:
        before = make_empty(k, v, beta.dtype) if state is None else state
        given = q, k, v, alpha, beta, *before, weight, hidden, dtype, call.dropout
        out, log_sum, mean = run(Causal, compose_causal, *given, in_graphs=True)
    else:
        log_sum, mean = run(Fold, compose_fold, k, v, beta, hidden)
        if state is not None:
            log_sum, mean = merge(*state, log_sum, mean)
        out = run(Read, compose_read, q, alpha, log_sum, mean, weight, dtype, call.dropout)
    return out.flatten(1, 2), log_sum.squeeze(2), mean.squeeze(2)


def attend_block_part(call: Call) -> Tensor:
    """The weighted block part of one sequence's output alone, [B, Hq, N, E] in the compute dtype."""
    q = call.query.unflatten(1, (call.key.shape[1], -1))
    out = attend_blocks(call, q, call.key.unsqueeze(2), call.value.unsqueeze(2), compute_dtype(q.dtype))
    return out.flatten(1, 2)


def attend_blocks(call: Call, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    weight = group_by_key_head(call.block_weight, k.shape[1])
    opened = [None if t is None else t.unsqueeze(2) for t in (call.open_key, call.open_value)]

    def blocks(rows: tuple[Tensor, ...], size: int, stream: int, *where: Tensor | None) -> Tensor:
        # A stream of its own: independent of the linear part's dropout, and of the other blocks'.
        dropout = None if call.dropout is None else call.dropout.make_stream(stream)
        settings = size, call.is_causal, call.scale, dtype, dropout
        out: Tensor = run(Blocks, compose_blocks, *rows, weight, *opened, *where, *settings)
        return out

    size = call.block_size
    assert size is not None
    if call.start is not None:
        return blocks((q, k, v), size, -1, call.start, call.block_mask())
    length = q.shape[-2]
    if torch.compiler.is_compiling() and not is_known(length):  # one graph for all lengths
        return blocks((q, k, v), size, -1, torch.zeros_like(sequence_lengths(k, None)), call.block_mask())
    short = length % size
    if not short or size > q.shape[-2]:
        return blocks((q, k, v), min(size, q.shape[-2]), -1, None, None)
    whole, last = zip(*(t.split([t.shape[-2] - short, short], -2) for t in (q, k, v)), strict=True)
    return torch.cat([blocks(whole, size, -1, None, None), blocks(last, short, -2, None, None)], -2)


def group_by_key_head(t: Tensor | None, heads: int) -> Tensor | None:
    """[B, Hq, D] -> [B, Hk, G, 1, D], where any size may be 1."""
    return None if t is None else split_heads(t, heads).unsqueeze(-2)
