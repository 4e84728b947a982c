"""What goes wrong, said in one sentence."""

import importlib
from pathlib import Path
from typing import Any


class Refused(Exception):
    """What the user asked for cannot be. The message is one sentence for the user, as it is."""


class WrongOption(Refused):
    """An option of a command that cannot be, and why.

    >>> WrongOption("--lengths", "must be positive").option
    '--lengths'
    """

    def __init__(self, option: str, why: str) -> None:
        super().__init__(why)
        self.option = option


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


def first_line(error: BaseException, strip: str = ".:") -> str:
    """What an error says, without the pages that some libraries add. strip: marks that are left off at its end, for a
    place inside another sentence; "" for the line as it is.

    >>> first_line(ValueError("It is too long:\\nmore"))
    'It is too long'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(strip) if lines else type(error).__name__


def read_text(file: Path, option: str = "") -> str:
    """The text in a file. Refused, after the name of the option that named it, where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refused(f"{option}there is no file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Refused(f"{option}{file} cannot be read: {reason}") from None
