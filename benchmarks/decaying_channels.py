"""Whether channels that decay with distance teach LLN alone what is near, and add to the value convolution.

    python benchmarks/decaying_channels.py --out benchmarks/results/decaying_channels.json
    python benchmarks/decaying_channels.py --scale mini --device cuda --data-root DATA --out found.json \
        --set data.name=corpus/wikipedia-2014 --set data.subset= --set data.length=512 --set optimisation.batch=32

A third of the channels sees all keys, a third those to the left and a third those to the right, whose weight falls as
exp(-distance / reach), with reaches of 1, 2, 4 and 8 tokens:

    L_ic = logmeanexp_j(beta k_jc - |i - j| / reach_c)      P_ij = sum_c softmax_c(alpha q_ic + L_ic) softmax_j(...)

the mean by the weights of the distances alone: with the sum in its place ("decay_sum") a channel of few keys starts
with next to no weight. An experiment, dense and therefore quadratic, and no part of the package. A run that is there
already, in --runs, is not run again, and rows of --out that are not asked for stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lln
from lln.files import write_json
from lln.lab.core.provenance import provenance
from lln.lab.paper.jobs import configure
from lln.lab.train.run import train

REACHES = (1.0, 2.0, 4.0, 8.0)  # tokens
ARMS = ("lln", "lln:value_convolution=5", "decay_mean", "decay_mean:value_convolution=5", "softmax")
# Of scale tiny, so that a run takes a minute on one core.
SHORT = {"data.length": "64", "optimisation.steps": "800", "evaluate_every": "200", "save_every": "800"}
REFUSED = dict.fromkeys(("padding", "causal", "cross", "packing"), "an experiment on whole sequences alone")


@functools.cache
def fall_off(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each group of channels the weights of distances [groups, N, N], and the log of their sums [groups, N]."""
    at = torch.arange(length, device=device)
    distance = (at[:, None] - at).float()
    sides = [
        torch.where(side * distance >= 0, torch.exp(-distance.abs() / reach), 0.0) for side in (1, -1)
        for reach in REACHES
    ]  # fmt: skip
    weights = torch.stack([torch.ones_like(distance), *sides])
    return weights, weights.sum(-1).log()


def attend(query: Tensor, key: Tensor, value: Tensor, *, as_mean: bool) -> Tensor:
    heads, length, dim = query.shape[1:]
    alpha, beta = lln.LLNAttention(heads, dim).coefficients(query, key)
    each = dim // 3 // len(REACHES)
    sizes = [dim - 2 * each * len(REACHES)] + [each] * (2 * len(REACHES))
    with torch.autocast(query.device.type, enabled=False):
        aq, bk = (t.reshape(*t.shape, *[1] * (4 - t.ndim)) * x.float() for t, x in ((alpha, query), (beta, key)))
        weights, sums = fall_off(length, query.device)
        top = bk.detach().amax(2, keepdim=True)
        written = torch.split((bk - top).exp(), sizes, -1)
        total = torch.cat([w @ rows for w, rows in zip(weights, written, strict=True)], -1)  # [B, H, N, D]
        log_sum = total.log() + top
        if as_mean:
            log_sum = log_sum - sums.repeat_interleave(torch.tensor(sizes, device=sums.device), 0).T
        read = torch.split(torch.softmax(aq + log_sum, -1) / total, sizes, -1)
        groups = zip(weights, read, written, strict=True)
        p = sum((w * (a @ b.transpose(-1, -2)) for w, a, b in groups), torch.zeros((), device=query.device))
        return (p @ value.float()).to(value.dtype)


@lln.register("decay_sum", refuses=REFUSED)
def decay_sum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value, as_mean=False)


@lln.register("decay_mean", refuses=REFUSED)
def decay_mean(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value, as_mean=True)


def run_arm(arm: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    changes = (SHORT if asked.scale == "tiny" else {}) | dict(one.split("=", 1) for one in asked.changes)
    config = configure("mlm", asked.scale, arm, seed, changes)
    config = dataclasses.replace(config, record_every=0)
    folder = f"{arm.replace(':', '-').replace('=', '')}-{seed}-{config.optimisation.steps}"
    result = train(config, asked.runs / folder, device=asked.device, data_root=asked.data_root)
    kept = ("metrics", "guess", "parameters", "notes", "config", "provenance")
    return {"attention": arm, "seed": seed, **{name: result[name] for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "decaying_channels")
    parser.add_argument("--scale", default="tiny", choices=("tiny", "mini"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--set", dest="changes", action="append", default=[])
    asked = parser.parse_args()
    asked_for = {(arm, seed) for arm in asked.arms.split(",") for seed in range(asked.seeds)}
    held = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    rows = [row for row in held if (row["attention"], row["seed"]) not in asked_for]
    for seed in range(asked.seeds):
        for arm in asked.arms.split(","):
            rows.append(run_arm(arm, seed, asked))
            print(arm, seed, rows[-1]["metrics"], flush=True)
            write_json(asked.out, {"rows": rows, "provenance": provenance(0, torch.device(asked.device))})


if __name__ == "__main__":
    main()
