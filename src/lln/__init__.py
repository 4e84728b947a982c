"""Attention whose cost grows linearly with the length of a sequence, and that is as concentrated as softmax attention.

Names are loaded when they are first used, so that `import lln`, `lln --help` and `lln --version` wait for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lln import _moved

if TYPE_CHECKING:
    from lln import instruments, naive, testing
    from lln.functional import lln_attention
    from lln.matching import match_data, match_moments
    from lln.nn import LLNAttention, MultiheadAttention, scaled_dot_product_attention
    from lln.peers import attention, mechanism, mechanisms, register
    from lln.state import LLNState

__version__ = "0.1.0"
__all__ = [
    "LLNAttention",
    "LLNState",
    "MultiheadAttention",
    "__version__",
    "attention",
    "instruments",
    "lln_attention",
    "match_data",
    "match_moments",
    "mechanism",
    "mechanisms",
    "naive",
    "register",
    "scaled_dot_product_attention",
    "testing",
]

_OFFERS = {
    "lln.functional": ("lln_attention",),
    "lln.matching": ("match_data", "match_moments"),
    "lln.nn": ("LLNAttention", "MultiheadAttention", "scaled_dot_product_attention"),
    "lln.peers": ("attention", "mechanism", "mechanisms", "register"),
    "lln.state": ("LLNState",),
}
_PLACES = {name: room for room, names in _OFFERS.items() for name in names}
_ROOMS = (
    "checks", "distributed", "functional", "instruments", "kernels", "matching", "naive", "nn", "peers", "state",
    "testing",
)  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take every name for one of lln's

    def __getattr__(name: str) -> Any:
        if name in _PLACES:
            found = getattr(importlib.import_module(_PLACES[name]), name)
        elif name in _ROOMS:
            found = importlib.import_module(f"lln.{name}")
        else:
            raise AttributeError(f"module 'lln' has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        loaded = {n for n, x in globals().items() if getattr(x, "__name__", "") == f"lln.{n}"}  # rooms like lln.hf
        return sorted({*__all__, *_ROOMS, *loaded, *(n for n in globals() if n.startswith("__"))} - {"_moved"})


_moved.install()
