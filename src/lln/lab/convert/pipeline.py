"""A softmax checkpoint in, an LLN checkpoint out: fit, distillation, fine-tuning, a report of each layer, a verdict."""

import contextlib
import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.repocard import metadata_load, metadata_save
from torch import Tensor
from transformers import PreTrainedModel
from yaml import YAMLError

from lln.checks import MATCHINGS, READS
from lln.files import hash_file, write_text
from lln.hf.converting import convert
from lln.hf.distillation import FINE_RATE, Learner, distill, distillation, fine_tune, fine_tuning
from lln.hf.find import attention_modules, read_sizes
from lln.hf.fitting import fit
from lln.hf.options import LLN, runs_ours
from lln.hf.positions import extend_positions
from lln.hf.watch import evaluating
from lln.lab.convert.layer_report import compare_layers, hidden_error, last_hidden, write_report
from lln.lab.convert.passages import as_batches, cut_passages, fingerprint
from lln.lab.convert.verdict import FEWEST, compare, judge, measure_blocks, measure_model, predicts
from lln.lab.convert.workplace import LEARNING, MODEL, Workplace
from lln.lab.core.errors import Refused, first_line
from lln.lab.core.pretrained import load, quiet, shorten_name
from lln.lab.inspect.inspection import count_positions, label_layers
from lln.values import check_choice, check_count, check_positive

