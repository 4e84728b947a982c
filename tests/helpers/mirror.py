"""A tiny mirror of Hub data sets, written by the tests that read it."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

CARD = """---
configs:
{configs}
---
A few rows, made for a test.
"""


def write_split(folder: Path, path: str, columns: Mapping[str, Any], pieces: int = 1) -> None:
    """`path` is like sst2/train; rows go to its pieces in order."""
    table = pa.table(dict(columns))
    size = -(-table.num_rows // pieces)
    for i in range(pieces):
        target = folder / f"{path}-{i:05d}-of-{pieces:05d}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(i * size, size), target)


def write_card(folder: Path, configs: dict[str, dict[str, str]]) -> None:
    lines = []
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, path in splits.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(CARD.format(configs="\n".join(lines)))


def write_set(root: Path, name: str, config: str, splits: Mapping[str, Mapping[str, Any]], pieces: int = 1) -> Path:
    """A set with a card, as on the Hub."""
    folder = root / name
    for split, columns in splits.items():
        write_split(folder, f"{config}/{split}", columns, pieces)
    write_card(folder, {config: {split: f"{config}/{split}-*" for split in splits}})
    return folder


def encode_image(pixels: np.ndarray, kind: str = "PNG") -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return {"bytes": buffer.getvalue(), "path": None}
