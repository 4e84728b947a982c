"""Launches of the evidence read with channels along directions of their own: what differs from `evidence_launch`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.triton import plan
from lln.kernels.triton.evidence_directed import (
    directed_asked_kernel,
    directed_read_kernel,
    directed_ready_kernel,
    directed_rows_kernel,
)
from lln.kernels.triton.evidence_directed_keys import directed_keys_kernel, directed_ways_kernel
from lln.kernels.triton.evidence_launch import KERNELS, Channels, EvidenceBackward, EvidenceForward


def direct(call: Call) -> Call:
    """A call whose directions are W, [B or 1, Hk, M, D] in float32, with beta in it: of both torch makes the gradients.
    What the op says of beta is then alpha's 1."""
    assert isinstance(call.directions, Tensor)
    way = call.beta.unsqueeze(-1) * call.directions.to(call.beta.dtype)
    return call.change(directions=way, beta=call.alpha)


class Directed(Channels):
    def make_ready(self, held: dict[str, Tensor], centred: bool) -> None:
        """The state as the queries' kernels read it: see `directed_ready_kernel`."""
        narrow = torch.bfloat16 if self.values["DOT"] is tl.bfloat16 else torch.float32
        at = self.batch, self.heads, self.channels
        low = self.values["LOW"] and centred
        self.values |= {
            "READ_KEY": self.allocate(*at, self.dim, dtype=narrow),
            "READ_KEY_LOW": self.allocate(*at, self.dim, dtype=narrow) if low else None,
            "READ_MEAN": self.allocate(*at, self.width, dtype=narrow), "OFFSET": self.allocate(*at),
            "CENTRE": self.allocate(*at[:2], self.dim) if centred else None,
        }  # fmt: skip
        self.launch(directed_ready_kernel, self.batch * self.heads * self.sets, "merge", **held, CENTRED=centred)


class DirectedForward(Directed, EvidenceForward):
    def read_channels(self, count: int, held: dict[str, Tensor], out: Tensor) -> None:
        self.make_ready(held, False)
        self.launch(directed_read_kernel, count, "read", OUT=out)


class DirectedBackward(Directed, EvidenceBackward):
    def ask_queries(self) -> None:
        self.make_ready({name: self.values[name] for name in KERNELS}, True)
        super().ask_queries()

    def read_backward(self, w: plan.Works, parts: dict[str, Tensor], dweight: Tensor | None) -> None:
        count, rows = self.query_heads * w.works, self.call.query.shape[0] * self.query_heads * self.rows
        self.values |= {"LOG_Z": self.allocate(rows), "OWN": self.allocate(rows)}
        self.launch(directed_rows_kernel, count, "read_backward", DWEIGHT=dweight)
        self.launch(directed_asked_kernel, count * self.sets, "asked", **parts)

    def ask_keys(self) -> None:
        w = self.cut("fold_backward", self.heads, True, self.shifted)
        self.launch(directed_keys_kernel, self.heads * w.works, "fold_backward")
        if "directions" not in self.wanted:
            return
        w = self.cut("ways", self.heads * self.sets, True, False)
        parts = self.allocate(self.heads * w.works, self.channels * self.dim)
        centred = self.call.log_sum is None and self.grads[0] is None
        self.launch(directed_ways_kernel, self.heads * self.sets * w.works, "ways", DWAY=parts, CENTRED=centred)
        self.add_ways(parts, w)

    def ask_no_keys(self) -> None:
        self.gradients["directions"] = torch.zeros_like(self.values["WAY"])
