"""What an index of packages shows: addresses in one place, and a README whose links lead somewhere from there."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lln

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESSES = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]


class Hook:
    """In the place of hatchling's, which is there where a wheel is built alone."""

    def __init__(self) -> None:
        self.root, self.config = str(ROOT), ADDRESSES


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    interface: Any = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = Hook
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Any] = {}
    module.CustomMetadataHook().update(made)
    return made


def test_every_link_of_the_readme_is_an_address(metadata: dict[str, Any]) -> None:
    text = metadata["readme"]["text"]
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(links) > 15
    assert all(link.startswith(("https://", "#")) for link in links)
    assert f"{ADDRESSES['repository']}/blob/main/docs/quickstart.md" in links
    assert f"{ADDRESSES['repository']}/raw/main/docs/assets/picture-light.svg" in links


def test_addresses_follow_from_one_place(metadata: dict[str, Any]) -> None:
    assert set(metadata["urls"]) == {"Repository", "Documentation", "Changelog", "Paper"}
    assert metadata["urls"]["Repository"] == ADDRESSES["repository"]
    assert {"readme", "urls", "version"} == set(PROJECT["project"]["dynamic"])
    for path in ROOT.glob("**/*.md"):
        if ".venv" not in path.parts:
            assert ADDRESSES["repository"] not in path.read_text(encoding="utf-8"), path


def test_the_citation_has_the_version() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"title", "message", "authors", "version"} <= set(cited)
    assert cited["version"] == lln.__version__
    assert [one["family-names"] for one in cited["references"][0]["authors"]] == ["Nahshan", "Kampeas", "Haleva"]
    assert cited["license"] == PROJECT["project"]["license"]
