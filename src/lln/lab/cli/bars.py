"""Progress of several training runs."""

from __future__ import annotations

from lln.lab.core.progress import Bars, describe_metrics
from lln.lab.paper.jobs import Job


class RunBars(Bars):
    """Two bars: all runs, by what they are estimated to take, and the steps of the one that was heard of last."""

    def __init__(self, costs: dict[str, float]) -> None:
        super().__init__()
        self.costs, self.number, self.done = costs, 0, 0.0
        self.running: dict[str, float] = {}  # the share of each that is done
        self.all = self.add("runs", sum(costs.values()) or 1)
        self.one = self.add("", 1, visible=False)

    def begin(self, job: Job) -> None:
        self.number += 1
        self.running[job.folder] = 0.0
        self.all(description=f"run {self.number} of {len(self.costs)}: {job.folder}")
        self.one(completed=0, total=job.config.optimisation.steps, visible=True, description="start")

    def step(self, job: Job, number: int, values: dict[str, float]) -> None:
        steps = job.config.optimisation.steps
        self.one(completed=number, total=steps, description=describe_metrics(values))
        self.running[job.folder] = number / steps
        self.advance()

    def end(self, job: Job) -> None:
        self.done += self.costs.get(job.folder, 0.0)
        self.running.pop(job.folder, None)
        self.advance()

    def advance(self) -> None:
        part = sum(self.costs.get(folder, 0.0) * share for folder, share in self.running.items())
        self.all(completed=self.done + part)
