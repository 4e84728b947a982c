"""How the patches of an image lie among a model's tokens, for what needs neighbours in both directions."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

# What asks for patches, and what does without them.
REMEDIES = {
    "tile": "use block_size, which cuts tokens in their order",
    "value_convolution": "use an odd number of tokens in the place of rows and columns",
}


@dataclasses.dataclass
class Patches:
    """How the tokens of one image model lie: `prefix` others first, then the patches row by row. How many rows and
    columns there are the convolution that makes the patches says each time it runs, so any image will do."""

    model: str  # its class
    prefix: int
    grids: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # by the number of patches

    def note(self, convolution: nn.Module, given: Any, output: Tensor) -> None:
        """A forward hook."""
        height, width = (int(size) for size in output.shape[-2:])
        if self.grids.get(height * width) != (height, width):
            self.grids[height * width] = height, width

    def find_grid(self, length: int, asked: str) -> tuple[int, int]:
        """(rows, columns) of a call with so many tokens. ValueError where they are not those of an image; asked: the
        option that needs them.

        >>> Patches("ViT", prefix=1, grids={12: (3, 4)}).find_grid(13, "tile")
        (3, 4)
        """
        grid = self.grids.get(length - self.prefix)
        if grid is None:
            known = ", ".join(f"{height} x {width}" for height, width in self.grids.values())
            raise ValueError(
                f"{asked}: the {length} tokens of {self.model} are not {self.prefix} special tokens and the patches of "
                f"an image that it was given ({known or 'none so far'}), so it is not known which tokens are "
                f"neighbours; {REMEDIES[asked]}."
            )
        return grid


def require_patches(patches: Patches | None, asked: str) -> Patches:
    if patches is None:
        raise ValueError(
            f"{asked}: the model does not cut an image into patches by a convolution; {REMEDIES[asked]}, or convert "
            "the image part of the model alone."
        )
    return patches
