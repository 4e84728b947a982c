"""`train(config, folder)`: from a config to a result, however often it is stopped on the way."""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback

from lln.lab.core.provenance import provenance
from lln.lab.data.examples import Stream
from lln.lab.data.needles import Needles, answers, by_distance
from lln.lab.train.config import Config
from lln.lab.train.graph import GraphTrainer, check_graph
from lln.lab.train.guesses import Guesses
from lln.lab.train.loop import (
    Metrics,
    RunTrainer,
    accuracy,
    arguments,
    mean_loss,
    mean_over_tokens,
    parameters,
    sequence_losses,
)
from lln.lab.train.models import build, check_attention, saved
from lln.lab.train.recording import Recording
from lln.lab.train.run_folder import Run, list_facts, step_of
from lln.lab.train.shard import ShardedTrainer, check_shards
from lln.lab.train.tasks import Place, TaskData, carry_tokenizer, load

MODEL = "model"  # folder with the trained model
REPORTS = ("tensorboard", "wandb", "trackio")  # modules that are packages of the same name

Say = Callable[[str], None]
Progress = Callable[[int, dict[str, float]], None]


class Follow(TrainerCallback):
    """Hands every step, and what was logged last, to a progress bar."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.last = progress, dict[str, float]()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.last |= {k: v for k, v in (logs or {}).items() if isinstance(v, float)}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress(state.global_step, self.last)


class Pace(TrainerCallback):
    """Seconds a step, between one look at the loss and the next, which waits for a GPU: what lies between two such
    looks with no evaluation and no checkpoint is steps alone. The first stretch warms up and does not count."""

    def __init__(self) -> None:
        self.paces: list[float] = []
        self.last: tuple[int, float] | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if "loss" not in (logs or {}):
            return
        now = time.perf_counter()
        if self.last is not None and state.global_step > self.last[0]:
            self.paces.append((now - self.last[1]) / (state.global_step - self.last[0]))
        self.last = state.global_step, now

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.last = None

    on_save = on_evaluate

    def median(self) -> float | None:
        kept = self.paces[1:]
        return statistics.median(kept) if kept else None


def train(
    config: Config,
    folder: Path,
    *,
    device: str = "cpu",
    data_root: Place = None,
    cache_dir: Place = None,
    report_to: list[str] | None = None,
    say: Say = lambda text: None,
    progress: Progress = lambda step, values: None,
) -> dict[str, Any]:
    """Train as the config says, in this folder, and return the result. A run that was stopped goes on from its last
    whole checkpoint; one that is finished is not run again.

    Raises:
        ValueError: settings that do not fit.
        DataError: data that are not there or not as they should be.
        NotFinite: a loss that is NaN or infinite.
    """
    if config.model.start:
        saved(config.model.start)
    if device != "cpu" and not torch.cuda.is_available():  # the trainer would take the CPU and not say so
        raise ValueError(f"device: there is no CUDA device here; got {device!r}.")
    processes, writes = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")) == 0
    check_attention(config)
    check_reports(report_to or [])
    if config.graph:
        check_graph(config, processes)
        if device == "cpu":
            say("graph: there is no CUDA graph on a CPU; the same steps are run one by one.")
    if config.fsdp:
        check_shards(config, processes)
    run = Run(folder, config.to_dict(), list_facts(config)) if writes else None
    if run is not None and run.result is not None:
        say(f"{folder} is finished: its result is shown again.")
        return run.result
    if run is None:
        return work(config, folder, None, device, processes, data_root, cache_dir, report_to, say, progress)
    with run.lock():
        return work(config, folder, run, device, processes, data_root, cache_dir, report_to, say, progress)


def work(
    config: Config, folder: Path, run: Run | None, device: str, processes: int, data_root: Place, cache_dir: Place,
    report_to: list[str] | None, say: Say, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    start = time.monotonic()
    transformers.utils.logging.disable_progress_bar()  # there is one bar, ours
    set_seed(config.seed)
    data = load(config, data_root, cache_dir)
    model = build(config, data.sizes)
    settings = arguments(config, folder, device=device, processes=processes, report_to=report_to or [])
    examples = config.optimisation.steps * config.optimisation.batch
    callbacks: list[Any] = [Follow(progress)]
    if run is not None:
        callbacks.append(Metrics(run))
    metrics, pick = scoring(config, data)
    kind = GraphTrainer if config.graph else ShardedTrainer if config.fsdp else RunTrainer
    trainer = kind(
        model=model,
        args=settings,
        train_dataset=Stream(data.train, seed=config.seed, length=examples),
        eval_dataset=data.evaluations if len(data.evaluations) > 1 else next(iter(data.evaluations.values())),
        data_collator=data.collate,
        compute_metrics=metrics,
        preprocess_logits_for_metrics=pick,
        compute_loss_func=mean_over_tokens if data.guessed is not None else None,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    pace = Pace()
    trainer.add_callback(pace)
    if data.guessed is not None:
        trainer.guesses = Guesses(model.lm_head, data.guessed, evaluated=pick is answers)
    if isinstance(trainer, GraphTrainer):
        trainer.record_every, trainer.compiles = config.record_every, config.compile
    if config.record_every and (run is not None or config.fsdp):  # all that hold a part of a gradient have to measure
        trainer.add_callback(Recording(run, config.record_every, trainer.log, lambda: loss_scale(trainer)))
    checkpoint = None
    if run is not None:
        run.begin()
        checkpoint = run.newest(say)
        run.go_back(0 if checkpoint is None else step_of(checkpoint))
        run.started(environment(config, data, model, settings.device))
        if checkpoint is not None:
            say(f"Going on from step {step_of(checkpoint)}.")
    checkpoint = shared(checkpoint, folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*'pin_memory' argument is set as true but no accelerator.*")
        # Some parts of the head return views of what they got. Nothing here changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        measured = trainer.evaluate(metric_key_prefix="final")
    whole = trainer.whole_state() if isinstance(trainer, ShardedTrainer) else None
    result = outcome(config, data, model, measured, settings.device, time.monotonic() - start)
    result["step_seconds"] = pace.median()
    if run is not None:
        model.save_pretrained(folder / MODEL, state_dict=whole)
        carry_tokenizer(data, folder / MODEL)
        run.finish(result)
    return result


def scoring(config: Config, data: TaskData) -> tuple[Callable[[Any], dict[str, float]], Callable[..., Any] | None]:
    """(what an evaluation tells, what of a batch's logits it needs for that; None: all)"""
    if config.task == "needles":
        evaluation = next(iter(data.evaluations.values()))
        assert isinstance(evaluation, Needles)
        distances = evaluation.distances()
        return lambda prediction: by_distance(prediction.predictions, distances), answers
    return (accuracy, None) if data.guessed is None else (mean_loss, sequence_losses)


def check_reports(names: list[str]) -> None:
    for name in names:
        if name not in REPORTS:
            raise ValueError(f"report_to must be among {', '.join(REPORTS)}; got {name!r}.")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"report_to: {name} is not installed; install it with: pip install {name}")


