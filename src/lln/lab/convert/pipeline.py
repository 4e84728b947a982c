"""A softmax checkpoint in, an LLN checkpoint out: matching, distillation, fine-tuning, and a report of each layer."""

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from lln.checks import MATCHINGS
from lln.files import write_text
from lln.hf.converting import convert
from lln.hf.distillation import FINE_RATE, RATE, Learner, distill, distillation, fine_tune, fine_tuning
from lln.hf.options import LLN, runs_ours
from lln.hf.watch import evaluating
from lln.lab.convert.layer_report import compare_layers, hidden_error, last_hidden, write_report
from lln.lab.convert.passages import as_batches, cut_passages, fingerprint
from lln.lab.convert.workplace import LEARNING, MODEL, Workplace
from lln.lab.core.errors import Refused, first_line
from lln.lab.core.pretrained import load, quiet, shorten_name
from lln.lab.inspect.inspection import count_positions, label_layers
from lln.values import check_choice, check_count, check_positive

MATCHED = 32  # passages that matching looks at
REPORTED = 4  # passages that the report is measured on
KEPT_EVERY = 20  # steps after which what was learned is put away
DOING = {"distilled": "distilling", "fine_tuned": "fine-tuning"}
# what is being done, steps done, steps in all, a few words
Progress = Callable[[str, int, int, str], None]


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """How a checkpoint is converted. What is not said here is in `lln.hf.convert`, `distill` and `fine_tune`."""

    attention: str = "lln_diag"
    matching: str = "data"
    block_size: int = 64
    distill: int = 0  # steps
    fine_tune: int = 0  # steps
    coefficients: str = "channel"  # what distillation learns of alpha and beta: one each a head or a channel
    mix: str = "scales"  # what it learns of the mix
    feature_map: str | None = None
    length: int = 512  # tokens of a passage at most
    batch_size: int = 4  # passages a step
    rate: float = RATE
    fine_rate: float = FINE_RATE
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, *LLN)
        check_choice("matching", self.matching, *MATCHINGS, "data")
        check_choice("coefficients", self.coefficients, "head", "channel")
        check_choice("mix", self.mix, "ratio", "scales")
        check_choice("feature_map", self.feature_map, None, "linear")
        for name in ("distill", "fine_tune", "seed"):
            check_count(name, getattr(self, name), least=0)
        for name in ("block_size", "length", "batch_size"):
            check_count(name, getattr(self, name))
        for name in ("rate", "fine_rate"):
            check_positive(name, getattr(self, name))
        if self.distill and self.matching != "data":
            raise ValueError(
                f"distill starts from numbers that do not change with the input, so it goes with matching='data'; got "
                f"{self.matching!r}."
            )
        if self.feature_map is not None and not self.distill:
            raise ValueError("feature_map is learned by distillation; give it steps with distill.")

    @property
    def shortest(self) -> int:
        """Tokens of a passage at least: within one block LLN+Diag is softmax, and nothing else could be learned."""
        return 2 * self.block_size if self.attention == "lln_diag" else 16

    @property
    def learned(self) -> dict[str, Any]:
        """Options of `convert` for what distillation learns."""
        if not self.distill:
            return {}
        found = {"learnable": self.coefficients, "feature_map": self.feature_map}
        return found | ({"mix": self.mix} if self.attention == "lln_diag" else {})


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
    length = int(min(plan.length, tokenizer.model_max_length, count_positions(model)))
    if length < plan.shortest:
        raise Refused(f"passages of {length} tokens are too short; at least {plan.shortest} are needed")
    kept, learned = split(cut_passages(tokenizer, texts, length, plan.shortest))
    parts = kept, learned, learned[:: max(1, len(learned) // MATCHED)][:MATCHED]
    reported, lessons, matched = (as_batches(model, tokenizer, part, plan.batch_size) for part in parts)
    with work.alone():
        with evaluating(model):
            conversion = Conversion(work, plan, model, reported, progress)
            conversion.match(matched)
            if plan.distill:
                learner = distillation(model, plan.distill, plan.rate)
                conversion.learn("distilled", learner, functools.partial(distill, model, lessons))
            if plan.fine_tune:
                learner = fine_tuning(model, plan.fine_tune, plan.fine_rate)
                conversion.learn(
                    "fine_tuned", learner,
                    lambda **how: fine_tune(model, load(name, device, headed=True)[0], lessons, **how),
                )  # fmt: skip
        result = {
            "request": work.request,
            "class": type(model).__name__,
            "passages": {"learned": len(learned), "reported": len(kept), "held_out": kept != learned, "tokens": length},
            **conversion.report(),
            "provenance": {**(about or {}), "transformers": transformers.__version__},
        }
        save(model, tokenizer, work, name, result)
    return result


def split(found: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """(passages for the report, passages to learn from): one in eight is kept apart where there are eight or more."""
    count = min(len(found) // 8, REPORTED)
    if not count:
        return found, found
    apart = {at * len(found) // count for at in range(count)}
    return [p for i, p in enumerate(found) if i in apart], [p for i, p in enumerate(found) if i not in apart]


def identity(name: str) -> dict[str, Any]:
    """What tells another model in the same folder: its config and the sizes of its files of weights."""
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        return {}
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.iterdir()):
        if file.suffix in (".safetensors", ".bin"):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
    return {"weights": digest.hexdigest()[:16]}


class Conversion:
    """The stages of one conversion. Each leaves what it measured and learned in the workplace, or finds it there."""

    def __init__(
        self,
        work: Workplace,
        plan: ConversionPlan,
        model: PreTrainedModel,
        kept: list[dict[str, Tensor]],
        progress: Progress,
    ) -> None:
        self.work, self.plan, self.model, self.kept, self.progress = work, plan, model, kept, progress
        self.found: dict[str, dict[str, Any]] = {}
        try:
            self.wanted = last_hidden(model, kept)
        except Exception as error:  # anything may happen in a model that is not made for text
            raise Refused(f"the model does not run on text alone: {first_line(error)}") from error

    def match(self, batches: list[dict[str, Tensor]]) -> None:
        plan = self.plan
        options: dict[str, Any] = {"implementation": plan.attention, "matching": plan.matching, **plan.learned}
        if plan.attention == "lln_diag":
            options["block_size"] = plan.block_size
        if plan.matching != "data":
            options["statistics"] = {"encoder": "sample", "decoder": "running"}
        if (held := self.work.read("matched")) is not None:
            number = 1.0 if plan.matching == "data" else None
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
    said = f"## How it was converted\n\n{write_report(result)}"
    write_text(card, card.read_text(encoding="utf-8").rstrip("\n") + "\n\n" + said)
    work.finish(result)
