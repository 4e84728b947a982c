"""What `lln inspect` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

Bar = Callable[[int], AbstractContextManager[Callable[[str], None]]]


class Refused(Exception):
    """A mistake of the user's, in one line."""


def read_texts(file: Path | None, given: list[str]) -> list[str]:
    """One text a line, or the given ones, or those that come with the package."""
    from lln.hf.inspect import TEXTS

    if file is None:
        texts = [text for text in given if text.strip()]
        if given and not texts:
            raise Refused("--texts: there is nothing but blanks in it")
        return texts or list(TEXTS)
    if given:
        raise Refused("--text and --texts are two ways to say one thing; give one of them")
    try:
        lines = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Refused(f"--text: there is no file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise Refused(f"--text: {file} cannot be read: {reason}") from None
    texts = [line.strip() for line in lines.splitlines() if line.strip()]
    if not texts:
        raise Refused(f"--text: {file} is empty; it should hold a text in each line")
    return texts


def run(
    name: str, texts: list[str], *, out: Path, max_length: int, batch_size: int, device: str, seed: int, as_json: bool,
    bar: Bar,
) -> None:  # fmt: skip
    """Measure, print the table (or JSON), write inspect.json and the page. Refused for what cannot be inspected."""
    from rich.console import Console

    from lln.bench.measure import provenance
    from lln.hf.inspect import CannotInspect, inspect
    from lln.hf.pretrained import CannotLoad, load
    from lln.report.inspect import layer_table, write

    torch.manual_seed(seed)
    try:
        model, tokenizer = load(name, device)
    except CannotLoad as error:
        raise Refused(str(error)) from None
    try:
        with bar(-(-len(texts) // batch_size)) as step:
            found = inspect(
                model, tokenizer, texts, max_length=max_length, batch_size=batch_size, progress=step
            )  # fmt: skip
    except CannotInspect as error:
        raise Refused(f"{name} ({type(model).__name__}) cannot be inspected: {error}") from None
    path = Path(name).expanduser()
    # Where a machine keeps its files is nobody's business; the last two parts of a path tell models apart.
    shown = "/".join(path.resolve().parts[-2:]) if path.is_dir() else name
    result = {
        "model": shown, "class": type(model).__name__, "texts": texts, "max_length": max_length, **found,
        "provenance": provenance(seed, torch.device(device)),
    }  # fmt: skip
    page = write(result, out)
    if as_json:
        print(json.dumps(result, indent=1, allow_nan=False))
        return
    Console().print(layer_table(result))
    print(f"The page is {page}: open it in a browser. Charts and inspect.json are beside it.")
