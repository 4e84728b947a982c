"""A table or figure of training runs, from the runs that exist to its files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from lln.files import write_result
from lln.lab.core.errors import Refused
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import write_csv
from lln.lab.paper.analysis import tell_verdicts
from lln.lab.paper.estimate import estimate_jobs, show_duration
from lln.lab.paper.experiments import Asked, Experiment
from lln.lab.paper.jobs import Job, check_jobs, find_state
from lln.lab.paper.needle_lengths import assemble_lengths, write_lengths
from lln.lab.paper.run_figures import assemble_figure
from lln.lab.paper.run_records import find_runs, find_stored_jobs, merge_runs, read_json, restore_runs
from lln.lab.paper.run_tables import assemble_table
from lln.lab.paper.run_tables_text import write_markdown


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
        elif self.experiment.paper is not None:
            result = assemble_table(*given)
        else:
            result = assemble_figure(*given, means=self.stored["rows"] if self.stored and kept else [])
        result["missing" if "missing" in result else "remarks"] += left
        return result

    def load(self, source: Path) -> dict[str, Any]:
        """From the runs in a folder and those that a result there holds; a result alone, or named itself, is taken as
        it is. Refused where there is none of these."""
        name, asked = self.experiment.name, self.asked
        self.stored = read_json(source if source.is_file() else source / f"{name}.json")
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
        self.stored = read_json(self.out / f"{self.experiment.name}.json")
        jobs, runs = self.experiment.jobs(self.asked), self.asked.runs
        check_jobs(jobs, runs)
        kept = find_stored_jobs(jobs, restore_runs(self.stored, self.asked.scale, self.asked.changes)[0], runs)
        states = {job.folder: "stored" if job.folder in kept else find_state(runs / job.folder) for job in jobs}
        to_do = [job for job in jobs if job.folder not in kept]
        return Workload(to_do, states, estimate_jobs(to_do, runs, self.asked.device, retry=retry))

    def describe(self, plan: Workload, at_once: int) -> str:
        """How many runs there are, and how long they will take."""
        asked, states, costs = self.asked, list(plan.states.values()), plan.costs
        words = ("finished", "stored", "failed", "begun")
        there = ", ".join(f"{states.count(word)} {word}" for word in words if word in states)
        usual = f" (a whole one takes about {self.experiment.tiny} on two quiet cores)" if asked.scale == "tiny" else ""
        together = f" one by one, and less with {at_once} at once" if at_once > 1 else ""
        text = f"all {len(states)} runs are there ({there})."
        if costs:
            text = (
                f"{len(states)} runs of {len(asked.attentions)} attentions on {asked.device}"
                + (f"; {there}" if there else "")
                + f". To do: {len(costs)}, very roughly {show_duration(sum(costs.values()))}{together}{usual}."
            )
        return "\n".join(
            [
                f"{self.experiment.name}, scale {asked.scale}: {text}",
                *(f"Left out: {why}." for why in self.unavailable.values()),
            ]
        )

    def collect(self) -> dict[str, Any]:
        """What there is so far, also written down."""
        about = provenance(self.asked.first, torch.device(self.asked.device)) | {"seeds": list(self.asked.numbers)}
        result = self.assemble(self.asked.runs) | {"provenance": about}
        self.write(result)
        return result

    def write(self, result: dict[str, Any], *, charts: bool = False) -> list[Path]:
        """NAME.json, and NAME.md or NAME.csv or both; of figures charts. Returns where they are."""
        name, texts = self.experiment.name, {}
        if self.experiment.paper is None:
            texts[".csv"] = write_csv(result["rows"])
        if self.experiment.paper is not None or name == "lengths":
            texts[".md"] = self.tell(result)
        if self.experiment.paper is None and charts:
            from lln.lab.paper.result_charts import draw_figure

            texts |= {f"{end}.svg": text for end, text in draw_figure(result).items()}
        return write_result(self.out, name, result, texts)

    def tell(self, result: dict[str, Any]) -> str:
        """The result for the reader of a terminal."""
        if self.experiment.name == "lengths":
            return write_lengths(result)
        if self.experiment.paper is not None:
            return write_markdown(result)
        lines = [tell_verdicts(f"{self.experiment.name}: {self.experiment.title}", result["verdicts"])]
        lines += [f"\n{text}" for text in (*result["differs"], *result["missing"])]
        return "\n".join([*lines, *(f"\n{f['folder']} failed: {f['sentence']}" for f in result["failed"])])


@dataclasses.dataclass(frozen=True)
class Workload:
    """The jobs to run; of each job, also those that are stored, whether it is finished, stored, failed, begun or new;
    estimated seconds of those that are not finished."""

    jobs: list[Job]
    states: dict[str, str]
    costs: dict[str, float]
