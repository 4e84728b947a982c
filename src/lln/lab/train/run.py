"""`train(config, folder)`: from a config to a result, however often it is stopped on the way."""

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from transformers.integrations import rewrite_logs

from lln.files import explain_writing, read_json
from lln.lab.core.devices import find_device_problem
from lln.lab.core.errors import DataError
from lln.lab.core.pretrained import identify
from lln.lab.core.provenance import provenance
from lln.lab.data.made_once import Place
from lln.lab.data.sources import resolve_root
from lln.lab.train.config import Config, need
from lln.lab.train.earlier import as_before
from lln.lab.train.graph import GraphLoop, check_graph
from lln.lab.train.loop import Loop, Progress, Report, count_processes
from lln.lab.train.models import build, check_attention, count_parameters, read_start
from lln.lab.train.run_folder import (
    CONFIG,
    ENVIRONMENT,
    FINAL,
    RESULT,
    Run,
    Say,
    list_differences,
    list_facts,
    read_step,
)
from lln.lab.train.shard import ShardedLoop, check_shards
from lln.lab.train.spread_loop import SpreadLoop, SpreadShardedLoop, check_spread
from lln.lab.train.tasks import load
from lln.values import check_count

MODEL = "model"  # folder with the trained model
REPORTS = ("tensorboard", "wandb", "trackio")  # modules that are packages of the same name


def train(
    config: Config,
    folder: Path,
    *,
    device: str = "cpu",
    data_root: Place = None,
    cache_dir: Place = None,
    report_to: list[str] | None = None,
    context_parallel: int = 1,
    say: Say = lambda text: None,
    progress: Progress = lambda step, values: None,
) -> dict[str, Any]:
    """Train a model as the config says, store everything in this folder, and return the result. A run that was stopped
    continues from its last complete checkpoint, and a finished run is not run again.

    device: "cpu" or "cuda". data_root, cache_dir: where data are found and kept, see `lln.lab.data`. report_to: among
    tensorboard, wandb and trackio. context_parallel: so many of torchrun's processes share each sequence; as how many
    there are in all, it may be another when a run goes on. say: gets sentences about what happens; progress: each step
    and the last values.

        >>> import tempfile
        >>> from lln.lab.recipes import recipe
        >>> from lln.lab.train.config import change
        >>> small = {"optimisation.steps": "2", "log_every": "1", "save_every": "2", "data.train": "8"}
        >>> config = change(recipe("image", "tiny", "lln"), small | {"record_every": "0", "data.evaluation": "8"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = train(config, Path(folder) / "run", cache_dir=folder)
        >>> result["facts"]["label"], sorted(result["metrics"])
        ('lln', ['accuracy', 'loss'])

    Raises:
        ValueError: settings that do not fit.
        DataError: data that are not there or not as they should be.
        NotFinite: a loss that is NaN or infinite.
    """
    processes, rank = count_processes()
    config = go_on_as_begun(config, folder, say)
    check(config, device, processes, report_to or [], context_parallel)
    if config.graph and device == "cpu":
        say("graph: there is no CUDA graph on a CPU; the same steps are run one by one.")
    if data_root is not None:
        resolve_root(data_root)  # refused, whether the data come from there or not
    run = Run(folder, config.to_dict(), list_facts(config))
    if (result := run.read_result()) is not None:
        compare_origin(run, config, data_root, cache_dir, say)
        say(f"{folder} is finished: its result is shown again.")
        return result
    began = time.monotonic()
    transformers.utils.logging.disable_progress_bar()  # there is one bar, ours
    where = join_processes(torch.device(device), processes)
    transformers.set_seed(config.seed)
    data = load(config, data_root, cache_dir)
    model = build(config, data.sizes).to(where)
    transformers.set_seed(config.seed)  # what training draws does not depend on how many weights were drawn
    start = identify(config.model.start) if config.model.start else {}
    sizes = {"parameters": count_parameters(model), "data": data.identity} | ({"start": start} if start else {})
    run.check_origin(data.identity, start)
    there = folder.exists()
    # What is refused is refused before here, and nothing has been written.
    with contextlib.ExitStack() as stack:
        checkpoint = None
        if rank == 0:
            stack.enter_context(run.lock())
            run = Run(folder, config.to_dict(), run.facts)  # another process may have begun it meanwhile
            stack.push(functools.partial(undo_early, run, not there))
            run.begin()
            checkpoint = run.find_newest(say)
            run.go_back(0 if checkpoint is None else read_step(checkpoint))
            versions = {"transformers": transformers.__version__, "processes": processes}
            environment = {**provenance(config.seed, where), **versions, **sizes}
            run.write(ENVIRONMENT, [*(run.read(ENVIRONMENT, list) or []), environment])
            if checkpoint is not None:
                say(f"Going on from step {read_step(checkpoint)}.")
        names = [checkpoint and checkpoint.name]
        if processes > 1:
            distributed.broadcast_object_list(names, 0)  # what the writing process found
        checkpoint = folder / names[0] if names[0] else None
        reports = [open_report(name, folder, config, stack) for name in report_to or [] if rank == 0]
        kind: Any = GraphLoop if config.graph else ShardedLoop if config.fsdp else Loop
        if context_parallel > 1:
            kind = functools.partial(SpreadShardedLoop if config.fsdp else SpreadLoop, ranks=context_parallel)
        loop: Loop = kind(config, data, model, where, run, reports, progress)
        with warnings.catch_warnings():
            # Some parts of the head return views of what they got. Nothing here changes them in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            loop.prepare(checkpoint)
            loop.train()
            measured = loop.evaluate(FINAL)
        weights = loop.gather_weights()
        result = {
            "config": config.to_dict(),
            "facts": run.facts,
            "metrics": {name.removeprefix(f"{FINAL}_"): v for name, v in measured.items() if math.isfinite(v)},
            "guess": data.guess,
            **sizes,
            "notes": data.notes,
            "seconds": time.monotonic() - began,  # of the process that finished it
            "provenance": provenance(config.seed, where),
            "step_seconds": loop.pace.median(),
        }
        if rank == 0:
            with explain_writing(folder):
                model.save_pretrained(folder / MODEL, state_dict=weights)
            if data.tokenizer is not None:
                data.tokenizer.save(folder / MODEL)
            run.write(RESULT, result)
    return result


