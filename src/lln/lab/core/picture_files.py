"""Picture files of a user: which there are below a folder, and how one is read."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lln.files import hash_file
from lln.lab.core.errors import Refused, first_line

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def find_pictures(folders: Sequence[Path]) -> dict[str, Path]:
    """The picture files below some folders, by the hashes of what is in them and in their order. Refused where a folder
    is not there or holds none, and where a file cannot be read as a picture: now, and not after an hour."""
    if importlib.util.find_spec("PIL") is None:
        raise Refused("pictures need pillow, which is missing; install it with: pip install 'lln-attention[train]'")
    found: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            problem = "is a file; name the folder that it is in" if folder.exists() else "is not there"
            raise Refused(f"--images: {folder} {problem}")
        files = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not files:
            raise Refused(f"--images: there is no picture below {folder} ({', '.join(SUFFIXES)})")
        for file in files:
            read_picture(file)
            found.setdefault(hash_file(file), file)
    return dict(sorted(found.items()))


def read_picture(file: Path) -> Any:
    """In red, green and blue, turned as its camera was held: as pipelines of transformers read it."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as held:
            return ImageOps.exif_transpose(held).convert("RGB")
    except Exception as error:  # a damaged file raises nearly anything
        raise Refused(f"{file} cannot be read as a picture ({first_line(error)}); remove or replace it") from None
