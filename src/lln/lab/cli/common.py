"""What commands share: extras, folders, progress, options read from text."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import typer

from lln.lab.core.errors import first_line

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
