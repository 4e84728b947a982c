"""A table or figure of training runs: what was asked for, understood or refused; what is left to run, and how long that
will take; what the runs say, and its files."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lln.files import read_json, write_result
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.errors import DataError, Refused
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import write_csv
from lln.lab.data.labelled import list_tasks
from lln.lab.data.sources import list_splits
from lln.lab.paper.analysis import tell_verdicts
from lln.lab.paper.experiments import EXPERIMENTS, Asked, Experiment, find_refusal
from lln.lab.paper.jobs import Job, check_jobs, configure, find_shape, find_state
from lln.lab.paper.needle_lengths import assemble_lengths, parse_lengths, write_lengths
from lln.lab.paper.rates import assemble_rates, list_known_rates, parse_rates
from lln.lab.paper.run_figures import assemble_figure
from lln.lab.paper.run_records import find_runs, find_stored_jobs, merge_runs, restore_runs
from lln.lab.paper.run_tables import assemble_table, write_table
from lln.lab.recipes import PRESETS
from lln.lab.train.config import Config

# Fitted to the tiny and mini recipes; an estimate is meant to tell minutes from hours.
REACHED = 0.3  # of the speed of a large matrix product
LAYER_SECONDS = 0.004  # of a step and layer, however small
MORE = 1.25  # evaluation, checkpoints, recording


def understand(
    name: str, *, scale: str, attentions: str | None, tasks: str | None, seeds: int, first: int, tunings: int | None,
    changes: dict[str, str], device: str | None, out: Path, controls: bool = True,
) -> Reproduction:  # fmt: skip
    """A request, as the command line gives it, with its defaults. Refused, in one sentence, for what cannot be; of the
    default attentions, those that cannot be run are left out."""
    experiment = EXPERIMENTS[name]
    task = "mlm" if experiment.task == "glue" else experiment.task
    unavailable: dict[str, str] = {}
    names: list[str] = []
    for attention in experiment.choose("attentions", scale) if attentions is None else split_names(attentions):
        if (why := find_refusal(task, scale, attention)) is None:
            names.append(configure(task, scale, attention, 0, {}).attention.label)  # whatever the order of options
        elif attentions is None:
            unavailable[attention] = why
        else:
            raise Refused(f"--attentions: {why}.")
    if not names:
        raise Refused(f"--attentions: there is none to run; got {attentions!r}.")
    lengths = parse_lengths(changes.get("lengths", "") if name == "lengths" else "")
    asked = Asked(
        scale=scale, attentions=tuple(dict.fromkeys(names)), tasks=choose_tasks(experiment, scale, tasks), seeds=seeds,
        tunings=tunings or (1 if scale == "tiny" else 3), runs=out / "runs", first=first, lengths=lengths,
        changes={key: value for key, value in changes.items() if (name, key) not in OF_EXPERIMENTS},
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"), controls=controls,
        rates=parse_rates(changes.get("rates", "") if name == "pretraining" else ""),
    )  # fmt: skip
    return Reproduction(experiment, asked, unavailable, out)


def split_names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def choose_tasks(experiment: Experiment, scale: str, tasks: str | None) -> tuple[str, ...]:
    allowed = experiment.choose("tasks", scale)
    if tasks is None:
        return allowed if experiment.columns else ()
    if not allowed:
        able = ", ".join(e.name for e in EXPERIMENTS.values() if e.tasks)
        raise Refused(f"--tasks goes with {able}, not with {experiment.name}.")
    given = split_names(tasks)
    unknown = [name for name in given if name not in allowed]
    if unknown or not given:
        elsewhere = unknown and any(unknown[0] in experiment.choose("tasks", other) for other in PRESETS)
        more = f" (at scale {scale})" if elsewhere else ""
        raise Refused(f"--tasks must be among {', '.join(allowed)}{more}; got {(unknown or [tasks])[0]!r}.")
    return tuple(given)


# What --set says of an experiment rather than of its runs.
OF_EXPERIMENTS = (("lengths", "lengths"), ("pretraining", "rates"))


class Workload(NamedTuple):
    """The jobs to run; of each job, also those that are stored, whether it is finished, stored, failed, begun or new;
    estimated seconds of those that are not finished."""

    jobs: list[Job]
    states: dict[str, str]
    costs: dict[str, float]


@dataclasses.dataclass
class Reproduction:
    """An experiment, what was asked of it, and what is to be done: `stored` is the result in the place of the new one,
    whose runs stand in for folders that are not there."""

    experiment: Experiment
    asked: Asked
    unavailable: dict[str, str]  # attentions that cannot be run, and why
    out: Path
    stored: dict[str, Any] | None = None

    def assemble(self, folder: Path) -> dict[str, Any]:
        """The result, as JSON, of the runs in a folder and of those that were stored."""
        kept, left = restore_runs(self.stored, self.asked.scale, self.asked.changes)
        given = self.experiment, self.asked, merge_runs(find_runs(folder), kept), self.unavailable
        if self.experiment.name == "lengths":
            result = assemble_lengths(*given)
        elif self.experiment.name == "pretraining":
            result = assemble_rates(*given)
        elif self.experiment.columns:
            result = assemble_table(*given)
        else:
            result = assemble_figure(*given, means=self.stored["rows"] if self.stored and kept else [])
        result["missing" if "missing" in result else "remarks"] += left
        return result

    def load(self, source: Path) -> dict[str, Any]:
        """From the runs in a folder and those that a result there holds; a result alone, or named itself, is taken as
        it is. Refused where there is none of these."""
        name, asked = self.experiment.name, self.asked
        self.stored = read_json(source if source.is_file() else source / f"{name}.json", dict)
        if source.is_file() or not find_runs(source):
            if self.stored is None:
                raise Refused(f"--from: there are no runs in {source}, and no {name}.json.")
            if name not in (self.stored.get("table"), self.stored.get("figure")):
                raise Refused(f"--from: {source} holds another result than {name}.")
            return self.stored
        result = self.assemble(source)
        if not result["rows"]:
            raise Refused(
                f"--from: none of the runs in {source} is one for {name} at scale {asked.scale} with "
                f"{', '.join(asked.attentions)}."
            )
        about = provenance(asked.first, torch.device("cpu"))
        return result | {"provenance": about | {"seeds": sorted({run["seed"] for run in result["runs"]})}}

    def plan(self, *, retry: bool) -> Workload:
        """What is to be run: what neither a folder nor the stored result holds. ValueError where folders hold other
        runs."""
        self.stored = read_json(self.out / f"{self.experiment.name}.json", dict)
        runs = self.asked.runs
        stored = restore_runs(self.stored, self.asked.scale, self.asked.changes)[0]
        asked = self.asked
        if self.experiment.name == "pretraining":
            there = merge_runs(find_runs(runs) if runs.is_dir() else [], stored)
            asked = dataclasses.replace(asked, best=list_known_rates(asked, there))
        jobs = self.experiment.jobs(asked)
        check_jobs(jobs, runs)
        kept = find_stored_jobs(jobs, stored, runs)
        states = {job.folder: "stored" if job.folder in kept else find_state(runs / job.folder) for job in jobs}
        to_do = [job for job in jobs if job.folder not in kept]
        return Workload(to_do, states, estimate_jobs(to_do, runs, self.asked.device, retry=retry))

    def describe(self, plan: Workload, at_once: int) -> str:
        """How many runs there are, and how long they will take."""
        states, words = list(plan.states.values()), ("finished", "stored", "failed", "begun")
        there = ", ".join(f"{states.count(word)} {word}" for word in words if word in states)
        facts = {"runs": len(states), "there": there, "costs": plan.costs, "at_once": at_once, "asked": self.asked}
        facts |= {"name": self.experiment.name, "tiny": self.experiment.tiny, "unavailable": self.unavailable}
        return "\n".join(write_paragraphs("reproduction.txt", "plan", **facts))

    def collect(self) -> dict[str, Any]:
        """What there is so far, also written down."""
        about = provenance(self.asked.first, torch.device(self.asked.device)) | {"seeds": list(self.asked.numbers)}
        result = self.assemble(self.asked.runs) | {"provenance": about}
        self.write(result)
        return result

    def write(self, result: dict[str, Any], *, charts: bool = False) -> list[Path]:
        """NAME.json, and NAME.md or NAME.csv or both; of figures charts. Returns where they are."""
        name, texts = self.experiment.name, {}
        if not self.experiment.columns:
            texts[".csv"] = write_csv(result["rows"])
        if self.experiment.columns or name == "lengths":
            texts[".md"] = self.tell(result)
        if not self.experiment.columns and charts:
            from lln.lab.paper.result_charts import draw_figure

            texts |= {f"{end}.svg": text for end, text in draw_figure(result).items()}
        return write_result(self.out, name, result, texts)

    def tell(self, result: dict[str, Any]) -> str:
        """The result for the reader of a terminal."""
        if self.experiment.name == "lengths":
            return write_lengths(result)
        if self.experiment.columns:
            return write_table(result)
        lines = [tell_verdicts(f"{self.experiment.name}: {self.experiment.title}", result["verdicts"])]
        lines += [f"\n{text}" for text in (*result["differs"], *result["missing"])]
        return "\n".join([*lines, *(f"\n{f['folder']} failed: {f['sentence']}" for f in result["failed"])])


def check_data(jobs: list[Job], data_root: Path | None) -> None:
    """DataError where a set is not there: before hours have gone by."""
    places: dict[tuple[str, str | None], str] = {}
    for config in (job.config for job in jobs if job.config.data.name != "generated"):
        name, part = config.data.name, config.data.subset or None
        if config.task == "glue":
            task = list_tasks()[config.data.subset]
            name, part = task.name, task.config
        places.setdefault((name, None if config.task == "lra" else part), config.task)
    for (name, part), used in places.items():
        known = list_splits(name, config=part, data_root=data_root)
        if known and "train" not in known:
            raise DataError(
                f"{' '.join(filter(None, (name, part)))} has no split 'train' here (it has {', '.join(known)}); "
                f"another set is named with --set {used}.data.name=..."
            )


# How long runs will roughly take: known from runs like them, else from counted operations.


def estimate_jobs(jobs: list[Job], runs: Path, device: str, *, retry: bool = False) -> dict[str, float]:
    """Seconds of each job that is not finished, by its folder."""
    known = find_runs(runs) if runs.is_dir() else []
    found = {}
    for job in jobs:
        if find_state(runs / job.folder) in (("finished",) if retry else ("finished", "failed")):
            continue
        shape = find_shape(job.config.to_dict())
        same = [run for run in known if run.result is not None and find_shape(run.config) == shape]
        mine = [run for run in same if run.facts["attention"] == job.config.attention.name]
        times = [seconds for run in (mine or same) if (seconds := run.cost["seconds"]) is not None]
        found[job.folder] = sum(times) / len(times) if times else count_seconds(job.config, device)
    return found


def count_seconds(config: Config, device: str) -> float:
    model, o = config.model, config.optimisation
    length = config.data.length
    if config.task == "image":
        length = (length // model.patch) ** 2 + 1
    elif config.task == "glue":
        length //= 2  # batches are as long as their longest example
    tokens = o.batch * length * (2 if config.data.subset == "retrieval" else 1)
    weights = model.layers * (4 * model.width**2 + 2 * model.width * model.inner)
    if config.task == "mlm":
        weights += model.width * config.data.vocabulary
    seen = length if config.attention.name == "softmax" else model.width // model.heads
    operations = 6 * tokens * (weights + 2 * model.layers * model.width * seen)
    least = model.layers * o.accumulation * LAYER_SECONDS
    return MORE * o.steps * (least + operations / (REACHED * measure_speed(device, config.precision)))


@functools.cache
def measure_speed(device: str, precision: str) -> float:
    """Operations a second of a matrix product."""
    where = torch.device(device)
    size = 4096 if where.type == "cuda" else 512
    a = torch.randn(size, size, device=where, dtype=getattr(torch, precision) if where.type == "cuda" else None)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
