"""Files that are either whole or not there: written beside their place and moved into it. Also read, and hashed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PART = ".part"  # the end of what is not whole yet
LEAST_FREE = 2**20  # bytes; with less a disk counts as full


class Unreadable(ValueError):
    """A file does not hold what it should. The message names the file and says what is wrong with it."""


def name_part(path: Path) -> Path:
    """A new place beside `path`, for what is to be moved there once it is whole."""
    return path.with_name(f"{path.name}{secrets.token_hex(4)}{PART}")


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields the path of a new file to write to, beside `path`. It is moved there once that went well. Who may read it
    is what the umask says, as of any other file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = name_part(path)
    temporary.open("xb").close()
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explain_writing(folder: Path) -> Iterator[None]:
    """For libraries that write into a folder: whichever of them finds that this cannot go on, as on a full disk, and in
    whatever words, here it is an OSError with the system's own."""
    try:
        yield
    except Exception as error:  # safetensors and torch have errors of their own, and NumPy an OSError without a number
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if (number := find_writing_error(error, folder)) is None:
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error


def find_writing_error(error: BaseException, folder: Path) -> int | None:
    """Which errno is behind an error; None: it has nothing to do with writing."""
    if (told := re.search(r"\(os error (\d+)\)", str(error))) is not None:  # Rust's
        return int(told[1])
    if not re.search(r"PytorchStreamWriter|inline_container|requested and \d+ written", str(error)):
        return None
    probe = name_part(folder / "probe")  # torch says where it failed, not why
    try:
        probe.write_bytes(bytes(LEAST_FREE))
    except OSError as found:
        return found.errno
    finally:
        probe.unlink(missing_ok=True)
    return errno.ENOSPC if shutil.disk_usage(folder).free < LEAST_FREE else errno.EIO


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


def read_json(path: Path, kind: type = object) -> Any:
    """What a JSON file holds, None where there is none. Unreadable where it is damaged, or holds something else than
    that kind: a dict or a list.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "result.json"
    >>> _ = file.write_text('{"loss": ')
    >>> read_json(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    lln.files.Unreadable: ...result.json cannot be read: it is not whole JSON (line 1: Expecting value).
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except json.JSONDecodeError as error:
        raise Unreadable(f"{path} cannot be read: it is not whole JSON (line {error.lineno}: {error.msg}).") from None
    except (UnicodeDecodeError, RecursionError):
        raise Unreadable(f"{path} cannot be read: it is no JSON in UTF-8.") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from None
    if found is not None and not isinstance(found, kind):
        wanted = "a list" if kind is list else "an object"
        raise Unreadable(f"{path} must hold {wanted} in JSON; got {type(found).__name__}.")
    return found


def read_data(name: str) -> Any:
    """What `data/NAME.json` of this package holds."""
    return read_json(Path(__file__).parent / "data" / f"{name}.json")


def put_between(text: str, marks: tuple[str, str], new: str) -> str:
    """`text` with what stands between two marks replaced."""
    start = text.index(marks[0]) + len(marks[0])
    return text[:start] + new + text[text.index(marks[1], start) :]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects, none where there is no file. Half a line at the end is left out: a killed
    process leaves one. Unreadable, with its number, for any other line that is no object."""
    found: list[dict[str, Any]] = []
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            row = None
        if not isinstance(row, dict):
            raise Unreadable(f"{path} cannot be read: line {number} is no JSON object.")
        found += [row] if row else []
    return found


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
