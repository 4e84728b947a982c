"""Compiles the GPU kernels for a card that is not there, and prints as JSON how much shared memory each would take:

    python compiled_kernels.py CAPABILITY DTYPE CAUSAL BLOCK_SIZE

The other tests run kernels in Triton's interpreter, as Python: what its compiler makes of them shows on a GPU, or here.
"""

import json
import sys
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lln import lln_attention
from lln.kernels.triton import moments, op, plan, support
from lln.kernels.triton.forward import Launch

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program can have: A100, H100


class Absent:
    """What the compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int) -> dict[str, int]:
    """From now on a launch compiles; the largest shared memory of each kernel goes into what is returned."""
    found: dict[str, int] = {}
    run, prepare = JITFunction.run, Launch.__init__

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        found[name] = max(found.get(name, 0), kernel.metadata.shared)
        return kernel

    def as_on_a_gpu(self: Launch, a: Any, recording: Any = None) -> None:
        prepare(self, a, None)
        if self.dtype == torch.bfloat16:
            self.values["DOT"] = tl.bfloat16

    driver.set_active(Absent(capability))
    CUDABackend.make_cubin = lambda self, *args, **options: b""  # the assembler is slow, and decides nothing of this
    JITFunction.run = compiled
    launches: Any = Launch
    launches.__init__ = as_on_a_gpu
    modules: list[Any] = [op, moments]
    for module in modules:
        module.replayed = lambda key, tensors, launches: launches(None)
    cards: Any = plan
    cards.shared_memory = lambda device: SHARED[capability]
    cards.multiprocessors = lambda device: 108
    support.interpreted = lambda: True  # the tensors are on a CPU
    return found


def main() -> None:
    capability, dtype, causal, block_size = sys.argv[1:]
    found = compile_only(int(capability))
    heads, key_heads, length, dim = 4, 2, 500, 64

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    rows = [draw(2, h, length, dim, dtype=getattr(torch, dtype)) for h in (heads, key_heads, key_heads)]
    factors, options = [draw(heads, dim), draw(key_heads, dim)], dict[str, Any]()
    mask = torch.ones(2, length, dtype=torch.bool)
    if int(block_size):
        options = {"block_size": int(block_size), "mix": draw(heads, dim)}
    out = lln_attention(
        *rows, *factors, key_mask=mask, dropout_p=0.1, is_causal=causal == "causal", backend="triton", **options
    )
    torch.autograd.grad(out, [*rows, *factors, *filter(torch.is_tensor, options.values())], torch.ones_like(out))
    moments.both_moments(rows[0].detach(), rows[1].detach(), key_heads, mask, mask, None, None)
    print(json.dumps({"limit": SHARED[int(capability)], "shared": found}))


if __name__ == "__main__":
    main()
