"""Picture files, each other than the last."""

from pathlib import Path

import torch
from PIL import Image


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Of 50 x 60 pixels, by their names in order."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    files = [folder / f"{number}.png" for number in range(count)]
    for file in files:
        pixels = torch.randint(0, 256, (50, 60, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(file)
    return files
