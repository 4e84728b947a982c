"""LLN+Diag of images: softmax attention inside tiles, patches that are neighbours in both directions.

    patches      a grid of them is cut into the fewest tiles of at most `tile` a side, all as large as each other or one
                 row or column less: 14 x 14 patches and tile = 8 give four tiles of 7 x 7
    other tokens (class, distillation, registers) belong to no place of the image, and the class token is what a
                 classifier reads. So every patch sees them beside its tile, and they see all tokens; there are a few,
                 and the cost stays linear in the number of patches

Consecutive tokens, the blocks of other models, would be a few rows of the image. What a tile holds is index arithmetic
on the device. LLN attention itself does not care about the order of its tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lln.checks import Inputs
from lln.functional import Backend, Coefficient, Mix, attend_checked
from lln.kernels.common import raw_stream
from lln.nn.attention import LLNAttention
from lln.nn.image_grid import REMEDIES, require_patches
from lln.nn.image_grid import Patches as Patches  # by this path saved models know it
from lln.nn.overlap import attend_apart, mix_parts
from lln.ranks import refuse_ranks
from lln.state import LLNState

MOST_GRIDS = 64  # whose tiles are kept


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Where the patches of one grid go: n tiles with S slots each."""

    tokens: Tensor  # [n, S]  the token in a slot, 0 where none is
    filled: Tensor | None  # [n, S]  slots that hold one; None: all
    slots: Tensor  # [patches]  the slot of each patch, tile by tile
    owner: Tensor  # [tokens]  the tile of each token; -1: it belongs to all


