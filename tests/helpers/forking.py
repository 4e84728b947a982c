"""Processes of their own that are forked off one which has imported everything: importing takes longer than what they
do in a test."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.processes import PRELOAD

LABORATORY = ["lln.lab.paper.run_jobs", "transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm"]


def make_context() -> Any:
    """The first in a test process says what there is to fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *LABORATORY])
    return context


def run_apart(function: Callable[..., Any], *arguments: Any) -> int | None:
    """The exit code of a process that calls this; -9 of one that was killed."""
    process = make_context().Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def train_apart(changes: Mapping[str, str], folder: Path, cache: Path, moment: str | None = None) -> None:
    """`lln train mlm` with LLN+Diag; kills itself at that moment ("logged 6", "saving checkpoint-8"), which is the same
    however busy the machine is."""
    import torch

    from lln.lab.recipes import recipe
    from lln.lab.train import loop as made_by
    from lln.lab.train import run_folder
    from lln.lab.train.config import change
    from lln.lab.train.run import train

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    loop: Any = made_by
    log, seal = run_folder.Run.log, loop.seal

    def reach(now: str) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def log_and_reach(self: Any, values: dict[str, Any]) -> None:
        log(self, values)
        if "loss" in values:
            reach(f"logged {values['step']}")

    def reach_and_seal(held: Path) -> None:
        reach(f"saving {held.name}")
        seal(held)

    if moment is not None:
        run_folder.Run.log = log_and_reach  # type: ignore[method-assign]
        loop.seal = reach_and_seal
    train(change(recipe("mlm", "tiny", "lln_diag"), dict(changes)), folder, cache_dir=cache)
