"""A compiled kernel launched again and again by the CUDA driver itself: its arguments are packed once, and a launch
fills in addresses. Triton's own way looks at all of them each time, which takes the host longer than the launch.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import torch

SIZES = {"64": 8, "32": 4, "16": 2, "8": 1}
PACKED: dict[str, Any] = {
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
}
PACKED |= {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i8": ctypes.c_int8, "u1": ctypes.c_uint8}
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)")
BUFFER, BUFFER_SIZE, END = 1, 2, 0  # CU_LAUNCH_PARAM_*
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread in which nothing was done on the device yet

Place = tuple[int, int, int]  # an argument; the memory that it points into, and how far: see `tape.Tape.play`
Launch = Callable[[list[int], int], None]  # with addresses of memory, on a stream; by one thread at a time


def make_launch(compiled: Any, grid: tuple[int, ...], template: list[Any], places: list[Place]) -> Launch:
    """Of a kernel that was compiled and launched before: by the driver where it has nothing out of the ordinary."""
    packed = pack(compiled, template, places)
    return make_triton_launch(compiled, grid, template, places) if packed is None else make_driver_launch(grid, *packed)


def make_triton_launch(compiled: Any, grid: tuple[int, ...], template: list[Any], places: list[Place]) -> Launch:
    run = compiled[grid]

    def launch(bases: list[int], stream: int) -> None:
        args = template.copy()
        for place, base, offset in places:
            args[place] = bases[base] + offset
        run(*args, stream=stream)

    return launch


def make_driver_launch(grid: tuple[int, ...], kernel: Any, buffer: Any, cells: list[tuple[Any, int, int]]) -> Launch:
    size = ctypes.c_size_t(len(buffer))
    extra = (ctypes.c_void_p * 5)(BUFFER, ctypes.addressof(buffer), BUFFER_SIZE, ctypes.addressof(size), END)
    function, threads, shared = kernel.function, 32 * kernel.metadata.num_warps, kernel.metadata.shared
    x, y, z = grid
    run = load_driver().cuLaunchKernel

    def launch(bases: list[int], stream: int) -> None:
        for cell, base, offset in cells:
            cell.value = bases[base] + offset
        code = run(function, x, y, z, threads, 1, 1, shared, stream, None, extra)
        if code == NO_CONTEXT:
            torch.cuda.current_stream().query()  # makes the device's context that of this thread
            code = run(function, x, y, z, threads, 1, 1, shared, stream, None, extra)
        if code:
            raise RuntimeError(f"CUDA error {code} when {kernel.metadata.name} was launched.")

    launch.keeps = (buffer, size, extra, kernel)  # type: ignore[attr-defined]
    return launch


@functools.cache
def load_driver() -> Any:
    """The CUDA driver's library, with the types of what `cuLaunchKernel` takes."""
    library = ctypes.CDLL("libcuda.so.1")
    uint, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[uint] * 7, pointer, pointer, pointer]
    return library


def pack(compiled: Any, template: list[Any], places: list[Place]) -> tuple[Any, Any, list[tuple[Any, int, int]]] | None:
    """(the kernel, its packed arguments, where addresses go). None where it is not known how it takes them: another
    vendor's device, clusters, scratch memory of Triton's own, another version of Triton."""
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
    buffer = (ctypes.c_char * end)()
    where = {place: (base, offset) for place, base, offset in places}
    cells = []
    for i, at, size in zip(taken, offsets, sizes, strict=False):
        kind = kinds[i]
        if kind.startswith("*"):
            cell = ctypes.c_uint64.from_buffer(buffer, at)
            if i in where:
                cells.append((cell, *where[i]))
            else:
                cell.value = template[i] or 0
        elif kind not in PACKED or ctypes.sizeof(PACKED[kind]) != size:
            return None
        else:
            PACKED[kind].from_buffer(buffer, at).value = template[i]
    return compiled, buffer, cells
