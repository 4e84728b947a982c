"""Images with a label: decoded once into one array, then plain pixels, augmented by seed."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln.training.cache import build_once
from lln.training.errors import DataError, need
from lln.training.examples import Examples, load_array
from lln.training.progress import track
from lln.training.seeds import generator
from lln.training.sources import Rows, read

CATS_VS_DOGS, CIFAR10, DIGITS = "microsoft/cats_vs_dogs", "uoft-cs/cifar10", "embedded/digits"
LABEL_NAMES = {
    CATS_VS_DOGS: ("cat", "dog"),
    CIFAR10: ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    DIGITS: tuple("0123456789"),
}


class Images(Examples):
    """Items: `pixel_values` [channels, height, width] float32 from -1 to 1, `labels` [].

    augment: mirror half of the images (`mirror`), and shift each by up to an eighth of its side; the choice depends on
    (seed, epoch, index) alone.
    """

    def __init__(
        self,
        pixels: np.ndarray,  # [n, height, width, channels] uint8
        labels: np.ndarray,  # [n]
        *,
        label_names: tuple[str, ...],
        augment: bool,
        mirror: bool,
        seed: int,
        identity: dict[str, Any],
        notes: list[str],
    ) -> None:
        self.pixels, self.labels, self.label_names = pixels, labels, list(label_names)
        self.augment, self.mirror, self.seed = augment, mirror, seed
        self.identity = {**identity, "augment": [mirror, seed] if augment else None}
        self.notes = notes

    @property
    def num_labels(self) -> int:
        return len(self.label_names)

    @property
    def majority(self) -> float:
        """The accuracy of always naming the most frequent class."""
        return float(np.bincount(self.labels).max() / len(self.labels))

    def __len__(self) -> int:
        return len(self.labels)

    def item(self, index: int, epoch: int = 0) -> dict[str, Tensor]:
        image = np.asarray(self.pixels[index])
        if self.augment:
            image = shift_and_mirror(image, generator("augment", self.seed, epoch, index), self.mirror)
        values = torch.from_numpy(image.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1.0)
        return {"pixel_values": values, "labels": torch.tensor(int(self.labels[index]))}


def shift_and_mirror(image: np.ndarray, draw: np.random.Generator, mirror: bool) -> np.ndarray:
    """[height, width, channels]; what comes in at an edge repeats the edge."""
    height, width = image.shape[:2]
    reach_y, reach_x = height // 8, width // 8
    y, x = int(draw.integers(0, 2 * reach_y + 1)), int(draw.integers(0, 2 * reach_x + 1))
    padded = np.pad(image, ((reach_y, reach_y), (reach_x, reach_x), (0, 0)), mode="edge")
    moved = padded[y : y + height, x : x + width]
    return moved[:, ::-1] if mirror and draw.random() < 0.5 else moved


def load_images(
    name: str,
    split: str,
    *,
    size: int | None = None,
    config: str | None = None,
    augment: bool = False,
    seed: int = 0,
    data_root: str | os.PathLike[str] | None = None,
    hold_out: float = 0.0,
    limit: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Images:
    """A split of a set with the columns image (or img) and label (or labels). `size`: cut to the middle square and
    resized to size x size; None: as stored, if all are of one size. The rest is as in `read`.

    On the Hub, Dogs vs Cats is one split: use hold_out for a validation split.
    """
    rows = read(name, split, config=config, data_root=data_root, hold_out=hold_out, limit=limit)
    labels, names = image_labels(rows)
    pixels, identity = decode(rows, size, cache_dir)
    return Images(
        pixels,
        labels,
        label_names=names,
        augment=augment,
        mirror=name != DIGITS,  # a mirrored digit is no digit
        seed=seed,
        identity=identity,
        notes=rows.notes,
    )


def image_labels(rows: Rows) -> tuple[np.ndarray, tuple[str, ...]]:
    """(labels [n], their names: numbers where the set is not known here)"""
    names = LABEL_NAMES.get(rows.identity["name"])
    labels = rows.labels(_column(rows, ("label", "labels")), len(names) if names else None)
    return labels, names or tuple(str(i) for i in range(int(labels.max()) + 1))


def decode(
    rows: Rows, size: int | None, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """([n, height, width, channels] uint8, mapped from the cache; its identity)"""
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, or None; got {size}.")
    pillow = need("PIL")
    # Another version may round a JPEG's pixels otherwise.
    identity = {"rows": rows.identity, "size": size, "pillow": pillow.__version__}

    def build(folder: Path) -> None:
        column = _column(rows, ("image", "img"))
        values = rows.table.column(column)
        first = _pixels(values[0].as_py(), size, rows, 0)
        pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, (len(rows), *first.shape))
        for i in track(range(len(rows)), len(rows), f"Decoding {rows.title}"):
            image = _pixels(values[i].as_py(), size, rows, i)
            if image.shape != first.shape:
                raise DataError(
                    f"{rows.title}: images differ in size ({image.shape[1]} x {image.shape[0]} in row {i}, "
                    f"{first.shape[1]} x {first.shape[0]} in row 0); give the size that they shall have."
                )
            pixels[i] = image
        pixels.flush()

    return load_array(build_once("images", {**identity, "form": 1}, build, cache_dir), "pixels"), identity


def _column(rows: Rows, names: tuple[str, ...]) -> str:
    for name in names:
        if name in rows.columns:
            return name
    raise DataError(f"{rows.title} has no column {' or '.join(names)}; there are: {', '.join(rows.columns)}.")


def _pixels(value: Any, size: int | None, rows: Rows, row: int) -> np.ndarray:
    """[height, width, channels] uint8"""
    image_module = need("PIL.Image")
    try:
        if isinstance(value, dict) and value.get("bytes"):
            image = image_module.open(io.BytesIO(value["bytes"])).convert("RGB")
        else:  # embedded: a square of grey levels
            levels = np.array(value, np.uint8)
            side = int(np.sqrt(levels.size))
            image = image_module.fromarray(levels.reshape(side, side))
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(f"{rows.title}: the image in row {row} cannot be decoded ({error}).") from None
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # Cut first: with resize's own `box`, pixels beyond it shine in.
        square = image.crop((left, top, left + side, top + side))
        image = square.resize((size, size), image_module.Resampling.BILINEAR)
    array = np.asarray(image)
    return array if array.ndim == 3 else array[:, :, None]


def grey(pixels: np.ndarray) -> np.ndarray:
    """[..., channels] -> [...] uint8, with the weights of Rec. 601 as in Long Range Arena."""
    if pixels.shape[-1] == 1:
        return pixels[..., 0]
    weighted = pixels.astype(np.uint32) @ np.array([299, 587, 114], np.uint32)
    return ((weighted + 500) // 1000).astype(np.uint8)
