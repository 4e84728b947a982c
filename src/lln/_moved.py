"""Import paths of the last release, which go on working for this one: each gives the module in its new place, and the
first use of a room that has moved warns."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

# Old name -> new name; what is not there has moved with its room. Not by lln.files: that is a module of lln, too.
MOVED: dict[str, str] = json.loads((Path(__file__).parent / "data" / "moved.json").read_text(encoding="utf-8"))
FUNCTIONS = ("attention", "mechanisms")  # of lln, which the modules of these names must not hide
WARNED: set[str] = set()


def find_new(old: str) -> str | None:
    """The new name of a module, or None where it has not moved.

    >>> find_new("lln.training.config")
    'lln.lab.train.config'
    """
    room, rest = old, ""
    while room not in MOVED:
        room, dot, last = room.rpartition(".")
        if not dot:
            return None
        rest = f".{last}{rest}"
    return MOVED[room] + rest


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Before the usual ones, which would load a second copy of a module that they find in a package of an old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = find_new(fullname) if fullname.startswith("lln.") else None
        if new is None or importlib.util.find_spec(new) is None:
            return None
        room = ".".join(fullname.split(".")[:2])
        if room not in WARNED:
            WARNED.add(room)
            warnings.warn(
                f"{fullname} is now {new}; the old name works in this release and not in the next.",
                DeprecationWarning,
                stacklevel=2,
            )
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        new = find_new(spec.name)
        assert new is not None
        module = importlib.import_module(new)
        self.own = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.own  # importing it under the old name has replaced it


class Package(types.ModuleType):
    """lln itself: importing the module `lln.attention` leaves the function `lln.attention` where it is."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in FUNCTIONS or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


def install() -> None:
    sys.meta_path.insert(0, Finder())
    sys.modules["lln"].__class__ = Package