def cut_tiles(height: int, width: int, prefix: int, tile: int, device: torch.device) -> Tiles:
    """Of a grid whose patches come row by row after `prefix` other tokens.

    >>> cut_tiles(3, 4, 1, 2, torch.device("cpu")).owner.tolist()
    [-1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3]
    """

    def cut(length: int) -> tuple[int, int, Tensor, Tensor]:
        """(tiles, places in the largest, the tile of each place, where it is in it) along one side."""
        count = -(-length // tile)
        at = torch.arange(length, device=device)
        index = (at * count).div(length, rounding_mode="floor")
        first = (index * length + count - 1).div(count, rounding_mode="floor")
        return count, -(-length // count), index, at - first

    rows, high, row, y = cut(height)
    columns, wide, column, x = cut(width)
    owner = (row[:, None] * columns + column).flatten()
    slots = owner * (high * wide) + (y[:, None] * wide + x).flatten()
    patches, count, size = height * width, rows * columns, high * wide
    tokens = torch.full((count * size,), -1, device=device)
    tokens = tokens.scatter(0, slots, torch.arange(prefix, prefix + patches, device=device)).view(count, size)
    filled = None if count * size == patches else tokens >= 0
    others = torch.full((prefix,), -1, device=device)
    return Tiles(tokens.clamp_min(0), filled, slots, torch.cat([others, owner]))


@functools.lru_cache(MOST_GRIDS)
def keep_tiles(grid: tuple[int, int], prefix: int, tile: int, device: torch.device, stream: int) -> Tiles:
    """Made once for each grid. stream: the one that writes them, since another may read too early."""
    with torch.inference_mode(False):  # tensors of inference mode could not be kept for a backward later
        return cut_tiles(*grid, prefix, tile, device)


def find_tiles(grid: tuple[int, int], prefix: int, tile: int, device: torch.device) -> Tiles:
    # What a graph captures must be its own: kept ones are dropped when many others have come.
    graph = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or graph:
        return cut_tiles(*grid, prefix, tile, device)
    return keep_tiles(grid, prefix, tile, device, raw_stream(device) if device.type == "cuda" else 0)


class TiledAttention(LLNAttention):
    """LLNAttention whose blocks are tiles, where `tile` says so and `patches` how the tokens lie.

    >>> attention = TiledAttention(2, 8, block_size=4)
    >>> attention.tile, attention.patches = 2, Patches("ViT", prefix=1, grids={12: (3, 4)})
    >>> q, k, v = torch.randn(3, 1, 2, 13, 8)
    >>> attention(q, k, v).shape, attention.list_tiles(q).tolist()
    (torch.Size([1, 2, 13, 8]), [-1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3])
    """

    tile: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.tile is None and super().is_plain

    def find_tiles(self, query: Tensor) -> Tiles | None:
        if self.tile is None:
            return None
        patches = require_patches(self.patches, "tile")
        grid = patches.find_grid(query.shape[2], "tile")
        return find_tiles(grid, patches.prefix, self.tile, query.device)

    @property
    def asks_for_patches(self) -> str | None:
        return "tile" if self.tile is not None else super().asks_for_patches

    def list_tiles(self, query: Tensor) -> Tensor | None:
        return None if (tiles := self.find_tiles(query)) is None else tiles.owner

    def run_op(self, inputs: Inputs, alpha: Tensor | None, beta: Tensor, **call: Any) -> Any:
        # Here and not in forward, so that P (`weights`) and all who call this module have tiles, in the tokens' order.
        if (tiles := self.find_tiles(inputs.query)) is None or self.block_size is None:
            return super().run_op(inputs, alpha, beta, **call)
        call = {"block_size": self.block_size, "mix": self.mix_weights(), "scale": self.scale} | call
        call = self.read_options() | call
        return tiled_attention(inputs, alpha, beta, tiles, **call, backend=self.backend)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.tile is None else f", tile={self.tile}")


def tiled_attention(
    inputs: Inputs,
    alpha: Coefficient | None,
    beta: Coefficient,
    tiles: Tiles,
    *,
    block_size: int,
    mix: Mix,
    scale: float | None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    state: LLNState | None = None,
    return_state: bool = False,
    backend: Backend = "auto",
    **read: Any,
) -> Tensor:
    """`lln.functional.attend_checked` with tiles in place of blocks. [B, H, N, E] in the dtype of query."""
    if is_causal or state is not None or return_state or inputs.cu_query is not None:
        raise ValueError(
            "tile: an image is seen as a whole, so causal attention, a state and packed sequences have no tiles; "
            f"{REMEDIES['tile']}."
        )
    refuse_ranks("tile", "an image is not spread over ranks; use block_size")
    linear = attend_checked(inputs, alpha, beta, dropout_p=dropout_p, backend=backend, scale=scale, **read)
    assert isinstance(linear, Tensor)
    return mix_parts(inputs, linear, attend_tiles(inputs, tiles, scale, dropout_p), mix, block_size)


def attend_tiles(inputs: Inputs, tiles: Tiles, scale: float | None, dropout_p: float) -> Tensor:
    """The softmax part alone. A row that sees no key is zero."""
    query, key, value, key_mask = inputs[:4]
    count, size = tiles.tokens.shape
    prefix = query.shape[2] - len(tiles.slots)
    index, masked = tiles.tokens.flatten(), key_mask is not None

    def fill(t: Tensor) -> Tensor:
        """Patches of t [B, H, N, D] in their slots: [B, H, n, S, D]."""
        return t.index_select(2, index).view(*t.shape[:2], count, size, t.shape[3])

    def lead(t: Tensor) -> Tensor:
        """The others of t [B, H, N, D] before the patches of every tile: [B, H, n, prefix + S, D]."""
        others = t[:, :, None, :prefix].expand(-1, -1, count, -1, -1)
        return torch.cat([others, fill(t)], 3) if prefix else fill(t)

    seen = tiles.filled if tiles.filled is None else tiles.filled.unsqueeze(0)  # [B or 1, n, S]
    if key_mask is not None:
        shown = key_mask.index_select(1, index).unflatten(1, (count, size))
        seen = shown if seen is None else seen & shown
    if seen is not None:
        front = torch.ones_like(seen[:, :, :1]) if key_mask is None else key_mask[:, None, :prefix]
        seen = torch.cat([front.expand(-1, count, prefix), seen], 2).unsqueeze(2)
    out = attend_apart(fill(query), lead(key), lead(value), seen, masked, scale, dropout_p)
    out = out.flatten(2, 3).index_select(2, tiles.slots)
    if not prefix:
        return out
    whole = None if key_mask is None else key_mask[:, None, None]
    q, k, v = query[:, :, None, :prefix], key[:, :, None], value[:, :, None]
    return torch.cat([attend_apart(q, k, v, whole, masked, scale, dropout_p).squeeze(2), out], 2)
