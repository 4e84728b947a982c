"""Bytes that each rank sends in one layer, forward and backward, at every length: counted while processes talk.

    python benchmarks/traffic.py --out benchmarks/results/traffic.json

A layer is an lln.LLNAttention whose rows lie on several processes of this machine (gloo). What it gives to collectives
is counted: states, rows of neighbours where a border cuts a block, sums for statistics, and who has how many rows. The
script ends with an error where a count depends on the length.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import lln
from lln.distributed import context_parallel
from lln.files import write_json
from lln.lab.bench.traffic import Traffic
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import print_wide, terminal_table

LENGTHS = (2**12, 2**14, 2**16, 2**18, 2**20)
KINDS: dict[str, dict[str, Any]] = {
    "LLN": {},
    "LLN, causal": {"statistics": "fixed", "is_causal": True},
    "LLN+Diag": {"block_size": 64},
    "LLN+Diag, borders cut blocks": {"block_size": 64, "odd": 7},
    "LLN+Diag, causal": {"statistics": "fixed", "block_size": 64, "is_causal": True, "odd": 7},
    "LLN+Diag, padded": {"block_size": 64, "padded": True, "odd": 7},
    "LLN, value convolution": {"value_convolution": 5},
    "evidence read": {"read": "evidence"},
}


def count(rank: int, settings: argparse.Namespace, port: int, answers: Any) -> None:
    """In each process: (bytes forward, bytes backward, collectives) of every kind at every length."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(settings.ranks))
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    mesh = init_device_mesh("cpu", (settings.ranks,))
    found = []
    for kind, own in KINDS.items():
        for length in settings.lengths:
            found.append([kind, length, *count_layer(mesh, rank, length // settings.ranks, settings, own)])
    answers.put((rank, found))
    dist.destroy_process_group()


def count_layer(mesh: Any, rank: int, rows: int, settings: argparse.Namespace, own: dict[str, Any]) -> list[int]:
    options = dict(own)
    where = {"is_causal": options.pop("is_causal", False)}
    rows += options.pop("odd", 0)
    if options.pop("padded", False):  # the first rows of the first rank
        where["key_mask"] = torch.arange(rows)[None] >= (9 if rank == 0 else 0)
    torch.manual_seed(settings.seed)
    layer = lln.LLNAttention(settings.heads, settings.dim, **options)
    size = (1, settings.heads, rows, settings.dim)
    q, k, v = (torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with context_parallel(mesh):
        with Traffic() as forward:
            out = layer(q, k, v, **where)
        with Traffic() as backward:
            out.float().square().mean().backward()
    return [forward.sent, backward.sent, forward.calls + backward.calls]


def measure(settings: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    work = functools.partial(context.Process, target=count)
    workers = [work(args=(rank, settings, port, answers)) for rank in range(settings.ranks)]
    for worker in workers:
        worker.start()
    found = dict(answers.get() for _ in workers)
    for worker in workers:
        worker.join()
    kinds: dict[str, Any] = {}
    for rank in range(settings.ranks):
        for kind, length, *counted in found[rank]:
            told = dict(zip(("forward", "backward", "collectives"), counted, strict=True))
            row = kinds.setdefault(kind, {"lengths": [], "ranks": []})
            if len(row["ranks"]) <= rank:
                row["ranks"].append(told)
            elif row["ranks"][rank] != told:
                raise RuntimeError(
                    f"{kind}: rank {rank} sends {told} at {length:,} tokens, fewer {row['ranks'][rank]}."
                )
            row["lengths"] = sorted({*row["lengths"], length})
    return {
        "what": "bytes that each rank sends in one layer, the same at every length",
        "settings": {name: value for name, value in vars(settings).items() if name != "out"},
        "provenance": provenance(settings.seed, torch.device("cpu")),
        "kinds": kinds,
    }


def show(result: dict[str, Any]) -> None:
    head = ("", "tokens", "forward, bytes, most of a rank", "backward", "collectives")
    rows = []
    for kind, each in result["kinds"].items():
        most = [max(rank[name] for rank in each["ranks"]) for name in ("forward", "backward", "collectives")]
        span = f"{each['lengths'][0]:,} to {each['lengths'][-1]:,}"
        rows.append([kind, span, *(f"{number:,}" for number in most)])
    settings = result["settings"]
    title = f"{settings['ranks']} ranks, {settings['heads']} heads of {settings['dim']}"
    print_wide(terminal_table(head, rows, "lrrrr", title=title))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens on all ranks")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    made = measure(asked := parser.parse_args())
    show(made)
    if asked.out is not None:
        write_json(asked.out, made)
