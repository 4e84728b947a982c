"""docs/cli.md, from what the command line says about itself.

It is read from the functions behind the commands, whose annotations are the same with every version of typer.
"""

from __future__ import annotations

import enum
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import typer
from rich.text import Text
from typer.models import ArgumentInfo

from lln.lab.cli.app import app
from lln.lab.core.tables import markdown_table

HEAD = """# Command line

`lln COMMAND --help` prints what is on this page, and `lln --install-completion` teaches the shell to complete commands
and options. Results go to stdout, progress and errors to stderr. The exit code is 0 if the command worked, 1 if it
failed, 2 if it was asked for in a wrong way, and 130 if it was interrupted.

Options that several commands have mean the same in all of them:

| option | what it means |
|---|---|
| `--attentions`, `--attention` | names of [mechanisms](mechanisms.md), with commas between, or one of them |
| `--scale` | how large models and runs are: tiny, mini or paper |
| `--device` | cpu, cuda or cuda:1; the GPU where there is one |
| `--out` | the folder for results |
| `--json` | print the result as JSON |

"""

FOOT = "\n*This page is made by `make pages` from the help texts; a test compares.*\n"


def strip_markup(text: str) -> str:
    """Help text without rich's markup; what it shows in bold, commands, as code."""
    coded = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", text.strip(), flags=re.DOTALL)
    return Text.from_markup(coded).plain


def paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in strip_markup(text).split("\n\n"))


def names(parameter: inspect.Parameter, info: Any) -> str:
    if isinstance(info, ArgumentInfo):
        return f"`{info.metavar or parameter.name.upper()}`"
    # Inside Annotated typer takes a first name for a default until it makes the command.
    texts = [info.default, *(info.param_decls or ())]
    given = [text for text in texts if isinstance(text, str) and text.startswith("-")]
    return ", ".join(f"`{name}`" for name in given or [f"--{parameter.name.replace('_', '-')}"])


def value(parameter: inspect.Parameter, kind: Any, info: Any) -> str:
    """What may be given, and what is taken where nothing is."""
    words = []
    for part in (kind, *typing.get_args(kind)):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            words.append(f"One of {', '.join(f'`{member.value}`' for member in part)}.")
    default = parameter.default
    if isinstance(info.show_default, str):
        words.append(f"Default: {info.show_default}.")
    elif default is inspect.Parameter.empty:
        words.append("Required.")
    elif default is not None and default is not False and default != "":
        words.append(f"Default: `{default.value if isinstance(default, enum.Enum) else default}`.")
    if info.envvar:
        words.append(f"Or the environment variable `{info.envvar}`.")
    return " ".join(words)


def table(function: Callable[..., Any]) -> list[str]:
    rows = []
    hints = typing.get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        kind, *extras = typing.get_args(hints[parameter.name]) or (hints[parameter.name],)
        info = next((extra for extra in extras if hasattr(extra, "param_decls")), None)
        if info is None or info.hidden:
            continue
        told = " ".join(filter(None, (strip_markup(" ".join((info.help or "").split())), value(parameter, kind, info))))
        rows.append((names(parameter, info), told))
    return [*markdown_table(["option", "what it means"], rows, "l"), ""] if rows else []


def sections(group: typer.Typer, path: str) -> list[str]:
    lines = []
    for command in group.registered_commands:
        function = command.callback
        assert function is not None
        if command.hidden:
            continue
        name = command.name or function.__name__.replace("_", "-")
        lines += [f"## {path} {name}", "", paragraphs(command.help or inspect.getdoc(function) or ""), ""]
        lines += table(function)
        if command.epilog:
            title, *examples = paragraphs(command.epilog).split("\n\n")
            lines += [title, "", *(f"- {example}".replace("` # ", "`: ") for example in examples), ""]
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        lines += sections(inner.typer_instance, f"{path} {inner.name}")
    return lines


def markdown() -> str:
    lines = ["## lln", ""]
    if app.registered_callback is not None and app.registered_callback.callback is not None:
        lines += table(app.registered_callback.callback)
    return HEAD + "\n".join(lines + sections(app, "lln")).rstrip() + "\n" + FOOT
