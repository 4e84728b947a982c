"""How the work of a call is cut into programs, and with which launch settings; all from shapes alone.

The settings are a small table stored with the package (data/launch.json), so that nothing is timed at a first use.
`lln bench --tune` measures the table anew. Cards unlike the one it was measured on begin with its stages, and `fit`
finds the rest.
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

HIP = torch.version.hip is not None  # AMD's devices, which torch calls cuda as well
TILE = 64  # rows of a tile unless blocks ask for more
# What a program takes beside its tiles, and a kernel that merges what works found (and that for each work), in the time
# of a tile; from the times of all kernels of LLN and LLN+Diag with one to 66 works a sequence on an H200.
BEGIN_AND_END = 1.0
MERGE, MERGE_EACH = 4.0, 0.1
MOST_WAVES = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one kernel: warps a program, stages of its pipelined loop, the most registers a thread may take (0: as many as
    it likes), and programs that a multiprocessor has room for (0: not known before `fit` has looked)."""

    warps: int = 4
    stages: int = 2
    registers: int = 0
    programs: int = 0

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """For the launch."""
        limit = {"maxnreg": self.registers} if self.registers and not HIP else {}
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


@dataclasses.dataclass(frozen=True)
class Card:
    """What a device has."""

    name: str
    shared: int  # bytes of shared memory that a program can have
    shared_all: int  # of a multiprocessor
    registers: int
    threads: int
    warp: int = 32  # threads of one
    measured: bool = False  # whether the stored settings are for cards like it


@functools.cache
def load_stored() -> dict[str, Any]:
    """What `lln bench --tune` measured: data/launch.json. While it measures it writes into this what it tries."""
    held: dict[str, Any] = json.loads((files("lln") / "data" / "launch.json").read_text())
    return held


def list_settings() -> dict[str, list[int]]:
    """The stored settings, (warps, stages, registers), by the names of `name_settings`."""
    settings: dict[str, list[int]] = load_stored()["settings"]
    return settings


def name_settings(kernel: str, blocks: bool, kind: str, dim: int, size: str) -> str:
    """How data/launch.json calls the settings of a kernel."""
    return f"{kernel}{'+blocks' if blocks else ''} {kind} {dim} {size}"


@functools.cache
def choose_settings(
    kernel: str, blocks: bool, dtype: torch.dtype, dim: int, rows: int, small: bool, measured: bool
) -> Settings:
    """The stored settings for the padded head dim `dim` (16 to 256) and tiles of `rows`; safe ones where there are
    none, for float32 and float16, whose products take more registers, and for tiles larger than those measured. Where
    they were not `measured` on such a card, a beginning for `fit`."""
    if kernel == "slow":  # kernels that rarely have to do anything
        return Settings(8, 1)
    if kernel == "merge":
        return Settings(4, 2 if HIP else 3)
    if rows > TILE:
        return Settings(8, 1)
    warps = 8 if dim >= 128 else 4
    if dtype == torch.bfloat16:
        size = min(max(dim, 64), 128)
        if found := list_settings().get(name_settings(kernel, blocks, "half", size, "small" if small else "large")):
            known = Settings(*found) if dim <= 128 else Settings(8, 1)
            return known if measured else Settings(warps, known.stages)
    return Settings(warps, 1 if measured else 2)


@functools.cache
def find_card(device: torch.device) -> Card | None:
    """None where Triton's interpreter runs the kernels."""
    if device.type != "cuda":
        return None
    held = torch.cuda.get_device_properties(device)
    shared = getattr(held, "shared_memory_per_block_optin", None) or held.shared_memory_per_block
    return Card(
        name=held.name,
        shared=shared,
        shared_all=max(getattr(held, "shared_memory_per_multiprocessor", shared), shared),
        registers=getattr(held, "regs_per_multiprocessor", 2**16),
        threads=held.max_threads_per_multi_processor,
        warp=getattr(held, "warp_size", 32),
        measured=not HIP and [held.major, held.minor] == load_stored()["capability"],
    )


def is_small(batch: int, heads: int, length: int) -> bool:
    """The size class of a call: whether its rows leave multiprocessors without work."""
    return batch * heads * length <= 2**16


HERE = contextlib.nullcontext()


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return HERE
    return torch.cuda.device(device)


