"""Kills commands at random moments and lets the same command go on, until it ends; the end must be, to the last bit,
the one of a command that nobody killed:

    make kill-test                              200 kills
    python tools/kill_test.py --commands train --cases 20

The commands: train (a language model), convert (fit, distillation and fine-tuning of a tiny BERT), reproduce (two runs
of Table 3). A number of the campaign is one command killed once or several times by SIGKILL, each time after a random
part of the time that it takes undisturbed. What must agree: metrics, weights and results, less what says when and how
long. Results are in results/hardening/kill-COMMAND.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from campaign import Campaign, Tried, finish, make_parser
from helpers.runs import SMALLEST, write_options

ROOT = Path(__file__).parent.parent
SMALL = SMALLEST | {
    "optimisation.steps": "60", "log_every": "2", "save_every": "4", "evaluate_every": "20", "record_every": "0",
}  # fmt: skip
PICTURES = {
    "optimisation.steps": "20", "optimisation.batch": "4", "log_every": "2", "save_every": "4", "evaluate_every": "10",
    "data.train": "64", "data.evaluation": "16",
}  # fmt: skip
# What differs between two runs that are the same: when, where and how long.
PASSING = {"seconds", "step_seconds", "provenance", "starts", "all_times_known", "beside", "bytes", "date", "command"}
KILLS = 3  # of one command, at most
Whole = tuple[dict[str, Any], float, int]  # of a command that nobody kills: its end, how long it takes, its exit code


def make_model(folder: Path) -> None:
    """A tiny BERT with a vocabulary of its own, and a text to convert it with."""
    import transformers

    words = [f"word{number}" for number in range(40)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(tokens))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, vocab_size=len(tokens),
        max_position_embeddings=96, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    transformers.BertTokenizerFast(vocab={t: i for i, t in enumerate(tokens)}).save_pretrained(folder)
    rng = random.Random(0)
    (folder.parent / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(6000)))


def write_command(name: str, place: Path, out: Path) -> list[str]:
    if name == "train":
        more = ["mlm", "--attention", "lln_diag", "--out", str(out), *write_options(SMALL)]
    elif name == "convert":
        more = [str(place / "model"), str(out), "--calibration", str(place / "text.txt")]
        more += ["--block-size", "8", "--length", "48", "--directions", "12", "--distill", "60", "--fine-tune", "40"]
    else:
        more = ["table3", "--attentions", "softmax,lln", "--keep-all", "--out", str(out), *write_options(PICTURES)]
    return [sys.executable, "-W", "ignore", "-m", "lln", name, *more]


def run(command: list[str], place: Path, after: float | None = None) -> int:
    """The exit code of a command; after: seconds until it is killed."""
    environment = os.environ | {"LLN_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (place / "said.txt").open("ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, cwd=place)
        try:
            return process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return process.wait()


def read_end(out: Path) -> dict[str, Any]:
    """All that must be the same, by the path of its file."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            found[name] = path.read_bytes()
        elif path.name == "metrics.jsonl":
            found[name] = path.read_text()
        elif path.name in ("result.json", "conversion.json", "table3.json", "config.json"):
            found[name] = drop_passing(json.loads(path.read_text()))
    return found


def drop_passing(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: drop_passing(one) for name, one in value.items() if name not in PASSING}
    return [drop_passing(one) for one in value] if isinstance(value, list) else value


def find_difference(wanted: dict[str, Any], found: dict[str, Any]) -> str | None:
    if apart := sorted(wanted.keys() ^ found.keys()):
        return f"{apart[0]} is in one of the two alone"
    changed = [name for name, value in wanted.items() if found[name] != value]
    return f"{changed[0]} is another" if changed else None


def prepare(name: str, place: Path) -> Whole:
    """Run it undisturbed."""
    for _ in range(2):  # the first makes tokens and tokenizers, which later ones find
        shutil.rmtree(place / "whole", ignore_errors=True)
        start = time.monotonic()
        code = run(write_command(name, place, place / "whole"), place)
        taken = time.monotonic() - start
        if code not in (0, 3, 4):
            raise SystemExit(f"lln {name} ends with {code}: {(place / 'said.txt').read_text()[-500:]}")
    return read_end(place / "whole"), taken, code


def kill(name: str, place: Path, rng: random.Random, whole: Whole) -> Tried:
    """A command that is killed up to three times and then left alone."""
    wanted, taken, wanted_code = whole
    out, kills = place / "killed", 0
    for path in place.glob("killed*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    command = write_command(name, place, out)
    for _ in range(rng.randint(1, KILLS)):
        if run(command, place, after=rng.uniform(0.0, taken)) >= 0:
            break  # it was faster
        kills += 1
    code = run(command, place)
    word = f"{kills} kills"
    if code != wanted_code:
        return Tried(
            word, f"after {word} it ends with {code}: {' '.join((place / 'said.txt').read_text()[-300:].split())}"
        )
    left = [p.name for p in place.glob("killed*") if p != out]
    fault = find_difference(wanted, read_end(out)) or (f"{left[0]} is left over" if left else None)
    return Tried(word, fault and f"after {word}: {fault}")


COMMANDS = ("train", "convert", "reproduce")


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, 67)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    options: argparse.Namespace = parser.parse_args(arguments)
    campaigns, until = [], time.monotonic()
    for name in options.commands:
        campaign = Campaign(f"kill-{name}", options, command=name)
        campaigns.append(campaign)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            make_model(place / "model")
            whole = prepare(name, place)

            def try_one(at: int, name: str = name, place: Path = place, whole: Any = whole) -> Tried:
                return kill(name, place, random.Random(f"{name} {options.seed} {at}"), whole)

            until = max(until, time.monotonic()) + options.seconds / len(options.commands)
            campaign.facts = {"seconds_undisturbed": round(whole[1], 1)}
            campaign.run(try_one, until)
            kills = sum(int(word.split()[0]) * count for word, count in campaign.counts.items())
            campaign.facts["kills"] = kills
            if options.only is None:
                campaign.save()
    finish(campaigns)


if __name__ == "__main__":
    main()
