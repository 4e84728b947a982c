"""A causal language model converted to LLN attention: its perplexity after each stage of the conversion, and that of
simpler attention after the same stages.

    python benchmarks/language_model.py --model DIR --learn FILE --judge FILE --kinds weighed,windows,blocks \\
        --distill 80,400 --fine-tune 0,200 --out benchmarks/results/language_model.json

`--model` is a folder of transformers. `--learn` and `--judge` are texts, a document in each line. Nothing is learned
from `--judge`. The stages are those of `lln convert`: the model is switched by name, fitted without gradients, each
layer is distilled (`lln.hf.distill`), and all weights are trained until the logits are those of the softmax model
(`lln.hf.fine_tune` with on="logits", Kullback-Leibler divergence). For every number of `--distill` there is a run from
the fit, and for every number of `--fine-tune` one from its end. What is learned in a step is `--batch` passages of
`--length` tokens, and no passage comes twice while there is text.

Beside a perplexity stands its ratio to the softmax model's, with the standard error of the mean over passages. What is
in `--out` already, of the same commit, device, torch and settings, is not made again, and several processes may add to
one file. With `--work DIR` a run that was stopped goes on after the last stage that it finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lln.hf
from lln.files import replace_file, write_json
from lln.hf.watch import switch_to_eval
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table
from real_models import FITTED, KINDS, Batches, Task
from storing import command

# What is compared, by the names of `real_models`. Windows and blocks have no linear part; the map of queries and keys
# is what distillation can teach them.
LEARNED: dict[str, dict[str, Any]] = {
    "weighed": KINDS["weighed"][1],
    "windows": {"mix": 0.0, "overlap": True, "feature_map": "linear"},
    "blocks": {"mix": 0.0, "feature_map": "linear"},
    "paper": KINDS["paper"][1],  # what switching by name gives; nothing is learned
}
SEVERAL = 2  # times as many tokens are judged at once as are learned from in a step
SAME = ("commit", "device", "torch")  # of the provenance of a row that counts as measured
Losses = dict[str, Tensor]  # by the length of the passages: the mean loss of a token of each
Judge = Callable[[PreTrainedModel], dict[str, dict[str, float]]]  # gives what `compare` does


def read_passages(tokenizer: Any, file: Path, length: int, each: int, count: int) -> list[list[int]]:
    """At most so many passages of exactly so many tokens, at most `each` of a document, in the order of the text."""
    found: list[list[int]] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(line[: 8 * length * each], add_special_tokens=False, verbose=False)["input_ids"]
            whole = range(0, len(ids) - length + 1, length)
            found += [ids[at : at + length] for at in whole[:each]]
            if len(found) >= count:
                break
    return found[:count]


def make_batches(found: list[list[int]], size: int, device: torch.device) -> Batches:
    """Without a mask, since no token is padding."""
    return [{"input_ids": torch.tensor(found[at : at + size], device=device)} for at in range(0, len(found), size)]


@torch.no_grad()
def measure_losses(model: PreTrainedModel, judged: dict[str, Batches]) -> Losses:
    """In the precision of the model's weights."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    found = {}
    with switch_to_eval(model):
        for length, batches in judged.items():
            rows = []
            for batch in batches:
                ids = batch["input_ids"]
                logits = model(**batch).logits[:, :-1].float()
                losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
                rows.append(losses.view(len(ids), -1).double().mean(1).cpu())
            found[length] = torch.cat(rows)
    torch.set_float32_matmul_precision(before)
    return found


def compare(found: Losses, softmax: Losses) -> dict[str, dict[str, float]]:
    """By length: the perplexity, the difference of the losses of a token and its standard error over passages."""
    result = {}
    for length, losses in found.items():
        apart = losses - softmax[length]
        error = float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
        result[length] = {
            "perplexity": math.exp(float(losses.mean())), "difference": float(apart.mean()), "error": error
        }  # fmt: skip
    return result


class Store:
    """The file of results, which several processes add to."""

    def __init__(self, path: Path | None, made: dict[str, Any], about: dict[str, Any]) -> None:
        self.path, self.made, self.result = path, made, {**about, "rows": []}
        if path is not None and path.exists():
            self.result["rows"] = json.loads(path.read_text())["rows"]

    def has(self, settings: dict[str, Any]) -> bool:
        wanted = settings | {"provenance": {name: self.made[name] for name in SAME}}
        return any(
            {name: row[name] for name in settings} | {"provenance": {n: row["provenance"][n] for n in SAME}} == wanted
            for row in self.result["rows"]
            if settings.keys() <= row.keys()
        )

    def add(self, settings: dict[str, Any], found: dict[str, Any]) -> None:
        row = settings | found | {"provenance": self.made}
        print({name: value for name, value in row.items() if name != "provenance"}, flush=True)
        if self.path is None:
            self.result["rows"].append(row)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            if self.path.exists():
                self.result["rows"] = json.loads(self.path.read_text())["rows"]
            kept = [old for old in self.result["rows"] if any(old.get(n) != v for n, v in settings.items())]
            self.result["rows"] = [*kept, row]
            write_json(self.path, self.result)


