"""`lln report` on the command line."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.shared import CountOrNone, Device, Seed, fail, find_missing, need, need_folder, parse_lengths
from lln.lab.core.progress import progress_bar


def report(
    out: Path = Path("report"),
    sections: str | None = None,
    quick: bool = False,
    again: bool = False,
    lengths: str | None = None,
    repeats: CountOrNone = None,
    seed: Seed = 0,
    device: Device = "",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure softmax attention and LLN attention on this machine, and write a page about it.

    Args:
        out: Folder for the page, its charts (SVG) and data (JSON, CSV).
        sections: Parts of the page, with commas between: distribution, explorer, moments, training, lengths, kernels
            (on a GPU). [default: all]
        quick: Measure less of everything, in about a minute. The page says that it is provisional.
        again: Measure again what the folder already holds, instead of keeping it.
        lengths: Sequence lengths to time, with commas between. [default: 256 to 8192, doubling; fewer with --quick]
        repeats: How often each call is timed. The page shows medians and quartiles. [default: 5; 2 with --quick]
        seed: Seed of all random numbers.
        as_json: Print the results as JSON.

    Examples:
        lln report  # then open report/index.html
        lln report --quick --out look  # a first look
        lln report --sections explorer,moments  # two parts of the page
        A report that was stopped goes on when the same command is given again.
    """
    need("report")
    need_folder(out)

    import lln
    from lln.lab.page.build import LENGTHS, PARTS, QUICK_LENGTHS, Options, make, make_part, read_stored, write

    names = list(PARTS) if sections is None else [name.strip() for name in sections.split(",")]
    for name in names:
        if name not in PARTS:
            raise typer.BadParameter(f"must be of {', '.join(PARTS)}; got {name!r}", param_hint="--sections")
    chosen = tuple(parse_lengths(lengths)) if lengths else QUICK_LENGTHS if quick else LENGTHS
    options = Options(out, quick, seed, device, chosen, repeats or (2 if quick else 5))
    absent, left_out = {}, []  # parts that cannot be measured here, and what they need
    if missing := find_missing("train"):
        absent["training"] = f"needs {', '.join(missing)}: pip install 'lln-attention[train]'"
    if not device.startswith("cuda"):
        absent["kernels"] = "needs a GPU: --device cuda"
    for name, why in absent.items():
        if sections is not None and name in names:
            raise typer.BadParameter(f"{name}: {why}", param_hint="--sections")
        if name in names:
            names.remove(name)
            left_out.append(f"Left out: {name}. It {why}")
    parts = [make_part(name, options) for name in PARTS if name in names]
    kept = [one.name for one in parts if not again and read_stored(options, one) is not None]
    if kept:
        typer.echo(f"Kept from before: {', '.join(kept)} (--again measures anew).", err=True)
    what = ", ".join(one.name for one in parts)
    typer.echo(f"lln-attention {lln.__version__} measures on {device} and writes a page: {what}.", err=True)
    steps = sum(one.steps for one in parts if one.name not in kept)
    try:
        with progress_bar(steps, transient=steps == 0) as step:
            results = make(options, parts, step, again=again)
    except KeyboardInterrupt:
        fail(f"Stopped. What is finished is kept in {out}; the same command goes on from there.", 130)
    page = write(options, parts, results, left_out)
    for sentence in left_out:
        typer.echo(sentence, err=True)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    else:
        typer.echo(f"The page is {page}: open it in a browser. Charts and data are beside it.")
