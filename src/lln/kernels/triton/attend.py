"""The Triton back end: a checked call handed to the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.kernels import eager
from lln.kernels.call import Call
from lln.kernels.step import step as eager_step
from lln.kernels.triton import plan
from lln.kernels.triton.support import OLDEST_TRITON, TRITON


def attend(call: Call) -> tuple[Tensor, ...]:
    """(out [B, Hq, N, E], log_sum [B, Hk, D], mean_value [B, Hk, D, E]) of a checked call; with the evidence read also
    (mean_key, entropy)."""
    if call.read == "evidence":
        return attend_by_evidence(call)
    dim, width, dtype = call.query.shape[-1], call.value.shape[-1], call.query.dtype
    size = call.block_size
    if call.is_causal and call.key_mask is not None and not plan.masks_fit(dim, dtype):
        return eager.attend(call)
    if size is not None and (call.scale < 1e-30 or not plan.blocks_fit(size, dim, width, dtype)):
        return attend_with_eager_blocks(call)
    from lln.kernels.triton.fit import DoesNotFit
    from lln.kernels.triton.op import apply
    from lln.kernels.triton.tape import draw_seed

    if call.dropout_p:
        call = call.change(seed=draw_seed(call.query.device))
    try:
        return apply(*call.arguments())
    except DoesNotFit:  # only before anything was computed
        return eager.attend(call) if size is None else attend_with_eager_blocks(call)


def attend_by_evidence(call: Call) -> tuple[Tensor, ...]:
    from lln.kernels.triton.evidence_join_launch import attend as attend_jointly
    from lln.kernels.triton.evidence_op import apply
    from lln.kernels.triton.fit import DoesNotFit
    from lln.kernels.triton.tape import draw_seed

    if call.dropout_p:
        call = call.change(seed=draw_seed(call.query.device))
    try:
        return attend_jointly(call) if call.joint else apply(call)
    except DoesNotFit:
        return eager.attend(call)


def attend_known(
    options: tuple[Any, ...], given: tuple[Tensor | None, ...], backend: str, attend: Callable[[], Tensor]
) -> Tensor:
    """What `attend` gives, see `recognise.attend_known`; where these kernels have no part in it, by calling it."""
    query = given[0]
    if torch.compiler.is_compiling() or not isinstance(query, Tensor) or TRITON is None or TRITON < OLDEST_TRITON:
        return attend()
    if not query.is_cuda and backend != "triton":
        return attend()
    return load_recogniser()(options, given, attend)


@functools.cache
def load_recogniser() -> Callable[..., Tensor]:
    """On demand, since `import lln` does without triton; once, since an import takes a tenth of what a call may."""
    from lln.kernels.triton.recognise import attend_known

    return attend_known


def can_step(call: Call) -> bool:
    """Whether one token after a state is one kernel. A compiler makes its own of `lln.kernels.step`."""
    from lln.kernels.triton import step

    return torch.compiler.is_compiling() or step.can_step(call.query, call.value, call.block_size)


def step(call: Call) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """As `lln.kernels.step.step`."""
    if torch.compiler.is_compiling():
        return eager_step(call)
    from lln.kernels.triton.step import Step, take_step

    state = call.log_sum, call.mean_value, call.count, call.open_key, call.open_value, call.open_mask
    held: Any = (None if t is None else t.contiguous() for t in state)
    factors = call.alpha, call.beta, call.lln_weight, call.block_weight
    out, log_sum, mean, *rest = take_step(
        Step(call.query, call.key, call.value, *factors, call.key_mask, *held), call.scale
    )
    return out, log_sum, mean, dict(zip(("count", "block_key", "block_value", "block_mask"), rest, strict=False))


def attend_with_eager_blocks(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks that do not fit into a program, or a scale that is not positive: the linear part here, the blocks by the
    eager back end."""
    fields = ("block_size", "lln_weight", "block_weight", "start", "open_key", "open_value", "open_mask")
    none: dict[str, Any] = dict.fromkeys(fields)
    linear, log_sum, mean = attend(call.change(**none))
    rows = [linear] if call.cu_query is None else linear.split(call.cu_query.diff().tolist(), -2)
    outs = []
    for sequence, part in zip(eager.draw_dropout(call).sequences(), rows, strict=True):
        assert sequence.lln_weight is not None
        part = part * sequence.lln_weight.unsqueeze(-2)
        outs.append((part + eager.attend_block_part(sequence) if part.shape[-2] else part).to(call.query.dtype))
    return torch.cat(outs, -2), log_sum, mean
