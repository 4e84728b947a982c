"""`lln reproduce` on the command line."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from lln.commands.common import need, need_folder, parse_device, progress_bar

EPILOG = (
    "Example: [bold]lln reproduce fig2 --quick[/bold] for a look in seconds; "
    "[bold]lln reproduce table2 --scale paper --device cuda[/bold] on a GPU."
)


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