def go_on_as_begun(config: Config, folder: Path, say: Say) -> Config:
    """The config to run: where the folder holds a run that was begun before a preset said more than it did then, the
    one that it was begun with."""
    earlier, held = as_before(config), read_json(folder / CONFIG)
    if held is None or held == config.to_dict() or held != earlier.to_dict():
        return config
    changed = "; ".join(list_differences(held, config.to_dict()))
    say(f"{folder} was begun with an earlier release and goes on with its settings ({changed}).")
    return earlier


def compare_origin(run: Run, config: Config, data_root: Place, cache_dir: Place, say: Say) -> None:
    """ValueError where a finished run was trained on other data, or began with other weights, than it is asked for now.
    Where the data are not here a sentence says that nobody looked."""
    if config.model.start:
        run.check_origin({}, identify(config.model.start))
    try:
        run.check_origin(load(config, data_root, cache_dir).identity, {})
    except DataError as error:
        say(f"Whether its data are the same is not known: {error}")


def undo_early(run: Run, with_folder: bool, kind: type[BaseException] | None, *_: Any) -> None:
    """As `ExitStack.push` calls it at the end. After Ctrl-C a run goes on; after an error a better one may begin."""
    if kind is not None and issubclass(kind, Exception):
        run.undo(with_folder=with_folder)


def check(config: Config, device: str, processes: int, report_to: list[str], context_parallel: int = 1) -> None:
    """ValueError or TypeError, in one sentence, for what cannot be run, before anything is written."""
    if config.model.start:
        read_start(config.model.start)
    problem = find_device_problem(device, 'device="cpu"')
    need((problem is None, f"device: {problem}"))
    check_attention(config)
    for name in report_to:
        need(
            (name in REPORTS, f"report_to must be among {', '.join(REPORTS)}; got {name!r}."),
            (
                importlib.util.find_spec(name) is not None,
                f"report_to: {name} is not installed; install it with: pip install {name}",
            ),
        )
    if config.graph:
        check_graph(config, processes)
    if config.fsdp:
        check_shards(config, processes)
    check_count("context_parallel", context_parallel)
    if context_parallel > 1:
        check_spread(config, processes, context_parallel)
    readers = processes // context_parallel
    o, precision = config.optimisation, config.precision
    need(
        (
            o.batch % (o.accumulation * readers) == 0,
            f"optimisation.batch must be a multiple of accumulation times processes; got {o.batch} for "
            f"{o.accumulation} x {readers}.",
        ),
        (
            device != "cpu" or precision != "float16",
            "precision: float16 needs a GPU, where its loss scale is decided; use bfloat16 or float32.",
        ),
        (
            device == "cpu" or precision != "bfloat16" or torch.cuda.is_bf16_supported(),
            "precision: this GPU has no bfloat16; use float32 or float16.",
        ),
    )


def join_processes(device: torch.device, processes: int) -> torch.device:
    """The device of this process, which can talk to the others from now on."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if processes > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def open_report(name: str, folder: Path, config: Config, stack: contextlib.ExitStack) -> Report:
    """A service that is told of what is logged, until the stack is closed."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = stack.enter_context(SummaryWriter(str(folder / "runs")))

        def write(values: dict[str, float], step: int) -> None:
            for tag, value in rewrite_logs(values).items():
                writer.add_scalar(tag, value, step)
            writer.flush()

        return write
    service = importlib.import_module(name)  # wandb, and trackio, which is called alike
    service.init(project=os.environ.get(f"{name.upper()}_PROJECT", "lln"), name=folder.name, config=config.to_dict())
    stack.callback(service.finish)
    return lambda values, step: service.log({**rewrite_logs(values), "train/global_step": step})
