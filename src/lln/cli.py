"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.commands import bench as bench_command
from lln.commands import common
from lln.commands import compare as compare_command
from lln.commands import report as report_command
from lln.commands import reproduce as reproduce_command
from lln.commands import train as train_command
from lln.commands.common import missing, need, need_folder, parse_device, parse_lengths, progress_bar

app = typer.Typer(
    help="Linear-time attention that behaves like softmax attention.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    app()


def version(wanted: bool) -> None:
    if wanted:
        import lln

        typer.echo(f"lln-attention {lln.__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=version, is_eager=True)
    ] = False,
) -> None:
    pass


app.command(epilog=report_command.EPILOG)(report_command.report)


@app.command(epilog="Example: [bold]lln calibrate --head-dims 64 --lengths 1024 --seeds 8 --out my-curves.json[/bold]")
def calibrate(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("curves.json"),
    head_dims: Annotated[str, typer.Option(help="Head dims to measure, with commas between. Default: all.")] = "",
    lengths: Annotated[str, typer.Option(help="Numbers of keys for the entropy curves. Default: all.")] = "",
    seeds: Annotated[int, typer.Option(min=0, help="Draws for each entropy curve; 0: as shipped.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.")] = 0,
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, ...", callback=parse_device)] = "cpu",
) -> None:
    """Measure the curves of variance and entropy matching (minutes on a GPU, hours for all of them on a CPU)."""
    import dataclasses

    import torch

    from lln.bench.measure import provenance
    from lln.calibrate import Plan, measure
    from lln.files import write_json

    changed: dict[str, Any] = {}
    if head_dims:
        changed["head_dims"] = tuple(parse_lengths(head_dims, "--head-dims"))
    if lengths:
        changed["lengths"] = tuple(parse_lengths(lengths))
    if seeds == 1:
        raise typer.BadParameter("a standard error needs at least 2 seeds.", param_hint="--seeds")
    if seeds:
        changed["entropy_seeds"] = seeds
    plan, where = dataclasses.replace(Plan(), **changed), torch.device(device)
    with progress_bar(plan.steps()) as step:
        curves = measure(plan, seed, where, step)
    write_json(out, {"provenance": provenance(seed, where), **curves})
    typer.echo(f"The curves are in {out}.")


app.command(epilog=bench_command.EPILOG)(bench_command.bench)
app.command(epilog=compare_command.EPILOG)(compare_command.compare)
app.command(epilog=train_command.EPILOG)(train_command.train)


app.command(epilog=reproduce_command.EPILOG)(reproduce_command.reproduce)


@app.command(
    epilog="Example: [bold]lln inspect sentence-transformers/all-MiniLM-L6-v2[/bold], then open inspected/index.html; "
    "[bold]lln inspect ./my-model --text notes.txt --max-length 256[/bold] for a saved folder and your own lines; "
    '[bold]lln inspect gpt2 --texts "One sentence." --texts "Another." --json[/bold].'
)
def inspect(
    model: Annotated[str, typer.Argument(help="A folder that a model was saved to, or a Hub id.", show_default=False)],
    text: Annotated[Path | None, typer.Option(help="A file with a text in each line; - reads stdin.")] = None,
    texts: Annotated[list[str] | None, typer.Option(help="A text; may be given several times.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, its charts (SVG) and data (JSON).")] = Path(
        "inspected"
    ),
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a text at most; the rest is cut off.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 8,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...", callback=parse_device)] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Seed, for models that draw random numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of the table.")] = False,
) -> None:
    """See how each head of a pretrained model attends, and what LLN would give on the same queries and keys."""
    need("report")
    need("hf")
    need_folder(out)

    from lln.commands.inspect import Refused, read_texts, run

    try:
        run(
            model, read_texts(text, texts or []), out=out, max_length=max_length, batch_size=batch_size, device=device,
            seed=seed, as_json=as_json, bar=functools.partial(progress_bar, transient=True),
        )  # fmt: skip
    except Refused as error:
        typer.echo(f"lln inspect: {error}", err=True)
        raise typer.Exit(2) from None


@app.command(epilog="Example: [bold]lln info[/bold] before you report a problem.")
def info() -> None:
    """Show versions, devices, back ends, and which extras are missing."""
    import torch
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    import lln
    from lln.kernels.gpu.support import OLDEST_TRITON, TRITON

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    table = Table(show_header=False, box=None)
    table.add_row("lln-attention", lln.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("torch", str(torch.__version__))
    table.add_row("devices", ", ".join(devices))
    triton = ".".join(map(str, TRITON)) if TRITON else "not installed"
    kernels = TRITON is not None and TRITON >= OLDEST_TRITON and torch.cuda.is_available()
    table.add_row("triton", triton)
    table.add_row("back ends", "eager, triton" if kernels else "eager (triton needs a CUDA device and Triton 3.6)")
    for extra in common.EXTRAS:
        names = missing(extra)
        remedy = f"missing {', '.join(names)}: pip install 'lln-attention[{extra}]'"
        table.add_row(f"extra {extra}", escape(remedy) if names else "installed")
    Console().print(table)
