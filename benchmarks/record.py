"""What lln.instruments.record costs a training run that records every 50th step.

    python benchmarks/record.py --out benchmarks/results/record.json

A small BERT learns to fill in masks. Steps without a recorder, with one that does not look at them, and recorded steps
take turns. The cost of recording every 50th step is that of 49 of the second kind and one of the third, above 50 of the
first. Times are CPU time of all threads, which a busy machine does not change much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

from lln.files import write_json
from lln.instruments import record
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import show_number
from lln.lab.core.timing import summarize
from storing import command

EVERY, MOST = 50, 0.10
SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
VOCABULARY = 8192


KINDS = ("plain", "watched", "recorded")


def steps(implementation: str, batch: int, length: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of steps of each kind, in turns."""
    import lln.hf  # noqa: F401

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, **SHAPE)
    config._attn_implementation = implementation
    model = BertForMaskedLM(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    rec = record(model, every=EVERY)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(len(KINDS) * (repeats + 1)):
        kind = KINDS[turn % len(KINDS)]
        rec.step = 0 if kind == "recorded" else 1
        x = torch.randint(0, VOCABULARY, (batch, length))
        watch: Any = contextlib.nullcontext() if kind == "plain" else rec
        start = time.process_time()
        with watch:
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        times[kind].append(1e3 * (time.process_time() - start))
    layers, heads = SHAPE["num_hidden_layers"], SHAPE["num_attention_heads"]
    if len(rec.rows()) != (repeats + 1) * layers * heads:
        raise SystemExit("Not every layer and head was recorded, or more than that, so the cost says nothing.")
    return {kind: values[1:] for kind, values in times.items()}  # the first of each warms up


def sentence(result: dict[str, Any]) -> str:
    """For the documentation."""
    rows, setting, made = result["rows"], result["setting"], result["provenance"]
    costs = " and ".join(
        f"{100 * rows[name]['cost']:.1f} % with {title}"
        for name, title in (("sdpa", "softmax"), ("lln_diag", "LLN+Diag"))
    )
    return (
        f"Recording every {setting['every']}th step costs a training run {costs} attention: a BERT of "
        f"{setting['num_hidden_layers']} layers and {setting['hidden_size']} channels, {setting['batch']} sequences of "
        f"{setting['length']} tokens, CPU time, {made['date'][:10]}, commit {made['commit']}."
    )


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = {}
    for implementation in ("sdpa", "lln_diag"):
        found = {
            kind: summarize(values)
            for kind, values in steps(implementation, args.batch, args.length, args.repeats).items()
        }
        plain, watched, recorded = (found[kind].median for kind in KINDS)
        # An idle recorder cannot make a step faster: what looks like it is noise.
        cost = ((EVERY - 1) * max(watched, plain) + recorded) / (EVERY * plain) - 1
        row: dict[str, Any] = {f"{kind}_cpu_ms": dataclasses.asdict(timing) for kind, timing in found.items()}
        rows[implementation] = row | {"cost": cost, "met": cost < MOST}
        print(
            f"{implementation}: a step takes {show_number(plain)} ms of CPU time, {show_number(watched)} with an "
            f"idle recorder, {show_number(recorded)} when recorded; recording every {EVERY}th costs {100 * cost:.2g} % "
            f"(at most {100 * MOST:.0f} %: {'met' if cost < MOST else 'MISSED'})",
            flush=True,
        )
    setting = {"every": EVERY, "batch": args.batch, "length": args.length, "vocabulary": VOCABULARY, **SHAPE}
    result = {"setting": setting, "most": MOST, "rows": rows, "provenance": provenance(0, torch.device("cpu"))}
    print(sentence(result))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