class Runs:
    """All that is measured of one kind of attention."""

    def __init__(self, task: Task, kind: str, args: argparse.Namespace, store: Store, judge: Judge) -> None:
        self.task, self.kind, self.args, self.store, self.judge = task, kind, args, store, judge

    def settings(self, distilled: int | None, fine_tuned: int) -> dict[str, Any]:
        """distilled: None before it. What has not been done yet has no rate."""
        args = self.args
        return {
            "kind": self.kind, "length": args.length, "batch": args.batch, "block_size": args.block_size,
            "directions": args.directions, "distilled": distilled, "fine_tuned": fine_tuned,
            "rate": args.rate if distilled else None, "fine_rate": args.fine_rate if fine_tuned else None,
            "seed": args.seed, "judged": args.judged, "lengths": args.lengths,
        }  # fmt: skip

    def go(self) -> None:
        if self.kind == "paper":
            self.measure(lambda: self.convert(), None, 0)
            return
        fitted = self.stage(None, 0, self.fit, "fitted")
        for steps in self.args.distill:
            if not steps:
                begun = fitted
            else:

                def distil(steps: int = steps) -> PreTrainedModel:
                    how = {"steps": steps, "rate": self.args.rate, "seed": self.args.seed}
                    return lln.hf.distill(fitted(), self.task.learn, progress=self.tell(f"distil {steps}"), **how)

                begun = self.stage(steps, 0, distil, f"distilled-{steps}")
            for more in filter(None, self.args.fine_tune):

                def tune(more: int = more, begun: Callable[[], PreTrainedModel] = begun) -> PreTrainedModel:
                    how = {"steps": more, "rate": self.args.fine_rate, "seed": self.args.seed + 1, "on": "logits"}
                    told = self.tell(f"fine-tune {more}")
                    return lln.hf.fine_tune(begun(), self.task.softmax, self.task.learn, progress=told, **how)

                self.measure(tune, steps, more)

    def convert(self) -> PreTrainedModel:
        options = dict(LEARNED[self.kind])
        if "directions" in options:
            options["directions"] = self.args.directions
        return self.task.convert(options)

    def fit(self) -> PreTrainedModel:
        model = self.convert()
        return lln.hf.fit(model, self.task.few, seed=self.args.seed) if self.kind == "weighed" else model

    def tell(self, what: str) -> Callable[[int, float], None]:
        began, held = time.monotonic(), []

        def progress(done: int, loss: float) -> None:
            held.append(loss)
            if done % 20 == 0:
                said = f"{time.monotonic() - began:.1f} s, loss {sum(held) / len(held):.4f}"
                print(f"{self.kind}, {what}: {done} steps, {said}", flush=True)
                held.clear()

        return progress

    def stage(
        self, distilled: int | None, fine_tuned: int, make: Callable[[], PreTrainedModel], name: str
    ) -> Callable[[], PreTrainedModel]:
        """Measure it, and return what makes a copy of the model as it is then."""
        settings = self.settings(distilled, fine_tuned) | {name: self.store.made[name] for name in SAME}
        told = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
        place = self.args.work and self.args.work / f"{self.kind}-{name}-{told}.safetensors"
        if place and place.exists():
            model = self.convert()
            state = load_file(place, device=str(model.device))
        else:
            model = self.measure(make, distilled, fine_tuned, always=True)
            state = {key: t.detach().clone() for key, t in model.state_dict().items() if ".lln." in key}
            if place and state:
                with replace_file(place) as part:  # another process may be as far
                    save_file(state, part)

        def again() -> PreTrainedModel:
            other = self.convert()
            other.load_state_dict(state, strict=False)
            return other

        return again

    def measure(
        self, make: Callable[[], PreTrainedModel], distilled: int | None, fine_tuned: int, always: bool = False
    ) -> Any:
        settings = self.settings(distilled, fine_tuned)
        known = self.store.has(settings)
        if known and not always:
            return None
        began = time.monotonic()
        model = make()
        seconds = time.monotonic() - began
        if not known:
            self.store.add(settings, {"found": self.judge(model), "seconds": round(seconds, 1)})
        return model


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    softmax = result["softmax"]
    lengths = list(softmax)
    header = ["attention", "distilled", "fine-tuned", "learned at"]
    for length in lengths:
        header += [f"perplexity at {int(length):,}", "times softmax's"]
    rows = [["softmax", "", "", "", *(text for n in lengths for text in (f"{softmax[n]['perplexity']:.2f}", "1"))]]
    titles = {kind: KINDS[kind][0] for kind in LEARNED}

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        steps = -1 if row["distilled"] is None else row["distilled"]
        kind = list(LEARNED).index(row["kind"]), row["block_size"], row["length"]
        return *kind, steps, row["fine_tuned"], row["fine_rate"] or 0.0, row["seed"]

    def list_all(name: str) -> set[Any]:
        return {row[name] for row in result["rows"]}

    for row in sorted(result["rows"], key=order):
        title = titles[row["kind"]] + (f", {row['block_size']} tokens" if row["block_size"] != 64 else "")
        title += f", {row['directions']} channels a dim" if len(list_all("directions")) > 1 else ""
        title += f", seed {row['seed']}" if len(list_all("seed")) > 1 else ""
        tuned = f"{row['fine_tuned']} at {row['fine_rate']:g}" if row["fine_tuned"] else ""
        cells = [title, name_steps(row), tuned, f"{row['batch']} x {row['length']:,}"]
        for length in lengths:
            one = row["found"].get(length)
            ratio = 1.0 if one is None else math.exp(one["difference"])
            error = 0.0 if one is None else ratio * one["error"]
            cells += ["", ""] if one is None else [f"{one['perplexity']:.2f}", f"{ratio:.3f} ± {error:.3f}"]
        rows.append(cells)
    lines = [*markdown_table(header, rows), ""]
    counts = ", ".join(f"{one['passages']:,} passages of {int(n):,} tokens" for n, one in softmax.items())
    lines.append(
        f"{result['model']}, perplexity on {counts} that nothing was learned from; ± is the standard error over "
        "passages. Distilled: steps that teach each layer alone. Fine-tuned: steps after that which train all weights "
        "on the softmax model's logits, and their rate; the softmax model itself would stay as it is. Learned at: "
        "passages of a step and their tokens. Blocks and windows have 64 tokens where nothing else is said."
    )
    origins = [row["provenance"] for row in result["rows"]]
    told = {f"{one['device']}, torch {one['torch']}, {one['date'][:10]}, commit {one['commit']}" for one in origins}
    return "\n".join([*lines, "", "; ".join(sorted(told)) + "."])


