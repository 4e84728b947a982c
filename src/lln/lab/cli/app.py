"""The command line: one file beside this one for each command, with a function of its name.

At the top of these files stand typer and the standard library alone: `lln --help` waits for no torch.
"""

import os
import sys
from typing import Annotated

import typer

from lln.lab.cli import bench, calibrate, compare, convert, info, inspect, plan, report, reproduce, shared, train

app = typer.Typer(
    cls=shared.Group,
    help="Linear Log-Normal attention, whose cost grows linearly with the length of a sequence. `lln COMMAND --help` "
    "explains a command.",
    epilog=shared.show_examples(
        [
            "lln report # a page about LLN attention, measured on this machine",
            "lln convert MODEL OUT --calibration notes.txt # gives a pretrained model LLN attention",
            "lln inspect MODEL # how each head of a pretrained model attends",
            "lln train mlm # a tiny model, trained from scratch",
        ]
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for module in (
    report,
    inspect,
    compare,
    convert,
    train,
    plan,
    reproduce,
    bench,
    calibrate,
    info,
):  # as --help lists them
    shared.add_command(app, getattr(module, module.__name__.rpartition(".")[2]))


def print_version(wanted: bool) -> None:
    if wanted:
        import lln

        typer.echo(f"lln-attention {lln.__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error comes from; may stand anywhere. Also LLN_DEBUG=1.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Exit codes: 0 it worked, 1 it failed, 2 it was asked for in a wrong way, 130 it was interrupted."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("LLN_DEBUG", "0") not in ("", "0")
    try:
        app(arguments)
    except KeyboardInterrupt:  # before typer, which ends with the same code, has begun or after it has ended
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or "no more is known"
        typer.echo(f"lln: {type(error).__name__}: {text} (--debug shows where)", err=True)
        sys.exit(1)
