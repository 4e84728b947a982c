"""In which order a conversion's files are written: a kill between any two leaves what the same command goes on from."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lln.files import Unreadable
from lln.lab.convert import workplace
from lln.lab.convert.workplace import Workplace
from lln.lab.core.errors import Refused

REQUEST = {"model": "mine", "weights": "0123"}


class Killed(BaseException):
    """Nothing catches it: as after SIGKILL, no further line runs."""


def convert(out: Path, fail: Callable[[str], None] = lambda moment: None) -> dict[str, Any]:
    """A conversion of one stage, by the calls that `pipeline` makes."""
    work = Workplace(out, REQUEST)
    if work.result is not None:
        shutil.rmtree(work.place, ignore_errors=True)
        return work.result
    with work.lock():
        if work.read("fitted") is None:
            fail("locked")
            work.keep("fitted", {"loss": 1}, {"a": torch.ones(3)})
        folder = work.place / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "weights").write_text("new")
        fail("saved")
        work.finish({"request": work.request, "found": 1})
    return {"request": work.request, "found": 1}


def kill_at(call: str, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    """At the count-th of the calls that change the disk, before it does."""
    made = 0
    owner, name = {"replace": (os, "replace"), "rmtree": (shutil, "rmtree"), "json": (workplace, "write_json"),
                   "tensors": (workplace, "save_file")}[call]  # fmt: skip
    plain = getattr(owner, name)

    def wrapped(*given: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == count:
            raise Killed
        return plain(*given, **options)

    monkeypatch.setattr(owner, name, wrapped)


MOMENTS = [("json", 1), ("json", 2), ("tensors", 1), ("replace", 1), ("replace", 2), ("replace", 3), ("rmtree", 2),
           ("replace", 4)]  # fmt: skip


@pytest.mark.parametrize(("call", "count"), MOMENTS)
@pytest.mark.parametrize("there", [False, True])
def test_wherever_it_is_killed_the_same_command_ends_alike(
    call: str, count: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with monkeypatch.context() as patch:
        kill_at(call, patch, count)
        with pytest.raises(Killed):
            convert(out)
    assert convert(out) == {"request": REQUEST, "found": 1}
    assert json.loads((out / "conversion.json").read_text())["found"] == 1
    assert (out / "weights").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_model_appears_with_its_report_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    move = os.replace

    def look(source: Path, target: Path) -> None:
        if Path(target) == tmp_path / "out":
            seen.append(((Path(source) / "conversion.json").is_file(), Path(target).exists()))
        move(source, target)

    monkeypatch.setattr(os, "replace", look)
    convert(tmp_path / "out")
    assert seen == [(True, False)]


def test_what_was_asked_for_is_known_before_anything_is_kept(tmp_path: Path) -> None:
    def look(moment: str) -> None:
        if moment == "locked":
            assert json.loads((tmp_path / "out.partial" / "request.json").read_text()) == REQUEST
            raise Killed

    with pytest.raises(Killed):
        convert(tmp_path / "out", look)
    assert not (tmp_path / "out.partial").exists()  # nothing was kept that one could go on from


def test_another_request_finds_neither_what_was_begun_nor_what_is_finished(tmp_path: Path) -> None:
    def stop(moment: str) -> None:
        if moment == "saved":
            raise Killed

    with pytest.raises(Killed):
        convert(tmp_path / "out", stop)
    other = REQUEST | {"weights": "4567"}
    for _ in ("begun", "finished"):
        with pytest.raises(Refused, match="weights are not the same; name another folder"):
            Workplace(tmp_path / "out", other)
        convert(tmp_path / "out")
    (tmp_path / "out" / "conversion.json").write_text("{")
    with pytest.raises(Unreadable, match=r"conversion.json cannot be read"):
        convert(tmp_path / "out")
