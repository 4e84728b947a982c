"""A softmax checkpoint in, an LLN checkpoint out: fit, distillation, fine-tuning, a report of each layer, a verdict."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub.repocard import metadata_load, metadata_save
from torch import Tensor
from transformers import PreTrainedModel
from yaml import YAMLError  # type: ignore[import-untyped]

from lln.files import explain_writing, write_text
from lln.hf.converting import convert
from lln.hf.distillation import HIDDEN, Learner, distill, distillation, find_logits, fine_tune, fine_tuning
from lln.hf.find import attention_modules, read_sizes
from lln.hf.fitting import fit
from lln.hf.options import runs_ours
from lln.hf.watch import move_batch, switch_to_eval
from lln.lab.convert.companions import MODULES, allow_longer, copy_companions, fetch_companions, find_transformer
from lln.lab.convert.conversion_plan import ConversionPlan
from lln.lab.convert.layer_report import compare_layers, hidden_error, last_hidden, name_size, write_report
from lln.lab.convert.material import IN_PYTHON, Batch, Material
from lln.lab.convert.verdict import (
    FEWEST,
    agree,
    can_decide,
    classify,
    compare,
    judge,
    leave_blocks,
    measure_model,
    predicts,
)
from lln.lab.convert.workplace import LEARNING, MODEL, Workplace
from lln.lab.core.errors import Refused, first_line
from lln.lab.core.pretrained import find_snapshot, identify, load, shorten_name, silence
from lln.lab.core.progress import ignore
from lln.lab.inspect.inspection import label_layers
from lln.nn.image_grid import REMEDIES

# How many passages or pictures
MATCHED = 32  # matching and the fit look at
REPORTED = 4  # the report of each layer is measured on
JUDGED = 64  # the verdict is measured on
KEPT_EVERY = 20  # steps after which what was learned is put away
DOING = {"distilled": "distilling", "fine_tuned": "fine-tuning"}
T = TypeVar("T")
# what is being done, steps done, steps in all, a few words
Progress = Callable[[str, int, int, str], None]


def convert_checkpoint(
    name: str,
    out: Path,
    material: Material,
    plan: ConversionPlan,
    *,
    device: str = "cpu",
    about: Mapping[str, Any] | None = None,
    progress: Progress = lambda stage, done, total, text: None,
    say: Callable[[str], None] = ignore,
) -> dict[str, Any]:
    """Convert the checkpoint `name`, a folder or a Hub id, with text or pictures, into the folder `out`; return what
    conversion.json there says, `about` (this machine) included. say: is told before the long part where no verdict
    will come of it. Killed at any moment, the same call goes on where it was and ends with the same numbers; once it is
    finished it only returns them again.

    Raises:
        Refused with one line; NotFinite where a loss is.
    """
    folder = Path(name).expanduser()
    inside = find_transformer(folder) if folder.is_dir() else ""
    place = str(folder / inside) if inside else name  # of the model that transformers loads
    read_model = functools.partial(load, place, device, headed=True, load_processor=material.load_processor)
    # Which weights a Hub id stands for today is known when they are here.
    loaded = None if folder.is_dir() else read_model()
    found = identify(place if loaded is None else str(find_snapshot(name) or place))
    work = Workplace(out, {"model": shorten_name(name), **found, **material.request(plan)})
    if work.result is not None:
        shutil.rmtree(work.place, ignore_errors=True)  # where the last thing before the end was a kill
        return work.result
    model, material.processor = read_model() if loaded is None else loaded
    if runs_ours(model.config):
        raise Refused(
            f"{name} runs {model.config._attn_implementation!r} already; convert the softmax model it was made from"
        )
    pieces = material.prepare(model, plan)
    kept, learned = split(pieces)
    if not can_decide(len(kept), kept != learned, predicts(model)):
        wanted = FEWEST if predicts(model) else 3 * FEWEST  # `split` keeps at most a third apart
        size = name_size({"passages": material.describe_size()})
        remedy = "" if material.called == "pictures" else " or a smaller --length"
        say(
            f"There are only {len(pieces)} {material.called} {size}. A verdict needs {wanted}, so there will be none; "
            f"give more {material.kind}{remedy}."
        )
    parts = kept, thin_out(kept, REPORTED), learned, thin_out(learned, MATCHED)
    judged, reported, lessons, matched = (material.make_batches(model, part, plan.batch_size) for part in parts)
    counts = {"learned": len(learned), "reported": len(parts[1]), "judged": len(kept)}
    goal = plan.choose_goal(predicts(model))
    if plan.fine_tune and not plan.match_only:
        check_goal(model, reported, goal)
    with work.lock():
        with switch_to_eval(model):
            conversion = Conversion(work, plan, model, material, reported, judged, progress)
            conversion.match(matched)
            if not plan.match_only:
                conversion.fit(matched)
            if plan.distill and not plan.match_only:
                learner = distillation(model, plan.distill, plan.rate)
                conversion.learn("distilled", learner, functools.partial(distill, model, lessons))
            if plan.fine_tune and not plan.match_only:
                learner = fine_tuning(model, plan.fine_tune, plan.fine_rate, goal)
                conversion.learn(
                    "fine_tuned", learner,
                    lambda **how: fine_tune(model, material.enlarge(read_model()[0]), lessons, on=goal, **how),
                )  # fmt: skip
        result = {
            "request": work.request,
            "class": type(model).__name__,
            "passages": counts | {"held_out": kept != learned, "called": material.called, **material.describe_size()},
            **conversion.report(),
            "verdict": conversion.judge(len(kept), kept != learned),
            "provenance": {**(about or {}), "transformers": transformers.__version__},
        }
        save(model, material, work, name, inside, result)
    return result


@torch.no_grad()
def check_goal(model: PreTrainedModel, batches: Sequence[Batch], goal: str) -> None:
    """Refused where fine-tuning, which comes last, could not be about this."""
    if goal == HIDDEN or predicts(model):
        return
    try:
        find_logits(model(**move_batch(batches[0], model)), type(model).__name__)
    except ValueError as error:
        raise Refused(f"fine_tune_on: {error}") from error


def split(found: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """(those to judge by, those to learn from): one in eight is kept apart, or as many as a verdict needs where
    that is no more than a third. Of very few all serve for both."""
    count = min(max(len(found) // 8, min(FEWEST, len(found) // 3)), JUDGED)
    if len(found) < 8:
        return found, found
    apart = {at * len(found) // count for at in range(count)}
    return [p for i, p in enumerate(found) if i in apart], [p for i, p in enumerate(found) if i not in apart]


def thin_out(found: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of them, from all over."""
    return found[:: max(1, len(found) // most)][:most]


class Conversion:
    """The stages of one conversion. Each leaves what it measured and learned in the workplace, or finds it there."""

    def __init__(
        self,
        work: Workplace,
        plan: ConversionPlan,
        model: PreTrainedModel,
        material: Material,
        kept: Sequence[Batch],
        judged: Sequence[Batch],
        progress: Progress,
    ) -> None:
        self.work, self.plan, self.model, self.kept, self.progress = work, plan, model, kept, progress
        self.judged, self.size = judged, plan.lay_blocks(material.block_size(plan), predicts(model))
        self.found: dict[str, dict[str, Any]] = {}
        try:
            self.wanted = last_hidden(model, kept)
        except Refused:
            raise
        except Exception as error:  # anything may happen in a model that takes more than that
            raise Refused(
                f"the model does not run on {material.kind} alone ({first_line(error)}); {IN_PYTHON}"
            ) from error
        progress("measuring, softmax", 0, 1, "")
        try:
            blocks = leave_blocks(model, self.size | plan.name_layers())
        except ValueError as error:
            instead = "in Python lln.hf.convert takes block_size, which cuts tokens in their order"
            raise Refused(str(error).replace(REMEDIES["tile"], instead)) from error
        self.softmax, self.blocks = measure_model(model, judged), measure_model(blocks, judged)
        self.classes = classify(model, judged)
        self.same_class_blocks = agree(classify(blocks, judged), self.classes)
        if plan.attention == "lln_diag":
            material.check_blocks(blocks)
        progress("measuring, softmax", 1, 1, "")

    def match(self, batches: Sequence[Batch]) -> None:
        """Give the model the attention that was asked for; the paper's read with alpha and beta that are matched."""
        dim = min(read_sizes(module)["head_dim"] for _, module in attention_modules(self.model))
        options = self.plan.options(dim, self.size, predicts(self.model))
        if "matching" not in options:
            convert(self.model, **options)
            return
        if (held := self.work.read("matched")) is not None:
            number = 1.0 if options["matching"] == "data" else None
            convert(self.model, **options, alpha=number, beta=number)
            self.take("matched", *held)
            return

        def follow() -> Iterator[Batch]:
            for number, batch in enumerate(batches):
                self.progress("matching", number, len(batches), "")
                yield batch
            self.progress("matching", len(batches), len(batches), "")

        convert(self.model, **options, batches=follow())
        self.end("matched", {})

    def fit(self, batches: Sequence[Batch]) -> None:
        if (held := self.work.read("fitted")) is not None:
            self.take("fitted", *held)
            return
        fit(self.model, batches, seed=self.plan.seed, progress=lambda n, of: self.progress("fitting", n, of, ""))
        self.end("fitted", {})

    def judge(self, passages: int, held_out: bool) -> dict[str, Any]:
        """Whether the model is still the one it was, of all that was kept from learning."""
        self.progress("judging", 0, 1, "")
        found = measure_model(self.model, self.judged)
        self.progress("judging", 1, 1, "")
        pair = compare(found, self.softmax), compare(self.blocks, self.softmax)
        same = agree(classify(self.model, self.judged), self.classes)
        classes = {} if same is None else {"same_class": same, "same_class_blocks_alone": self.same_class_blocks}
        return judge(*pair, passages, held_out, predicts(self.model)) | classes

    def learn(self, stage: str, learner: Learner, teach: Callable[..., Any]) -> None:
        if (held := self.work.read(stage)) is not None:
            self.take(stage, *held)
            return
        losses: dict[str, float] = {}
        if (begun := self.work.read(LEARNING)) is not None and begun[0]["stage"] == stage:
            learner.load(begun[1], begun[0]["done"])
            losses["first"] = begun[0]["first"]

        def tell(done: int, loss: float) -> None:
            losses.setdefault("first", loss)
            losses["last"] = loss
            self.progress(DOING[stage], done, learner.steps, f"loss {loss:.4f}")
            if done % KEPT_EVERY == 0 and done < learner.steps:
                notes = {"stage": stage, "done": done, "first": losses["first"]}
                self.work.keep(LEARNING, notes, learner.state())

        teach(seed=self.plan.seed, learner=learner, progress=tell)
        self.end(stage, {"loss": losses})

    def end(self, stage: str, found: dict[str, Any]) -> None:
        """Measure the layers after a stage, and put it away."""
        what = f"measuring, {stage.replace('_', '-')}"
        self.progress(what, 0, 1, "")
        earlier = next((held["layers"] for held in self.found.values()), ())
        found["layers"] = compare_layers(self.model, self.kept, earlier)
        found["hidden_error"] = hidden_error(last_hidden(self.model, self.kept), self.wanted)
        self.progress(what, 1, 1, "")
        state = self.model.state_dict()
        changed = state if stage == "fine_tuned" else {name: t for name, t in state.items() if ".lln." in name}
        self.work.keep(stage, found, changed)
        self.found[stage] = found

    def take(self, stage: str, found: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """What a stage left when it was over."""
        self.model.load_state_dict(tensors, strict=False)
        self.found[stage] = found

    def report(self) -> dict[str, Any]:
        first = next(iter(self.found.values()))["layers"]
        labels = label_layers([(row["layer"], 0) for row in first])
        layers = [
            {"layer": row["layer"], "label": labels[row["layer"], 0], "softmax": row["softmax"]}
            | {stage: found["layers"][number]["lln"] for stage, found in self.found.items()}
            for number, row in enumerate(first)
        ]
        return {
            "stages": list(self.found),
            "layers": layers,
            "hidden_error": {stage: found["hidden_error"] for stage, found in self.found.items()},
            "loss": {stage: found["loss"] for stage, found in self.found.items() if "loss" in found},
        }


def save(
    model: PreTrainedModel, material: Material, work: Workplace, name: str, inside: str, result: dict[str, Any]
) -> None:
    """The model, in the dtype that its checkpoint had, with all that lies beside it there and a card that shows the
    report. inside: where in the checkpoint's folder the model is."""
    folder, place = work.place / MODEL, Path(name).expanduser()
    own = folder / inside
    shutil.rmtree(folder, ignore_errors=True)
    held = transformers.AutoConfig.from_pretrained(place / inside if inside else name, local_files_only=True).dtype
    model.to(getattr(torch, held) if isinstance(held, str) else held or torch.float32)
    with silence(transformers, bars=False), explain_writing(work.place):
        model.save_pretrained(own)
        made = list_files(folder)
        material.processor.save_pretrained(own)
        source, known = (place, True) if place.is_dir() else fetch_companions(name)
    if material.changed:
        made = list_files(folder)
    files = {"kept": [], "left_out": []} if source is None else copy_companions(source, folder, made)
    result["files"] = {**files, "known": known}
    if material.changed and (length := material.describe_size().get("tokens")):
        allow_longer(own, length)
    card = folder / "README.md"
    if inside:
        (own / "README.md").replace(card)
    inherited = read_card(name)
    if (folder / MODULES).is_file():
        inherited["library_name"] = "sentence-transformers"
    said = f"## How it was converted\n\n{write_report(result, inherited.get('license'))}"
    write_text(card, card.read_text(encoding="utf-8").rstrip("\n") + "\n\n" + said)
    metadata_save(card, (metadata_load(card) or {}) | inherited)
    work.finish(result)


def list_files(folder: Path) -> set[Path]:
    """README.md, too, where it is still to be moved to."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} | {Path("README.md")}


def read_card(name: str) -> dict[str, Any]:
    """What the card of a converted model takes over from that of the model: its licence and what it is for."""
    own = Path(name).expanduser() / "README.md"
    facts: dict[str, Any] = {} if own.parent.is_dir() else {"base_model": name}
    if own.is_file():
        with contextlib.suppress(ValueError, YAMLError):  # a card that nobody can read says nothing
            held = metadata_load(own) or {}
            names = ("base_model", "license", "license_name", "license_link", "language", "pipeline_tag")
            facts |= {name: held[name] for name in names if name in held}
    return facts
