"""What `conversion_quality.py` asks of its processes: each job teaches or times one thing and returns what it found.

A process opens a `Desk` once, with the models and the texts, cut into tokens, at hand.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import lzma
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, ViTForImageClassification

import lln.hf
from conversion import CHOSEN, FITTED, ROWS, Measure, Passages, lay, pydoc, similarities, spearman
from lln.hf.layers import find_running
from lln.lab.core.timing import peak_memory, time_calls
from lln.lab.data.images import load_images

Batches = list[dict[str, Tensor]]
Found = dict[str, Any]

SOFTMAX = "softmax"
TEXTS = "texts.pt"  # in the folder that all processes share
PARTIES = ("Democratic", "Republican")
STEP = 512  # speeches are cut to a multiple of it, so that those of one length need no padding
HEAD_RATE = 1e-3
PROBES = 20  # repetitions of the cross-validation of frozen embeddings
WIKIPEDIA, PYTHON = "Wikipedia", "Python's documentation"


def read_text(path: Path) -> str:
    """Also of a file that xz compressed."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text(encoding="utf-8")


@dataclasses.dataclass
class Texts:
    """Tokens of what is learned from and measured on."""

    learn: dict[str, Passages]  # by text, of the short length
    judge: dict[str, Passages]
    stream: list[int]  # Wikipedia laid end to end
    speeches: list[tuple[int, str, list[int]]]  # party, president, tokens


def prepare(args: argparse.Namespace) -> Texts:
    if args.text is None:  # pictures are read where they are needed
        return Texts({}, {}, [], [])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    plain = functools.partial(tokenizer, add_special_tokens=False, verbose=False)
    lines = read_text(args.text).splitlines()[: args.documents]
    ids = plain(lines)["input_ids"]
    halves = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    wikipedia = [[p for one in half for p in lay(tokenizer, one, args.length)[:2]][: args.most] for half in halves]
    python = [part[: args.most] for part in pydoc(tokenizer, args.length)]
    speeches = []
    if args.speeches is not None:
        given = [json.loads(line) for line in read_text(args.speeches).splitlines()]
        given = [one for one in given if one["party"] in PARTIES][: args.speech_count]
        tokens = plain([one["text"] for one in given])["input_ids"]
        speeches = [(PARTIES.index(s["party"]), s["name"], t) for s, t in zip(given, tokens, strict=True)]
    learn, judge = ({WIKIPEDIA: w, PYTHON: p} for w, p in zip(wikipedia, python, strict=True))
    return Texts(learn, judge, [token for one in ids for token in one], speeches)


