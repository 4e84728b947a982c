"""`lln bench` on the command line."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.lab.cli import shared
from lln.lab.core.progress import progress_bar

Dtype = enum.StrEnum("Dtype", "bfloat16 float16 float32")
Causal = enum.StrEnum("Causal", "no yes both")


def bench(
    lengths: str | None = None,
    heads: shared.CountOrNone = None,
    dim: shared.CountOrNone = None,
    batch: shared.CountOrNone = None,
    tokens: shared.CountOrNone = None,
    shapes: str | None = None,
    causal: Causal | None = None,
    dtype: Dtype | None = None,
    only: Annotated[str | None, typer.Option("--attentions", "--only")] = None,
    peers: str | None = None,
    model: str | None = None,
    modes: str | None = None,
    kinds: str | None = None,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9)] = 0.0,
    repeats: shared.CountOrNone = None,
    quick: bool = False,
    device: shared.Device = "",
    seed: shared.Seed = 0,
    out: Path = Path("bench"),
    as_json: shared.JsonForTable = False,
    render: Path | None = None,
    tune: bool = False,
) -> None:
    """Check LLN attention, then time it beside torch's attentions: forward and backward, memory, and how near the time
    is to the least that moving the bytes takes.

    Args:
        lengths: Lengths, with commas between. [default: 512 to 4096, on cuda to 65536]
        heads: Number of heads. [default: 12]
        dim: Head dimension. [default: 64]
        batch: Batch size. [default: 1]
        tokens: Tokens in a batch. The batch size is TOKENS // length, at least 1.
        shapes: Shapes BxHxNxD with commas between, instead of a grid of lengths.
        causal: Causal attention (yes), bidirectional attention (no), or both. [default: both, with --peers yes]
        dtype: Precision of the inputs. [default: bfloat16 on cuda, float32 on cpu]
        only: Names of attentions, as in the table, with commas between. [default: all]
        peers: fla adds the causal attentions of flash-linear-attention, beside a few of the others.
        model: Time a whole transformers model instead: roberta-base or llama-1b (of that size, with random weights),
            a folder or a Hub id.
        modes: For --model: eager, compiled, and on cuda graph and compiled-graph, with commas between. [default: all]
        kinds: For --model: inference and training, for decoders prefill and token, with commas between. [default:
            all]
        dropout: Dropout of the attention weights in what is timed.
        repeats: Measurements behind each median. [default: 5, on cuda 50]
        quick: Take short lengths and fewer repeats.
        seed: Seed of the random inputs.
        out: Folder for bench.json, bench.md and the charts (SVG).
        render: Measure nothing, and write table, Markdown and charts of this stored bench.json.
        tune: Find the fastest settings of the kernels instead.

    Examples:
        lln bench --quick  # a look in a minute
        lln bench --lengths 1024,8192 --tokens 65536 --attentions flash,LLN,LLN+Diag  # batches of equal size
        lln bench --shapes 16x12x4096x64,1x12x16384x64 --causal no --json  # shapes of your own
        lln bench --dropout 0.1 --causal no  # what training an encoder takes
        lln bench --peers fla  # flash-linear-attention, which tunes itself for minutes
        lln bench --model roberta-base --lengths 512,4096  # a whole model, as transformers runs it
        lln bench --render bench/bench.json --out page  # draws what another machine measured
    """
    shared.need_folder(out)

    import torch

    from lln.files import write_json
    from lln.lab.bench.bench_tables import describe_growth, make_bench_table, read_result, write_bench
    from lln.lab.bench.calls import CheckFailed
    from lln.lab.bench.kernel_plan import make_plan
    from lln.lab.bench.kernel_times import measure

    where = torch.device(device)
    if tune:
        from lln.lab.bench.tune import tune as find_settings

        try:
            with progress_bar(None) as step:
                path = find_settings(device=where, out=out, progress=step, dim=dim, seed=seed)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        typer.echo(f"The settings are in {path}; they take effect as src/lln/data/launch.json.")
        return
    for option, text in (("--modes", modes), ("--kinds", kinds)):
        if model is None and text is not None:
            raise typer.BadParameter("goes with --model.", param_hint=option)
    options: dict[str, Any] = {
        "lengths": None if lengths is None else shared.parse_lengths(lengths), "heads": heads, "dim": dim,
        "batch": batch, "tokens": tokens, "shapes": shapes, "causal": causal, "dtype": dtype, "only": only,
        "peers": peers, "repeats": repeats, "quick": quick, "device": where, "seed": seed, "dropout": dropout,
    }  # fmt: skip

    def store(found: dict[str, Any]) -> None:
        write_json(out / "bench.json", found)

    try:
        if render is not None:
            result = read_result(render)
        elif model is not None:
            shared.need("hf")
            from lln.lab.bench.model_times import measure_model, plan_model

            asked = plan_model(model=model, modes=modes, kinds=kinds, **options)
            with progress_bar(None) as step:
                result = measure_model(asked, store=store, progress=step)
        else:
            plan = make_plan(**options)
            with progress_bar(plan.steps()) as step:
                result = measure(plan, store=store, progress=step)
    except CheckFailed as error:
        shared.fail(str(error), 1)
    with shared.trust("--render", render):
        if "errors" in result:  # of a model
            from lln.lab.bench.bench_tables import make_model_table, write_model

            shared.publish(result, out, "model", write_model(result), [make_model_table(result)], as_json=as_json)
            return
        shown = [make_bench_table(result), *describe_growth(result)]
        shared.publish(result, out, "bench", write_bench(result), shown, as_json=as_json)
