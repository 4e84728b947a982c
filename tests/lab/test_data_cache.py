"""What is made once is whole, whoever asks, whatever happens to the maker."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lln.files import Unreadable
from lln.lab.data.made_once import build_once, find_cache, load_arrays


def write(name: str, text: str) -> Callable[[Path], None]:
    """A builder of one file."""

    def build(folder: Path) -> None:
        (folder / name).write_text(text)

    return build


# Says in a file that it was called, takes its time, and writes its result in two steps.
BUILDER = """
import sys, time
from pathlib import Path
from lln.lab.data.made_once import build_once

def build(folder):
    calls.mkdir(exist_ok=True)
    (calls / sys.argv[2]).touch()
    (folder / "a.bin").write_bytes(b"first")
    time.sleep(float(sys.argv[3]))
    (folder / "b.bin").write_bytes(b"second")

root = Path(sys.argv[1])
calls = root / "calls"
folder = build_once("things", {"n": 1}, build, root)
print((folder / "a.bin").read_text(), (folder / "b.bin").read_text())
"""


def start(root: Path, name: str, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILDER, str(root), name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_of_processes_that_ask_at_once_one_builds_and_all_get_it(tmp_path: Path) -> None:
    makers = [start(tmp_path, str(i), 0.5) for i in range(2)]
    assert [maker.communicate(timeout=100)[0] for maker in makers] == ["first second\n"] * 2
    assert len(list((tmp_path / "calls").iterdir())) == 1
    assert len([path for path in (tmp_path / "things").iterdir() if path.is_dir()]) == 1


def test_a_killed_builder_leaves_nothing_that_anyone_takes_for_the_result(tmp_path: Path) -> None:
    maker = start(tmp_path, "killed", 60)
    wait_for(tmp_path / "calls" / "killed")
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert list((tmp_path / "things").glob("*.part"))
    folder = build_once("things", {"n": 1}, write("b.bin", "new"), tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["b.bin", "manifest.json"]
    assert not list((tmp_path / "things").glob("*.part"))


def test_a_failed_build_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        build_once("kind", {"n": 1}, fails, tmp_path)
    assert [path for path in (tmp_path / "kind").iterdir() if path.is_dir()] == []
    folder = build_once("kind", {"n": 1}, write("x", "whole"), tmp_path)
    assert (folder / "x").read_text() == "whole"


def test_a_whole_result_is_kept_and_a_damaged_one_built_again(tmp_path: Path) -> None:
    built = []

    def build(folder: Path) -> None:
        built.append(1)
        (folder / "x").write_text("whole")

    folder = build_once("kind", {"n": 1}, build, tmp_path)
    assert build_once("kind", {"n": 1}, build, tmp_path) == folder
    assert len(built) == 1
    manifest = folder / "manifest.json"
    damages: list[Callable[[], object]] = [
        lambda: (folder / "x").write_text("ha"),
        (folder / "x").unlink,
        manifest.unlink,
    ]
    damages += [functools.partial(manifest.write_text, text) for text in ("[]", '{"sizes": 3}', '{"sizes"', "3")]
    for number, damage in enumerate(damages, 2):
        damage()
        assert (build_once("kind", {"n": 1}, build, tmp_path) / "x").read_text() == "whole"
        assert len(built) == number
    assert build_once("kind", {"n": 2}, build, tmp_path) != folder
    assert json.loads((folder / "manifest.json").read_text())["key"] == {"n": 1}


def test_an_array_that_is_none_is_named(tmp_path: Path) -> None:
    """As damage leaves one that changes no size."""
    folder = build_once("kind", {}, lambda part: np.save(part / "x.npy", np.zeros(8)), tmp_path)
    size = (folder / "x.npy").stat().st_size
    (folder / "x.npy").write_bytes(bytes(size))
    with pytest.raises(Unreadable, match=r"x.npy cannot be read: it is no array .* Remove its folder"):
        load_arrays(folder)


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "environment"))
    assert find_cache() == tmp_path / "environment"
    assert find_cache(tmp_path) == tmp_path
    monkeypatch.delenv("LLN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "xdg"))
    assert find_cache() == tmp_path / "xdg" / "lln"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert find_cache() == Path.home() / ".cache" / "lln"
