"""The command line: `lln report`, `lln info`."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Linear-time attention that behaves like softmax attention, and the instruments that prove it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What each extra of the package brings, by the module that shows it is there.
EXTRAS = {"report": ("altair", "vl_convert", "jinja2")}


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


def missing(extra: str) -> list[str]:
    return [module for module in EXTRAS[extra] if importlib.util.find_spec(module) is None]


def need(extra: str) -> None:
    if names := missing(extra):
        raise typer.BadParameter(
            f"this command needs {', '.join(names)}; install them with: pip install 'lln-attention[{extra}]'"
        )


def parse_lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or lengths[0] < 1:
        raise typer.BadParameter(f"must be positive whole numbers with commas between, like 512,2048; got {text!r}")
    return lengths


def parse_device(text: str) -> str:
    import torch

    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise typer.BadParameter(f"torch cannot use {text!r} here: {reason}") from None
    return text


@app.command(epilog="Example: [bold]lln report --quick --out page[/bold], then open page/index.html.")
def report(
    out: Annotated[Path, typer.Option(help="Folder for the page, its charts (SVG) and data (JSON).")] = Path("report"),
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to measure, with commas between.")
    ] = "256,512,1024,2048,4096,8192",
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths and fewer repeats: a look in seconds.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Calls of each; the page shows median and quartiles.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, ...", callback=parse_device)] = "cpu",
) -> None:
    """Measure softmax attention and LLN on this machine and write a page about it."""
    need("report")
    chosen = [256, 512, 1024] if quick else parse_lengths(lengths)
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; name a folder.", param_hint="--out")

    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from lln.bench.lengths import measure
    from lln.report.lengths import section
    from lln.report.page import write_page

    console = Console()
    columns = TextColumn("{task.description:24}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("start", total=2 * len(chosen) + 1)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)

        where = torch.device(device)
        result = measure(chosen, repeats=2 if quick else repeats, seed=seed, device=where, progress=step)
        progress.update(task, completed=2 * len(chosen) + 1, description="measured")
    page = write_page(out, [section(result)], result["provenance"])
    console.print(
        f"The page is [bold]{page}[/bold]: open it in a browser. Charts and data are beside it.", soft_wrap=True
    )


@app.command(epilog="Example: [bold]lln info[/bold] before you report a problem.")
def info() -> None:
    """Show versions, devices, back ends, and which extras are missing."""
    import torch
    from rich.console import Console
    from rich.table import Table

    import lln

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
    table.add_row("back ends", "eager")
    for extra in EXTRAS:
        names = missing(extra)
        remedy = f"missing {', '.join(names)}: pip install 'lln-attention[{extra}]'"
        table.add_row(f"extra {extra}", remedy if names else "installed")
    Console().print(table)
