"""Which back end runs a call, or a part of it: the one place that decides it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lln.kernels import carry, eager
from lln.kernels.call import Call
from lln.kernels.triton import attend as triton
from lln.kernels.triton.support import explain_evidence, explain_refusal, has_kernels


def choose(backend: str, call: Call) -> Callable[[Call], tuple[Tensor, ...]]:
    """backend: "eager", "triton", or "auto" for the fastest that can run the call. ValueError where "triton" cannot."""
    if backend == "eager" or (backend == "auto" and not call.query.is_cuda):
        return eager.attend
    reason = explain_refusal(call.query) if call.read == "paper" else explain_evidence(call)
    if reason is None:
        return triton.attend
    if backend == "auto":
        return eager.attend
    raise ValueError(f"backend='triton' cannot run this call: {reason}; use 'auto' or 'eager'.")


def block_start(
    key: Tensor, key_mask: Tensor | None, cu_key: Tensor | None, count: Tensor | None, block_size: int
) -> Tensor | None:
    """As `carry.block_start`, in one launch where kernels run: a mask would cost six."""
    if count is None and key_mask is None:
        return None
    if cu_key is not None or not key.shape[0] or torch.compiler.is_compiling() or not has_kernels(key):
        return carry.block_start(key, key_mask, cu_key, count, block_size)
    from lln.kernels.triton.start import find_start  # on demand: `import lln` does without triton

    return find_start(key, key_mask, None if count is None else count.contiguous(), block_size)
