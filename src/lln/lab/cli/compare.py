"""`lln compare` on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli import shared
from lln.lab.core.progress import progress_bar


def compare(
    lengths: str = "512,2048",
    only: Annotated[str | None, typer.Option("--attentions", "--only")] = None,
    everything: Annotated[bool, typer.Option("--all")] = False,
    plugin: Annotated[list[str] | None, typer.Option()] = None,
    temperatures: str = "0.5,1,2",
    model: str | None = None,
    batch: shared.Count = 1,
    heads: shared.Count = 4,
    dim: shared.Count = 64,
    causal: bool = False,
    repeats: shared.Count = 3,
    device: shared.Device = "",
    seed: shared.Seed = 0,
    out: Path = Path("compare"),
    as_json: shared.JsonForTable = False,
) -> None:
    """Compare attention mechanisms on the same inputs: time, memory, entropy, spectral gap, and overlap with softmax.

    Entropy says how concentrated an attention is. The spectral gap is 1 where all tokens attend alike, and 0 where a
    part of the sequence never mixes with the rest. Overlap is the share of attention that goes where softmax attention
    goes.

    Args:
        lengths: Sequence lengths, with commas between.
        only: Names of mechanisms, with commas between. [default: softmax, lln, lln_diag, elu, performer,
            cosformer, nystromformer, linformer]
        everything: Compare every mechanism that this package has.
        plugin: Compare your own attention too, given as file.py:function. May be given several times.
        temperatures: Temperatures at which entropy, gap and overlap are measured, with commas between.
        model: A folder or a Hub id. Entropy, gap and overlap are then measured on the queries and keys of this model.
        batch: Number of sequences in a batch.
        heads: Number of heads.
        dim: Number of channels of a head.
        causal: Compare causal attention. Mechanisms that have no causal form are marked "no".
        repeats: How often each call is timed.
        seed: Seed of the inputs.
        out: Folder for compare.json, compare.md and the charts (SVG).

    Examples:
        lln compare  # a few mechanisms
        lln compare --all --lengths 512,2048  # every mechanism
        lln compare --attentions softmax,lln_diag,elu --model ./my-model  # on the queries and keys of a model
        lln compare --plugin my_attention.py:attend  # attention of your own
    """
    import torch

    from lln.files import write_json
    from lln.lab.bench.bench_tables import make_compare_table, write_compare
    from lln.lab.bench.comparison import DEFAULT, ComparisonPlan, measure, measure_on_model
    from lln.lab.core.plugin import load_attention
    from lln.peers import mechanisms

    shared.need_folder(out)
    if only is not None and everything:
        raise typer.BadParameter("--attentions and --all exclude each other.", param_hint="--attentions")
    own = [load_attention(text, "--plugin") for text in plugin or []]
    asked = [name.strip() for name in only.split(",")] if only is not None else DEFAULT
    names = tuple(mechanisms()) if everything else tuple(asked)
    names = tuple(dict.fromkeys((*names, *own)))
    hot = shared.parse_numbers(temperatures, "--temperatures", float, "numbers with commas between, like 0.5,1,2", 1e6)
    plan = ComparisonPlan(
        names=names, lengths=tuple(shared.parse_lengths(lengths)), temperatures=tuple(hot), batch=batch, heads=heads,
        dim=dim, causal=causal, device=torch.device(device), repeats=repeats, seed=seed,
    )  # fmt: skip
    loaded = None
    if model is not None:
        shared.need("hf")

        from lln.lab.core.pretrained import load

        loaded = load(model)
    with progress_bar(plan.steps() if loaded is None else None) as step:
        result = measure(plan, store=lambda found: write_json(out / "compare.json", found), progress=step)
        if loaded is not None:
            result |= {"model": Path(str(model)).name, "recorded": measure_on_model(plan, *loaded, step)}
            write_json(out / "compare.json", result)
    shared.publish(result, out, "compare", write_compare(result), [make_compare_table(result)], as_json=as_json)
