"""Images with a label: decoded once into one array, then plain pixels, augmented by seed."""

import io
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from lln.lab.core.errors import DataError, need
from lln.lab.core.progress import track
from lln.lab.core.seeds import UNIT, draws, pick, stream_key, to_unit
from lln.lab.data.examples import Labelled
from lln.lab.data.made_once import build_once, load_arrays
from lln.lab.data.sources import KNOWN, Rows, Selection, read

CATS_VS_DOGS, CIFAR10, DIGITS = "microsoft/cats_vs_dogs", "uoft-cs/cifar10", "embedded/digits"


@dataclass(eq=False)
class Images(Labelled):
    """Items: `pixel_values` [channels, height, width] float32 from -1 to 1, `labels` [].

    augment: mirror half of the images (`mirror`), and shift each by up to an eighth of its side; the choice depends on
    (seed, epoch, index) alone. stored: the identity of the pixels as they are.
    """

    pixels: np.ndarray  # [n, height, width, channels] uint8
    labels: np.ndarray  # [n]
    _: KW_ONLY
    label_names: list[str]
    augment: bool
    mirror: bool
    seed: int
    stored: dict[str, Any]
    notes: list[str]

    def __post_init__(self) -> None:
        self.key = stream_key("augment", self.seed)
        self.identity = {**self.stored, "augment": [self.mirror, self.seed] if self.augment else None}

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: np.ndarray | slice) -> dict[str, Tensor]:
        pixels = torch.from_numpy(np.array(self.pixels[indices]))
        return {"pixels": pixels, "labels": torch.from_numpy(self.labels[indices])}

    def finish(self, rows: dict[str, Tensor], index: Tensor, epoch: Tensor) -> dict[str, Tensor]:
        pixels = rows["pixels"]  # [B, height, width, channels]
        if self.augment:
            pixels = shift_and_mirror(pixels, draws(self.key, epoch, index, 3), self.mirror)
        # Laid out anew: with one channel `contiguous` would leave strides that make convolutions round otherwise.
        values = pixels.movedim(-1, 1).clone(memory_format=torch.contiguous_format).float() / 127.5 - 1.0
        return {"pixel_values": values, "labels": rows["labels"]}


def shift_and_mirror(pixels: Tensor, drawn: Tensor, mirror: bool) -> Tensor:
    """[B, height, width, channels] by random numbers [B, 3]; what comes in at an edge repeats the edge."""
    sides = pixels.shape[1:3]
    rows, columns = (
        torch.arange(side, device=pixels.device) + (pick(by, 2 * (side // 8) + 1) - side // 8)[:, None]
        for side, by in zip(sides, drawn[:, :2].unbind(1), strict=True)
    )  # [B, height], [B, width]
    rows, columns = (at.clamp(0, side - 1) for at, side in zip((rows, columns), sides, strict=True))
    if mirror:
        columns = torch.where(to_unit(drawn[:, 2:]) < UNIT // 2, columns.flip(1), columns)
    example = torch.arange(len(pixels), device=pixels.device)
    return pixels[example[:, None, None], rows[:, :, None], columns[:, None, :]]


def load_images(
    name: str,
    split: str,
    *,
    size: int | None = None,
    augment: bool = False,
    seed: int = 0,
    **selection: Unpack[Selection],
) -> Images:
    """Load a split of a set with the columns image (or img) and label (or labels). size: cut to the middle square and
    resized to size x size; None: as stored, if all are of one size. augment, seed: see `Images`. selection: config,
    data_root, hold_out, limit and cache_dir, as in `read`. Labels of a set that is not known here are named by their
    numbers.

    On the Hub, Dogs vs Cats is one split: use hold_out for a validation split.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as cache:
    ...     digits = load_images("embedded/digits", "test", limit=5, cache_dir=cache)
    >>> len(digits), digits.num_labels, digits[0]["pixel_values"].shape
    (5, 10, torch.Size([1, 8, 8]))
    """
    rows = read(name, split, **selection)
    names = KNOWN.get(name, {}).get("labels")
    labels = rows.labels(rows.find("label", "labels"), len(names) if names else None)
    pixels, stored = decode(rows, size)
    return Images(
        pixels,
        labels,
        label_names=names or [str(i) for i in range(int(labels.max()) + 1)],
        augment=augment,
        mirror=name != DIGITS,  # a mirrored digit is no digit
        seed=seed,
        stored=stored,
        notes=rows.notes,
    )


def decode(rows: Rows, size: int | None) -> tuple[np.ndarray, dict[str, Any]]:
    """([n, height, width, channels] uint8, mapped from the cache; its identity)"""
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, or None; got {size}.")
    # Another version may round a JPEG's pixels otherwise.
    identity = {"rows": rows.identity, "size": size, "pillow": need("PIL").__version__}

    def build(folder: Path) -> None:
        values = rows.table.column(rows.find("image", "img"))
        first = _decode_one(values[0].as_py(), size, rows, 0)
        pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, (len(rows), *first.shape))
        for i in track(range(len(rows)), len(rows), f"Decoding {rows.title}"):
            image = _decode_one(values[i].as_py(), size, rows, i)
            if image.shape != first.shape:
                raise DataError(
                    f"{rows.title}: images differ in size ({image.shape[1]} x {image.shape[0]} in row {i}, "
                    f"{first.shape[1]} x {first.shape[0]} in row 0); give the size that they shall have."
                )
            pixels[i] = image
        pixels.flush()

    return load_arrays(build_once("images", {**identity, "form": 1}, build, rows.cache_dir))["pixels"], identity


def _decode_one(value: Any, size: int | None, rows: Rows, row: int) -> np.ndarray:
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


def to_grey(pixels: np.ndarray) -> np.ndarray:
    """[..., channels] -> [...] uint8, with the weights of Rec. 601 as in Long Range Arena."""
    if pixels.shape[-1] == 1:
        return pixels[..., 0]
    weighted = pixels.astype(np.uint32) @ np.array([299, 587, 114], np.uint32)
    return ((weighted + 500) // 1000).astype(np.uint8)
