"""The tables of docs/distributed.md: what a layer was counted to send, and what 64 cards would take on paper."""

from __future__ import annotations

import json
from pathlib import Path

from lln.lab.bench.card_times import read_pieces
from lln.lab.bench.cluster import CARDS, NAMES, SHAPES, Cluster, Job, plan_cluster
from lln.lab.cli.plan import HEAD, show_row
from lln.lab.core.tables import markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PIECES = Path("2026-11-15-h200") / "million" / "bench.json"
CARD_COUNT, MODEL = 64, "bert-base"


def traffic() -> str:
    """Bytes that a rank sends in a layer, at every length that was measured."""
    found = json.loads((RESULTS / "traffic.json").read_text())
    settings, made = found["settings"], found["provenance"]
    rows, spans = [], set()
    for kind, each in found["kinds"].items():
        most = [max(rank[name] for rank in each["ranks"]) for name in ("forward", "backward", "collectives")]
        rows.append([kind, *(f"{number:,}" for number in most)])
        spans.add((each["lengths"][0], each["lengths"][-1]))
    [(first, last)] = spans
    lines = markdown_table(["call", "bytes forward", "bytes backward", "collectives"], rows, "lrrr")
    heads = "one head" if settings["heads"] == 1 else f"{settings['heads']} heads"
    said = (
        f"The table shows the rank that sends most, of {settings['ranks']} ranks with {heads} of {settings['dim']} "
        f"channels in bfloat16. The numbers are the same at every length from {first:,} to {last:,} tokens "
        f"(`benchmarks/traffic.py`, commit {made['commit']})."
    )
    return "\n".join([*lines, "", said, ""])


def cutting() -> str:
    """What a sequence in shards takes beside one pass over it, on one device."""
    found = json.loads((RESULTS / "distributed.json").read_text())
    settings, made, rows, device, extra = found["settings"], found["provenance"], [], [], []
    for kind, each in found["kinds"].items():
        row, own = [kind], [kind]
        for what in ("forward", "training"):
            row += compare_ways(each[what])
            own += compare_ways(each["device"][what])
            rank, alone = (each["device"][what][way]["median"] for way in ("rank", "its rows alone"))
            own += [f"{rank / alone - 1:+.1%}"]
            extra.append(rank / alone - 1)
        rows.append([*row, *(f"{max(each['errors'][way].values()):.1e}" for way in ("one pass", "sharded"))])
        device.append(own)
    columns = ["forward, ms", "in shards", "cost"], ["with backward, ms", "in shards", "cost"]
    lines = markdown_table(["", *columns[0], *columns[1], "largest error", "in shards"], rows, "lrrrrrrrr")
    checked = f", of {settings['checked']} of the heads" if settings["checked"] < settings["heads"] else ""
    said = (
        f"{settings['length']:,} tokens in {settings['shards']} shards, {settings['heads']} heads of "
        f"{settings['dim']}, bfloat16, medians of {settings['repeats']}; errors of the output and all "
        f"gradients{checked}, against float64. {made['device']}, `benchmarks/distributed.py`, commit {made['commit']}. "
        "The ranks are emulated, one after another, so these times hold the Python of all ranks, where cards that work "
        "at the same time would each run their own. What the device takes, as a CUDA graph:"
    )
    head = ["", *columns[0], "a rank", *columns[1], "a rank"]
    after = (
        f"*A rank* compares what one rank does with the same rows where there are no others: {min(extra):.1%} to "
        f"{max(extra):.1%} more. The rest of the cost comes from kernels that fill the device less well with an "
        "eighth of the rows."
    )
    return "\n".join([*lines, "", said, "", *markdown_table(head, device, "lrrrrrrrr"), "", after, ""])


def compare_ways(times: dict[str, dict[str, float]]) -> list[str]:
    """One pass, in shards, and what the shards cost beside it."""
    one, cut = (times[way]["median"] for way in ("one pass", "sharded"))
    return [f"{one:.2f}", f"{cut:.2f}", f"{cut / one - 1:+.1%}"]


def plan() -> str:
    """What `lln plan` says of 64 cards with a million tokens each."""
    job, pieces = Job(CARD_COUNT * 2**20), read_pieces(RESULTS / PIECES, causal=False)
    found = plan_cluster(SHAPES[MODEL], job, Cluster(CARDS["h200"], CARD_COUNT), pieces)
    rows = [[NAMES[each["attention"]], *show_row(each)] for each in found["attentions"]]
    command = (
        f"lln plan {MODEL} --length {job.length} --cards {CARD_COUNT} --pieces benchmarks/results/{PIECES.as_posix()}"
    )
    said = [f"- {text}" for text in found["assumptions"]]
    lines = markdown_table(["attention", *HEAD], rows, "lrrrrrr")
    return "\n".join([f"    {command}", "", *lines, "", "These numbers assume the following:", "", *said, ""])
