"""Which runs the paper's tables and figures need, and our own (matching, variants, lengths), at each scale."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lln.hf
from lln.lab.data.needles import Planting
from lln.lab.paper import published
from lln.lab.paper.jobs import DEIT, Job, configure, name_folder
from lln.lab.recipes import NAMES
from lln.lab.recipes.needles import lengthen, set_length
from lln.lab.train.config import LEARNED
from lln.lab.train.models import check_attention
from lln.lab.train.run import MODEL
from lln.peers import mechanisms

ALPHAS = (1, 1.5, 2, 3, 4)  # alpha = beta of Fig. 10a
SCALED = (2, 4)  # of Fig. 10b
FLOAT16 = "float16"
WATCHED = ("image", "mlm")  # whose alpha and beta Fig. 9 can show; the paper's first
LENGTHS = {"tiny": (128, 512), "mini": (256, 512, 2048, 8192, 32768)}  # of needles in text

# Table 1: the paper's, and what else tells apart where accuracy comes from.
ALL1 = (
    "softmax", "lln", "lln_diag", "block_diagonal", "elu", "elu_diag", "performer", "cosformer", "nystromformer",
    "hedgehog", "reformer", "longformer", "transformer_ls", "transnormer_t1", "transnormer_t2", "flash", "tnn",
)  # fmt: skip
FEW1 = ("softmax", "lln", "lln_diag", "elu")

# Ours: how alpha and beta are found, and what else may help LLN.
MATCHED = (
    "", ":matching=variance", ":matching=entropy", *(f":alpha={alpha:g}" for alpha in ALPHAS), ":statistics=sample",
    ":matching=entropy:statistics=sample",
)  # fmt: skip
MATCHINGS = ("softmax", *(name + how for name in ("lln_diag", "lln") for how in MATCHED))
VARIANTS = (
    "softmax", "softmax:convolution=5", "lln", "lln:alpha=2:learnable=head", "lln:alpha=2:learnable=channel",
    "lln:feature_map=linear:statistics=fixed", "lln:convolution=5", "lln_diag", "lln_diag:alpha=2:learnable=channel",
    "lln_diag:convolution=5", "lln_diag:overlap=true", "block_diagonal",
)  # fmt: skip


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
    lengths: tuple[int, ...] = ()  # of `lengths`; none: those of the scale

    @property
    def numbers(self) -> range:
        """The seeds."""
        return range(self.first, self.first + self.seeds)

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


@dataclasses.dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    task: str  # the one that counts
    attentions: Callable[[str], tuple[str, ...]]  # of a scale
    jobs: Callable[[Asked], list[Job]]
    tiny: str  # how long it takes at that scale on two cores
    tasks: Callable[[str], tuple[str, ...]] = lambda scale: ()
    paper: published.Numbers | None = None  # of tables; of our own none are published
    columns: tuple[str, ...] = ()


def make_job(
    asked: Asked, task: str, attention: str, seed: int, name: str | None = None, *, preset: str | None = None,
    precision: str | None = None, before: Job | None = None,
) -> Job:  # fmt: skip
    """before: the pre-training whose model it starts from."""
    start = None if before is None else asked.runs / before.folder / MODEL
    config = configure(
        task, preset or asked.scale, attention, seed, asked.changes, name=name, start=start, precision=precision
    )
    pretraining, after = (None, None) if before is None else (before.config.seed, before.folder)
    return Job(name_folder(config, name, pretraining), config, after)


def list_tuned(asked: Asked) -> list[Job]:
    """Seed by seed and attention by attention, so that whole rows are there soon."""
    found = []
    for seed, attention in itertools.product(asked.numbers, asked.attentions):
        before = make_job(asked, "mlm", attention, seed)
        tunings = itertools.product(range(asked.tunings), asked.tasks)
        found.append(before)
        found += [make_job(asked, "glue", attention, number, task, before=before) for number, task in tunings]
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
        Planting.from_options(usual.data.options).check(length)
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


def always(*names: str) -> Callable[[str], tuple[str, ...]]:
    """The same at every scale."""
    return lambda scale: names


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment(
            "table1", "accuracy on GLUE after MLM pre-training (%)", "glue",
            lambda scale: FEW1 if scale == "tiny" else ALL1, list_tuned, "10 min",
            # Tiny has two embedded tasks, one of sentences and one of pairs.
            lambda scale: ("sst2", "qqp") if scale == "tiny" else tuple(NAMES["glue"]),
            published.TABLE1, published.COLUMNS1,
        ),
        Experiment(
            "table3", "accuracy of a vision transformer on Dogs vs Cats (%)", "image",
            always("softmax", "lln_diag", "linformer"), functools.partial(list_single, task="image"), "2 min",
            paper=published.TABLE3, columns=published.COLUMNS3,
        ),
        Experiment(
            "table5", "accuracy on Long Range Arena (%)", "lra", always(*published.TABLE5),
            functools.partial(list_single, task="lra"), "20 min", always(*published.COLUMNS5[:-1]), published.TABLE5,
            published.COLUMNS5,
        ),
        Experiment(
            "fig1", "Temperature, entropy and spectral gap of every layer while a model trains", "mlm",
            always("softmax"), functools.partial(list_single, task="mlm"), "2 min",
        ),
        Experiment(
            "fig8", "Loss and loss scale of pre-training", "mlm", always("softmax", "lln", "lln_diag"), list_fig8,
            "6 min",
        ),
        Experiment(
            "fig9", "alpha and beta of every layer while a model trains", "image", always("lln"),
            lambda asked: [job for task in find_watched(asked) for job in list_single(asked, task)], "1 min",
            always(*WATCHED),
        ),
        Experiment(
            "fig10", "Accuracy and loss scale with fixed alpha = beta and with moment matching", "image", always("lln"),
            list_fig10, "3 min",
        ),
        Experiment(
            "matching", "Which matching and which statistics train best", "glue", always(*MATCHINGS), list_tuned,
            "15 min", always("sst2"), {}, ("sst2",),
        ),
        Experiment(
            "variants", "What helps LLN: learned alpha and beta, feature map, convolution, overlapping blocks", "glue",
            always(*VARIANTS), list_tuned, "10 min", always("sst2"), {}, ("sst2",),
        ),
        Experiment(
            "lengths", "Needles in text against length", "needles",
            always("softmax", "lln", "lln_diag", "block_diagonal"), list_lengths, "2 min",
        ),
    )
}  # fmt: skip


def find_refusal(task: str, scale: str, attention: str) -> str | None:
    """Why models cannot run this attention, or None."""
    config = configure(task, scale, attention, 0, {})
    name = config.attention.name
    if name not in ("softmax", *lln.hf.IMPLEMENTATIONS):
        known = name in mechanisms()
        reason = "cannot be the attention of a transformers model" if known else "is no mechanism of lln.mechanisms()"
        return f"{attention} {reason}"
    try:
        check_attention(config)
    except (ValueError, TypeError) as error:
        return f"{attention}: {error}".rstrip(".")
    return None
