"""`lln reproduce` for tables and figures that are made of training runs: what it says and draws while they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lln.lab.cli.common import fail, find_missing
from lln.lab.core.errors import DataError, Refused
from lln.lab.core.progress import Bars, describe_metrics

if TYPE_CHECKING:
    from lln.lab.paper.jobs import Job
    from lln.lab.paper.reproduction import Reproduction, Workload
    from lln.lab.paper.request import Request


def reproduce_runs(request: Request) -> None:
    from lln.lab.paper.experiments import EXPERIMENTS
    from lln.lab.paper.reproduction import Reproduction
    from lln.lab.paper.request import check_data, understand

    experiment, source = EXPERIMENTS[request.name], request.source
    try:
        if experiment.paper is None and request.charts and (names := find_missing("report")):
            raise Refused(
                f"charts need {', '.join(names)} (pip install 'lln-attention[report]'); --no-charts runs without, and "
                "--from draws later."
            )
        if source is not None and not source.is_dir() and not (source.is_file() and source.suffix == ".json"):
            raise Refused(f"--from: {source} is not a folder, nor a result in JSON.")
        work = Reproduction(experiment, *understand(request), request.out)
        if source is not None:
            publish(work, work.load(source), request, source)
            return
        plan = work.plan(retry=request.retry)
        check_data(plan.jobs, request.data_root)
        typer.echo(work.describe(plan, request.at_once), err=True)
        if request.dry_run:
            for folder, state in plan.states.items():
                typer.echo(f"{folder}: {state}")
            return
    except (Refused, ValueError, DataError) as error:
        fail(f"lln reproduce: {error}")
    result = run(work, plan, request)
    publish(work, result, request, work.asked.runs)
    if result["failed"]:
        raise typer.Exit(1)


def run(work: Reproduction, plan: Workload, request: Request) -> dict[str, Any]:
    import transformers

    from lln.lab.paper.run_jobs import Hooks, run_jobs
    from lln.lab.paper.run_tables_text import tell_row

    transformers.utils.logging.set_verbosity_error()  # a new head on a trained model is meant
    if not plan.costs:
        return work.collect()
    with RunBars(plan.costs) as bars:

        def end(job: Job, now: str) -> None:
            bars.end(job)
            if job.folder in plan.costs:
                result = work.collect()
                if now == "finished" and work.experiment.paper is not None:
                    bars.say(tell_row(result, job.config.attention.label))

        hooks = Hooks(say=bars.say, begin=bars.begin, step=bars.step, end=end)
        try:
            run_jobs(
                plan.jobs, work.asked.runs, device=work.asked.device, data_root=request.data_root, hooks=hooks,
                retry=request.retry, keep=request.keep, at_once=request.at_once,
            )  # fmt: skip
        except KeyboardInterrupt:
            work.collect()
            bars.progress.stop()
            fail(f"Stopped. The same command goes on where it was; what there is so far is in {work.out}.", 130)
        except OSError as error:
            bars.progress.stop()
            why = f"{error.strerror or error}: the runs in {work.asked.runs} stop here"
            fail(f"{why}; the same command goes on.", 1)
    return work.collect()


def publish(work: Reproduction, result: dict[str, Any], request: Request, where: Path) -> None:
    paths = work.write(result, charts=request.charts)
    typer.echo(json.dumps(result, indent=1) if request.as_json else work.tell(result))
    typer.echo(f"Written: {', '.join(map(str, paths))}; runs: {where}.", err=True)


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
