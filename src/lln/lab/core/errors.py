"""What goes wrong with data, said in one sentence."""

from __future__ import annotations

import importlib
from typing import Any


class DataError(Exception):
    """Data that is not there, is incomplete, or is not what its name promises. The message is for the user as it is."""


def need(module: str) -> Any:
    """The module, or a DataError that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise DataError(
            f"{package} is missing; install what training needs with: pip install 'lln-attention[train]'"
        ) from None
