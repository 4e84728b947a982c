"""Folders of picture files as batches that an image model takes: what a conversion of it looks at and learns from.

Files are known by what is in them: they come in the order of their hashes, which mixes folders of one class each, and a
file that is there twice counts once, so that nothing is judged by a picture that was learned from.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lln.hf.layers import find_running
from lln.hf.positions import extend_positions
from lln.lab.convert.conversion_plan import ConversionPlan
from lln.lab.convert.material import Material
from lln.lab.core.errors import Refused, first_line
from lln.lab.core.picture_files import read_picture


class Pictures(Material):
    called, given_as = "pictures", "pixel_values"

    def __init__(self, files: dict[str, Path]) -> None:
        """files: by their hashes, as `find_pictures` gives them."""
        self.files = files
        self.pixels: tuple[int, int] = (0, 0)  # height and width of what the model is given, once it is known
        self.image_size: int | None = None

    def fingerprint(self) -> str:
        return hashlib.sha256("".join(self.files).encode()).hexdigest()[:16]

    def load_processor(self, model: PreTrainedModel, name: str, options: dict[str, Any]) -> Any:
        self.check_model(model, name)
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(name, **options)
        except Exception as error:
            raise Refused(
                f"{name} has no image processor that can be loaded ({first_line(error)}); save the one that made the "
                "model's pictures in its folder, with its save_pretrained"
            ) from error

    def prepare(self, model: PreTrainedModel, plan: ConversionPlan) -> list[Path]:
        files, self.image_size = list(self.files.values()), plan.image_size
        self.pixels = self.measure(files[0])
        if self.image_size is not None and self.pixels != (self.image_size,) * 2:
            self.resize(self.image_size, files[0])
            self.enlarge(model)
            self.changed = True
        return files

    def measure(self, file: Path) -> tuple[int, int]:
        """(height, width) of what the processor makes of a picture."""
        height, width = self.make_input(file).shape[-2:]
        return height, width

    def resize(self, side: int, example: Path) -> None:
        """Let the processor make pictures of side x side pixels, with as much cut off as before."""
        held = self.processor.to_dict()
        sizes = {name: held[name] for name in ("size", "crop_size") if isinstance(held.get(name), dict)}
        for name, old in sizes.items():
            factors = {key: side / self.pixels[key == "width"] for key, value in old.items() if value is not None}
            held[name] = {key: round(factor * old[key]) for key, factor in factors.items()}
        self.processor, before = type(self.processor).from_dict(held), self.pixels
        self.pixels = self.measure(example)
        if self.pixels != (side, side):
            raise Refused(
                f"--image-size {side}: the image processor makes pictures of {before[0]} x {before[1]} pixels, and "
                f"told otherwise {self.pixels[0]} x {self.pixels[1]}; set its size in preprocessor_config.json"
            )

    def enlarge(self, model: PreTrainedModel) -> PreTrainedModel:
        if self.image_size is None:
            return model
        try:
            return extend_positions(model, image_size=self.image_size)
        except ValueError as error:
            raise Refused(f"--image-size {self.image_size}: {first_line(error)}") from error

    def make_batches(self, model: PreTrainedModel, some: Sequence[Path], size: int) -> "PictureBatches":
        return PictureBatches(self, some, size)

    def make_input(self, file: Path) -> Tensor:
        """[1, channels, height, width]"""
        made: Tensor = self.processor(images=[read_picture(file)], return_tensors="pt")["pixel_values"]
        return made

    def describe_size(self) -> dict[str, Any]:
        return {"pixels": list(self.pixels)}

    def block_size(self, plan: ConversionPlan) -> dict[str, int]:
        return {"tile": plan.tile}

    def check_blocks(self, model: PreTrainedModel) -> None:
        tiled = find_running(model).values()
        for attention in tiled:
            for height, width in attention.patches.grids.values():
                if max(height, width) <= attention.tile:
                    raise Refused(
                        f"pictures of {height} x {width} patches fit into one tile of {attention.tile}, where lln_diag "
                        f"is softmax; give a --tile below {max(height, width)}, or larger pictures with --image-size"
                    )


class PictureBatches(Sequence[dict[str, Tensor]]):
    """`size` pictures at a time, read when they are needed: all at once may be more than there is memory for."""

    def __init__(self, pictures: Pictures, files: Sequence[Path], size: int) -> None:
        self.pictures, self.parts = pictures, [files[at : at + size] for at in range(0, len(files), size)]

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, at: int) -> dict[str, Tensor]: ...

    @overload
    def __getitem__(self, at: slice) -> list[dict[str, Tensor]]: ...

    def __getitem__(self, at: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        made = [self.pictures.make_input(file) for file in self.parts[at]]
        for file, one in zip(self.parts[at], made, strict=True):
            if one.shape != made[0].shape:
                sizes = " and ".join(f"{t.shape[-2]} x {t.shape[-1]}" for t in (made[0], one))
                raise Refused(
                    f"the image processor makes pictures of different sizes ({sizes} pixels, of {file.name}); let it "
                    "crop or resize them to one size in preprocessor_config.json"
                )
        return {"pixel_values": torch.cat(made)}
