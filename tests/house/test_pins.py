"""The project's own environment is pinned, whole: a set-up next year installs what was tested."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_all_that_is_installed_is_pinned() -> None:
    import pin

    text = (ROOT / "constraints.txt").read_text()
    pinned, needed = pin.list_pinned(text), pin.list_needed()
    assert len(needed) > 30
    assert not needed.keys() - pinned.keys()
    assert {"torch", "numpy", "transformers", "pytest", "ruff", "safetensors"} <= pinned.keys()
    assert "triton" not in pinned  # each build of torch asks for its own
    above, mark, below = text.partition(pin.MARK)
    assert mark
    assert not pin.list_pinned(above).keys() & pin.list_pinned(below).keys()
    names = [line.partition("==")[0] for line in below.splitlines()]
    assert names == sorted(names)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9A-Za-z.+!]+", line) for line in below.splitlines())


def test_what_is_pinned_by_hand_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pin

    file = tmp_path / "constraints.txt"
    file.write_text(f"# Why.\nnumpy==1.0\n\n{pin.MARK}old==3\n")
    monkeypatch.setattr(pin, "CONSTRAINTS", file)
    pin.main()
    held = pin.list_pinned(file.read_text())
    assert held["numpy"] == "1.0"
    assert "old" not in held
    before = file.read_text()
    pin.main()
    assert file.read_text() == before
