"""Which calls the GPU kernels can run; nothing here imports Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.common import is_plain, is_watched
from lln.kernels.evidence import count_channels
from lln.kernels.triton import plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_DIM = 256
EVIDENCE_DIM = 128  # with the evidence read, whose programs hold twice as much
WINDOW = 128  # keys of a block or window with mix="evidence", which a program holds at once
OLDEST_TRITON = (3, 6)  # 3.2 aborts on some of the kernels


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def find_triton() -> tuple[int, ...] | None:
    """The version of Triton, without importing it."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(name))[:2])
    return None


TRITON = find_triton()


def explain_refusal(query: Tensor) -> str | None:
    """Why the kernels cannot run a call with this query; None when they can."""
    device = query.device
    if TRITON is None:
        return "it needs the triton package, which is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"it runs on CUDA and HIP devices, and the tensors are on {device}"
    if TRITON < OLDEST_TRITON:
        needed, found = (".".join(map(str, version)) for version in (OLDEST_TRITON, TRITON))
        return f"its kernels need Triton {needed} or newer, and {found} is installed"
    if query.dtype not in DTYPES:
        return f"its kernels are for float32, bfloat16 and float16, and the tensors are {query.dtype}"
    if query.shape[-1] > LARGEST_DIM:
        return f"its kernels are for head dims up to {LARGEST_DIM}, and this one is {query.shape[-1]}"
    # A compiler's tracer cannot ask the device; by then a first eager call has, or the kernels' own compiler will.
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    return find_lack(device)


def explain_evidence(call: Call) -> str | None:
    """The same of a call with the evidence read."""
    where, dim, width = "", call.query.shape[-1], call.value.shape[-1]
    if torch.compiler.is_compiling() or is_watched():
        where = "outside torch.compile and torch.func"
    elif max(dim, width) > EVIDENCE_DIM:
        where = f"with head dims up to {EVIDENCE_DIM}, and these are {dim} and {width}"
    elif call.block_size is not None:
        where = explain_blocks(call, call.block_size)
    elif call.is_causal and call.query.shape[2] > 1:
        channels = count_channels(call.directions, dim)
        if channels > EVIDENCE_DIM:
            where = f"with up to {EVIDENCE_DIM} channels where is_causal is set, and these are {channels}"
    return f"the evidence read has kernels {where}" if where else explain_refusal(call.query)


def explain_blocks(call: Call, size: int) -> str:
    """What they ask of blocks, and this call has not."""
    if call.joint:
        return f"with mix='evidence' for windows of up to {WINDOW} keys, and these are {size}" if size > WINDOW else ""
    if call.is_causal:
        return "with block_size where is_causal is set for mix='evidence' alone"
    if call.scale < 1e-30 or not plan.blocks_fit(size, call.query.shape[-1], call.value.shape[-1], call.query.dtype):
        return f"with blocks that fit into a program, and block_size is {size}"
    return ""


@functools.cache
def find_lack(device: torch.device) -> str | None:
    """Whether there is room for the kernels is found when they are compiled: see `fit`."""
    if not plan.HIP and torch.cuda.get_device_capability(device) < (8, 0):
        return f"Triton needs compute capability 8.0, which {torch.cuda.get_device_name(device)} lacks"
    return None


def has_kernels(*tensors: Tensor) -> bool:
    """Whether kernels other than those of attention run for these tensors. What has no memory of its own, a subclass or
    a tensor inside torch.func, is for torch."""
    return explain_refusal(tensors[0]) is None and all(map(is_plain, tensors))
