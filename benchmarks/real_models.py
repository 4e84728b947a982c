"""Pretrained models that people use, converted to LLN attention: what each still does of what it was made for, beside
the softmax model and beside simpler things that cost as little.

    python benchmarks/real_models.py --stories DIR --gte DIR --stsb FILE.parquet --text FILE \\
        --antiberty DIR --sequences FILE --whisper DIR --speech DIR --out benchmarks/results/real_models.json

Each model is a folder of transformers, and each option is measured where it is given:

- stories15M (`--stories`), a decoder with rotary positions: perplexity of texts of 256 tokens that the softmax model
  wrote itself, sampled from its own distribution. No other model can have a lower one in the mean, and the logarithm of
  a perplexity over softmax's is the Kullback-Leibler divergence of a token.
- SmolLM2 (`--smollm2`), another: perplexity of passages of `--text` of 256 tokens.
- gte-small (`--gte`), an encoder: Spearman's rank correlation, times 100, of the cosines of sentences with people's
  scores on STS-B (`--stsb`), with blocks of 64, which most sentences do not fill, and of 16.
- AntiBERTy (`--antiberty`), an encoder: accuracy, in percent, on masked residues of antibodies (`--sequences`).
- Whisper (`--whisper`), whose encoder reads 1,500 positions of sound: of the tokens that the softmax model writes down
  when it hears the WAV files in `--speech`, how many, in percent, come first with the converted encoder, too. Its
  decoder stays as it is. Sound is to be had, say, by `espeak-ng -w speech/1.wav "some sentences"`.

`--text` is a document in each line, `--sequences` a sequence. What is measured on is never learned from. A result
stands beside those of other models in the same file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import lln.hf
from conversion import cut
from lln.files import write_json
from lln.hf.find import attention_modules, read_sizes
from lln.lab.convert.passages import pad_batches
from lln.lab.convert.verdict import measure_model
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table

FITTED = 8  # batches that a fit looks at
WRITTEN, PASSAGE = 256, 256  # tokens of a text that a decoder wrote, or reads
NO_TIMESTAMPS = 50362  # the token of Whisper's English models that asks for text alone
LEARNED = {"mix": "scales", "feature_map": "linear"}
STAGES = {"fitted": "fit without gradients", "distilled": "distilled", "fine_tuned": "fine-tuned"}
# What is compared: title, options of lln.hf.convert, stages. `directions`: times the head dim. `beta`: so small that a
# channel weighs all keys alike, which is the plain mean of all values. `overlap` is for decoders, where the first token
# of a block would see nothing but itself nearby.
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "blocks": ("blocks alone", {"mix": 0.0, "statistics": {"encoder": "sample", "decoder": "fixed"}}, ()),
    "windows": ("windows that overlap alone", {"mix": 0.0, "overlap": True, "statistics": "fixed"}, ()),
    "paper": ("LLN+Diag, the paper's read", {"statistics": {"encoder": "sample", "decoder": "running"}}, ()),
    "mean": ("blocks and the plain mean", {"read": "evidence", "beta": 1e-6, **LEARNED}, tuple(STAGES)),
    "evidence": ("LLN+Diag, evidence read", {"read": "evidence", "directions": 4, **LEARNED}, tuple(STAGES)),
    "weighed": (
        "LLN+Diag, evidence read and mix",
        {"read": "evidence", "directions": 4, "mix": "evidence", "feature_map": "linear", "overlap": True},
        tuple(STAGES),
    ),
}
Batches = list[dict[str, Tensor]]


@dataclasses.dataclass
class Task:
    """One model: what it learns from, and what is measured."""

    title: str
    softmax: PreTrainedModel
    learn: Batches
    measure: Callable[[PreTrainedModel], float]
    what: str
    block_size: int
    bar: Callable[[float], float]  # of the softmax model's figure: the last one that is near enough

    def convert(self, options: dict[str, Any]) -> PreTrainedModel:
        options = {**options, "block_size": self.block_size}
        if not self.causal:
            options.pop("overlap", None)
        if "directions" in options:
            options["directions"] *= min(read_sizes(one)["head_dim"] for _, one in attention_modules(self.softmax))
        if "running" in str(options.get("statistics")):
            options["batches"] = self.few
        return lln.hf.convert(copy.deepcopy(self.softmax), "lln_diag", **options)

    @property
    def causal(self) -> bool:
        return any(getattr(module, "is_causal", False) for _, module in attention_modules(self.softmax))

    @property
    def few(self) -> Batches:
        return self.learn[:: max(1, len(self.learn) // FITTED)][:FITTED]

    def rows(self, args: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
        """(name of a row, its figure, seconds that the conversion took so far)"""
        for name, (_, options, stages) in KINDS.items():
            if (name == "windows" and not self.causal) or name not in args.kinds.split(","):
                continue
            began = time.monotonic()
            model, spent = self.convert(options), 0.0
            for stage in stages or ("",):
                if stage == "fitted":
                    lln.hf.fit(model, self.few, seed=args.seed)
                elif stage == "distilled":
                    lln.hf.distill(model, self.learn, steps=args.distill, rate=args.rate, seed=args.seed)
                elif stage == "fine_tuned":
                    if not args.fine_tune:
                        continue
                    lln.hf.fine_tune(model, self.softmax, self.learn, steps=args.fine_tune, seed=args.seed)
                spent += time.monotonic() - began
                yield f"{name}_{stage}".rstrip("_"), self.measure(model), spent
                began = time.monotonic()


def perplexity(model: PreTrainedModel, batches: Batches) -> float:
    return math.exp(float(measure_model(model, batches)))


def stories(folder: Path, args: argparse.Namespace) -> Iterator[Task]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(args.seed)
    start = torch.full([args.learned + args.judged, 1], model.config.bos_token_id)
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    texts = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=WRITTEN - 1, **how)
    given = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in texts.split(args.batch)]
    judged, learn = given[: args.judged // args.batch], given[args.judged // args.batch :]
    what = f"perplexity of {args.judged} texts of {WRITTEN} tokens that it wrote"
    yield Task("stories15M", model, learn, lambda m: perplexity(m, judged), what, 64, lambda value: 1.05 * value)


def smollm2(folder: Path, args: argparse.Namespace) -> Iterator[Task]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    learn, judged = text_batches(model, AutoTokenizer.from_pretrained(folder), PASSAGE, args)
    what = f"perplexity of {args.judged} passages of {PASSAGE} tokens"
    yield Task("SmolLM2-135M", model, learn, lambda m: perplexity(m, judged), what, 64, lambda value: 1.1 * value)


def text_batches(model: Any, tokenizer: Any, length: int, args: argparse.Namespace) -> tuple[Batches, Batches]:
    """(to learn from, to measure on), at most one passage of a document."""
    lines = args.text.read_text(encoding="utf-8").splitlines()
    found: list[list[int]] = []
    for line in lines:
        found += cut(tokenizer, line[: 16 * length], length)[:1]
        if len(found) == args.learned + args.judged:
            break
    learn, judged = found[args.judged :], found[: args.judged]
    return pad_batches(model, tokenizer, learn, args.batch), pad_batches(model, tokenizer, judged, args.batch)


def gte(folder: Path, args: argparse.Namespace) -> Iterator[Task]:
    import pyarrow.parquet

    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    pairs = pyarrow.parquet.read_table(args.stsb).to_pylist()
    # From all over the set, which is in the order of its sources; then by length, so that batches hold little padding.
    pairs = sorted(pairs[:: max(1, len(pairs) // args.pairs)][: args.pairs], key=lambda pair: len(pair["sentence1"]))
    gold = torch.tensor([pair["label"] for pair in pairs], dtype=torch.float64)

    @torch.no_grad()
    def measure(model: PreTrainedModel) -> float:
        sides = []
        for side in ("sentence1", "sentence2"):
            means = []
            for first in range(0, len(pairs), 32):
                texts = [pair[side] for pair in pairs[first : first + 32]]
                batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
                hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
                means.append((hidden * mask).sum(1) / mask.sum(1))
            sides.append(torch.cat(means).double())
        return 100 * spearman(torch.cosine_similarity(sides[0], sides[1]), gold)

    what = f"100 Spearman on {len(pairs)} pairs of STS-B"
    for block in (16, 64):
        learn, _ = text_batches(model, tokenizer, 4 * block, argparse.Namespace(**vars(args) | {"batch": 128 // block}))
        yield Task(f"gte-small, blocks of {block}", model, learn, measure, what, block, lambda value: value - 1)


def spearman(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of the ranks, where equals share the mean of theirs."""

    def ranks(values: Tensor) -> Tensor:
        order = values.sort().values
        first, after = (torch.searchsorted(order, values, right=right) for right in (False, True))
        return (first + after).double()

    return float(torch.stack([ranks(a), ranks(b)]).corrcoef()[0, 1])


