"""Progress of several training runs."""

from __future__ import annotations

from typing import Any

from lln.lab.paper.jobs import Job


class Bars:
    """Two bars on stderr: all runs, by what they are estimated to take, and the steps of the one that was heard of
    last."""

    def __init__(self, jobs: list[Job], costs: dict[str, float]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self.costs, self.number, self.done = costs, 0, 0.0
        self.running: dict[str, float] = {}  # the share of each that is done
        self.progress = Progress(
            TextColumn("{task.description:44}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), Remaining(),
            console=Console(stderr=True),
        )  # fmt: skip
        self.all = self.progress.add_task("runs", total=sum(costs.values()) or 1)
        self.one = self.progress.add_task("", total=1, visible=False)

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def stop(self) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, job: Job) -> None:
        self.number += 1
        self.running[job.folder] = 0.0
        self.progress.update(self.all, description=f"run {self.number} of {len(self.costs)}: {job.folder}")
        self.progress.reset(self.one, total=job.config.optimisation.steps, visible=True, description="start")

    def step(self, job: Job, number: int, values: dict[str, float]) -> None:
        known = {"loss": "loss", "eval_loss": "eval", "eval_accuracy": "accuracy"}
        text = ", ".join(f"{short} {values[name]:.3f}" for name, short in known.items() if name in values)
        steps = job.config.optimisation.steps
        self.progress.update(self.one, completed=number, total=steps, description=text)
        self.running[job.folder] = number / steps
        self.advance()

    def end(self, job: Job) -> None:
        self.done += self.costs.get(job.folder, 0.0)
        self.running.pop(job.folder, None)
        self.advance()

    def advance(self) -> None:
        part = sum(self.costs.get(folder, 0.0) * share for folder, share in self.running.items())
        self.progress.update(self.all, completed=self.done + part)
