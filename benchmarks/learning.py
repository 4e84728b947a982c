"""That the tiny presets learn: every task on data that needs no download, for softmax, LLN and LLN+Diag.

    python benchmarks/learning.py --out benchmarks/results/learning.json

Each row is what `lln train TASK --name NAME --attention ATTENTION` prints, beside what a guess scores: the unigram
entropy for language models (lower is better), the share of the most frequent class elsewhere. A run that is there
already, in --runs, is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from lln.files import write_json
from lln.lab.core.provenance import provenance
from lln.lab.recipes import NAMES, recipe
from lln.lab.train.run import train

ATTENTIONS = ("softmax", "lln", "lln_diag")
# The tiny presets of GLUE's three tasks on pairs are one.
TASKS = [("mlm", None), ("glue", "sst2"), ("glue", "qqp"), ("image", None), *(("lra", name) for name in NAMES["lra"])]
LEAST = {"image": 0.90}  # accuracy; elsewhere the bar is the guess


def has_learned(task: str, metrics: dict[str, float], guess: dict[str, float]) -> bool:
    if task == "mlm":
        return metrics["loss"] < guess["loss"]
    return metrics["accuracy"] > max(guess["accuracy"], LEAST.get(task, 0.0))


def row(task: str, name: str | None, attention: str, runs: Path) -> dict[str, Any]:
    folder = runs / "-".join(filter(None, (task, name, attention)))
    result = train(recipe(task, "tiny", attention, name), folder)
    metrics, guess = result["metrics"], result["guess"]
    command = ["lln train", task, *(["--name", name] if name else []), "--attention", attention]
    return {
        "command": " ".join(command), "task": task, "name": name, "attention": attention, "metrics": metrics,
        "guess": guess, "seconds": round(result["seconds"], 1), "learned": has_learned(task, metrics, guess),
        "notes": result["notes"], "commit": result["provenance"]["commit"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "learning")
    parser.add_argument("--only", help="a task, or task/name; other rows of --out stay as they are")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    held = json.loads(arguments.out.read_text())["rows"] if arguments.only and arguments.out.exists() else []
    for task, name in TASKS:
        if arguments.only not in (None, task, f"{task}/{name}"):
            rows += [r for r in held if (r["task"], r["name"]) == (task, name)]
            continue
        for attention in ATTENTIONS:
            rows.append(row(task, name, attention, arguments.runs))
            shown, guess = ({k: round(v, 3) for k, v in rows[-1][part].items()} for part in ("metrics", "guess"))
            print(rows[-1]["command"], shown, "guess", guess, f"{rows[-1]['seconds']} s", flush=True)
    write_json(arguments.out, {"rows": rows, "provenance": provenance(0, torch.device("cpu"))})
    if bad := [r["command"] for r in rows if not r["learned"]]:
        raise SystemExit(f"Not learned: {'; '.join(bad)}.")


if __name__ == "__main__":
    main()
