"""What `lln reproduce` does for tables and figures that are made of training runs."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
import typer

from lln.files import write_json, write_text
from lln.lab.cli.bars import RunBars
from lln.lab.cli.common import find_missing
from lln.lab.cli.reproduce import show_verdicts
from lln.lab.cli.train import pair
from lln.lab.core.errors import DataError, Refused
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import write_csv
from lln.lab.data.glue import list_tasks
from lln.lab.data.sources import list_splits
from lln.lab.paper import needle_lengths as lengths
from lln.lab.paper import render
from lln.lab.paper import run_figures as curves
from lln.lab.paper import run_tables as tables
from lln.lab.paper.at_once import drive_at_once
from lln.lab.paper.estimate import estimate, minutes
from lln.lab.paper.experiments import EXPERIMENTS, Asked, Experiment, refused
from lln.lab.paper.finished_runs import find, read
from lln.lab.paper.jobs import Hooks, Job, check, configure, drive, label, state
from lln.lab.recipes import PRESETS
from lln.lab.train.config import Config

LENGTHS = "lengths"  # a table and a chart


@dataclasses.dataclass(frozen=True)
class Request:
    """The command line, as it was given."""

    name: str
    scale: str
    attentions: str | None
    tasks: str | None
    seeds: int
    first: int
    tunings: int | None
    changes: list[str]
    data_root: Path | None
    device: str | None
    out: Path
    source: Path | None
    charts: bool
    dry_run: bool
    retry: bool
    keep: bool
    at_once: int
    as_json: bool


def reproduce_runs(request: Request) -> None:
    experiment = EXPERIMENTS[request.name]
    try:
        asked, unavailable = understand(experiment, request)
        if request.source is not None:
            publish(experiment, request, *from_folder(experiment, asked, request.source, unavailable))
            return
        jobs = experiment.jobs(asked)
        check(jobs, asked.runs)
        check_data(jobs, request.data_root)
        costs = estimate(jobs, asked.runs, asked.device, retry=request.retry)
        typer.echo(plan(experiment, asked, jobs, costs, unavailable, request.at_once), err=True)
        if request.dry_run:
            for job in jobs:
                typer.echo(f"{job.folder}: {state(asked.runs / job.folder)}")
            return
    except (Refused, ValueError, DataError) as error:
        typer.echo(f"lln reproduce: {error}", err=True)
        raise typer.Exit(2) from None
    result = run(experiment, request, asked, jobs, costs, unavailable)
    publish(experiment, request, result, asked.runs)
    if result["failed"]:
        raise typer.Exit(1)


# What was asked for


def understand(experiment: Experiment, request: Request) -> tuple[Asked, dict[str, str]]:
    """The request with its defaults, and of the default attentions those that cannot be run, and why."""
    if experiment.paper is None and request.charts and (names := find_missing("report")):
        raise Refused(
            f"charts need {', '.join(names)} (pip install 'lln-attention[report]'); --no-charts runs without, and "
            "--from draws later."
        )
    if request.source is not None and not request.source.is_dir():
        raise Refused(f"--from: {request.source} is not a folder.")
    scale = request.scale
    task = "mlm" if experiment.task == "glue" else experiment.task
    if request.attentions is None:
        reasons = {name: refused(task, scale, name) for name in experiment.attentions(scale)}
        unavailable = {name: why for name, why in reasons.items() if why is not None}
        attentions = tuple(name for name in reasons if name not in unavailable)
    else:
        given = [text.strip() for text in request.attentions.split(",") if text.strip()]
        for name in given:
            if (why := refused(task, scale, name)) is not None:
                raise Refused(f"--attentions: {why}.")
        # Written as labels are, whatever the order of options.
        attentions = tuple(dict.fromkeys(label(configure(task, scale, name, 0, {}).to_dict()) for name in given))
        unavailable = {}
    changes = dict(map(pair, request.changes))
    given_lengths = changes.pop("lengths", "") if experiment.name == LENGTHS else ""
    if not attentions:
        raise Refused(f"--attentions: there is none to run; got {request.attentions!r}.")
    asked = Asked(
        scale=scale, attentions=attentions, tasks=chosen_tasks(experiment, request), seeds=request.seeds,
        tunings=request.tunings or (1 if scale == "tiny" else 3), changes=changes,
        runs=request.out / "runs", device=request.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        first=request.first, lengths=lengths.parse_lengths(given_lengths),
    )  # fmt: skip
    return asked, unavailable


def chosen_tasks(experiment: Experiment, request: Request) -> tuple[str, ...]:
    allowed = experiment.tasks(request.scale)
    if request.tasks is None:
        return allowed if experiment.columns else ()
    if not allowed:
        able = ", ".join(e.name for e in EXPERIMENTS.values() if e.tasks(request.scale))
        raise Refused(f"--tasks goes with {able}, not with {experiment.name}.")
    given = tuple(dict.fromkeys(text.strip() for text in request.tasks.split(",") if text.strip()))
    for name in given:
        if name not in allowed:
            elsewhere = any(name in experiment.tasks(scale) for scale in PRESETS)
            more = f" (at scale {request.scale})" if elsewhere else ""
            raise Refused(f"--tasks must be among {', '.join(allowed)}{more}; got {name!r}.")
    if not given:
        raise Refused(f"--tasks must be among {', '.join(allowed)}; got {request.tasks!r}.")
    return given


def check_data(jobs: list[Job], data_root: Path | None) -> None:
    """DataError where a set is not there: before hours have gone by."""
    seen: set[tuple[str, str | None]] = set()
    for job in jobs:
        place = data_of(job.config)
        if place is not None and place not in seen:
            seen.add(place)
            known = list_splits(place[0], config=place[1], data_root=data_root)
            if known and "train" not in known:
                raise DataError(
                    f"{' '.join(filter(None, place))} has no split 'train' here (it has {', '.join(known)}); another "
                    f"set is named with --set {job.config.task}.data.name=..."
                )


def data_of(config: Config) -> tuple[str, str | None] | None:
    """(name, configuration) of the set that a run reads, None where it is generated."""
    data = config.data
    if data.name == "generated":
        return None
    if config.task == "glue":
        task = list_tasks()[data.subset]
        return task.name, task.config
    return data.name, (data.subset or None) if config.task in ("mlm", "image", "needles") else None


def plan(
    experiment: Experiment, asked: Asked, jobs: list[Job], costs: dict[str, float], unavailable: dict[str, str],
    at_once: int = 1,
) -> str:  # fmt: skip
    counts = dict.fromkeys(("finished", "failed", "begun", "new"), 0)
    for job in jobs:
        counts[state(asked.runs / job.folder)] += 1
    there = ", ".join(f"{count} {word}" for word, count in counts.items() if count and word != "new")
    usual = f" (a whole one takes about {experiment.tiny} on two quiet cores)" if asked.scale == "tiny" else ""
    together = f" one by one, and less with {at_once} at once" if at_once > 1 else ""
    lines = [
        f"{experiment.name}, scale {asked.scale}: {len(jobs)} runs of {len(asked.attentions)} attentions on "
        f"{asked.device}" + (f"; {there}" if there else "") + f". To do: {len(costs)}, very roughly "
        f"{minutes(sum(costs.values()))}{together}{usual}." if costs else
        f"{experiment.name}, scale {asked.scale}: all {len(jobs)} runs are there ({there})."
    ]  # fmt: skip
    lines += [f"Left out: {why}." for why in unavailable.values()]
    return "\n".join(lines)


# Running and writing


def run(
    experiment: Experiment, request: Request, asked: Asked, jobs: list[Job], costs: dict[str, float],
    unavailable: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    transformers.utils.logging.set_verbosity_error()  # a new head on a trained model is meant
    about = provenance(asked.first, torch.device(asked.device)) | {"seeds": list(asked.numbers)}
    result: dict[str, Any] = {}

    def collect() -> None:
        nonlocal result
        result = assemble(experiment, asked, asked.runs, unavailable) | {"provenance": about}
        write_data(experiment, result, request.out)

    if not costs:
        collect()
        return result
    with RunBars(costs) as bars:

        def end(job: Job, now: str) -> None:
            bars.end(job)
            if job.folder in costs:
                collect()
                if now == "finished" and experiment.paper is not None:
                    bars.say(render.row_line(result, label(job.config.to_dict())))

        hooks = Hooks(say=bars.say, begin=bars.begin, step=bars.step, end=end)
        try:
            go = drive if request.at_once == 1 else functools.partial(drive_at_once, at_once=request.at_once)
            go(
                jobs, asked.runs, device=asked.device, data_root=request.data_root, hooks=hooks, retry=request.retry,
                keep=request.keep,
            )  # fmt: skip
        except KeyboardInterrupt:
            collect()
            bars.progress.stop()
            typer.echo(
                f"Stopped. The same command goes on where it was; what there is so far is in {request.out}.", err=True
            )
            raise typer.Exit(130) from None
        except OSError as error:
            bars.progress.stop()
            typer.echo(
                f"{error.strerror or error}: the runs in {asked.runs} stop here; the same command goes on.", err=True
            )
            raise typer.Exit(1) from None
    collect()
    return result


def assemble(experiment: Experiment, asked: Asked, runs: Path, unavailable: dict[str, str]) -> dict[str, Any]:
    make = curves.assemble if experiment.paper is None else tables.assemble
    make = lengths.assemble if experiment.name == LENGTHS else make
    return make(experiment, asked, find(runs), unavailable)


def from_folder(
    experiment: Experiment, asked: Asked, source: Path, unavailable: dict[str, str]
) -> tuple[dict[str, Any], Path]:
    """From the runs in a folder, or where there are none from the result that somebody made of them there."""
    stored = read(source / f"{experiment.name}.json")
    if not find(source):
        if stored is None:
            raise Refused(f"--from: there are no runs in {source}, and no {experiment.name}.json.")
        return stored, source
    result = assemble(experiment, asked, source, unavailable)
    if not result["rows"]:
        raise Refused(
            f"--from: none of the runs in {source} is one for {experiment.name} at scale {asked.scale} with "
            f"{', '.join(asked.attentions)}."
        )
    about = provenance(asked.first, torch.device("cpu"))
    return result | {"provenance": about | {"seeds": sorted({run["seed"] for run in result["runs"]})}}, source


def write_data(experiment: Experiment, result: dict[str, Any], out: Path) -> list[Path]:
    if experiment.paper is not None:
        return render.write(result, out)
    paths = [out / f"{experiment.name}.json", out / f"{experiment.name}.csv"]
    write_json(paths[0], result)
    write_text(paths[1], write_csv(result["rows"]))
    if experiment.name == LENGTHS:
        paths.append(out / f"{experiment.name}.md")
        write_text(paths[-1], lengths.markdown(result))
    return paths


def publish(experiment: Experiment, request: Request, result: dict[str, Any], where: Path) -> None:
    paths = write_data(experiment, result, request.out)
    if experiment.paper is None and request.charts:
        from lln.lab.paper.run_charts import charts_of

        for end, text in charts_of(result).items():
            paths.append(request.out / f"{experiment.name}{end}.svg")
            write_text(paths[-1], text)
    if request.as_json:
        typer.echo(json.dumps(result, indent=1))
    elif experiment.paper is not None:
        typer.echo(render.markdown(result))
    elif experiment.name == LENGTHS:
        typer.echo(lengths.markdown(result))
    else:
        show_verdicts(f"{experiment.name}: {experiment.title}", result["verdicts"])
        for text in (*result["differs"], *result["missing"]):
            typer.echo(f"\n{text}")
        for failed in result["failed"]:
            typer.echo(f"\n{failed['folder']} failed: {failed['sentence']}")
    typer.echo(f"Written: {', '.join(map(str, paths))}; runs: {where}.", err=True)
