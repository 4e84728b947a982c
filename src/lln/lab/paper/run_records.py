"""Runs, whoever made them, read back for tables and figures: from their folders, or from results that stored them."""

import collections
import dataclasses
import functools
import json
import os
import re
import statistics
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from lln.files import read_json, read_json_lines
from lln.lab.paper.jobs import DEIT, FAILED, Job, configure, find_recipe, find_shape, find_state
from lln.lab.paper.published import describe_differences
from lln.lab.paper.run_jobs import ATTEMPTS
from lln.lab.recipes import NAMES
from lln.lab.recipes.needles import lengthen, set_length
from lln.lab.train.config import TASKS, Attention
from lln.lab.train.earlier import as_before
from lln.lab.train.run import MODEL
from lln.lab.train.run_folder import CHECKPOINT, CONFIG, ENVIRONMENT, FACTS, METRICS, RESULT, list_differences

T = TypeVar("T")
STANDS_FOR = {"topics": "sst2", "pairs": "qqp"}  # the embedded tasks for those of GLUE
LOGGED = ("loss", "eval_loss", "loss_scale")
LAYERED = ("temperature", "entropy", "spectral_gap", "alpha", "beta")
RECORDED = ("metrics", "guess", "parameters", "notes", "provenance", "step_seconds")  # of a result
COSTS = ("seconds", "beside", "bytes", "starts", "all_times_known")

