"""What is slow to make is made once a machine and kept on disk, whole or not at all. Also the splits of sets that are
made here."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lln.files import Unreadable, explain_writing, name_part, write_json
from lln.lab.core.errors import first_line, need
from lln.lab.core.progress import track
from lln.lab.core.seeds import fingerprint
from lln.values import check_choice, check_count

MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")
Place = str | os.PathLike[str] | None


def find_cache(cache_dir: Place = None) -> Path:
    """cache_dir, or else LLN_CACHE, or else lln in the user's cache folder."""
    chosen = cache_dir or os.environ.get("LLN_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "lln"


def build_once(kind: str, key: Mapping[str, Any], build: Callable[[Path], None], cache_dir: Place = None) -> Path:
    """The folder with what `build(folder)` wrote for this key, which must hold everything that decides its content.

    A folder appears complete or not at all: it is built beside its place and renamed. Of several processes that ask at
    once, one builds and the others wait. A folder whose files have other sizes than at its making is built again.
    """
    parent = find_cache(cache_dir) / kind
    name = fingerprint(key)[:32]
    folder = parent / name
    if is_whole(folder):
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with need("filelock").FileLock(parent / f"{name}.lock"):
        if is_whole(folder):
            return folder
        for remains in parent.glob(f"{name}*.part"):  # of a builder that was killed
            shutil.rmtree(remains, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(folder)
        part = name_part(folder)
        part.mkdir()  # as the umask says
        try:
            with explain_writing(part):
                build(part)
            sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
            for path in part.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            write_json(part / MANIFEST, {"key": dict(key), "sizes": sizes})
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return folder


def is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def build_arrays(
    kind: str, identity: Mapping[str, Any], make: Callable[[], Mapping[str, np.ndarray]], cache_dir: Place = None
) -> dict[str, np.ndarray]:
    """What `make()` returns for this identity, made once."""

    def build(folder: Path) -> None:
        for name, array in make().items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    return load_arrays(build_once(kind, {**identity, "form": 1}, build, cache_dir))


def load_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The arrays in a folder by name: mapped, not read, so that processes on one machine share their pages."""
    return {path.stem: load_array(path) for path in folder.glob("*.npy")}


def load_array(path: Path) -> np.ndarray:
    try:
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise Unreadable(f"{path} cannot be read: it is no array ({first_line(error)}). Remove its folder.") from None
    return found


def choose_split(number: int) -> str:
    """Eight of ten are for training."""
    return {8: "validation", 9: "test"}.get(number % 10, "train")


def generate(
    name: str,
    split: str,
    count: int,
    seed: int,
    options: Any,  # a dataclass: what decides the content, besides the seed
    rows: Iterator[np.ndarray],
    pack: Callable[[list[np.ndarray]], Mapping[str, np.ndarray]],
    cache_dir: Place,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(the arrays that `pack` makes of the first `count` rows, their identity), from the cache where they are there."""
    check_choice("split", split, *SPLITS)
    check_count("count", count)
    kind = name.lower()
    identity = {"name": f"generated/{kind}", "split": split, "count": count, "seed": seed, **asdict(options)}
    made = track(islice(rows, count), count, f"Generating {name} {split}")
    return build_arrays(kind, identity, lambda: pack(list(made)), cache_dir), identity
