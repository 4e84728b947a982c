"""Where the first block of each sequence begins, from a padding mask: see `carry.block_start`, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.kernels.triton.plan import use_device
from lln.kernels.triton.tape import Recording, replay, signature


@triton.jit(do_not_specialize=["mask_b", "n", "size"])
def start_kernel(MASK, COUNT, START, mask_b, mask_n, n, size, MASKED: tl.constexpr, COUNTED: tl.constexpr):
    """A program a sequence."""
    b = tl.program_id(0)
    first = tl.full([], 0, tl.int64)
    if MASKED:
        at = tl.arange(0, 1024)
        nearest = tl.zeros([1024], tl.int64) + n
        for begin in range(0, n, 1024):
            rows = begin + at
            seen = tl.load(MASK + b.to(tl.int64) * mask_b + rows.to(tl.int64) * mask_n, mask=rows < n, other=0)
            nearest = tl.minimum(nearest, tl.where(seen != 0, rows.to(tl.int64), n))
        first = tl.min(nearest, 0)
    start = -first
    if COUNTED:
        count = tl.load(COUNT + b)
        start = tl.where(count > 0, count % size, start)
    tl.store(START + b, start)


def find_start(key: Tensor, key_mask: Tensor | None, count: Tensor | None, block_size: int) -> Tensor:
    """[B] int64"""

    def launches(recording: Recording | None) -> Sequence[Tensor]:
        start = torch.empty(key.shape[0], dtype=torch.int64, device=key.device)
        strides = (0, 0) if key_mask is None else key_mask.stride()
        args = (key_mask, count, start, *strides, key.shape[2], block_size, key_mask is not None, count is not None)
        with use_device(key.device):
            compiled = start_kernel[(key.shape[0],)](*args)
        if recording is not None:
            recording.make(start)
            recording.launch(compiled, (key.shape[0],), args)
        return (start,)

    given = key, key_mask, count
    return replay(("start", key.device, block_size, signature(given)), given, launches)[0]
