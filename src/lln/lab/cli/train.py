"""`lln train` on the command line."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.lab.cli.shared import AsJson, Count, DataRoot, Device, SeedOrNone, fail, need, need_folder, parse_changes
from lln.lab.core.errors import WrongOption
from lln.lab.core.progress import Bars, describe_metrics


def train(
    task: Annotated[str, typer.Argument(metavar="TASK")],
    attention: str = "lln_diag",
    preset: Annotated[str, typer.Option("--scale", "--preset")] = "tiny",
    name: str | None = None,
    out: Path | None = None,
    start: Path | None = None,
    seed: SeedOrNone = None,
    changes: Annotated[list[str] | None, typer.Option("--set")] = None,
    data_root: DataRoot = None,
    report_to: str = "",
    device: Device = "",
    graph: bool = False,
    fsdp: bool = False,
    context_parallel: Count = 1,
    dry_run: bool = False,
    as_json: AsJson = False,
) -> None:
    """Train one of the paper's models with any attention. A run that was stopped goes on where it was.

    Args:
        task: What the model learns: mlm (words that are hidden in a text), glue (questions about sentences), image
            (what a picture shows), lra (Long Range Arena), or needles (values that stand far away in a text).
        attention: softmax, lln, lln_diag, the name of another mechanism, or your own as file.py:function.
        preset: How large the model and the run are: tiny, mini or paper.
        name: Which task of glue (sst2, mnli, qqp, qnli) or of lra (listops, text, retrieval, pathfinder, image).
            [default: the first]
        out: Folder for the run. [default: runs/TASK-NAME-...]
        start: Folder of a trained model whose weights this run begins with.
        seed: Seed of the first weights, of the order of the examples, and of the masks. [default: 0]
        changes: Changes an option of the config, as optimisation.rate=1e-3 does. --dry-run prints all options. May be
            given several times.
        report_to: Services that are told how the run goes: tensorboard, wandb or trackio, with commas between.
        device: cpu or cuda. CUDA_VISIBLE_DEVICES chooses among several GPUs. [default: the GPU where there is one]
        graph: Run each step as one CUDA graph, so that the GPU does not wait for Python.
        fsdp: Spread the weights over the processes of torchrun, so that each holds a part of them.
        context_parallel: How many processes share each sequence, so that each holds a part of its tokens. This works
            for mlm with lln or lln_diag.
        dry_run: Print the config and the sizes, and train nothing.

    Examples:
        lln train mlm  # a tiny run on text that comes with Python
        lln train lra --name listops --attention softmax --set optimisation.steps=800  # 800 steps with softmax
        lln train glue --name sst2 --scale mini --data-root DIR --start runs/mlm/model  # fine-tuning
        torchrun --nproc-per-node 2 -m lln train mlm  # on two devices
        A run that was stopped goes on when the same command is given again.
    """
    need("train")

    from lln.hf.distillation import NotFinite
    from lln.lab.core.errors import DataError
    from lln.lab.core.plugin import load_attention, names_file
    from lln.lab.recipes import recipe
    from lln.lab.train.config import change
    from lln.lab.train.run import train as run

    asked = parse_changes(changes)
    for option, held in (("seed", seed), ("graph", graph), ("fsdp", fsdp), ("start", start)):
        name_there = "model.start" if option == "start" else option
        if held is None or held is False:
            continue
        if name_there in asked:
            raise WrongOption("--set", f"{name_there} is given twice, with --{option} and here.")
        asked[name_there] = "yes" if held is True else str(held)
    if device not in ("cpu", "cuda"):
        why = f"must be cpu or cuda; among several GPUs CUDA_VISIBLE_DEVICES chooses; got {device!r}."
        raise typer.BadParameter(why, param_hint="--device")
    if names_file(attention) or attention.endswith(".py"):  # the function is missing: that is said
        attention = load_attention(attention, "--attention")
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes, the one that writes
    try:
        config = change(recipe(task, preset, attention, name), asked)
        folder = out or Path("runs") / "-".join(filter(None, (task, name, preset, attention, f"seed{config.seed}")))
        need_folder(folder)
        if dry_run:
            show_sizes(config, data_root)
            return
        with Bars(quiet=not first) as bars:
            update = bars.add("start", config.optimisation.steps)
            result = run(
                config, folder, device=device, data_root=data_root, say=bars.say,
                progress=lambda number, values: update(completed=number, description=describe_metrics(values)),
                report_to=report_to.split(",") if report_to else [], context_parallel=context_parallel,
            )  # fmt: skip
    except (ValueError, TypeError, DataError) as error:
        fail(f"lln train: {error}")
    except NotFinite as error:
        fail(f"lln train: {error}", 1)
    except KeyboardInterrupt:
        fail(f"Stopped. The same command goes on from the last checkpoint in {folder}.", 130)
    except OSError as error:
        why = f"{error.strerror or error}: the run in {folder} stops here"
        if error.filename and not Path(str(error.filename)).is_relative_to(folder):  # in the cache of data, say
            why = f"{error.filename}: {why}"
        fail(f"{why}; the same command goes on from its last whole checkpoint.", 1)
    if first and as_json:
        typer.echo(json.dumps(result, indent=1))
    elif first:
        show_result(result, folder)


def show_result(result: dict[str, Any], folder: Path) -> None:
    from lln.lab.core.tables import print_wide, terminal_table

    config = result["config"]
    what = " ".join(filter(None, (config["task"], config["data"]["subset"])))
    rows = [(name, f"{value:.4f}") for name, value in result["metrics"].items()]
    rows += [(f"{name} of a guess", f"{value:.4f}") for name, value in result["guess"].items()]
    rows += [("parameters", f"{result['parameters']:,}"), ("time", f"{result['seconds']:.0f} s")]
    print_wide(terminal_table((), rows, title=f"{what}, {config['attention']['name']}"))
    for note in result["notes"]:
        typer.echo(f"Data: {note}")
    typer.echo(f"The run is in {folder}: config, metrics, checkpoints, model, result.")


def show_sizes(config: Any, data_root: Path | None) -> None:
    """What a run would be: the config, the model's size, tokens a step, an estimate of memory."""
    from lln.lab.data.sources import resolve_root
    from lln.lab.train.models import build, check_attention, count_parameters
    from lln.lab.train.tasks import load

    check_attention(config)
    if data_root is not None:
        resolve_root(data_root)
    data = load(config, data_root)
    model = build(config, data.sizes)
    count, o = count_parameters(model), config.optimisation
    first = data.train[0]
    tokens = first["input_ids"].numel() if "input_ids" in first else (config.data.length // config.model.patch) ** 2
    micro = o.batch // o.accumulation
    width = 2 if config.precision != "float32" else 4
    # Weights, gradients and two moments in float32; about 34 numbers a token, channel and layer for the backward, or 2
    # where activations are computed again.
    kept = 2 if config.checkpointing else 34
    activations = kept * micro * tokens * config.model.width * config.model.layers * width
    vocabulary = micro * tokens * data.sizes.vocabulary * 4 if config.task == "mlm" else 0
    typer.echo(json.dumps(config.to_dict(), indent=1))
    typer.echo(
        f"{count:,} parameters; {len(data.train):,} examples; {o.steps:,} steps of about {o.batch * tokens:,} tokens"
    )
    typer.echo(f"memory, roughly: {16 * count / 2**20:,.0f} MiB for weights and optimiser, ", nl=False)
    typer.echo(f"{(activations + vocabulary) / 2**20:,.0f} MiB for activations")
    for note in data.notes:
        typer.echo(f"Data: {note}")