Curves = dict[str, dict[int, float]]  # by name and step


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run that was begun, with all that tables and figures take from it: stored, it needs its folder no more."""

    folder: str  # its path below where it was looked for
    config: dict[str, Any]
    facts: dict[str, Any]  # see lln.lab.train.run_folder.list_facts
    cost: dict[str, Any]  # see read_cost
    result: dict[str, Any] | None
    failure: dict[str, Any] | None
    path: Path | None = None  # None: stored
    stored_curves: Curves | None = None

    @property
    def attention(self) -> str:
        """As in --attentions."""
        return str(self.facts["label"])

    @property
    def seed(self) -> int:
        return int(self.facts["seed"])

    @property
    def column(self) -> str:
        """The task, and of GLUE and LRA which one."""
        task, name = self.facts["task"], self.facts["name"]
        return str(STANDS_FOR.get(name, name) if task == "glue" else name if task == "lra" else task)

    @property
    def pretraining(self) -> str | None:
        """Which pre-trained model it starts from: its seed where that is known."""
        start = self.facts["start"]
        return start and (start["folder"] if start["seed"] is None else f"seed {start['seed']}")

    @property
    def score(self) -> float | None:
        """Accuracy in %, of MNLI the matched one; of MLM the loss on held-out text. None: not finished."""
        if self.result is None:
            return None
        metrics = self.result["metrics"]
        if self.facts["task"] == "mlm":
            return float(metrics["loss"])
        return 100.0 * float(next(value for name, value in metrics.items() if name.endswith("accuracy")))

    @property
    def is_bare(self) -> bool:
        """Whether its curves are not known."""
        return self.path is None and self.stored_curves is None

    @functools.cached_property
    def curves(self) -> Curves:
        return (self.stored_curves or {}) if self.path is None else read_curves(self.path)

    def identify(self) -> str:
        """What two runs that are one and the same have in common, wherever they are."""
        facts = {name: self.facts[name] for name in ("label", "seed", "name", "length")}
        return json.dumps([facts, self.pretraining, find_shape(self.config)], sort_keys=True)

    def to_dict(self, quantities: Collection[str] = ()) -> dict[str, Any]:
        """For JSON, with the curves of these quantities."""
        result, config = self.result or {}, self.config
        if self.facts["start"] is not None:  # where this machine keeps it is nobody's business
            config = config | {"model": config["model"] | {"start": f"{self.facts['start']['folder']}/{MODEL}"}}
        found = {
            "folder": self.folder, "attention": self.attention, "column": self.column, "seed": self.seed,
            "pretraining": self.pretraining, "score": self.score,
            "how": {name: self.config[name] for name in ("precision", "graph", "compile")},
            **self.cost, **{name: result.get(name) for name in RECORDED}, "facts": self.facts, "config": config,
        }  # fmt: skip
        if self.failure is not None:
            found["failure"] = self.failure
        if quantities and not self.is_bare:
            found["curves"] = {n: points for n, points in self.curves.items() if n.partition(",")[0] in quantities}
        return found


def list_runs(runs: list[RunRecord], quantities: Collection[str] = ()) -> dict[str, Any]:
    """What a result stores of the runs it is made of."""
    return {
        "failed": [{"folder": r.folder, "sentence": r.failure["sentence"]} for r in runs if r.failure is not None],
        "unfinished": [r.folder for r in runs if r.result is None and r.failure is None],
        "runs": [run.to_dict(quantities) for run in runs if run.result is not None],
        "without_result": [run.to_dict(quantities) for run in runs if run.result is None],
    }


# From folders


def find_runs(folder: Path) -> list[RunRecord]:
    """Every run in this folder or below it, in the order of their names; not in checkpoints and models, which another
    process may be writing or removing."""
    found = {}
    for place, inside, files in os.walk(folder, followlinks=True):
        inside[:] = [name for name in inside if name != MODEL and not name.startswith(CHECKPOINT)]
        path = Path(place)
        config = read_json(path / CONFIG) if CONFIG in files else None
        if isinstance(config, dict) and {"task", "preset", "attention", "optimisation", "seed"} <= config.keys():
            result = read_json(path / RESULT)
            found[path / CONFIG] = RunRecord(
                folder=path.relative_to(folder).as_posix(), config=config, path=path, cost=read_cost(path, result),
                facts=read_json(path / FACTS) or derive_facts(config), result=result, failure=read_json(path / FAILED),
            )  # fmt: skip
    return [found[file] for file in sorted(found)]


def read_cost(path: Path, result: dict[str, Any] | None) -> dict[str, Any]:
    """Seconds over all times it was started, beside how many other runs at most, and bytes of the GPU; what a killed
    process took is not known."""
    times = read_json(path / ATTEMPTS) or []
    starts = len(read_json(path / ENVIRONMENT) or [])
    seconds = sum(t["seconds"] for t in times) if times else (result or {}).get("seconds")
    most = max((t["bytes"] for t in times if t["bytes"] is not None), default=None)
    beside = max((t.get("beside", 0) for t in times), default=0)
    return dict(zip(COSTS, (seconds, beside, most, starts, starts <= max(len(times), 1)), strict=True))


def read_curves(path: Path) -> Curves:
    """What a run logged, and of what it recorded of its layers the mean over heads: `alpha, layer 1`."""
    found: Curves = {}
    for line in read_json_lines(path / METRICS):
        values = {name: [line[name]] for name in LOGGED if name in line}
        heads = line.get("heads", [])
        for number, layer in enumerate(dict.fromkeys(head["layer"] for head in heads), 1):
            for name in LAYERED:
                values[f"{name}, layer {number}"] = [h.get(name) for h in heads if h["layer"] == layer]
        for name, given in values.items():
            if numbers := [x for x in given if isinstance(x, (int, float))]:
                found.setdefault(name, {})[line["step"]] = statistics.fmean(numbers)
    return found


def select_layers(curves: Curves, quantity: str) -> Curves:
    """{layer: {step: mean over its heads}}, layers by number from 1.

    >>> select_layers({"loss": {1: 4.0}, "alpha, layer 1": {1: 2.1}}, "alpha")
    {'layer 1': {1: 2.1}}
    """
    return {name.partition(", ")[2]: points for name, points in curves.items() if name.startswith(f"{quantity}, ")}


# From stored results


def restore_runs(
    result: dict[str, Any] | None, scale: str, changes: dict[str, str]
) -> tuple[list[RunRecord], list[str]]:
    """The runs that a result of this scale stored, and sentences about those whose settings are not known."""
    found, left = [], []
    held = [] if result is None or result["scale"] != scale else [*result["runs"], *result.get("without_result", ())]
    for run in held:
        config = run.get("config") or derive_config(run, result or {}, changes)
        if config is None:
            left.append(f"{run['folder']} is left out: stored without its settings, it seems to have others.")
            continue
        curves = run.get("curves")
        found.append(
            RunRecord(
                folder=run["folder"], config=config, facts=run.get("facts") or derive_facts(config),
                cost={name: run[name] for name in COSTS}, failure=run.get("failure"),
                result=None if run["score"] is None else {name: run[name] for name in RECORDED if name in run},
                stored_curves=curves and {n: {int(s): x for s, x in points.items()} for n, points in curves.items()},
            )
        )  # fmt: skip
    return found, left


def merge_runs(found: list[RunRecord], stored: list[RunRecord]) -> list[RunRecord]:
    """Each run once, from its folder where that has a result, in the order of their names."""
    merged = {run.identify(): run for run in sorted((*stored, *found), key=lambda run: run.result is not None)}
    return sorted(merged.values(), key=lambda run: Path(run.folder))


def find_stored_jobs(jobs: list[Job], stored: list[RunRecord], runs: Path) -> set[str]:
    """Folders of the jobs that need not be run, since a result holds what came of them: all that are stored as
    finished and have no folder, less those whose model another job has to start from."""
    by_folder = {job.folder: job for job in jobs}
    known = {run.identify() for run in stored if run.result is not None}

    def identify(job: Job) -> str:
        before = None if job.after is None else by_folder[job.after].config.seed
        c = job.config
        facts = {"label": c.attention.label, "seed": c.seed, "name": c.data.subset, "length": c.data.length}
        start = None if before is None else {"seed": before, "folder": job.after}
        return RunRecord(job.folder, c.to_dict(), facts | {"start": start}, {}, None, None).identify()

    there = {job.folder for job in jobs if find_state(runs / job.folder) == "new" and identify(job) in known}
    while needed := there & {job.after for job in jobs if job.folder not in there}:
        there -= needed
    return there


# Of one kind


def group_by(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """In the order in which they come.

    >>> group_by(["alpha", "beta", "all"], lambda word: word[0])
    {'a': ['alpha', 'all'], 'b': ['beta']}
    """
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def select_alike(runs: list[RunRecord], wanted: dict[str, Any] | None) -> tuple[list[RunRecord], list[str]]:
    """Of runs of one column those that can stand in one table: with the settings asked for, where there are any, else
    with those that most of them have. Also a sentence about the others."""
    if not runs:
        return [], []
    shapes = [find_shape(run.config) for run in runs]
    if wanted is None or wanted not in shapes:
        texts = collections.Counter(json.dumps(shape, sort_keys=True) for shape in shapes)
        wanted = json.loads(texts.most_common(1)[0][0])
    pairs = list(zip(runs, shapes, strict=True))
    left = [
        f"{run.folder} is left out: {'; '.join(list_differences(shape, wanted))} for the others."
        for run, shape in pairs
        if shape != wanted
    ]
    return [run for run, shape in pairs if shape == wanted], left


# From before facts were written down, in folders and in stored results. Nothing else guesses.


def derive_facts(config: dict[str, Any]) -> dict[str, Any]:
    """What `lln.lab.train.run_folder.list_facts` would have stored, from a config.json: the label from the recipe that
    the preset names, the run it starts from out of the name of its folder."""
    task, preset, held = config["task"], config["preset"], config["attention"]
    start = None
    if config["model"]["start"]:
        folder = Path(config["model"]["start"]).parent.name
        seed, length = re.search(r"seed(\d+)$", folder), re.search(r"^needles-(\d+)-", folder)
        start = {
            "folder": folder, "task": "needles" if length else None, "seed": int(seed[1]) if seed else None,
            "length": int(length[1]) if length else None,
        }  # fmt: skip
    attention = dataclasses.replace(Attention(**held), preset=find_recipe(task, preset, None).attention.preset)
    return {
        "task": task, "name": config["data"]["subset"], "preset": preset, "attention": held["name"],
        "label": attention.label, "seed": config["seed"], "length": config["data"]["length"], "start": start,
    }  # fmt: skip


def derive_config(run: dict[str, Any], result: dict[str, Any], changes: dict[str, str]) -> dict[str, Any] | None:
    """The config of a run that a result stored without it: what these changes make of the recipe, if that is what the
    result says of the model and its training. None: it says something else, so the settings are not known."""
    column, preset, start = run["column"], result["scale"], None
    task = "lra" if result.get("table") == "table5" else column if column in TASKS else "glue"
    name = column if task in NAMES else None
    if (task, preset, run["how"]["precision"]) == ("image", "paper", "float16"):
        preset = DEIT
    if run["pretraining"] is not None:
        start = Path(run["pretraining"].replace("seed ", "seed")) / "model"
    config = as_before(configure(
        task, preset, run["attention"], run["seed"], changes, name=name, start=start, precision=run["how"]["precision"]
    ))  # fmt: skip
    if task == "needles":
        named = re.search(r"needles-(\d+)(?:-after-(\d+))?-", run["folder"])
        assert named is not None
        length, after = int(named[1]), named[2]
        config = set_length(config, length) if after is None else lengthen(config, length, f"needles-{after}-{start}")
        o, said = config.optimisation, result["settings"][named[1]]
        same = (said["steps"], said["batch"], said["sequences"]) == (o.steps, o.batch, config.data.evaluation)
    else:
        paper = as_before(find_recipe(task, "paper", name)).to_dict()
        told = describe_differences(config.to_dict(), paper)
        said = result.get("differs", [])
        if "marks" in result:
            marks = result["marks"][{"mlm": "MLM loss", "image": "accuracy"}.get(task, column)]
            said = [text for part in told for text in marks[part]]
        texts = [text for part in told.values() for text in part]
        # A figure says nothing of its float16 runs.
        same = "differs" in result and config.precision == "float16"
        same = same or all(any(text in one for one in said) for text in texts)
    return config.to_dict() | run["how"] if same else None