def is_tf32_allowed() -> bool:
    """Whether float32 matrices may be multiplied as tf32, by either of torch's two ways to say so."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was said in the newer way, which the older cannot read
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def choose_precision(dtype: torch.dtype) -> str:
    """How matrices are multiplied that are not bfloat16. float32 and float16 multiply as float32 in three passes of
    tf32, which keep 21 bits: float16 has too few exponents for weights and states. With
    torch.set_float32_matmul_precision("high"), float32 in one. AMD's matrix units multiply float32."""
    if HIP:
        return "ieee"
    return "tf32" if dtype == torch.bfloat16 or (dtype == torch.float32 and is_tf32_allowed()) else "tf32x3"


@functools.cache
def count_multiprocessors(device: torch.device) -> int:
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


def pad_dim(dim: int, least: int = 32) -> int:
    """The head dim that a kernel works with: a power of two. Not 16: Triton 3.6 lets eight warps write products of
    16 by 16 beyond their shared memory."""
    return max(1 << (dim - 1).bit_length(), least)


def pad_value_dim(width: int, dim: int) -> int:
    """The value dim that a kernel works with; beside the largest head dims there is no room for 32."""
    return pad_dim(width, 32 if dim <= 128 else 16)


def value_part(dim: int, dtype: torch.dtype) -> int:
    """Channels of the values that a kernel takes at once: what fits into shared memory beside this head dim."""
    if dtype == torch.bfloat16:
        return 128 if dim <= 128 else 64
    return 64 if dim <= 64 else 32 if dim <= 128 else 16


def blocks_fit(block_size: int, dim: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a tile of whole blocks is small enough for a program, of which it needs several."""
    if block_size > (2 * TILE if dtype == torch.bfloat16 else TILE):  # the others multiply as float32, twice the room
        return False
    rows, _ = tile_rows(block_size, dim, dtype)
    return rows * max(pad_dim(dim), pad_value_dim(min(width, value_part(dim, dtype)), dim)) <= 128 * TILE


def masks_fit(dim: int, dtype: torch.dtype) -> bool:
    """Whether causal kernels have shared memory for a key mask: with the largest head dims they ask for too much."""
    return dtype == torch.bfloat16 or pad_dim(dim) <= 128


def choose_splits(count: int, sequences: int, slots: int, merged: bool) -> int:
    """Into how many works to cut each of so many sequences of `count` tiles, for a device that runs `slots` programs at
    a time. They run in waves, and one that is half full takes as long as a full one. merged: what the works of a
    sequence found is put together by another kernel, which takes about as long as a few tiles."""

    def reckon(splits: int) -> float:
        tiles = -(-count // splits)
        works = -(-count // tiles)
        waves = -(-sequences * works // slots)
        return waves * (tiles + BEGIN_AND_END) + (MERGE + MERGE_EACH * works if merged and works > 1 else 0.0)

    candidates = {min(max(slots * waves // max(sequences, 1), 1), count) for waves in range(MOST_WAVES + 1)}
    return min(sorted(candidates), key=reckon)


def cut(
    device: torch.device, length: int, batch: int, heads: int, rows: int, used: int, shifted: bool,
    cu_seqlens: Tensor | None, programs: int, merged: bool = False,
) -> Works:  # fmt: skip
    """Works for sequences of this length (packed: of this length together), where a multiprocessor has room for so many
    `programs`; 0: one for each sequence."""
    if cu_seqlens is None and length == 0:
        return Works(used, rows, 1, 0, 0)
    extra = 1 if shifted else 0
    wanted = programs * count_multiprocessors(device)
    if cu_seqlens is None:
        count = -(-length // used) + extra
        merged = merged and device.type == "cuda"  # the interpreter is to meet works that are merged
        splits = choose_splits(count, batch * heads, wanted, merged) if wanted else 1
        tiles = -(-count // splits)
        splits = max(-(-count // tiles), 1)
        return Works(used, rows, tiles, splits, batch * splits)
    # The host does not know the lengths: as many works as there can be, and a table on the device of whose they are.
    longest = -(-length // used)
    tiles = max(longest * heads // wanted if wanted else longest, 1)
    works = -(-length // (used * tiles)) + batch * (1 + extra)
    counts = (cu_seqlens.diff() + (used - 1)) // used + extra
    begin = torch.nn.functional.pad(((counts + (tiles - 1)) // tiles).cumsum(0), (1, 0))
    owner = torch.searchsorted(begin, torch.arange(works, device=device), right=True) - 1
    return Works(used, rows, tiles, 0, works, owner.clamp_max(batch - 1), begin)
