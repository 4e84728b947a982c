"""Which runs the paper's tables and figures need, and our own (matching, variants, lengths), at each scale."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import lln.hf
from lln.files import read_data
from lln.lab.core.ranges import make
from lln.lab.data.needles import Planting
from lln.lab.paper.jobs import DEIT, Job, configure, name_folder
from lln.lab.paper.published import TABLES
from lln.lab.recipes.needles import lengthen, set_length
from lln.lab.train.config import LEARNED
from lln.lab.train.models import check_attention
from lln.lab.train.run import MODEL
from lln.peers import mechanisms
from lln.rules import suggest

ALPHAS = (1, 1.5, 2, 3, 4)  # alpha = beta of Fig. 10a
SCALED = (2, 4)  # of Fig. 10b
FLOAT16 = "float16"
WATCHED = ("image", "mlm")  # whose alpha and beta Fig. 9 can show; the paper's first
RATES = (0.5, 1.0, 2.0)  # of the recipe's learning rate, which attentions are tried at in `pretraining`
LENGTHS = {"tiny": (128, 512), "mini": (256, 512, 2048, 8192, 32768)}  # of needles in text


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is to be run, with all defaults filled in."""

    scale: str
    attentions: tuple[str, ...]
    tasks: tuple[str, ...]  # of GLUE or LRA; of Fig. 9 which models
    seeds: int
    tunings: int  # fine-tunings of each pre-trained model
    changes: dict[str, str]
    runs: Path
    device: str
    first: int = 0  # seed
    rates: tuple[float, ...] = RATES  # of `pretraining`
    best: dict[str, float] = dataclasses.field(default_factory=dict)  # the rate of attentions whose grid is finished
    controls: bool = False  # fine-tunings without a pre-training beside those with one
    lengths: tuple[int, ...] = ()  # of `lengths`; none: those of the scale

    @property
    def numbers(self) -> range:
        """The seeds."""
        return range(self.first, self.first + self.seeds)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


def make_job(
    asked: Asked, task: str, attention: str, seed: int, name: str | None = None, *, preset: str | None = None,
    precision: str | None = None, before: Job | None = None, untrained: bool = False,
) -> Job:  # fmt: skip
    """before: the pre-training whose model it starts from; untrained: whose sizes and tokenizer alone."""
    start = None if before is None else asked.runs / before.folder / MODEL
    config = configure(
        task, preset or asked.scale, attention, seed, asked.changes, name=name, start=start, precision=precision
    )
    if untrained:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, untrained=True))
    pretraining, after = (None, None) if before is None else (before.config.seed, before.folder)
    return Job(name_folder(config, name, pretraining), config, after)


def list_tuned(asked: Asked) -> list[Job]:
    """Seed by seed and attention by attention, so that whole rows are there soon. Beside the fine-tunings of each task
    a control with new weights: what the task teaches by itself."""
    found = []
    for seed, attention in itertools.product(asked.numbers, asked.attentions):
        before = make_job(asked, "mlm", attention, seed)
        tunings = itertools.product(range(asked.tunings), asked.tasks)
        found.append(before)
        found += [make_job(asked, "glue", attention, number, task, before=before) for number, task in tunings]
        controls = asked.tasks if asked.controls else ()
        found += [make_job(asked, "glue", attention, seed, task, before=before, untrained=True) for task in controls]
    return found


def list_single(asked: Asked, task: str) -> list[Job]:
    names = asked.tasks if task == "lra" else (None,)
    return [
        make_job(asked, task, attention, seed, name)
        for seed, attention, name in itertools.product(asked.numbers, asked.attentions, names)
    ]


def list_fig8(asked: Asked) -> list[Job]:
    """The loss scale of Fig. 8b exists under float16, which needs a GPU."""
    found = list_single(asked, "mlm")
    if asked.on_gpu and any(job.config.precision != FLOAT16 for job in found):
        found += [make_job(asked, "mlm", name, asked.first, precision=FLOAT16) for name in asked.attentions]
    return found


def find_watched(asked: Asked) -> tuple[str, ...]:
    """Models of Fig. 9: vision transformers, as in the paper, or language models."""
    return tuple(task for task in asked.tasks if task in WATCHED) or WATCHED[:1]