def name_steps(row: dict[str, Any]) -> str:
    if row["distilled"] is None:
        return "fitted" if row["kind"] == "weighed" else "as it is"
    return str(row["distilled"] or "")


def read_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = command(__doc__)
    for name in ("model", "learn", "judge"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--name", help="what the model is called in the result; default: the name of its folder")
    parser.add_argument("--kinds", default="weighed,windows,blocks,paper", help="what is compared, with commas between")
    parser.add_argument("--distill", type=read_numbers, default=[80], help="numbers of steps, with commas between")
    parser.add_argument("--fine-tune", type=read_numbers, default=[0], help="likewise")
    parser.add_argument("--lengths", type=read_numbers, default=[256], help="tokens of the passages that are judged")
    parser.add_argument("--work", type=Path, help="a folder for what a stopped run goes on from")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="highest", choices=("highest", "high"), help="of float32 in learning")
    counts = {"length": 256, "batch": 2, "judged": 64, "each": 8, "block-size": 64, "directions": 4,
              "threads": 1, "seed": 0}  # fmt: skip
    for name, usual in counts.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--fine-rate", type=float, default=1e-4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision(args.precision)
    made = provenance(args.seed, device) | {"transformers": transformers.__version__}

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # As many tokens are judged at every length.
    judged = {}
    for n in args.lengths:
        found = read_passages(tokenizer, args.judge, n, 2, max(1, args.judged * min(args.lengths) // n))
        judged[str(n)] = make_batches(found, max(1, SEVERAL * args.batch * args.length // n), device)
    softmax = measure_losses(model, judged)
    about: dict[str, Any] = {"model": args.name or args.model.name, "softmax": {}}
    for held, losses in softmax.items():
        about["softmax"][held] = {"perplexity": math.exp(float(losses.mean())), "passages": len(losses)}
    print(about, flush=True)
    wanted = args.batch * max(*args.distill, *args.fine_tune, FITTED)
    learn = make_batches(read_passages(tokenizer, args.learn, args.length, args.each, wanted), args.batch, device)
    store = Store(args.out, made, about)
    for kind in args.kinds.split(","):
        task = Task(about["model"], model, learn, lambda m: 0.0, "", args.block_size, lambda value: value)
        Runs(task, kind, args, store, lambda m: compare(measure_losses(m, judged), softmax)).go()
    print(table(store.result))


if __name__ == "__main__":
    main()
