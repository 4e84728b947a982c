"""What commands share: extras, folders, options and how they are read, how a result is shown and a failure told."""

import contextlib
import copy
import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from lln.files import write_text
from lln.lab.core.errors import Refused, WrongOption, first_line
from lln.lab.core.tables import print_wide

N = TypeVar("N", int, float)
# What each extra of the package brings, by the modules that show it is there.
CLI = ("typer", "rich", "jinja2")
HF = ("transformers", "safetensors", "filelock")
EXTRAS = {
    "cli": CLI,
    "report": (*CLI, "altair", "vl_convert"),
    "instruments": ("pandas",),
    "hf": HF,
    "train": (*CLI, *HF, "huggingface_hub", "tokenizers", "pyarrow", "PIL", "sklearn", "scipy", "yaml"),
}


class Command(TyperCommand):
    """Whose flags stand in --help without `<bool>`: they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found = super().get_params(ctx)
        for option in found:
            if getattr(option, "is_flag", False):
                option.display_type_rich = lambda ctx: None  # type: ignore[attr-defined]
        return found


def add_command(app: typer.Typer, command: Callable[..., None]) -> None:
    """Adds a function as a command. Its docstring is what --help says: first what the command does; under `Args:` each
    option, with [default: ...] where words tell it; last the epilog, which begins with `Example:`."""
    text, _, example = inspect.cleandoc(command.__doc__ or "").partition("\n\nExample: ")
    about, _, options = text.partition("\n\nArgs:")
    kinds = get_type_hints(command, include_extras=True)
    for line in re.split(r"\n    (?=\w)", options)[1:]:
        name, _, said = " ".join(line.split()).partition(": ")
        said, _, default = said.removesuffix("]").partition(" [default: ")
        kind, *given = get_args(kinds[name]) if get_origin(kinds[name]) is Annotated else [kinds[name]]
        flag = [f"--{name.replace('_', '-')}"] if kinds[name] is bool else []  # without a --no-... beside it
        option = copy.copy(given[0]) if given else typer.Option(*flag)
        option.help, option.show_default = said, default or option.show_default
        kinds[name] = Annotated[kind, option]
    command.__annotations__ = kinds
    explained = explain(command.__name__)(command)
    examples = re.split(r"(?<=[;.]) (?=\[bold\]|\w)", " ".join(example.split()))  # one a line
    app.command(cls=Command, help=about, epilog="\n\n".join(["Examples:", *(part.rstrip(";.") for part in examples)]))(
        explained
    )


def find_missing(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def need(extra: str) -> None:
    if names := find_missing(extra):
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


def parse_numbers(text: str, option: str, kind: Callable[[str], N], said: str) -> list[N]:
    """Positive numbers of one kind with commas between, in order; each once."""
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not 0 < numbers[0] <= numbers[-1] < math.inf:
        raise typer.BadParameter(f"must be positive {said}; got {text!r}", param_hint=option)
    return numbers


def parse_lengths(text: str, option: str = "--lengths") -> list[int]:
    return parse_numbers(text, option, int, "whole numbers with commas between, like 512,2048")


def parse_device(text: str | None) -> str | None:
    import torch

    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise typer.BadParameter(f"torch cannot use {text!r} here: {reason}") from None
    return text


def choose_device(text: str) -> str | None:
    """The one that was asked for, or the GPU where there is one."""
    import torch

    return parse_device(text or ("cuda" if torch.cuda.is_available() else "cpu"))


# Kinds of options, and options that mean the same in several commands.
Count = Annotated[int, typer.Option(min=1)]
CountOrNone = Annotated[int | None, typer.Option(min=1)]
Seed = Annotated[int, typer.Option(min=0)]
Device = Annotated[  # one rule for all commands
    str,
    typer.Option(help="cpu, cuda, cuda:1, ...", show_default="the GPU where there is one", callback=choose_device),
]
DataRoot = Annotated[Path | None, typer.Option(help="Folder with data in the Hub's layout.", envvar="LLN_DATA_ROOT")]
ModelName = Annotated[str, typer.Argument(help="A folder that a model was saved to, or a Hub id.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
JsonForTable = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of the table.")]


def fail(text: str, code: int = 2) -> NoReturn:
    """Ends the command with one sentence. Exit codes: 1 it failed, 2 it was asked for in a wrong way, 130 it was
    interrupted."""
    typer.echo(text, err=True)
    raise typer.Exit(code) from None


@contextlib.contextmanager
def explain(command: str) -> Iterator[None]:
    """Says in one sentence what is refused, and of an option as typer does."""
    try:
        yield
    except WrongOption as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None
    except Refused as error:
        fail(f"lln {command}: {error}")


def publish(
    result: dict[str, Any], out: Path, name: str, markdown: str, shown: Sequence[Any], *, as_json: bool
) -> None:
    """Writes OUT/NAME.md and, where altair is there, the charts, and prints what is shown of the result or, as JSON,
    all of it. NAME is bench, model or compare."""
    write_text(out / f"{name}.md", markdown)
    said = f"Table and result are in {out}; charts need: pip install 'lln-attention[report]'"
    if not find_missing("report"):
        from lln.lab.bench import bench_charts

        drawn = getattr(bench_charts, f"draw_{name}")(result)
        for chart, text in drawn.items():
            write_text(out / f"{chart}.svg", text)
        said = f"Table, result and {len(drawn)} charts are in {out}."
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        print_wide(*shown)
    typer.echo(said, err=True)


def parse_pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise typer.BadParameter(f"must be NAME=VALUE, like optimisation.rate=1e-3; got {text!r}.", param_hint="--set")
    return name, value
