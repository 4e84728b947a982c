"""Import paths of the last release, which go on working for this one: each gives the module in its new place, and the
first use of a room that has moved warns."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence

DATA = ("embedded", "examples", "images", "listops", "needles", "pathfinder", "sources", "text", "tokenizer")
MOVED = {
    "lln.attention": "lln.functional",
    "lln.calibrate": "lln.lab.calibration",
    "lln.cli": "lln.lab.cli.app",
    "lln.convolution": "lln.nn.convolution",
    "lln.curves": "lln.matching.curves",
    "lln.mechanisms": "lln.peers",
    "lln.mechanisms.lln_attention": "lln.peers.log_normal",
    "lln.moments": "lln.matching.moments",
    "lln.multihead": "lln.nn.multihead",
    "lln.recipes": "lln.lab.recipes",
    "lln.training": "lln.lab.train",
    "lln.training.cache": "lln.lab.data.made_once",
    "lln.training.errors": "lln.lab.core.errors",
    "lln.training.glue": "lln.lab.data.labelled",
    "lln.training.lra": "lln.lab.data.labelled",
    "lln.training.masking": "lln.lab.data.text",
    "lln.training.runs": "lln.lab.train.run_folder",
    "lln.training.seeds": "lln.lab.core.seeds",
    "lln.training.trainer": "lln.lab.train.loop",
} | {f"lln.training.{name}": f"lln.lab.data.{name}" for name in DATA}
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