def loss_scale(trainer: RunTrainer) -> float | None:
    """Of float16 training: how much the loss is multiplied so that gradients do not vanish."""
    scaler = trainer.accelerator.scaler
    return None if scaler is None else float(scaler.get_scale())


def shared(checkpoint: Path | None, folder: Path) -> Path | None:
    """What the writing process found, in all processes."""
    if not torch.distributed.is_initialized():
        return checkpoint
    found: list[Any] = [None if checkpoint is None else checkpoint.name]
    torch.distributed.broadcast_object_list(found, 0)
    return None if found[0] is None else folder / found[0]


def environment(config: Config, data: TaskData, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    import accelerate

    return {
        **provenance(config.seed, device),
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "parameters": parameters(model),
        "data": data.identity,
    }


def outcome(
    config: Config, data: TaskData, model: PreTrainedModel, measured: dict[str, float], device: torch.device,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    kept = {
        name.removeprefix("final_"): value
        for name, value in measured.items()
        if name.endswith(("loss", "accuracy")) and math.isfinite(value)
    }
    return {
        "config": config.to_dict(),
        "facts": list_facts(config),
        "metrics": kept,
        "guess": data.guess,
        "parameters": parameters(model),
        "notes": data.notes,
        "data": data.identity,
        "seconds": seconds,  # of the process that finished it
        "provenance": provenance(config.seed, device),
    }
