"""`lln bench` on the command line."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.common import JsonForTable, explain_options, fail, need_folder, parse_device, parse_lengths, publish
from lln.lab.core.progress import progress_bar

EPILOG = (
    "Example: [bold]lln bench --quick[/bold] for a look in a minute; "
    "[bold]lln bench --lengths 1024,8192 --tokens 65536 --only flash,LLN,LLN+Diag[/bold] for batches of equal size; "
    "[bold]lln bench --shapes 16x12x4096x64,1x12x16384x64 --causal no --json[/bold] for shapes of your own; "
    "[bold]lln bench --dropout 0.1 --causal no[/bold] for what training an encoder takes; "
    "[bold]lln bench --peers fla[/bold] for flash-linear-attention, which tunes itself for minutes; "
    "[bold]lln bench --render bench/bench.json --out page[/bold] to draw what another machine measured."
)


Dtype = enum.StrEnum("Dtype", "bfloat16 float16 float32")
Causal = enum.StrEnum("Causal", "no yes both")


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
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9, help="Of attention weights, in what is timed.")] = 0.0,
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
    as_json: JsonForTable = False,
    render: Annotated[
        Path | None, typer.Option(help="Measure nothing: table, Markdown and charts of this stored bench.json.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Find the fastest settings of the kernels instead.")] = False,
) -> None:
    """Check LLN attention, then time it beside torch's attentions: forward, backward, memory, share of the floor."""
    need_folder(out)

    import torch

    from lln.files import write_json
    from lln.lab.bench.bench_tables import describe_growth, make_bench_table, read_result, write_bench
    from lln.lab.bench.calls import CheckFailed
    from lln.lab.bench.kernel_plan import make_plan
    from lln.lab.bench.kernel_times import measure

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if tune:
        from lln.lab.bench.tune import tune as find_settings

        try:
            with progress_bar(None) as step:
                path = find_settings(device=where, out=out, progress=step, dim=dim, seed=seed)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        typer.echo(f"The settings are in {path}; they take effect as src/lln/data/launch.json.")
        return
    with explain_options():
        if render is not None:
            result = read_result(render)
        else:
            plan = make_plan(
                lengths=None if lengths is None else parse_lengths(lengths), heads=heads, dim=dim, batch=batch,
                tokens=tokens, shapes=shapes, causal=causal, dtype=dtype, only=only, peers=peers, repeats=repeats,
                quick=quick, device=where, seed=seed, dropout=dropout,
            )  # fmt: skip
            try:
                with progress_bar(plan.steps()) as step:
                    result = measure(plan, store=lambda found: write_json(out / "bench.json", found), progress=step)
            except CheckFailed as error:
                fail(str(error), 1)
    shown = [make_bench_table(result), *describe_growth(result)]
    publish(result, out, "bench", write_bench(result), shown, as_json=as_json)
