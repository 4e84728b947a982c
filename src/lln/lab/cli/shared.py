"""What commands share: extras, folders, options and how they are read, how a result is shown and a failure told."""

import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from lln.files import Unreadable, write_text
from lln.lab.core.errors import Refused, WrongOption, first_line
from lln.lab.core.limits import LAST_SEED, LONGEST, MOST, STEPS
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
        return hide_kinds_of_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.message:  # pydantic's words before ours
                error.message = error.message.removeprefix("Value error, ")
            raise


class Group(TyperGroup):
    """The same of `lln` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return hide_kinds_of_flags(super().get_params(ctx))


def hide_kinds_of_flags(options: list[Any]) -> list[Any]:
    for option in options:
        if getattr(option, "is_flag", False):
            option.display_type_rich = lambda ctx: None
    return options


def add_command(app: typer.Typer, command: Callable[..., None]) -> None:
    """Adds a function as a command. Its docstring is what --help says: first what the command does; under `Args:` each
    option, with [default: ...] where words tell it; under `Examples:` commands, each with a comment, and sentences."""
    text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("\n\nExamples:\n")
    about, _, options = text.partition("\n\nArgs:")
    about = "\n\n".join(" ".join(part.split()) for part in about.split("\n\n"))
    kinds = get_type_hints(command, include_extras=True)
    for line in split_entries(options):
        name, _, said = line.partition(": ")
        said, _, default = said.removesuffix("]").partition(" [default: ")
        kind, *given = get_args(kinds[name]) if get_origin(kinds[name]) is Annotated else [kinds[name]]
        flag = [f"--{name.replace('_', '-')}"] if kinds[name] is bool else []  # without a --no-... beside it
        option = copy.copy(given[0]) if given else typer.Option(*flag)
        option.help, option.show_default = said, default or option.show_default
        if Path in (kind, *get_args(kind)) or any(Path in get_args(one) for one in get_args(kind)):
            option.parser = read_path
            if isinstance(option, typer.models.OptionInfo):
                option.metavar = "<path>"
        kinds[name] = Annotated[kind, option]
    command.__annotations__ = kinds
    app.command(
        cls=Command,
        help=about,
        short_help=about.partition(". ")[0].partition("\n")[0].rstrip("."),
        epilog=show_examples(split_entries(examples)),
    )(explain(command.__name__)(settle(command)))


def split_entries(section: str) -> list[str]:
    """Of a section of a docstring: an entry begins with four blanks, and goes on in lines with more."""
    return [" ".join(entry.split()) for entry in re.split(r"(?:^|\n)    (?=\S)", section) if entry.strip()]


def show_examples(examples: list[str]) -> str:
    """As --help shows them: one a line, commands in bold, with what they do as a comment of the shell."""
    parts = [example.partition(" # ") for example in examples]
    shown = [
        f"[bold]{command}[/bold]  # {words}" if words else example
        for example, (command, _, words) in zip(examples, parts, strict=True)
    ]
    shown = [f"[bold]{line}[/bold]" if line.startswith("lln ") else line for line in shown]
    return "\n\n".join(["Examples:", *shown])


def settle(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its options as they are meant: ~ is the home folder wherever a path is named. Numbers that are
    none, which typer lets pass through any range, and text that is none are refused."""

    @functools.wraps(command)
    def settled(**options: Any) -> None:
        for name, value in options.items():
            shown = f"--{name.replace('_', '-')}"
            if isinstance(value, float) and not math.isfinite(value):
                raise WrongOption(shown, f"must be a finite number; got {value}.")
            for one in value if isinstance(value, list) else [value]:
                check_text(shown, one)
            if isinstance(value, list):
                options[name] = [expand(shown, one) if isinstance(one, Path) else one for one in value]
            elif isinstance(value, Path):
                options[name] = expand(shown, value)
            elif name == "model" and isinstance(value, str) and value.startswith("~"):  # else as it was given
                options[name] = str(expand(shown, value))
        command(**options)

    return settled


def check_text(option: str, value: Any) -> None:
    """Refused for bytes that are no text: neither could they be told, nor a file be named so."""
    try:
        if isinstance(value, (str, Path)):
            str(value).encode()
    except UnicodeEncodeError:
        raise WrongOption(option, f"must be text in UTF-8; got {str(value)!r}.") from None


def read_path(text: str | Path) -> Path:
    """Of an option, or its default. Python takes no name at all, as a variable of the shell that is not set gives one,
    for the folder that one is in."""
    if isinstance(text, Path):
        return text
    if not text or "\0" in text:
        raise typer.BadParameter(f"must name a file or a folder; got {text!r}.")
    return Path(text)


