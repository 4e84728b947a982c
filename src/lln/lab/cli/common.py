"""What commands share: extras, folders, progress, options read from text."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from lln.files import write_text
from lln.lab.core.errors import WrongOption, first_line

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
        reason = first_line(error)
        raise typer.BadParameter(f"torch cannot use {text!r} here: {reason}") from None
    return text


@contextlib.contextmanager
def explain_options() -> Iterator[None]:
    """Says what is wrong with an option as typer does."""
    try:
        yield
    except WrongOption as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None


def publish(
    result: dict[str, Any], out: Path, name: str, *, markdown: str, charts: Callable[[], dict[str, str]],
    show: Callable[[], None], as_json: bool,
) -> None:  # fmt: skip
    """Writes OUT/NAME.md and, where altair is there to draw them, the charts; prints the result, or shows it."""
    write_text(out / f"{name}.md", markdown)
    said = f"Table and result are in {out}; charts need: pip install 'lln-attention[report]'"
    if not missing("report"):
        drawn = charts()
        for chart, text in drawn.items():
            write_text(out / f"{chart}.svg", text)
        said = f"Table, result and {len(drawn)} charts are in {out}."
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        show()
    typer.echo(said, err=True)