def list_fig10(asked: Asked) -> list[Job]:
    plans: list[tuple[int, tuple[float, ...], dict[str, Any]]] = [(seed, ALPHAS, {}) for seed in asked.numbers]
    if asked.on_gpu:
        how = {"preset": DEIT if asked.scale == "paper" else None, "precision": FLOAT16}
        plans.append((asked.first, SCALED, how))
    found = [
        make_job(asked, "image", attention + fixed, seed, **how)
        for seed, alphas, how in plans
        for attention in asked.attentions
        for fixed in ("", *(f":alpha={alpha:g}" for alpha in alphas))
    ]
    return list({job.folder: job for job in found}.values())  # with precision=float16 they are among the first


def list_lengths(asked: Asked) -> list[Job]:
    """From short to long: a model goes on from the one that learned the task at the length before."""
    found, lengths = [], asked.lengths or LENGTHS[asked.scale]
    usual = configure("needles", asked.scale, "softmax", 0, asked.changes)
    for length in lengths:
        make(Planting, usual.data.options, "needles").check(length)
    if usual.model.positions == LEARNED and len(lengths) > 1:
        raise ValueError(
            "model.positions: a model that goes on with longer sequences has not learned their positions; use none or "
            "sinusoidal, or one of the lengths alone."
        )
    for seed in asked.numbers:
        before: dict[str, Job] = {}
        for length, attention in itertools.product(lengths, asked.attentions):
            config, last = configure("needles", asked.scale, attention, seed, asked.changes), before.get(attention)
            name, now = f"needles-{length}", set_length(config, length)
            if last is not None:
                name += f"-after-{last.config.data.length}"
                now = lengthen(config, length, str(asked.runs / last.folder / MODEL))
            folder = name_folder(config, None).replace("needles", name, 1)
            before[attention] = Job(folder, now, None if last is None else last.folder)
            found.append(before[attention])
    return found


def list_pretraining(asked: Asked, once: Sequence[str]) -> list[Job]:
    """Every rate with the first seed; the other seeds with the best, once it is known, which of one rate it is at once.
    once: attentions that get the first seed alone."""
    found, alone = [], len(asked.rates) == 1
    for seed, attention in itertools.product(asked.numbers, asked.attentions):
        usual = make_job(asked, "mlm", attention, seed).config
        rates = [factor * usual.optimisation.rate for factor in asked.rates]
        if seed != asked.first and attention in once:
            rates = []
        elif seed != asked.first and not alone:
            rates = [asked.best[attention]] if attention in asked.best else []
        for rate in rates:
            config = dataclasses.replace(usual, optimisation=dataclasses.replace(usual.optimisation, rate=rate))
            found.append(Job(f"{name_folder(config, None)}-rate{rate:g}", config))
    return found


OWN_JOBS: dict[str, Callable[[Asked], list[Job]]] = {
    "fig8": list_fig8,
    "fig9": lambda asked: [job for task in find_watched(asked) for job in list_single(asked, task)],
    "fig10": list_fig10,
    "lengths": list_lengths,
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table, which has columns, or a figure; see data/experiments.json. What is asked for where nobody says it is
    less at scale tiny, which has two embedded tasks, one of sentences and one of pairs."""

    name: str
    title: str
    task: str  # the one that counts
    tiny: str  # how long it takes at that scale on two cores
    attentions: list[str]
    tasks: Sequence[str] = ()
    columns: Sequence[str] = ()
    at_tiny: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    once: Sequence[str] = ()  # attentions of `pretraining` that one seed is enough for

    def choose(self, what: str, scale: str) -> tuple[str, ...]:
        """Its attentions or tasks at a scale."""
        return tuple(self.at_tiny.get(what, getattr(self, what)) if scale == "tiny" else getattr(self, what))

    def jobs(self, asked: Asked) -> list[Job]:
        if self.name == "pretraining":
            return list_pretraining(asked, self.once)
        usual = list_tuned if self.task == "glue" else functools.partial(list_single, task=self.task)
        return OWN_JOBS.get(self.name, usual)(asked)


EXPERIMENTS = {
    name: Experiment(name, **{"columns": TABLES[name]["columns"] if name in TABLES else (), **held})
    for name, held in read_data("experiments").items()
}


def find_refusal(task: str, scale: str, attention: str) -> str | None:
    """Why models cannot run this attention, or None."""
    config = configure(task, scale, attention, 0, {})
    name = config.attention.name
    if name not in ("softmax", *lln.hf.IMPLEMENTATIONS, *mechanisms()):
        return f"{attention} is no mechanism of lln.mechanisms().{suggest(name, mechanisms())}"
    try:
        check_attention(config)
    except (ValueError, TypeError) as error:
        return f"{attention}: {error}".rstrip(".")
    return None
