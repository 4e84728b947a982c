"""Compiled kernels launched again and again by the CUDA driver itself: their arguments are packed once, and play.c
fills in addresses and launches one after another. Triton's own way looks at all arguments of each kernel every time,
which takes the host longer than the launch.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
import warnings
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import torch

SIZES = {"64": 8, "32": 4, "16": 2, "8": 1}
PACKED: dict[str, str] = {
    "fp32": "f",
    "fp64": "d",
    "i64": "q",
    "u64": "Q",
    "i32": "i",
    "u32": "I",
    "i8": "b",
    "u1": "B",
}
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)")
MOST_BYTES = 4096  # of one kernel's arguments, as in play.c
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread in which nothing was done on the device yet

Place = tuple[int, int, int]  # an argument; the memory that it points into, and how far: see `tape.Tape.play`
Kernel = tuple[Any, tuple[int, ...], list[Any], list[Place]]  # compiled, grid, arguments, where addresses go
Play = Callable[[list[int], int], None]  # with addresses of memory, on a stream


def make_play(kernels: Sequence[Kernel]) -> Play:
    """Launches kernels that were compiled and launched before, in their order: by the driver where they have nothing
    out of the ordinary."""
    packed = [pack(*kernel) for kernel in kernels]
    player = load_player() if packed and None not in packed else None
    if player is None:
        return make_triton_play(kernels)
    return make_driver_play(*player, b"".join(part for part in packed if part is not None))


def make_triton_play(kernels: Sequence[Kernel]) -> Play:
    runs = [(compiled[grid], template, places) for compiled, grid, template, places in kernels]

    def play(bases: list[int], stream: int) -> None:
        for run, template, places in runs:
            args = template.copy()
            for place, base, offset in places:
                args[place] = bases[base] + offset
            run(*args, stream=stream)

    return play


def make_driver_play(run: Callable[[int, bytes, list[int], int], int], launch: int, packed: bytes) -> Play:
    """launch: the address of cuLaunchKernel."""

    def play(bases: list[int], stream: int) -> None:
        code = run(launch, packed, bases, stream)
        if code == NO_CONTEXT:
            torch.cuda.current_stream().query()  # makes the device's context that of this thread
            code = run(launch, packed, bases, stream)
        if code:
            raise RuntimeError(f"CUDA error {code} when kernels of lln_attention were launched.")

    return play


@functools.cache
def load_player() -> tuple[Callable[[int, bytes, list[int], int], int], int] | None:
    """(`play` of play.c, the address of cuLaunchKernel). It is built as Triton builds its own launchers, by the C
    compiler that Triton needs; None, with a warning, where there is none any more, since Triton keeps what it has
    built."""
    try:
        from triton.runtime.build import compile_module_from_src

        source = (files("lln.kernels.triton") / "play.c").read_text()
        run = compile_module_from_src(src=source, name="lln_play").play
        return run, ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value or 0
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.CalledProcessError) as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warnings.warn(
            "Repeated calls of lln_attention go through Triton's own launcher, which gives the same results and takes "
            f"the host several times as long, because lln/kernels/triton/play.c could not be built ({why}). "
            "It takes a C compiler: install gcc, or name one in the environment variable CC.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def pack(compiled: Any, grid: tuple[int, ...], template: list[Any], places: list[Place]) -> bytes | None:
    """A kernel as play.c reads it. None where it is not known how it takes its arguments: another vendor's device,
    clusters, scratch memory of Triton's own, another version of Triton."""
    try:
        metadata, kinds = compiled.metadata, list(compiled.src.signature.values())
        entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
        special = metadata.launch_cooperative_grid or metadata.launch_pdl or metadata.num_ctas != 1
        special = special or metadata.global_scratch_size or metadata.profile_scratch_size
    except (AttributeError, KeyError, TypeError):
        return None
    if entry is None or special or len(kinds) != len(template):
        return None
    sizes = [SIZES[bits] for bits in PARAMETER.findall(entry[1])]
    taken = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
    if len(sizes) - len(taken) not in (0, 2):  # two pointers to scratch memory, of which there is none
        return None
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // size) * size)
        end = offsets[-1] + size
    arguments = bytearray(-(-end // 8) * 8)
    where = {place: (base, offset) for place, base, offset in places}
    cells = []
    for i, at, size in zip(taken, offsets, sizes, strict=False):
        kind = kinds[i]
        if kind.startswith("*"):
            if i in where:
                cells.append((at, *where[i]))
            struct.pack_into("Q", arguments, at, 0 if i in where else template[i] or 0)
        elif kind not in PACKED or struct.calcsize(PACKED[kind]) != size:
            return None
        else:
            struct.pack_into(PACKED[kind], arguments, at, template[i])
    if end > MOST_BYTES:
        return None
    head = (compiled.function, *grid, 32 * metadata.num_warps, metadata.shared, end, len(cells))
    return struct.pack("8q", *head) + b"".join(struct.pack("3q", *cell) for cell in cells) + bytes(arguments)
