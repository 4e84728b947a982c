"""The first session of the documentation prints what stands below each piece of it."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+\.\d+")


def test_the_session_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.chdir(tmp_path)
    session = importlib.import_module("walkthrough")
    found = session.run_session(session.PAGE.read_text(encoding="utf-8"))
    assert len(found) > 5
    assert sum(bool(shown) for shown, _ in found) > 5
    for shown, printed in found:
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
        # Another torch adds in another order, and learning makes more of it.
        wanted, got = ([float(n) for n in NUMBER.findall(text)] for text in (shown, printed))
        assert got == pytest.approx(wanted, rel=0.1, abs=0.03)
