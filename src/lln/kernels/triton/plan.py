"""How the work of a call is cut into programs, and with which launch settings; all from shapes alone.

The settings are a small table stored with the package (data/launch.json), so that nothing is tried out at a first
use. `lln bench --tune` measures the table anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

ROOMY = 227 * 1024  # bytes of shared memory where the stored settings were measured
LEAST = 160 * 1024  # that the largest kernels need with the smallest settings
TILE = 64  # rows of a tile unless blocks ask for more


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one kernel: warps a program, stages of its pipelined loop, programs a multiprocessor to aim at, and the most
    registers a thread may take (0: as many as it likes)."""

    warps: int = 4
    stages: int = 2
    programs: int = 4
    registers: int = 0

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """For the launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclasses.dataclass(frozen=True)
class Works:
    """How a set of sequences is cut: see `parts`."""

    used: int  # rows of a tile that are used
    rows: int  # rows of a tile, a power of two
    tiles: int  # tiles of a work
    splits: int  # works of a sequence; of the longest one possible when packed
    works: int
    owner: Tensor | None = None  # [works] sequence of each, when packed
    begin: Tensor | None = None  # [sequences + 1] first work of each


@functools.cache
def table() -> dict[str, list[int]]:
    stored: dict[str, Any] = json.loads((files("lln") / "data" / "launch.json").read_text())
    return dict(stored["settings"])


def key(kernel: str, blocks: bool, kind: str, dim: int, size: str) -> str:
    return f"{kernel}{'+blocks' if blocks else ''} {kind} {dim} {size}"


@functools.cache
def settings(kernel: str, blocks: bool, dtype: torch.dtype, dim: int, rows: int, small: bool, roomy: bool) -> Settings:
    """The stored settings for the padded head dim `dim` (16 to 256) and tiles of `rows`; safe ones where there are
    none, for float32 and float16, whose products take more registers, for tiles larger than those measured, and on
    devices with less shared memory (not `roomy`)."""
    if rows > TILE:
        return Settings(8, 1, 2)
    if dtype == torch.bfloat16 and roomy:
        size = min(max(dim, 64), 128)
        if found := table().get(key(kernel, blocks, "half", size, "small" if small else "large")):
            return Settings(*found) if dim <= 128 else Settings(8, 1, found[2])
    return Settings(8 if dim >= 128 else 4, 1, 3)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    if device.type != "cuda":
        return ROOMY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", ROOMY))


def is_small(batch: int, heads: int, length: int) -> bool:
    """The size class of a call: whether its rows leave multiprocessors without work."""
    return batch * heads * length <= 2**16


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def tf32_allowed() -> bool:
    """Whether float32 matrices may be multiplied as tf32, by either of torch's two ways to say so."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was said in the newer way, which the older cannot read
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter: several splits, of several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_rows(block_size: int | None, dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """(rows of a tile, rows of it that are used): whole blocks."""
    if block_size is None:
        rows = TILE // 2 if dtype != torch.bfloat16 and dim > 64 else TILE
        return rows, rows
    rows = TILE if block_size <= TILE else 2 * TILE
    return rows, rows // block_size * block_size


def padded(dim: int, least: int = 32) -> int:
    """The head dim that a kernel works with: a power of two. Not 16: Triton 3.6 lets eight warps write products of
    16 by 16 beyond their shared memory."""
    return max(1 << (dim - 1).bit_length(), least)


def padded_value(width: int, dim: int) -> int:
    """The value dim that a kernel works with; beside the largest head dims there is no room for 32."""
    return padded(width, 32 if dim <= 128 else 16)


def value_part(dim: int, dtype: torch.dtype) -> int:
    """Channels of the values that a kernel takes at once: what fits into shared memory beside this head dim."""
    if dtype == torch.bfloat16:
        return 128 if dim <= 128 else 64
    return 64 if dim <= 64 else 32 if dim <= 128 else 16


def blocks_fit(block_size: int, dim: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a tile of whole blocks fits into a program, of which it needs several."""
    if block_size > (2 * TILE if dtype == torch.bfloat16 else TILE):  # the others multiply as float32, twice the room
        return False
    rows, _ = tile_rows(block_size, dim, dtype)
    size = max(padded(dim), padded_value(min(width, value_part(dim, dtype)), dim))
    return rows * size * (2 if dtype == torch.bfloat16 else 4) <= 16384


def masks_fit(dim: int, dtype: torch.dtype) -> bool:
    """Whether causal kernels have shared memory for a key mask: with the largest head dims they ask for too much."""
    return dtype == torch.bfloat16 or padded(dim) <= 128


def cut(
    device: torch.device, length: int, batch: int, heads: int, rows: int, used: int, shifted: bool,
    cu_seqlens: Tensor | None, programs: int,
) -> Works:  # fmt: skip
    """Works for sequences of this length (packed: of this length together), about `programs` a multiprocessor."""
    if cu_seqlens is None and length == 0:
        return Works(used, rows, 1, 0, 0)
    extra = 1 if shifted else 0
    wanted = programs * multiprocessors(device)
    if cu_seqlens is None:
        count = -(-length // used) + extra
        splits = max(min(wanted // max(batch * heads, 1), count), 1)
        tiles = -(-count // splits)
        splits = max(-(-count // tiles), 1)
        return Works(used, rows, tiles, splits, batch * splits)
    # The host does not know the lengths: as many works as there can be, and a table on the device of whose they are.
    tiles = max(-(-length // used) * heads // wanted, 1)
    works = -(-length // (used * tiles)) + batch * (1 + extra)
    counts = (cu_seqlens.diff() + (used - 1)) // used + extra
    begin = torch.nn.functional.pad(((counts + (tiles - 1)) // tiles).cumsum(0), (1, 0))
    owner = torch.searchsorted(begin, torch.arange(works, device=device), right=True) - 1
    return Works(used, rows, tiles, 0, works, owner.clamp_max(batch - 1), begin)
