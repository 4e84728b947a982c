"""LLN attention in the global layers of a ModernBERT whose local layers stay as they are, trained briefly.

    python benchmarks/global_layers.py --out benchmarks/results/global_layers.json

A small ModernBERT with random weights learns to fill in masked bytes of a plain text: as it is, with LLN and LLN+Diag
attention in its global layers, and, as the control, with sliding windows in all of them. As for the published
ModernBERT, most steps see short sequences and the last ones long ones. Every kind starts from the same weights and sees
the same bytes. The loss is told on long passages that no step saw, with the standard error of its difference from
softmax over these passages; times are CPU time of a step and of a call without gradients. A kind that the file holds
already, measured alike, is not measured again. On a GPU, in bfloat16 and long enough to tell more than a first step:

    python benchmarks/global_layers.py --device cuda --width 512 --short-steps 2000 --long-steps 200 --judged 32 \
        --rate 1e-3 --out benchmarks/results/global_layers_gpu.json

The text is the documentation that Python brings, every fourth topic of it for the held-out loss, or a file of yours.
Each kind takes four to five minutes of one CPU core.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM

import lln.hf
from lln.files import write_json
from lln.lab.core.progress import track
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table
from lln.lab.core.timing import summarize
from lln.lab.data.embedded import list_paragraphs

KINDS = {
    "softmax": "softmax, as ModernBERT is",
    "windows": "sliding windows in every layer",
    "lln_diag": "LLN+Diag in the global layers",
    "lln": "LLN in the global layers",
    "evidence": "LLN+Diag, evidence read, in the global layers",
}
MASK, VOCABULARY = 256, 264  # bytes, the mask, and room for the marks that a config asks for
HIDDEN_SHARE = 0.3
LAYERS = 6
GLOBAL = (0, 3)  # of them, in ModernBERT


def make_model(kind: str, width: int, length: int, seed: int) -> ModernBertForMaskedLM:
    torch.manual_seed(seed)
    marks = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), MASK + 1)
    config = ModernBertConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width // 2, num_hidden_layers=LAYERS,
        num_attention_heads=width // 64, max_position_embeddings=length, attn_implementation="sdpa", **marks,
    )  # fmt: skip
    model = ModernBertForMaskedLM(config)
    if kind == "windows":
        local = copy.deepcopy(config)
        local.layer_types = ["sliding_attention"] * LAYERS
        weights = model.state_dict()
        model = ModernBertForMaskedLM(local)
        model.load_state_dict(weights)
    elif kind == "evidence":
        lln.hf.convert(model, "lln_diag", read="evidence", mix="evidence", layers="full_attention")
    elif kind != "softmax":
        lln.hf.convert(model, kind, layers="full_attention")
    return model


def read_texts(file: Path | None) -> tuple[Tensor, Tensor]:
    """(bytes to learn from, bytes to measure on)"""
    if file is None:
        paragraphs, topics = list_paragraphs(), sorted({topic for topic, _ in list_paragraphs()})
        held = set(topics[::4])
        sides = ["\n".join(text for topic, text in paragraphs if (topic in held) == side) for side in (False, True)]
        parts = [side.encode() for side in sides]
    else:
        whole = file.read_bytes()
        parts = [whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]]
    learn, judge = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return learn, judge


def draw(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Passages from anywhere, see `hide`."""
    starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
    return hide(torch.stack([text[start : start + length] for start in starts.tolist()]), generator)


