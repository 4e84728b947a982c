"""Import paths of the last release, which go on working for this one: each gives what is in the new place, and its
first use warns and names that."""

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
from typing import Any

# Old name -> new name; what is not there has moved with its room. Not by lln.files: that is a module of lln, too.
MOVED: dict[str, str] = json.loads((Path(__file__).parent / "data" / "moved.json").read_text(encoding="utf-8"))
FUNCTIONS = ("attention", "mechanisms")  # of lln, which the modules of these names must not hide
WARNED: set[str] = set()  # a search for a module, without importing it, comes here as well


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


class Room(types.ModuleType):
    """A package by its old name, with the names of the new one. It is not the new one: that has its own name, by which
    Python would look for the modules that have left it."""

    def __init__(self, old: str, new: types.ModuleType) -> None:
        super().__init__(old, new.__doc__)
        self._new = new

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in MOVED:  # whatever the new room calls so is something else
            raise AttributeError(f"{self.__name__}.{name} is a module that was not imported yet.")
        return getattr(self._new, name)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        hidden_by = self.__name__.rpartition(".")[2]
        if hidden_by in FUNCTIONS and isinstance(value, types.ModuleType) and not name.startswith("_"):
            # `import lln.mechanisms.draws as draws` asks what is called lln.mechanisms, and that is the function
            setattr(getattr(sys.modules["lln"], hidden_by), name, value)


class Loader(importlib.abc.Loader):
    """Gives the module in its new place, the very same; in the place of a package, a room."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self.new)
        self.own = module.__spec__
        return module if spec.submodule_search_locations is None else Room(spec.name, module)

    def exec_module(self, module: types.ModuleType) -> None:
        if not isinstance(module, Room):
            module.__spec__ = self.own  # importing it under the old name has replaced it


class Finder(importlib.abc.MetaPathFinder):
    """Before the usual ones, which would take what is left of a folder of an old name for a package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = find_new(fullname) if fullname.startswith("lln.") else None
        found = new and importlib.util.find_spec(new)
        if new is None or not found:
            return None
        if fullname not in WARNED:
            WARNED.add(fullname)
            warnings.warn(
                f"{fullname} is now {new}; the old name works in this release and not in the next.",
                DeprecationWarning,
                stacklevel=2,
            )
        is_room = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, Loader(new), is_package=is_room)


class Package(types.ModuleType):
    """lln itself: importing the module `lln.attention` leaves the function `lln.attention` where it is."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in FUNCTIONS or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


def install() -> None:
    sys.meta_path.insert(0, Finder())
    sys.modules["lln"].__class__ = Package
