"""`lln calibrate` on the command line."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lln.lab.cli.shared import Device, Seed, need_file, parse_lengths
from lln.lab.core.limits import MOST, WIDEST
from lln.lab.core.progress import progress_bar


def calibrate(
    out: Path = Path("curves.json"),
    head_dims: str = "",
    lengths: str = "",
    seeds: Annotated[int, typer.Option(min=0, max=MOST)] = 0,
    seed: Seed = 0,
    device: Device = "",
) -> None:
    """Measure the curves of variance and entropy matching. This takes minutes on a GPU, and hours for all curves on a
    CPU.

    Args:
        out: The JSON file to write.
        head_dims: Head dimensions to measure, with commas between. [default: all]
        lengths: Numbers of keys for the entropy curves, with commas between. [default: all]
        seeds: Draws for each entropy curve. 0 takes as many as for the curves in the package.
        seed: Seed of all draws.

    Examples:
        lln calibrate --head-dims 64 --lengths 1024 --seeds 8 --out my-curves.json  # one curve
    """
    need_file(out)

    import dataclasses

    import torch

    from lln.files import write_json
    from lln.lab.calibration import CurvePlan, measure
    from lln.lab.core.provenance import provenance

    changed: dict[str, Any] = {}
    if head_dims:
        changed["head_dims"] = tuple(parse_lengths(head_dims, "--head-dims", WIDEST))
    if lengths:
        changed["lengths"] = tuple(parse_lengths(lengths))
    if seeds == 1:
        raise typer.BadParameter("a standard error needs at least 2 seeds.", param_hint="--seeds")
    if seeds:
        changed["entropy_seeds"] = seeds
    plan, where = dataclasses.replace(CurvePlan(), **changed), torch.device(device)
    with progress_bar(plan.steps()) as step:
        curves = measure(plan, seed, where, step)
    write_json(out, {"provenance": provenance(seed, where), **curves})
    typer.echo(f"The curves are in {out}.")
