"""Import paths of the last release, which go on working for this one: each gives what is in the new place, and its
first use warns and names that."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader as AnyLoader
    from importlib.abc import MetaPathFinder as AnyFinder
else:  # their module, and pathlib, bring more than all of this takes, before `lln` can hear Ctrl-C
    AnyLoader = AnyFinder = object

# Old name -> new name, or several where what was one module is now more; what is not there has moved with its room. Not
# by lln.files: that is a module of lln, too.
with open(os.path.join(os.path.dirname(__file__), "data", "moved.json"), encoding="utf-8") as file:
    MOVED: dict[str, str | list[str]] = json.load(file)
FUNCTIONS = ("attention", "mechanisms")  # of lln, which the modules of these names must not hide
WARNED: set[str] = set()  # a search for a module, without importing it, comes here as well


def find_new(old: str) -> list[str]:
    """The new names of a module: one, several where its names are now in several, none where it has not moved.

    >>> find_new("lln.training.config")
    ['lln.lab.train.config']
    """
    room, rest = old, ""
    while room not in MOVED:
        room, dot, last = room.rpartition(".")
        if not dot:
            return []
        rest = f".{last}{rest}"
    new = MOVED[room]
    return [name + rest for name in ([new] if isinstance(new, str) else new)]


def warn_once(old: str) -> None:
    if old not in WARNED:
        WARNED.add(old)
        warnings.warn(
            f"{old} is now {' and '.join(find_new(old))}; the old name works in this release and not in the next.",
            DeprecationWarning,
            stacklevel=3,
        )


class Room(types.ModuleType):
    """A package, or a module that is now several, by its old name and with the names of the new ones. A package is not
    the new one: that has its own name, by which Python would look for the modules that have left it."""

    def __init__(self, old: str, new: list[types.ModuleType]) -> None:
        super().__init__(old, new[0].__doc__)
        self._new = new

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in MOVED:  # whatever the new room calls so is something else
            raise AttributeError(f"{self.__name__}.{name} is a module that was not imported yet.")
        found = getattr(next((new for new in self._new if hasattr(new, name)), self._new[0]), name)
        if not name.startswith("__"):  # Python's own names are asked for on the way to a module of the room
            warn_once(self.__name__)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        hidden_by = self.__name__.rpartition(".")[2]
        if hidden_by in FUNCTIONS and isinstance(value, types.ModuleType) and not name.startswith("_"):
            # `import lln.mechanisms.draws as draws` asks what is called lln.mechanisms, and that is the function
            setattr(getattr(sys.modules["lln"], hidden_by), name, value)


class Loader(AnyLoader):
    """Gives the module in its new place, the very same; in the place of a package, or of several modules, a room."""

    def __init__(self, new: list[str]) -> None:
        self.new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        modules = [importlib.import_module(name) for name in self.new]
        self.own = modules[0].__spec__
        is_same = spec.submodule_search_locations is None and len(modules) == 1
        return modules[0] if is_same else Room(spec.name, modules)

    def exec_module(self, module: types.ModuleType) -> None:
        if not isinstance(module, Room):
            module.__spec__ = self.own  # importing it under the old name has replaced it


class Finder(AnyFinder):
    """Before the usual ones, which would take what is left of a folder of an old name for a package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = find_new(fullname) if fullname.startswith("lln.") else []
        found = importlib.util.find_spec(new[0]) if new else None
        if found is None:
            return None
        is_room = found.submodule_search_locations is not None
        if not is_room:  # a room warns when a name of it is used: it may be imported for the sake of a module in it
            warn_once(fullname)
        return importlib.machinery.ModuleSpec(fullname, Loader(new), is_package=is_room)


class Package(types.ModuleType):
    """lln itself: importing the module `lln.attention` leaves the function `lln.attention` where it is."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in FUNCTIONS or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


def install() -> None:
    sys.meta_path.insert(0, Finder())
    sys.modules["lln"].__class__ = Package
