"""What commands share: extras, folders, progress, options read from text."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

# What each extra of the package brings, by the module that shows it is there.
EXTRAS = {
    "report": ("altair", "vl_convert", "jinja2"),
    "instruments": ("pandas",),
    "hf": ("transformers", "safetensors", "filelock"),
    "train": ("transformers", "accelerate", "tokenizers", "pyarrow", "PIL", "sklearn"),
}


def missing(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def need(extra: str) -> None:
    if names := missing(extra):
        raise typer.BadParameter(
            f"this command needs {', '.join(names)}; install them with: pip install 'lln-attention[{extra}]'"
        )


def need_folder(out: Path) -> None:
    """Says at once, not after minutes of work, that nothing can be written there. Makes nothing."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file; name a folder.", param_hint="--out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{there} is a folder that you may not write to; name another.", param_hint="--out")


@contextlib.contextmanager
def progress_bar(steps: int | None, *, transient: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a few words as each of the steps begins. None: nobody knows how many. The bar is
    on stderr, since stdout is for results. `transient`: nothing is left of it in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=transient) as progress:
        task = progress.add_task("start", total=steps)
        yield lambda text: progress.update(task, advance=1, description=text)


def parse_lengths(text: str, option: str = "--lengths") -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 1:
        raise typer.BadParameter(
            f"must be positive whole numbers with commas between, like 512,2048; got {text!r}", param_hint=option
        )
    return lengths


def parse_device(text: str | None) -> str | None:
    import torch

    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise typer.BadParameter(f"torch cannot use {text!r} here: {reason}") from None
    return text
