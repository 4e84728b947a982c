"""Files that are either whole or not there: written beside their place and moved into it. Also read, and hashed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields the path of a new file to write to, beside `path`. It is moved there once that went well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        yield Path(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_result(out: Path, name: str, result: Any, texts: dict[str, str]) -> list[Path]:
    """OUT/NAME.json and a file for each text, by the end of its name: {".md": ..., "-time.svg": ...}. Returns where
    they are."""
    paths = [out / f"{name}{end}" for end in (".json", *texts)]
    write_json(paths[0], result)
    for path, text in zip(paths[1:], texts.values(), strict=True):
        write_text(path, text)
    return paths


def read_json(path: Path) -> Any:
    """What a JSON file holds, None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_data(name: str) -> Any:
    """What `data/NAME.json` of this package holds."""
    return read_json(Path(__file__).parent / "data" / f"{name}.json")


def put_between(text: str, marks: tuple[str, str], new: str) -> str:
    """`text` with what stands between two marks replaced."""
    start = text.index(marks[0]) + len(marks[0])
    return text[:start] + new + text[text.index(marks[1], start) :]


def read_json_lines(path: Path) -> list[Any]:
    """The lines of a file of JSON lines that are whole: a killed process may have left half of one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
