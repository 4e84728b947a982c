"""Launches of the causal evidence read, forward and backward: see `evidence_causal`."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.triton import plan
from lln.kernels.triton.evidence_causal import (
    evidence_queries_kernel,
    evidence_values_kernel,
    evidence_weights_kernel,
)
from lln.kernels.triton.evidence_causal_keys import evidence_causal_keys_kernel, evidence_suffix_kernel
from lln.kernels.triton.evidence_chunks import evidence_prefix_kernel
from lln.kernels.triton.evidence_fold import evidence_fold_kernel
from lln.kernels.triton.evidence_launch import HELD, KERNELS, Channels, EvidenceBackward, EvidenceForward
from lln.kernels.triton.forward import ROWS, name_strides

# Of what is done again. Not 16 rows: see `plan.pad_dim`.
SLOW = {"BM": 32, "USED": 1, "EVEN": False, "SLOW": True}
# What the forward has no use for.
BACKWARD = ("GRAD", "ROW_F", "ROW_B", "ROW_R", "REACH", "REACH_H", "REACH_R", "REFERENCE", "g_b", "g_h", "g_n", "g_d")


def direct_signed(call: Call) -> Call:
    """Keys and their negatives as what they are, directions: the causal kernels have one way to take these."""
    dim = call.key.shape[-1]
    ways = torch.eye(dim, dtype=call.beta.dtype, device=call.key.device)
    beta = torch.cat([call.beta.expand(*call.beta.shape[:2], dim)] * 2, -1)
    return call.change(directions=torch.cat([ways, -ways]).expand(call.key.shape[1], -1, -1), beta=beta)


class Causal(Channels):
    def fold_channel_prefixes(self) -> tuple[plan.Works, Any]:
        """(works of the call; the state after the last). Kernels are given the states before each work, and L after
        it in two forms."""
        w = self.cut("causal", self.query_heads, True, False)
        count = self.heads * w.works
        parts, before = self.allocate_held(count), self.allocate_held(count)
        self.launch(evidence_fold_kernel, count * self.sets, "fold", **parts, SINGLE=False)
        final = self.allocate_held(self.batch, self.heads)
        given = [getattr(self.call, name) for name in HELD]
        at = count, self.channels
        self.values |= {"END": self.allocate(*at, dtype=torch.float64), "END32": self.allocate(*at)}
        names = {"LOG": "BEFORE"} | {name: f"{name}_BEFORE" for name in KERNELS[1:]}
        self.merge_channels(
            evidence_prefix_kernel, w, **parts, **{names[n]: t for n, t in before.items()},
            **{f"{n}_IN": None if t is None else t.contiguous() for n, t in zip(KERNELS, given, strict=True)},
            **{f"{n}_OUT": t for n, t in final.items()},
        )  # fmt: skip
        rows = self.call.query.shape[0] * self.query_heads * self.rows
        narrow = torch.bfloat16 if self.values["DOT"] is tl.bfloat16 else torch.float32
        self.values |= {
            "KEY_END": final["KEY"], "CENTRE": self.allocate(self.batch, self.heads, self.dim),
            "ROW_A": self.allocate(rows, self.channels, dtype=narrow),
            "MARK": self.allocate(self.query_heads * w.works, dtype=torch.int32), "FINE": w.used,
        }  # fmt: skip
        return w, final

    def launch_twice(self, kernel: Any, w: plan.Works, count: int, settings: str) -> None:
        """A kernel, and again for the splits that are marked, row by row."""
        even = self.values["EVEN"]
        self.launch(kernel, count, settings, SLOW=False)
        self.launch(kernel, count, "slow", **SLOW, tiles=w.tiles * w.used)
        self.values |= {"BM": w.rows, "USED": w.used, "EVEN": even, "tiles": w.tiles}


class CausalForward(Causal, EvidenceForward):
    def attend(self) -> tuple[Tensor, ...]:
        with plan.use_device(self.device):
            w, final = self.fold_channel_prefixes()
            out = self.allocate_like(self.call.query, self.width)
            self.values |= {**dict(name_strides("o", out)), "OUT": out, "BACKWARD": False, **dict.fromkeys(BACKWARD)}
            self.launch_twice(evidence_weights_kernel, w, self.query_heads * w.works, "causal")
            self.launch_twice(evidence_values_kernel, w, self.query_heads * w.works, "causal_values")
            return out, *final.values()


class CausalBackward(Causal, EvidenceBackward):
    def run(self) -> dict[str, Tensor]:
        with plan.use_device(self.device):
            w, _final = self.fold_channel_prefixes()
            self.ask_rows(w)
            first = self.sum_channel_suffix(w)
            self.ask_causal_keys(w)
            if self.call.log_sum is not None:
                self.give_state(first)
        return self.gradients

    def ask_rows(self, w: plan.Works) -> None:
        """dq, what keys need of every row, and what the queries of a split ask of the state before it."""
        count, made = self.query_heads * w.works, self.values["ROW_A"]
        at = count, self.channels
        self.values |= {
            "ROW_F": self.allocate(*made.shape), "ROW_B": self.allocate(*made.shape, dtype=made.dtype),
            "ROW_R": self.allocate(*made.shape), "REACH": self.allocate(*at, self.width),
            "REACH_K": self.allocate(*at, self.dim), "REACH_H": self.allocate(*at), "REACH_R": self.allocate(*at),
            "REFERENCE": self.allocate(self.heads * w.works * w.tiles, self.channels),
            "OUT": None, "BACKWARD": True, **dict.fromkeys(ROWS["o"]),
        }  # fmt: skip
        self.launch_twice(evidence_weights_kernel, w, count, "causal")
        self.launch_twice(evidence_values_kernel, w, count, "causal_rows")
        self.launch_twice(evidence_queries_kernel, w, count, "causal_queries")

    def sum_channel_suffix(self, w: plan.Works) -> list[Tensor]:
        """R, Q, h and r at the end of every work; those at the start of the sequences."""
        made: dict[str, Tensor] = {}
        for name, *lead in (("SUFFIX", self.heads * w.works), ("FIRST", self.batch, self.heads)):
            at = *lead, self.channels
            made |= {name: self.allocate(*at, self.width), f"{name}_K": self.allocate(*at, self.dim)}
            made |= {f"{name}_H": self.allocate(*at), f"{name}_R": self.allocate(*at)}
        held = {name: self.values[f"{name}_OUT"] for name in KERNELS}
        self.merge_channels(evidence_suffix_kernel, w, **made, **self.find_grads(held))
        return [made[name] for name in ("FIRST", "FIRST_K", "FIRST_H", "FIRST_R")]

    def ask_causal_keys(self, w: plan.Works) -> None:
        count, directed = self.heads * w.works, not self.signs
        wanted = "directions" in self.wanted if directed else self.dbeta
        parts = self.allocate_parts(wanted, count, self.channels * self.dim if directed else self.dim)
        centred = self.call.log_sum is None and all(g is None for g in self.grads)
        self.values |= {"DWAY": parts, "DBETA": parts, "HAS_DBETA": wanted, "CENTRED": centred}
        self.launch_twice(evidence_causal_keys_kernel, w, count, "causal_keys")
        if directed:
            self.add_ways(parts, w)
        else:
            self.add_up("beta", parts, w)

    def give_state(self, first: list[Tensor]) -> None:
        """Gradients of the incoming state: it is small, and torch does it."""
        reach, reach_k, reach_h, reach_r = first
        _log, mean, key, entropy = (getattr(self.call, name) for name in HELD)
        near = key - self.values["CENTRE"].unsqueeze(-2)
        dlog = (mean * reach).sum(-1) + (near * reach_k).sum(-1) + reach_h * entropy - reach_r
        for name, g in zip(HELD, (dlog, reach, reach_k, reach_h), strict=True):
            self.gradients[name] = g.to(getattr(self.call, name).dtype).contiguous()
