"""Files that are either whole or not there: written beside their place and moved into it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def put_between(text: str, marks: tuple[str, str], new: str) -> str:
    """`text` with what stands between two marks replaced."""
    start = text.index(marks[0]) + len(marks[0])
    return text[:start] + new + text[text.index(marks[1], start) :]