class Teaching(Measure):
    """`Measure` on batches that are given: its conversions, and what they are told."""

    def __init__(self, softmax: PreTrainedModel, lessons: Batches, **told: Any) -> None:
        self.softmax, self.batches = softmax, lessons
        self.few = lessons[:: max(1, len(lessons) // told.pop("fitted"))]
        self.args = argparse.Namespace(**told)

    def teach(self, row: str, rate: float) -> PreTrainedModel:
        _, kind, options, doing = ROWS[row]
        return self.convert(kind, options, doing, rate)


class Desk:
    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self.args, self.place = args, place
        self.device = torch.device(args.device)
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)

    @functools.cached_property
    def texts(self) -> Texts:
        texts: Texts = torch.load(self.place / TEXTS, weights_only=False)
        return texts

    @functools.cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.args.model)

    @functools.cached_property
    def softmax(self) -> PreTrainedModel:
        model: PreTrainedModel = AutoModel.from_pretrained(self.args.model, dtype=torch.float32)
        return model.to(self.device).eval()

    @functools.cached_property
    def lessons(self) -> Batches:
        """Three passages of Wikipedia and one of Python's documentation each; the latter come again sooner."""
        first, second = (self.texts.learn[name][: -CHOSEN // 2] for name in (WIKIPEDIA, PYTHON))
        count = len(first) // 3
        return [self.batch([*first[3 * at : 3 * at + 3], second[at % len(second)]]) for at in range(count)]

    @functools.cached_property
    def judged(self) -> dict[str, tuple[Batches, Tensor]]:
        """Of each text what is measured on and what softmax makes of it; under "chosen" what rates are chosen on."""
        parts = dict(self.texts.judge)
        parts |= {f"chosen, {name}": part[-CHOSEN // 2 :] for name, part in self.texts.learn.items()}
        found = {}
        for name, part in parts.items():
            batches = self.batches(part, 16)
            found[name] = batches, similarities(self.softmax, batches)
        return found

    def batch(self, passages: Passages) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(passages, device=self.device)}

    def batches(self, passages: Passages, size: int) -> Batches:
        return [self.batch(passages[at : at + size]) for at in range(0, len(passages), size)]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def warm(self) -> Found:
        """What takes its time and needs no text."""
        return {"parameters": 0 if self.args.model is None else self.softmax.num_parameters()}

    # Seeds

    def seeds(self, row: str, block_size: int, seed: int, rate: float) -> Found:
        how = {"block_size": block_size, "seed": seed, "distill": self.args.distill, "fitted": FITTED // 4}
        model = Teaching(self.softmax, self.lessons, **how).teach(row, rate)
        return {name: spearman(similarities(model, batches), wanted) for name, (batches, wanted) in self.judged.items()}

    # Longer texts

    def extend(self, length: int) -> PreTrainedModel:
        longest = self.softmax.config.max_position_embeddings
        model = copy.deepcopy(self.softmax)
        return lln.hf.extend_positions(model, length) if length > longest else model

    def pieces(self, length: int) -> tuple[Batches, Batches]:
        """(to learn from, to measure on) of Wikipedia laid end to end, as many tokens a step at every length."""
        whole = lay(self.tokenizer, self.texts.stream, length)
        count = min(self.args.long_judged, len(whole) // 3)
        size = max(1, self.args.tokens // length)
        return self.batches(whole[count : count + self.args.long_learned * size], size), self.batches(
            whole[:count], size
        )

    def teach_long(self, row: str, length: int) -> tuple[PreTrainedModel, float]:
        """A model that was taught on texts so long, and its rank correlation."""
        softmax, (learn, judge) = self.extend(length), self.pieces(length)
        how = {"block_size": 64, "seed": 0, "distill": self.args.long_distill, "fitted": 4}
        with self.autocast():
            model = Teaching(softmax, learn, **how).teach(row, self.args.long_rate)
            return model, spearman(similarities(model, judge), similarities(softmax, judge))

    def quality(self, row: str, length: int) -> Found:
        if row != SOFTMAX:
            return {"spearman": self.teach_long(row, length)[1]}
        # What rounding alone does to the order.
        softmax, judge = self.extend(length), self.pieces(length)[1]
        with self.autocast():
            rounded = similarities(softmax, judge)
        return {"spearman": spearman(rounded, similarities(softmax, judge))}

    @torch.inference_mode()
    def speed(self, length: int, rows: list[str]) -> Found:
        """Milliseconds and bytes of the attention of a layer, and milliseconds of the model."""
        args, size = self.args, max(1, self.args.speed_tokens // length)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        softmax = self.extend(length).to(dtype)
        ids = torch.tensor(self.texts.stream[: size * length], device=self.device).view(size, length)
        heads, dim = (
            softmax.config.num_attention_heads,
            softmax.config.hidden_size // softmax.config.num_attention_heads,
        )
        q, k, v = (
            torch.randn(size, length, heads, dim, device=self.device, dtype=dtype).transpose(1, 2) for _ in "qkv"
        )
        models = {SOFTMAX: softmax}
        attends: dict[str, Any] = {SOFTMAX: functools.partial(nn.functional.scaled_dot_product_attention, q, k, v)}
        for row in rows:
            _, kind, options, _ = ROWS[row]
            if not options.get("mix", True):  # which LLN+Diag computes with a linear part that weighs nothing
                kind, options = "block_diagonal", {"block_size": 64}
            told = argparse.Namespace(block_size=64, seed=0)
            teaching = Teaching(softmax, [{}], fitted=1)
            teaching.args = told
            models[row] = teaching.convert(kind, options, "", 0.0).eval()
            attention = next(iter(find_running(models[row]).values()))
            where: dict[str, Any] = {"is_causal": False, "key_mask": None, "query_mask": None}
            where |= {} if kind.startswith("lln") else {"cu_seqlens": None, "dropout": 0.0}
            attends[row] = functools.partial(attention, q, k, v, **where)
        works: dict[str, Any] = {name: functools.partial(model, input_ids=ids) for name, model in models.items()}
        found: Found = {}
        for what, calls in (("attention", attends), ("model", works)):
            times = time_calls(calls, repeats=args.repeats, device=self.device, warmup=3)
            found[what] = {name: dataclasses.asdict(one) for name, one in times.items()}
            found[f"{what}_bytes"] = {name: peak_memory(call, self.device) for name, call in calls.items()}
        return found | {"batch": size}

    # Speeches

    def speech_batches(self, chosen: Any, length: int, seed: int | None) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Speeches of one length together, cut to a multiple of `STEP`; by seed in an order of chance."""
        before, after = self.tokenizer("")["input_ids"]
        groups: dict[int, list[int]] = {}
        for at in chosen:
            whole = min(len(self.texts.speeches[at][2]) + 2, length)
            groups.setdefault(max(whole // STEP, 1) * STEP if whole >= STEP else whole, []).append(at)
        generator = torch.Generator().manual_seed(seed or 0)
        found = []
        for size, members in groups.items():
            order = (
                torch.randperm(len(members), generator=generator).tolist() if seed is not None else range(len(members))
            )
            most = max(1, min(4, self.args.speech_tokens // size))
            mixed = [members[i] for i in order]
            found += [(size, mixed[first : first + most]) for first in range(0, len(mixed), most)]
        order = torch.randperm(len(found), generator=generator).tolist() if seed is not None else range(len(found))
        for size, members in (found[i] for i in order):
            rows = [[before, *self.texts.speeches[at][2][: size - 2], after] for at in members]
            yield self.batch(rows), torch.tensor(members)

    def long_model(self, kind: str) -> PreTrainedModel:
        """Softmax, or what `adapt` has put away."""
        if kind.startswith(SOFTMAX):
            return self.extend(self.speech_length(kind))
        path = self.place / f"{kind}.pt"
        if not path.exists():
            self.adapt(kind)
        model: PreTrainedModel = torch.load(path, map_location=self.device, weights_only=False)
        return model

    def speech_length(self, kind: str) -> int:
        short, long = int(self.args.length), int(self.args.speech_length)
        return min(short, long) if kind == f"{SOFTMAX}, cut" else long

    def adapt(self, kind: str) -> Found:
        model, value = self.teach_long(kind, self.args.speech_length)
        torch.save(model, self.place / f"{kind}.pt")
        return {"spearman": value}

    def labels(self) -> Tensor:
        return torch.tensor([party for party, _, _ in self.texts.speeches])

    def probe(self, kind: str) -> Found:
        """Accuracy of a linear classifier on embeddings as they are: of new speeches, and of new presidents."""
        model, labels = self.long_model(kind), self.labels()
        hidden = torch.empty(len(labels), model.config.hidden_size)
        with torch.no_grad(), self.autocast():
            for batch, members in self.speech_batches(range(len(labels)), self.speech_length(kind), None):
                hidden[members] = model(**batch).last_hidden_state.mean(1).float().cpu()
        presidents = [name for _, name, _ in self.texts.speeches]
        found: Found = {}
        kinds = ("speeches", StratifiedKFold, None), ("presidents", StratifiedGroupKFold, presidents)
        for what, folds, groups in kinds:
            found[what] = [
                float(cross_val_score(
                    make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000)), hidden.numpy(),
                    labels.numpy(), groups=groups,
                    cv=folds(self.args.folds, shuffle=True, random_state=seed),
                ).mean())
                for seed in range(PROBES)
            ]  # fmt: skip
        return found | {"majority": float(labels.bincount().max() / len(labels))}

    def fold(self, kind: str, seed: int, at: int) -> Found:
        """Fine-tuned on all but a fold: how many of the fold's speeches are given their party."""
        labels, length = self.labels(), self.speech_length(kind)
        folds = StratifiedKFold(self.args.folds, shuffle=True, random_state=seed)
        learn, judge = list(folds.split(labels.numpy(), labels.numpy()))[at]
        torch.manual_seed(seed)
        task = Classifier(self.long_model(kind)).to(self.device)
        epochs = [list(self.speech_batches(learn.tolist(), length, 1000 * seed + e)) for e in range(self.args.epochs)]
        steps = [one for epoch in epochs for one in epoch]
        adam, schedule = task.optimiser(self.args.speech_rate, len(steps))
        for batch, members in steps:
            with self.autocast():
                loss = nn.functional.cross_entropy(task(batch).float(), labels[members].to(self.device))
            torch.autograd.backward(loss)
            adam.step()
            adam.zero_grad()
            schedule.step()
        right = 0
        with torch.no_grad(), self.autocast():
            for batch, members in self.speech_batches(judge.tolist(), length, None):
                right += int((task(batch).argmax(-1).cpu() == labels[members]).sum())
        return {"right": right, "of": len(judge), "steps": len(steps), "last_loss": float(loss.detach())}

    def cost(self, kinds: list[str]) -> Found:
        """Of a training step, and of a call without gradients, on the longest speeches; a few of them at a time."""
        found: Found = {"forward": {}, "training": {}, "forward_bytes": {}, "training_bytes": {}}
        works: dict[str, dict[str, Any]] = {"forward": {}, "training": {}}
        size = max(1, self.args.speech_tokens // self.args.speech_length)
        for kind in kinds:
            length = self.speech_length(kind)
            task = Classifier(self.long_model(kind)).to(self.device)
            adam, _ = task.optimiser(self.args.speech_rate, 1000)
            batch = self.batch([self.texts.stream[at * length : (at + 1) * length] for at in range(size)])
            works["forward"][kind] = functools.partial(self.call, task, batch, None)
            works["training"][kind] = functools.partial(self.call, task, batch, adam)
        for what, calls in works.items():
            times = time_calls(calls, repeats=self.args.repeats, device=self.device, warmup=2)
            found[what] = {name: dataclasses.asdict(one) for name, one in times.items()}
            found[f"{what}_bytes"] = {name: peak_memory(call, self.device) for name, call in calls.items()}
        return found | {"batch": size}

    def call(self, task: Classifier, batch: dict[str, Tensor], adam: Any) -> None:
        with torch.set_grad_enabled(adam is not None), self.autocast():
            loss = task(batch).float().square().mean()
        if adam is not None:
            loss.backward()
            adam.step()
            adam.zero_grad()

    # Pictures

    def image(self, row: str, seed: int) -> Found:
        """Accuracy in percent on the test pictures, and how many keep their class."""
        judged, labels = self.pictures("test", self.args.picture_judged)
        softmax = ViTForImageClassification.from_pretrained(self.args.vit, dtype=torch.float32).to(self.device).eval()
        model = softmax
        if row != SOFTMAX:
            _, kind, options, doing = ROWS[row]
            how = {"block_size": None, "seed": seed, "distill": self.args.picture_distill, "fitted": 8}
            lessons = self.pictures("train", 128 * self.args.picture_learned)[0]
            teaching = Teaching(softmax, lessons, **how)
            options = {**options, **({"tile": self.args.tile} if kind == "lln_diag" else {})}
            model = teaching.convert(kind, options, doing, self.args.long_rate)
        found, wanted = [torch.cat([m(**b).logits.argmax(-1) for b in judged]).cpu() for m in (model, softmax)]
        return {
            "accuracy": 100 * float((found == labels).double().mean()),
            "same_class": 100 * float((found == wanted).double().mean()),
            "pictures": len(labels),
        }

    def pictures(self, split: str, most: int) -> tuple[Batches, Tensor]:
        held = load_images("uoft-cs/cifar10", split, data_root=self.args.data_root, limit=most)
        rows = [held[at] for at in range(len(held))]
        pixels = torch.stack([row["pixel_values"] for row in rows])
        size = self.softmax_side()
        assert pixels.shape[-1] == size, (pixels.shape, size)
        batches = [{"pixel_values": part.to(self.device)} for part in torch.split(pixels, 128)]
        return batches, torch.stack([row["labels"] for row in rows])

    def softmax_side(self) -> int:
        return int(json.loads((self.args.vit / "config.json").read_text())["image_size"])


class Classifier(nn.Module):
    """An encoder, the mean over a text's tokens, and a linear layer. Trained without dropout."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body.eval()
        self.head = nn.Linear(body.config.hidden_size, len(PARTIES))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.head(self.body(**batch).last_hidden_state.mean(1))
        return out

    def optimiser(self, rate: float, steps: int) -> tuple[Any, Any]:
        groups = [
            {"params": list(self.body.parameters()), "lr": rate},
            {"params": list(self.head.parameters()), "lr": HEAD_RATE},
        ]
        adam = torch.optim.AdamW(groups, weight_decay=0.01)
        warm = max(1, steps // 10)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda at: min((at + 1) / warm, 1 - at / (steps + 1)))


DESK: list[Desk] = []  # of this process


def open_desk(args: argparse.Namespace, place: Path) -> None:
    DESK.append(Desk(args, place))


def run_job(name: str, given: tuple[Any, ...]) -> Found:
    desk, began = DESK[0], time.monotonic()
    try:
        found: Found = getattr(desk, name)(*given)
    except torch.AcceleratorError:  # nothing that this process asks of the device would be answered any more
        traceback.print_exc()
        os._exit(1)
    if desk.device.type == "cuda":
        torch.cuda.empty_cache()
    return found | {"seconds": round(time.monotonic() - began, 1)}