def expand(option: str, path: Path | str) -> Path:
    """Refused for a home folder that nobody has."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise WrongOption(option, f"there is no such home folder; got {path}.") from None


def find_missing(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def need(extra: str) -> None:
    if names := find_missing(extra):
        them = "it" if len(names) == 1 else "them"
        raise typer.BadParameter(
            f"this command needs {', '.join(names)}; install {them} with: pip install 'lln-attention[{extra}]'"
        )


def need_folder(out: Path, option: str = "--out") -> None:
    """Says at once, not after minutes of work, that nothing can be written there: it is tried. Leaves nothing."""
    try:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise typer.BadParameter(f"{there} is a file; name a folder.", param_hint=option)
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"tried")
    except PermissionError:
        why = f"{there} is a folder that you may not write to; name another."
        raise typer.BadParameter(why, param_hint=option) from None
    except OSError as error:
        raise typer.BadParameter(f"{out} cannot be written: {error.strerror}.", param_hint=option) from None


def need_file(out: Path, option: str = "--out") -> None:
    """As `need_folder`, for a command that writes one file."""
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder; name a file.", param_hint=option)
    need_folder(out.parent, option)


def parse_numbers(text: str, option: str, kind: Callable[[str], N], said: str, most: float = math.inf) -> list[N]:
    """Positive numbers of one kind with commas between, in order; each once."""
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise typer.BadParameter(f"must be positive {said}; got {text!r}", param_hint=option)
    if numbers[-1] > most:
        raise typer.BadParameter(f"must be at most {most:,}; got {numbers[-1]}", param_hint=option)
    return numbers


def parse_lengths(text: str, option: str = "--lengths", most: int = LONGEST) -> list[int]:
    return parse_numbers(text, option, int, "whole numbers with commas between, like 512,2048", most)


def parse_device(text: str) -> str:
    from lln.lab.core.devices import find_device_problem

    if problem := find_device_problem(text):
        raise typer.BadParameter(problem, param_hint="--device")
    return text


def choose_device(text: str) -> str:
    """The one that was asked for, or the GPU where there is one."""
    import torch

    return parse_device(text or ("cuda" if torch.cuda.is_available() else "cpu"))


# Kinds of options, and options that mean the same in several commands.
Count = Annotated[int, typer.Option(min=1, max=MOST)]
CountOrNone = Annotated[int | None, typer.Option(min=1, max=MOST)]
Steps = Annotated[int, typer.Option(min=0, max=STEPS)]
Seed = Annotated[int, typer.Option(min=0, max=LAST_SEED)]
SeedOrNone = Annotated[int | None, typer.Option(min=0, max=LAST_SEED)]
DEVICE: dict[str, Any] = {"help": "cpu, cuda, cuda:1, ...", "show_default": "the GPU where there is one"}
Device = Annotated[str, typer.Option(**DEVICE, callback=choose_device)]  # one rule for all commands
# Of a command that has other things to refuse, and then calls `choose_device`: to choose takes seconds, for torch.
DeviceChosenLater = Annotated[str, typer.Option(**DEVICE)]
HUB_FOLDER = "Folder with data sets, laid out as on the Hugging Face Hub."
DataRoot = Annotated[Path | None, typer.Option(help=HUB_FOLDER, envvar="LLN_DATA_ROOT")]
ModelName = Annotated[
    str, typer.Argument(help="A folder that a model was saved to, or a Hub id.", show_default=False, metavar="MODEL")
]
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
    except KeyboardInterrupt:  # of commands that have more to tell about it, only before they have begun
        fail(f"lln {command}: stopped.", 130)
    except WrongOption as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from None
    except (Refused, Unreadable) as error:
        fail(f"lln {command}: {error}")
    except OSError as error:
        if error.errno is None or error.strerror is None:  # of a library, about something else than a file
            raise
        fail(f"lln {command}: {f'{error.filename}: ' if error.filename else ''}{error.strerror}.", 1)
    except (MemoryError, RuntimeError, TypeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(f"lln {command}: there is not enough memory for that ({first_line(error)}).", 1)


def is_out_of_memory(error: BaseException) -> bool:
    """torch has an exception of its own for a GPU alone; of sizes that no machine could have it says that they
    overflow."""
    said = str(error)
    words = ("allocate memory", "out of memory", "Overflow when unpacking", "calculation overflowed")
    return isinstance(error, MemoryError) or any(word in said for word in words)


def publish(
    result: dict[str, Any], out: Path, name: str, markdown: str, shown: Sequence[Any], *, as_json: bool
) -> None:
    """Writes OUT/NAME.md and, where altair is there, the charts, and prints what is shown of the result or, as JSON,
    all of it. NAME is bench, model or compare."""
    drawn: dict[str, str] = {}
    said = f"Table and result are in {out}; charts need: pip install 'lln-attention[report]'"
    if not find_missing("report"):
        from lln.lab.bench import bench_charts

        drawn = getattr(bench_charts, f"draw_{name}")(result)
        said = f"Table, result and {len(drawn)} charts are in {out}."
    write_text(out / f"{name}.md", markdown)
    for chart, text in drawn.items():
        write_text(out / f"{chart}.svg", text)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        print_wide(*shown)
    typer.echo(said, err=True)


@contextlib.contextmanager
def trust(option: str, file: Path | None) -> Iterator[None]:
    """While what a stored result holds is taken as it is. Where it holds something else than we would have written, as
    whoever edits one may find, that is said of the file. file: None where nothing is taken on trust."""
    try:
        yield
    except (Refused, Unreadable, typer.BadParameter, typer.Exit, OSError):
        raise
    except Exception as error:  # whichever part of it is missed first
        if file is None:
            raise
        why = f"{type(error).__name__}: {first_line(error)}"
        raise WrongOption(option, f"{file} does not hold a whole result, as it was written here ({why}).") from error


def parse_changes(texts: Sequence[str] | None) -> dict[str, str]:
    """Of --set, by names. Of what is given twice the last counts, and the other is said to count for nothing."""
    found: dict[str, str] = {}
    for text in texts or []:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise WrongOption("--set", f"must be NAME=VALUE, like optimisation.rate=1e-3; got {text!r}.")
        if name in found:
            typer.echo(f"--set {name}={found[name]} gives way to --set {name}={value}, which comes later.", err=True)
        found[name] = value
    return found
