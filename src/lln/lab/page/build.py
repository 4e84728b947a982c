"""The page of `lln report`: its parts are measured one after another, each stored when it is finished."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lln
from lln.files import write_json
from lln.lab.bench.calls import measure_lengths
from lln.lab.bench.kernel_plan import make_plan
from lln.lab.bench.kernel_times import measure as measure_kernels
from lln.lab.core.page import Result, Section, write_page
from lln.lab.core.progress import Progress
from lln.lab.page import distribution_section, explorer_section, kernels_section, lengths_section, moments_section
from lln.lab.page import training_section as training

PARTS = ("lengths", "kernels", "explorer", "distribution", "moments", "training")  # speed first
LENGTHS, QUICK_LENGTHS = (256, 512, 1024, 2048, 4096, 8192), (256, 512, 1024)
KERNEL_LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 65536]


@dataclasses.dataclass(frozen=True)
class Options:
    out: Path
    quick: bool = False
    seed: int = 0
    device: str = "cpu"
    lengths: tuple[int, ...] = LENGTHS
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Part:
    """settings: with another value of these, what is stored is no longer what is asked for. begun: where a measurement
    that was stopped goes on from."""

    name: str
    steps: int
    settings: dict[str, Any]
    measure: Callable[..., Result]  # takes progress=
    section: Callable[[Result], Section]
    begun: Path | None = None


# Measured on the CPU by a plan of their own: what the equations do, not what a device does.
ANALYSED: dict[str, Any] = {
    "distribution": distribution_section, "explorer": explorer_section, "moments": moments_section,
}  # fmt: skip


def make_part(name: str, options: Options) -> Part:
    seed, device, quick = options.seed, options.device, options.quick
    settings: dict[str, Any] = {"version": lln.__version__, "seed": seed}
    measure: Callable[..., Result]
    if name in ANALYSED:
        of = ANALYSED[name]
        plan = of.QUICK if quick else of.FULL
        measure = partial(of.measure, plan, seed=seed)
        return Part(name, plan.count_steps(), settings | asdict(plan), measure, of.make_section)
    settings["device"] = device
    if name == "training":
        plan = training.QUICK if quick else training.FULL
        # A run goes on only with the settings it was begun with, so each setting has a folder of its own.
        size = "quick" if quick else "full"
        runs = options.out / "runs" / f"{size}-seed{seed}-{device.replace(':', '')}-{lln.__version__}"
        measure = partial(training.measure, plan, seed=seed, device=device, runs=runs)
        steps = plan.steps * len(training.ATTENTIONS)
        return Part(name, steps, settings | asdict(plan), measure, training.make_section, begun=runs)
    where = torch.device(device)
    if name == "lengths":
        given: dict[str, Any] = {"lengths": options.lengths, "repeats": options.repeats}
        measure = partial(measure_lengths, **given, seed=seed, device=where)
        return Part(name, 2 * len(options.lengths), settings | given, measure, lengths_section.make_section)
    plan = make_plan(lengths=KERNEL_LENGTHS[:3] if quick else KERNEL_LENGTHS, quick=quick, device=where, seed=seed)
    measure = partial(measure_kernels, plan)
    return Part(name, plan.steps(), settings | {"quick": quick}, measure, kernels_section.make_section)


def read_stored(options: Options, one: Part) -> Result | None:
    """What an earlier run measured with the same settings."""
    try:
        found: Result = json.loads((options.out / f"{one.name}.json").read_text(encoding="utf-8"))
        kept = json.loads((options.out / "settings" / f"{one.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if kept == json.loads(json.dumps(one.settings)) else None


def make(options: Options, parts: Sequence[Part], step: Progress, *, again: bool = False) -> dict[str, Result]:
    """The results by name, measured or kept."""
    results: dict[str, Result] = {}
    for one in parts:
        found = None if again else read_stored(options, one)
        if found is None:
            if again and one.begun is not None and one.begun.exists():
                shutil.rmtree(one.begun)
            found = one.measure(progress=step)
            found = json.loads(json.dumps(found))  # as it will be read back
            write_json(options.out / f"{one.name}.json", found)
            write_json(options.out / "settings" / f"{one.name}.json", one.settings)
        results[one.name] = found
    return results


def write(options: Options, parts: Sequence[Part], results: dict[str, Result], left_out: Sequence[str]) -> Path:
    sections = [one.section(results[one.name]) for one in parts]
    # Of the times, where there are some: what else is measured takes one thread, and that would be said of them too.
    provenance = results.get("lengths", next(iter(results.values())))["provenance"]
    doubts = lengths_section.describe_doubts(results["lengths"]) if "lengths" in results else []
    return write_page(
        options.out, sections, provenance, summary=summarize(results), left_out=left_out, doubts=doubts,
        provisional=options.quick,
    )  # fmt: skip


def summarize(results: dict[str, Result]) -> list[str]:
    """What a reader in a hurry should know, as far as it was measured."""
    said = []
    if "lengths" in results:
        said += lengths_section.describe_crossovers(results["lengths"]["rows"])
    if "training" in results:
        ended = training.list_losses(results["training"])
        said.append(f"The short training run below ended at a loss of {ended}: too short a run to rank them.")
    return said
