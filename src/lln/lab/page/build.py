"""The page of `lln report`: its parts are measured one after another, each stored when it is finished."""

from __future__ import annotations

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
from lln.lab.bench.kernel_plan import make_plan
from lln.lab.bench.kernel_times import measure as measure_kernels
from lln.lab.bench.length_times import measure as measure_lengths
from lln.lab.core.page import Section, write_page
from lln.lab.page import (
    distribution_section as distribution,
)
from lln.lab.page import (
    explorer_section as explorer,
)
from lln.lab.page import (
    kernels_section as kernels,
)
from lln.lab.page import (
    lengths_section as lengths,
)
from lln.lab.page import (
    moments_section as moments,
)
from lln.lab.page import (
    training_section as training,
)

Progress = Callable[[str], None]
PARTS = ("distribution", "explorer", "moments", "training", "lengths", "kernels")  # in the order of the story
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
    measure: Callable[..., dict[str, Any]]  # takes progress=
    section: Callable[[dict[str, Any]], Section]
    begun: Path | None = None


def part(name: str, options: Options) -> Part:
    seed, device, quick = options.seed, options.device, options.quick
    settings: dict[str, Any] = {"version": lln.__version__, "seed": seed}
    if name == "distribution":
        d = distribution.QUICK if quick else distribution.Plan()
        return Part(
            name, d.seeds, settings | asdict(d), partial(distribution.measure, d, seed=seed), distribution.section
        )
    if name == "explorer":
        e = explorer.QUICK if quick else explorer.Plan()
        return Part(
            name, explorer.steps(e), settings | asdict(e), partial(explorer.measure, e, seed=seed), explorer.section
        )
    if name == "moments":
        m = moments.QUICK if quick else moments.Plan()
        return Part(name, m.seeds, settings | asdict(m), partial(moments.measure, m, seed=seed), moments.section)
    settings["device"] = device
    if name == "training":
        t = training.QUICK if quick else training.Plan()
        # A run goes on only with the settings it was begun with, so each setting has a folder of its own.
        size = "quick" if quick else "full"
        runs = options.out / "runs" / f"{size}-seed{seed}-{device.replace(':', '')}-{lln.__version__}"
        measure = partial(training.measure, t, seed=seed, device=device, runs=runs)
        steps = t.steps * len(training.ATTENTIONS)
        return Part(name, steps, settings | asdict(t), measure, training.section, begun=runs)
    where = torch.device(device)
    if name == "lengths":
        given = {"lengths": options.lengths, "repeats": options.repeats}
        measure = partial(measure_lengths, **given, seed=seed, device=where)  # type: ignore[arg-type]
        return Part(name, 2 * len(options.lengths), settings | given, measure, lengths.section)
    plan = make_plan(lengths=KERNEL_LENGTHS[:3] if quick else KERNEL_LENGTHS, quick=quick, device=where, seed=seed)
    measure = partial(measure_kernels, plan, store=lambda found: None)
    return Part(name, plan.steps(), settings | {"quick": quick}, measure, kernels.section)


def stored(options: Options, one: Part) -> dict[str, Any] | None:
    """What an earlier run measured with the same settings."""
    try:
        found: dict[str, Any] = json.loads((options.out / f"{one.name}.json").read_text(encoding="utf-8"))
        kept = json.loads((options.out / "settings" / f"{one.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if kept == json.loads(json.dumps(one.settings)) else None


def make(options: Options, parts: Sequence[Part], step: Progress, *, again: bool = False) -> dict[str, dict[str, Any]]:
    """The results by name, measured or kept."""
    results: dict[str, dict[str, Any]] = {}
    for one in parts:
        found = None if again else stored(options, one)
        if found is None:
            if again and one.begun is not None and one.begun.exists():
                shutil.rmtree(one.begun)
            found = one.measure(progress=step)
            found = json.loads(json.dumps(found))  # as it will be read back
            write_json(options.out / f"{one.name}.json", found)
            write_json(options.out / "settings" / f"{one.name}.json", one.settings)
        results[one.name] = found
    return results


def write(options: Options, parts: Sequence[Part], results: dict[str, dict[str, Any]], left_out: Sequence[str]) -> Path:
    sections = [one.section(results[one.name]) for one in parts]
    # Of the times, where there are some: what else is measured takes one thread, and that would be said of them too.
    provenance = results.get("lengths", next(iter(results.values())))["provenance"]
    return write_page(options.out, sections, provenance, summary=summary(results), left_out=left_out)


def summary(results: dict[str, dict[str, Any]]) -> list[str]:
    """What a reader in a hurry should know, as far as it was measured."""
    said = []
    if "lengths" in results:
        said += lengths.crossovers(results["lengths"]["rows"])
    if "training" in results:
        found = results["training"]["attentions"]
        ended = ", ".join(f"{x['loss']:.2f} with {name}" for name, x in found.items())
        said.append(f"The short training run below ended at a loss of {ended}: too short a run to rank them.")
    return said