MATCHED = 32  # passages that matching and the fit look at
REPORTED = 4  # passages that the report of each layer is measured on
JUDGED = 64  # passages that the verdict is measured on
LONGEST = 1024  # tokens of a passage where nobody says how long they are to be
KEPT_EVERY = 20  # steps after which what was learned is put away
DOING = {"distilled": "distilling", "fine_tuned": "fine-tuning"}
# what is being done, steps done, steps in all, a few words
Progress = Callable[[str, int, int, str], None]


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """How a checkpoint is converted. What is not said here is in `lln.hf.convert`, `distill` and `fine_tune`."""

    attention: str = "lln_diag"
    read: str = "evidence"
    directions: int | None = None  # channels of the evidence read; None: four times the head dim
    matching: str = "data"  # of the paper's read
    match_only: bool = False  # alpha and beta of the paper's read, and nothing else
    block_size: int = 64
    distill: int = 400  # steps
    fine_tune: int = 0  # steps
    coefficients: str = (
        "channel"  # what distillation learns of the paper's alpha and beta: one each a head or a channel
    )
    mix: str = "scales"  # what it learns of the mix
    feature_map: str | None = "linear"
    length: int | None = None  # tokens of a passage at most; None: what texts and model have, up to LONGEST
    batch_size: int = 4  # passages a step
    rate: float = 0.01
    fine_rate: float = FINE_RATE
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, *LLN)
        check_choice("read", self.read, *READS)
        for name in ("directions", "length"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_choice("matching", self.matching, *MATCHINGS, "data")
        check_choice("coefficients", self.coefficients, "head", "channel")
        check_choice("mix", self.mix, "ratio", "scales")
        check_choice("feature_map", self.feature_map, None, "linear")
        for name in ("distill", "fine_tune", "seed"):
            check_count(name, getattr(self, name), least=0)
        for name in ("block_size", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("rate", "fine_rate"):
            check_positive(name, getattr(self, name))
        if self.distill and self.matching != "data" and not self.match_only and self.read == "paper":
            raise ValueError(
                f"distill starts from numbers that do not change with the input, so it goes with matching='data'; got "
                f"{self.matching!r}."
            )
        if self.read == "evidence" and not self.match_only:
            for name, usual in (("matching", "data"), ("coefficients", "channel")):
                if getattr(self, name) != usual:
                    raise ValueError(f"{name}={getattr(self, name)!r} goes with read='paper' or match_only.")
        if self.read == "paper" and self.directions is not None:
            raise ValueError(f"directions go with read='evidence'; got directions={self.directions} and read='paper'.")

    @property
    def shortest(self) -> int:
        """Tokens of a passage at least: within one block LLN+Diag is softmax, and nothing else could be learned."""
        return 2 * self.block_size if self.attention == "lln_diag" else 16

    def options(self, head_dim: int) -> dict[str, Any]:
        """Of `lln.hf.convert`."""
        found: dict[str, Any] = {"implementation": self.attention}
        blocks = self.attention == "lln_diag"
        if blocks:
            found["block_size"] = self.block_size
        if self.match_only:
            found["matching"] = self.matching
            if self.matching != "data":
                found["statistics"] = {"encoder": "sample", "decoder": "running"}
            return found
        found |= {"mix": self.mix} if blocks else {}
        found |= {"feature_map": self.feature_map} if self.distill and self.feature_map is not None else {}
        if self.read == "evidence":
            return found | {"read": "evidence", "directions": self.directions or 4 * head_dim}
        return found | {"matching": "data"} | ({"learnable": self.coefficients} if self.distill else {})


def convert_checkpoint(
    name: str,
    out: Path,
    texts: Sequence[str],
    plan: ConversionPlan,
    *,
    device: str = "cpu",
    about: Mapping[str, Any] | None = None,
    progress: Progress = lambda stage, done, total, text: None,
) -> dict[str, Any]:
    """Convert the checkpoint `name`, a folder or a Hub id, with the text of some files, into the folder `out`; return
    what conversion.json there says, `about` (this machine) included. Killed at any moment, the same call goes on where
    it was and ends with the same numbers; once it is finished it only returns them again.

    Raises:
        Refused with one line; NotFinite where a loss is.
    """
    request = {"model": shorten_name(name), **identity(name), **dataclasses.asdict(plan), "text": fingerprint(texts)}
    work = Workplace(out, request)
    if work.result is not None:
        shutil.rmtree(work.place, ignore_errors=True)  # where the last thing before the end was a kill
        return work.result
    model, tokenizer = load(name, device, headed=True)
    if runs_ours(model.config):
        raise Refused(
            f"{name} runs {model.config._attn_implementation!r} already; convert the softmax model it was made from"
        )
    length = choose_length(plan, model, tokenizer, texts)
    if length < plan.shortest:
        raise Refused(f"passages of {length} tokens are too short; at least {plan.shortest} are needed")
    kept, learned = split(cut_passages(tokenizer, texts, length, plan.shortest))
    parts = kept, thin_out(kept, REPORTED), learned, thin_out(learned, MATCHED)
    judged, reported, lessons, matched = (as_batches(model, tokenizer, part, plan.batch_size) for part in parts)
    counts = {"learned": len(learned), "reported": len(parts[1]), "judged": len(kept)}
    with work.alone():
        with evaluating(model):
            conversion = Conversion(work, plan, model, reported, judged, progress)
            conversion.match(matched)
            if not plan.match_only:
                conversion.fit(matched)
            if plan.distill and not plan.match_only:
                learner = distillation(model, plan.distill, plan.rate)
                conversion.learn("distilled", learner, functools.partial(distill, model, lessons))
            if plan.fine_tune and not plan.match_only:
                learner = fine_tuning(model, plan.fine_tune, plan.fine_rate)
                conversion.learn(
                    "fine_tuned", learner,
                    lambda **how: fine_tune(model, load_long(name, device, length), lessons, **how),
                )  # fmt: skip
        result = {
            "request": work.request,
            "class": type(model).__name__,
            "passages": counts | {"held_out": kept != learned, "tokens": length},
            **conversion.report(),
            "verdict": conversion.judge(len(kept), kept != learned),
            "provenance": {**(about or {}), "transformers": transformers.__version__},
        }
        save(model, tokenizer, work, name, result)
    return result


def split(found: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """(passages to judge by, passages to learn from): one in eight is kept apart, or as many as a verdict needs where
    that is no more than a third. Of very few all serve for both."""
    count = min(max(len(found) // 8, min(FEWEST, len(found) // 3)), JUDGED)
    if len(found) < 8:
        return found, found
    apart = {at * len(found) // count for at in range(count)}
    return [p for i, p in enumerate(found) if i in apart], [p for i, p in enumerate(found) if i not in apart]


def thin_out(found: list[list[int]], most: int) -> list[list[int]]:
    """At most so many of them, from all over the text."""
    return found[:: max(1, len(found) // most)][:most]


def choose_length(plan: ConversionPlan, model: PreTrainedModel, tokenizer: Any, texts: Sequence[str]) -> int:
    """Tokens of a passage: what was asked for, with the model's places made more where it has too few; else what texts
    and model have."""
    places = int(min(tokenizer.model_max_length, count_positions(model)))
    if plan.length is None:
        longest = max(len(tokenizer(text, verbose=False)["input_ids"]) for text in texts)
        return min(places, LONGEST, max(longest, plan.shortest))
    if plan.length > places:
        try:
            extend_positions(model, plan.length)
        except ValueError as error:
            raise Refused(f"length: the model has {places} places, and {error}") from error
        tokenizer.model_max_length = plan.length
    return plan.length


def load_long(name: str, device: str, length: int) -> PreTrainedModel:
    """The softmax model again, with as many places."""
    model: PreTrainedModel = load(name, device, headed=True)[0]
    return extend_positions(model, length) if length > count_positions(model) else model


def identity(name: str) -> dict[str, Any]:
    """What tells another model in the same folder: its config and its weights, to the last bit."""
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        return {}
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.iterdir()):
        if file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {hash_file(file)}".encode())
    return {"weights": digest.hexdigest()[:16]}


class Conversion:
    """The stages of one conversion. Each leaves what it measured and learned in the workplace, or finds it there."""

    def __init__(
        self,
        work: Workplace,
        plan: ConversionPlan,
        model: PreTrainedModel,
        kept: list[dict[str, Tensor]],
        judged: list[dict[str, Tensor]],
        progress: Progress,
    ) -> None:
        self.work, self.plan, self.model, self.kept, self.progress = work, plan, model, kept, progress
        self.judged = judged
        self.found: dict[str, dict[str, Any]] = {}
        try:
            self.wanted = last_hidden(model, kept)
        except Exception as error:  # anything may happen in a model that is not made for text
            raise Refused(f"the model does not run on text alone: {first_line(error)}") from error
        progress("measuring, softmax", 0, 1, "")
        self.softmax = measure_model(model, judged)
        self.blocks = measure_blocks(model, judged, {"block_size": plan.block_size})
        progress("measuring, softmax", 1, 1, "")

    def match(self, batches: list[dict[str, Tensor]]) -> None:
        """Give the model the attention that was asked for; the paper's read with alpha and beta that are matched."""
        dim = min(read_sizes(module)["head_dim"] for _, module in attention_modules(self.model))
        options = self.plan.options(dim)
        if "matching" not in options:
            convert(self.model, **options)
            return
        if (held := self.work.read("matched")) is not None:
            number = 1.0 if options["matching"] == "data" else None
            convert(self.model, **options, alpha=number, beta=number)
            self.take("matched", *held)
            return

        def follow() -> Iterator[dict[str, Tensor]]:
            for number, batch in enumerate(batches):
                self.progress("matching", number, len(batches), "")
                yield batch
            self.progress("matching", len(batches), len(batches), "")

        convert(self.model, **options, batches=follow())
        self.end("matched", {})

    def fit(self, batches: list[dict[str, Tensor]]) -> None:
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
        return judge(*pair, passages, held_out, predicts(self.model))

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
        found["layers"] = compare_layers(self.model, self.kept)
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


def save(model: PreTrainedModel, tokenizer: Any, work: Workplace, name: str, result: dict[str, Any]) -> None:
    """The model, in the dtype that its checkpoint had, with its tokenizer and a card that shows the report."""
    folder = work.place / MODEL
    shutil.rmtree(folder, ignore_errors=True)
    held = transformers.AutoConfig.from_pretrained(name, local_files_only=True).dtype
    model.to(getattr(torch, held) if isinstance(held, str) else held or torch.float32)
    with quiet(transformers, bars=False):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    card = folder / "README.md"
    inherited = read_card(name)
    said = f"## How it was converted\n\n{write_report(result, inherited.get('license'))}"
    write_text(card, card.read_text(encoding="utf-8").rstrip("\n") + "\n\n" + said)
    metadata_save(card, (metadata_load(card) or {}) | inherited)
    work.finish(result)


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