def hide(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Passages with masked bytes, and what to say: -100 where nothing is masked."""
    hidden = torch.rand(rows.shape, generator=generator) < HIDDEN_SHARE
    return rows.long().masked_fill(hidden, MASK), rows.long().masked_fill(~hidden, -100)


def read_clock(device: str) -> float:
    """CPU seconds of this process, which others on the machine do not change; on a GPU seconds when all is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


@contextlib.contextmanager
def time_attention(model: ModernBertForMaskedLM, device: str) -> Iterator[list[float]]:
    """Seconds in the attention of those layers that are global in ModernBERT, call by call."""
    found: list[float] = []
    handles = []
    for layer in (model.model.layers[at].attn for at in GLOBAL):
        handles.append(layer.register_forward_pre_hook(lambda *_: found.append(-read_clock(device))))
        handles.append(layer.register_forward_hook(lambda *_: found.append(found.pop() + read_clock(device))))
    yield found
    for handle in handles:
        handle.remove()


def measure(kind: str, text: Tensor, held: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(kind, args.width, args.length, args.seed).to(args.device).train()
    run = torch.autocast(args.device, torch.bfloat16, enabled=args.device != "cpu")
    optimiser = torch.optim.AdamW(model.parameters(), args.rate, weight_decay=0.01)
    steps = args.short_steps + args.long_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.rate, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    times: list[float] = []
    losses: list[float] = []
    for step in track(range(steps), steps, f"Training with {KINDS[kind]}"):
        length = args.short if step < args.short_steps else args.length
        inputs, labels = draw(text, args.length // length, length, generator)
        inputs, labels = inputs.to(args.device), labels.to(args.device)
        start = read_clock(args.device)
        with run:
            loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step > args.short_steps:  # the first long step warms up
            times.append(read_clock(args.device) - start)
        losses.append(float(loss.detach()))
    judged, calls = [], []
    generator = torch.Generator().manual_seed(args.seed + 1)
    model.eval()
    with torch.no_grad(), run, time_attention(model, args.device) as inside:
        for at in range(args.judged):  # as far apart as the text allows
            first = at * (len(held) - args.length) // max(args.judged - 1, 1)
            inputs, labels = hide(held[None, first : first + args.length], generator)
            inputs, labels = inputs.to(args.device), labels.to(args.device)
            start = read_clock(args.device)
            judged.append(float(model(input_ids=inputs, labels=labels).loss))
            calls.append(read_clock(args.device) - start)
    return {
        "losses": [round(value, 4) for value in losses],
        "held_out": judged,
        "step_s": dataclasses.asdict(summarize(times)),
        "forward_s": dataclasses.asdict(summarize(calls[1:])),
        "attention_s": dataclasses.asdict(summarize(inside[len(GLOBAL) :])),
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows, how, made = result["rows"], result["how"], result["provenance"]
    base = rows["softmax"]
    lines = []
    for kind, title in KINDS.items():
        if kind not in rows:
            continue
        one = rows[kind]
        off, error = mean_and_error([a - b for a, b in zip(one["held_out"], base["held_out"], strict=True)])
        lines.append(
            [
                title,
                f"{mean_and_error(one['held_out'])[0]:.3f}",
                "" if one is base else f"{off:+.3f} ± {error:.3f}",
                *(f"{one[name]['median']:.3g} ({one[name]['median'] / base[name]['median']:.2f}x)"
                  for name in ("step_s", "forward_s", "attention_s")),
            ]
        )  # fmt: skip
    head = ["attention", "loss", "against softmax", "s a step", "s a call", "of it one global layer's attention"]
    clock = "Times at that length, batch 1, medians, "
    if how.get("device", "cpu") == "cpu":
        clock += (
            "CPU time of one thread; on a CPU transformers' local layers cost as much as global ones, since torch "
            "hides what lies outside of a window after it is computed."
        )
    else:
        clock += "in bfloat16."
    steps = how["short_steps"] + how["long_steps"]
    brief = "So brief a training shows that nothing broke, not which is better in the end. " if steps < 500 else ""
    if "windows" not in result["rows"]:
        brief += "What windows alone would give in the global layers was not measured. "
    about = (
        f"ModernBERT of {LAYERS} layers, {len(GLOBAL)} of them global, {how['width']} channels, heads of 64, "
        f"random weights, seed {how['seed']}; {how['short_steps']} steps of {how['length']:,} bytes in passages of "
        f"{how['short']:,} and {how['long_steps']} of {how['length']:,}, learning rate {how['rate']}. Loss in nats a "
        f"masked byte on {how['judged']} passages of {how['length']:,} bytes that no step saw, ± the standard error "
        f"over these passages: what another seed would change is not in it. {brief}{clock} Text: {result['text']}. "
        f"{made['device']}, torch {made['torch']}, transformers {made['transformers']}, "
        f"{made['date'][:10]}, commit {made['commit']}."
    )
    return "\n".join([*markdown_table(head, lines), "", about])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a plain text; its last tenth is for the held-out loss")
    parser.add_argument("--out", type=Path, help="where to store the result")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, with commas between")
    counts = {"width": 128, "length": 8192, "short": 1024, "short-steps": 100, "long-steps": 8, "judged": 8}
    for name, usual in counts.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    learn, judge = read_texts(args.text)
    name = args.text.stem if args.text else "the documentation that Python brings"
    how = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in (*counts, "rate", "seed")}
    if args.device != "cpu":
        how["device"] = args.device
    held = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    rows = held["rows"] if held.get("how") == how else {}
    for kind in args.only.split(","):
        if kind in rows:
            continue
        rows[kind] = measure(kind, learn, judge, args)
        made = provenance(args.seed, torch.device(args.device)) | {"transformers": transformers.__version__}
        kinds = make_model("softmax", 64, 64, 0).config.layer_types
        assert tuple(at for at, one in enumerate(kinds) if one == "full_attention") == GLOBAL
        result = {"how": how, "text": name, "rows": rows, "provenance": made}
        if args.out:
            write_json(args.out, result)
        print(
            kind,
            {name: rows[kind][name] for name in ("step_s", "forward_s")},
            sum(rows[kind]["held_out"]) / args.judged,
            flush=True,
        )
    if "softmax" in rows:
        print(table(result))


if __name__ == "__main__":
    main()
