"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Linear-time attention that behaves like softmax attention.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LENGTHS, QUICK_LENGTHS = "256,512,1024,2048,4096,8192", "256,512,1024"

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


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with a few words as each of the steps begins."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("start", total=steps)
        yield lambda text: progress.update(task, advance=1, description=text)


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
        str | None,
        typer.Option(help="Sequence lengths to measure, with commas between.", show_default=LENGTHS),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths and fewer repeats: a look in seconds.")] = False,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Calls of each; the page shows median and quartiles.", show_default="5")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, ...", callback=parse_device)] = "cpu",
) -> None:
    """Measure softmax attention and LLN on this machine and write a page about it."""
    need("report")
    chosen = parse_lengths(lengths or (QUICK_LENGTHS if quick else LENGTHS))
    repeats = repeats or (2 if quick else 5)
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; name a folder.", param_hint="--out")

    import torch

    from lln.bench.lengths import measure
    from lln.report import lengths as time_and_memory
    from lln.report import moments
    from lln.report.page import write_page

    plan = moments.QUICK if quick else moments.Plan()
    with progress_bar(2 * len(chosen) + plan.seeds) as step:
        result = measure(chosen, repeats=repeats, seed=seed, device=torch.device(device), progress=step)
        matched = moments.measure(plan, seed=seed, progress=step)
    page = write_page(out, [time_and_memory.section(result), moments.section(matched)], result["provenance"])
    typer.echo(f"The page is {page}: open it in a browser. Charts and data are beside it.")


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
        changed["head_dims"] = tuple(parse_lengths(head_dims))
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


@app.command(epilog="Example: [bold]lln info[/bold] before you report a problem.")
def info() -> None:
    """Show versions, devices, back ends, and which extras are missing."""
    import torch
    from rich.console import Console
    from rich.markup import escape
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
        table.add_row(f"extra {extra}", escape(remedy) if names else "installed")
    Console().print(table)