def antiberty(folder: Path, args: argparse.Namespace) -> Iterator[Task]:
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = {piece: at for at, piece in enumerate((folder / "vocab.txt").read_text().split())}
    lines = args.sequences.read_text().split()[: args.learned + args.judged]
    sequences = [[ids["[CLS]"], *(ids[letter] for letter in line), ids["[SEP]"]] for line in lines]
    tokenizer = argparse.Namespace(pad_token_id=ids["[PAD]"])  # all that batches ask of one
    generator = torch.Generator().manual_seed(args.seed)

    def hide(part: list[list[int]]) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Batches with 15 % of the residues masked, and the residues there, -100 elsewhere."""
        found = []
        for batch in pad_batches(model, tokenizer, part, args.batch):
            x = batch["input_ids"]
            chosen = (torch.rand(x.shape, generator=generator) < 0.15) & (x > ids["[MASK]"])
            labels = x.masked_fill(~chosen, -100)
            found.append((batch | {"input_ids": x.masked_fill(chosen, ids["[MASK]"])}, labels))
        return found

    judged, learn = hide(sequences[: args.judged]), hide(sequences[args.judged :])

    @torch.no_grad()
    def measure(model: PreTrainedModel) -> float:
        right = sum(int((model(**batch).logits.argmax(-1) == labels).sum()) for batch, labels in judged)
        return 100 * right / masked

    masked = sum(int((labels >= 0).sum()) for _, labels in judged)
    what = f"percent right of {masked:,} masked residues of {args.judged} antibodies"
    yield Task("AntiBERTy", model, [b for b, _ in learn], measure, what, 32, lambda value: value - 1)


def whisper(folder: Path, args: argparse.Namespace) -> Iterator[Task]:
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    hear = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    files = sorted(args.speech.glob("*.wav"))[: args.learned + args.judged]
    heard = [hear(read_sound(one), sampling_rate=16000, return_tensors="pt").input_features for one in files]
    start = torch.tensor([[model.config.decoder_start_token_id, NO_TIMESTAMPS]])
    model.generation_config.max_length = None  # which would warn beside max_new_tokens
    written = [
        torch.cat([start, model.generate(one, decoder_input_ids=start, max_new_tokens=100, do_sample=False)], 1)
        for one in heard[: args.judged]
    ]  # what is given back begins after `start`
    tokens = sum(one.shape[1] - start.shape[1] for one in written)

    @torch.no_grad()
    def measure(encoder: PreTrainedModel) -> float:
        right = 0
        for sound, text in zip(heard, written, strict=False):
            states = (encoder(sound).last_hidden_state,)
            logits = model(encoder_outputs=states, decoder_input_ids=text[:, :-1]).logits
            right += int((logits.argmax(-1) == text[:, 1:])[:, start.shape[1] - 1 :].sum())
        return 100 * right / tokens

    what = f"percent of the {tokens:,} tokens that softmax writes down of {len(written)} pieces of speech"
    learn = [{"input_features": one} for one in heard[args.judged :]]
    yield Task("Whisper tiny.en", model.get_encoder(), learn, measure, what, 64, lambda value: value - 1)


def read_sound(path: Path) -> Any:
    """A WAV file of one channel of 16 bits as 16,000 numbers a second."""
    import scipy.signal  # which other models do without

    with wave.open(str(path)) as file:
        rate, sound = file.getframerate(), numpy.frombuffer(file.readframes(file.getnframes()), "<i2")
    return scipy.signal.resample_poly(sound.astype(numpy.float32) / 32768, 16000, rate)


TASKS = {"stories": stories, "smollm2": smollm2, "gte": gte, "antiberty": antiberty, "whisper": whisper}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    models = result["models"]
    titles = {"softmax": "softmax"}
    for kind, (title, _, stages) in KINDS.items():
        titles |= {
            f"{kind}_{stage}".rstrip("_"): ", ".join(filter(None, (title, STAGES.get(stage))))
            for stage in stages or ("",)
        }
    rows = [
        [title, *(f"{one['rows'][name]['value']:.2f}" if name in one["rows"] else "" for one in models.values())]
        for name, title in titles.items()
    ]
    rows.append(["the last figure that counts as kept", *(f"{one['bar']:.2f}" for one in models.values())])
    lines = [*markdown_table(["attention", *models], rows), ""]
    lines += ["Of a perplexity less is better, of everything else more. An empty cell was not measured.", ""]
    for title, one in models.items():
        how, made = one["how"], one["provenance"]
        lines.append(
            f"{title}: {one['what']}; {how['distill']} steps of distillation and {how['fine_tune']} of fine-tuning, "
            f"{made['device']}, torch {made['torch']}, {made['date'][:10]}, commit {made['commit']}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in TASKS:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    for name in ("stsb", "text", "sequences"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--speech", type=Path, metavar="DIR")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what is compared, with commas between")
    parser.add_argument("--out", type=Path, help="where to store the result")
    counts = {"distill": 200, "fine-tune": 0, "batch": 2, "learned": 128, "judged": 32, "pairs": 1500, "threads": 1}
    for name, usual in counts.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    made = provenance(args.seed, torch.device("cpu")) | {"transformers": transformers.__version__}
    how = {name: getattr(args, name) for name in ("distill", "fine_tune", "learned", "judged", "rate", "seed")}

    result: dict[str, Any] = {"models": {}}

    def store(title: str, about: dict[str, Any]) -> None:
        if args.out and args.out.exists():  # another process may have added to it
            result.update(json.loads(args.out.read_text()))
        result["models"][title] = about
        if args.out:
            write_json(args.out, result)

    for name, maker in TASKS.items():
        for task in maker(getattr(args, name), args) if getattr(args, name) else ():
            value = task.measure(task.softmax)
            rows: dict[str, Any] = {"softmax": {"value": value, "seconds": 0.0}}
            batch, *_, length = next(iter(task.learn[0].values())).shape
            about = {"what": task.what, "block_size": task.block_size, "bar": task.bar(value)}
            about |= {"how": how | {"batch": batch, "length": length}}
            for row, figure, seconds in task.rows(args):
                rows[row] = {"value": figure, "seconds": round(seconds, 1)}
                print(f"{task.title}, softmax {value:.3f}, {row}: {rows[row]}", flush=True)
                store(task.title, about | {"rows": rows, "provenance": made})
    print(table(result))


if __name__ == "__main__":
    main()
