"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.util
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.commands import compare as compare_command
from lln.commands import train as train_command

app = typer.Typer(
    help="Linear-time attention that behaves like softmax attention.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LENGTHS, QUICK_LENGTHS = "256,512,1024,2048,4096,8192", "256,512,1024"

# What each extra of the package brings, by the module that shows it is there.
EXTRAS = {
    "report": ("altair", "vl_convert", "jinja2"),
    "instruments": ("pandas",),
    "hf": ("transformers", "safetensors"),
    "train": ("transformers", "accelerate", "tokenizers", "pyarrow", "PIL", "sklearn"),
}


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


def need_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; name a folder.", param_hint="--out")


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
    need_folder(out)

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


class Dtype(enum.StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Causal(enum.StrEnum):
    no = "no"
    yes = "yes"
    both = "both"


@app.command(
    epilog="Example: [bold]lln bench --quick[/bold] for a look in a minute; "
    "[bold]lln bench --lengths 1024,8192 --tokens 65536 --only flash,LLN,LLN+Diag[/bold] for batches of equal size; "
    "[bold]lln bench --shapes 16x12x4096x64,1x12x16384x64 --causal no --json[/bold] for shapes of your own; "
    "[bold]lln bench --peers fla[/bold] for flash-linear-attention, which tunes itself for minutes; "
    "[bold]lln bench --render bench/bench.json --out page[/bold] to draw what another machine measured."
)
def bench(
    lengths: Annotated[
        str | None,
        typer.Option(help="Lengths, with commas between.", show_default="512 to 4096, on cuda to 65536"),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads.", show_default="12")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Head dim.", show_default="64")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size.", show_default="1")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a batch: the batch size is TOKENS // length, at least 1.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="Shapes BxHxNxD with commas between, instead of a grid of lengths.")
    ] = None,
    causal: Annotated[
        Causal | None,
        typer.Option(help="Causal attention, bidirectional (no), or both.", show_default="both, with --peers yes"),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the inputs.", show_default="bfloat16 on cuda, float32 on cpu")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Attentions by name, as in the table, with commas between.", show_default="all")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="fla: flash-linear-attention's causal attentions, beside a few of the others.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Measurements behind each median.", show_default="5, on cuda 50")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths and fewer repeats.")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, ...", callback=parse_device, show_default="cuda if there is one"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for bench.json, bench.md and the charts (SVG).")] = Path("bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of the table.")] = False,
    render: Annotated[
        Path | None, typer.Option(help="Measure nothing: table, Markdown and charts of this stored bench.json.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Find the fastest settings of the kernels instead.")] = False,
) -> None:
    """Check LLN attention, then time it beside torch's attentions: forward, backward, memory, share of the floor."""
    need_folder(out)

    import torch

    from lln.bench.compare import CheckFailed, measure
    from lln.bench.output import publish, read
    from lln.bench.plan import make_plan
    from lln.files import write_json

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if tune:
        from lln.bench.tune import tune as find_settings

        try:
            with progress_bar(None) as step:
                path = find_settings(device=where, out=out, progress=step, dim=dim, seed=seed)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        typer.echo(f"The settings are in {path}; they take effect as src/lln/data/launch.json.")
        return
    if render is not None:
        result = read(render)
    else:
        plan = make_plan(
            lengths=None if lengths is None else parse_lengths(lengths), heads=heads, dim=dim, batch=batch,
            tokens=tokens, shapes=shapes, causal=causal, dtype=dtype, only=only, peers=peers, repeats=repeats,
            quick=quick, device=where, seed=seed,
        )  # fmt: skip
        try:
            with progress_bar(plan.steps()) as step:
                result = measure(plan, store=lambda found: write_json(out / "bench.json", found), progress=step)
        except CheckFailed as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
    publish(result, out, as_json=as_json, charts=not missing("report"))


app.command(epilog=compare_command.EPILOG)(compare_command.compare)
app.command(epilog=train_command.EPILOG)(train_command.train)


class FigureName(enum.StrEnum):
    fig2 = "fig2"
    fig5a = "fig5a"
    fig5b = "fig5b"
    fig6a = "fig6a"
    fig6b = "fig6b"
    fig7 = "fig7"
    table2 = "table2"
    table4 = "table4"


class Scale(enum.StrEnum):
    tiny = "tiny"
    mini = "mini"
    paper = "paper"


@app.command(
    epilog="Example: [bold]lln reproduce fig2 --quick[/bold] for a look in seconds; "
    "[bold]lln reproduce table2 --scale paper --device cuda[/bold] on a GPU."
)
def reproduce(
    figure: Annotated[FigureName, typer.Argument(help="A figure or table of the paper.")],
    out: Annotated[Path, typer.Option(help="Folder for the data (JSON) and the charts (SVG).")] = Path("reproduced"),
    quick: Annotated[bool, typer.Option("--quick", help="Shorter sequences and fewer draws.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Sets of draws.", show_default="4, quick 2")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.")] = 0,
    scale: Annotated[Scale, typer.Option(help="Of a table: sizes of models and sequences.")] = Scale.tiny,
    device: Annotated[str, typer.Option(help="Of a table: cpu, cuda, ...", callback=parse_device)] = "cpu",
) -> None:
    """Make a figure or table of the paper from scratch and say whether its claims hold, in numbers."""
    need_folder(out)
    if figure.value.startswith("table"):
        reproduce_costs(figure.value, scale.value, device, out, repeats=1 if quick else 3, seed=seed)
        return
    need("report")

    import dataclasses

    from lln.reproduce.figure import QUICK, Plan, run, write
    from lln.reproduce.figures import FIGURES

    chosen, plan = FIGURES[figure.value], QUICK if quick else Plan()
    plan = dataclasses.replace(plan, seeds=seeds or plan.seeds)
    with progress_bar(chosen.steps(plan)) as step:
        result = run(chosen, plan, seed, step)
    paths = write(chosen, plan, result, out)
    typer.echo(f"{chosen.name}: {chosen.title}")
    for verdict in result["verdicts"]:
        typer.echo(f"\n{'holds' if verdict['holds'] else 'DOES NOT HOLD'}: {verdict['claim']}\n  {verdict['sentence']}")
    typer.echo(f"\nWritten: {', '.join(map(str, paths))}.")


def reproduce_costs(name: str, scale: str, device: str, out: Path, *, repeats: int, seed: int) -> None:
    need("train")

    import torch

    from lln.files import write_json
    from lln.reproduce.costs import TABLES, markdown, measure, write

    table = TABLES[name]
    with progress_bar(len(table.cells(scale))) as step:
        result = measure(
            table, scale, device=torch.device(device), repeats=repeats, seed=seed, progress=step,
            store=lambda found: write_json(out / f"{name}.json", found),
        )  # fmt: skip
    paths = write(table, result, out)
    typer.echo(markdown(table, result))
    typer.echo(f"Written: {', '.join(map(str, paths))}.", err=True)


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
    for extra in EXTRAS:
        names = missing(extra)
        remedy = f"missing {', '.join(names)}: pip install 'lln-attention[{extra}]'"
        table.add_row(f"extra {extra}", escape(remedy) if names else "installed")
    Console().print(table)
