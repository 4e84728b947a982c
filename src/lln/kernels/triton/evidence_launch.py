"""Launches of the evidence read's kernels, forward and backward. What they compute is said in `evidence_fold`; how a
call is cut, fitted and recorded, and what a kernel is given, in `forward`."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.evidence import SIGNED
from lln.kernels.triton import plan
from lln.kernels.triton.backward import MADE, Backward
from lln.kernels.triton.evidence_fold import evidence_fold_kernel, evidence_merge_kernel, evidence_sum_kernel
from lln.kernels.triton.evidence_keys import evidence_fold_backward_kernel
from lln.kernels.triton.evidence_read import evidence_read_backward_kernel, evidence_read_kernel
from lln.kernels.triton.fit import Fit
from lln.kernels.triton.forward import SPLITS, Launch, name_strides
from lln.kernels.triton.plan import Settings
from lln.kernels.triton.tape import Recording

KERNELS = ("LOG", "MEAN", "KEY", "ENTROPY")  # how kernels call the fields of a state
SET = 64  # channels with directions of their own that a program works on at once
ROOM = 160 * 1024  # bytes of shared memory for all matrices of the keys' backward
HELD = ("log_sum", "mean_value", "mean_key", "entropy")
Outer = tuple[Tensor | None, ...]  # gradients of the output and of the four fields of the state

# Warps and stages by kernel and sets of channels, in bfloat16 at head dim 64: from what the compiler says of registers.
# Not measured.
SETTINGS = {
    ("fold", 1): Settings(4, 3),
    ("fold", 2): Settings(4, 3),
    ("read", 1): Settings(4, 3),
    ("read", 2): Settings(4, 3),
    ("read_backward", 1): Settings(4, 2),
    ("read_backward", 2): Settings(8, 1),
    ("fold_backward", 1): Settings(4, 2),
    ("fold_backward", 2): Settings(4, 2),
    ("read+blocks", 1): Settings(4, 2),
    ("read+blocks", 2): Settings(8, 2),
    ("read_backward+blocks", 1): Settings(4, 1),
    ("read_backward+blocks", 2): Settings(8, 1),
    ("fold_backward+blocks", 1): Settings(4, 2),
    ("fold_backward+blocks", 2): Settings(4, 1),
    ("causal", 1): Settings(8, 2),
    ("causal_values", 1): Settings(4, 2),
    ("causal_rows", 1): Settings(8, 2),
    ("causal_queries", 1): Settings(4, 2),
    ("causal_keys", 1): Settings(8, 1),
    ("causal", 0): Settings(8, 1),
    ("causal_values", 0): Settings(8, 1),
    ("causal_rows", 0): Settings(8, 1),
    ("causal_queries", 0): Settings(8, 1),
    ("causal_keys", 0): Settings(8, 1),
    # Sets of channels with directions of their own.
    ("fold", 0): Settings(4, 3),
    ("read", 0): Settings(4, 3),
    ("read_backward", 0): Settings(4, 3),
    ("asked", 0): Settings(4, 2),
    ("fold_backward", 0): Settings(4, 2),
    ("ways", 0): Settings(4, 2),
    ("read+blocks", 0): Settings(4, 2),
    ("read_backward+blocks", 0): Settings(4, 2),
    ("asked+blocks", 0): Settings(4, 2),
    ("fold_backward+blocks", 0): Settings(4, 2),
    ("ways+blocks", 0): Settings(4, 2),
}


class Channels(Launch):
    """What the launches of both passes share: the names of `Launch` mean states with channels of this read."""

    signs: int  # 0: channels have directions of their own
    sets: int
    channels: int

    def name_channels(self) -> None:
        way = self.call.directions
        steps: tuple[int | None, int | None] = (None, None)
        if isinstance(way, Tensor):
            room = SET if self.dtype == torch.bfloat16 or self.size <= 64 else SET // 2
            size = plan.pad_dim(way.shape[2])
            size = size if self.call.is_causal else min(size, room)
            self.signs, self.channels, self.sets = 0, way.shape[2], -(-way.shape[2] // size)
            steps = 0 if way.shape[0] == 1 else way.stride(0), way.stride(1)
        else:
            self.signs = self.sets = 2 if way == SIGNED else 1
            self.channels, size, way = self.signs * self.dim, plan.pad_dim(self.dim), None
        low = self.dtype == torch.bfloat16 and (self.size <= 64 or not self.signs)
        precision = self.values["PRECISION"]
        self.values |= {
            "SIGNS": self.signs or 1, "SETS": self.sets, "M": self.channels, "BX": size, "WAY": way,
            "DIRECTED": way is not None, "way_b": steps[0], "way_h": steps[1], "LOW": low,
            "HAS_STATE": self.call.log_sum is not None, "ASK_X": None, "ASK_X_LOW": None,
            # Of exponents, whose error is that of a whole weight: three passes of tf32 would be larger by half.
            "EXACT": "ieee" if self.dtype == torch.float32 and precision == "tf32x3" else precision,
        }  # fmt: skip
        # What is read again in each turn of a loop takes no registers: on the card that this was tried for vectors
        # alone; on others also matrices, which is worth it only where shared memory could not keep them.
        card = plan.find_card(self.device)
        lean = self.blocks or self.signs == 2
        self.values["LEAN"] = lean and (card is None or card.measured or card.shared < ROOM)

    def settings(self, kernel: str) -> Settings:
        found = self.fit.settings.get(kernel)
        blocks = "+blocks" if self.blocks and kernel != "fold" else ""
        known = SETTINGS.get((f"{kernel}{blocks}", self.signs))
        if found is not None or known is None:
            return found or super().settings(kernel)
        if self.dtype != torch.bfloat16 or self.size > 64 or self.tile > plan.TILE:
            known = Settings(8, 1)
        return known

    def allocate_held(self, *lead: int) -> dict[str, Tensor]:
        """A new state by the names that kernels know."""
        at = *lead, self.channels
        return {
            "LOG": self.allocate(*at, dtype=torch.float64), "MEAN": self.allocate(*at, self.width),
            "KEY": self.allocate(*at, self.dim), "ENTROPY": self.allocate(*at, dtype=torch.float64),
        }  # fmt: skip

    def merge_channels(self, kernel: Any, w: plan.Works, **given: Any) -> None:
        """As `merge_with`."""
        count = self.batch * self.heads * self.channels
        channels = max(min(1 << max(count // 1024 - 1, 0).bit_length(), 8), 4)
        at_once = SPLITS[w.begin is not None or w.splits > SPLITS[0]]
        programs = self.batch * self.heads * -(-self.channels // channels)
        self.launch(kernel, programs, "merge", BC=channels, BP=at_once, **given)

    def hold(self) -> dict[str, Tensor]:
        """The state of all keys, [B, heads, ...]."""
        given = [getattr(self.call, name) for name in HELD]
        if not self.keys:
            if given[0] is not None:
                copies = (t.clone(memory_format=torch.contiguous_format) for t in given)
                return dict(zip(KERNELS, copies, strict=True))
            log, *others = (t.new_zeros(t.shape) for t in self.allocate_held(self.batch, self.heads).values())
            return dict(zip(KERNELS, (log - torch.inf, *others), strict=True))
        w = self.cut("fold", self.heads * self.sets, True, False)
        single = w.splits == 1 and self.call.cu_key is None and given[0] is None
        lead = (self.batch, self.heads) if single else (self.heads * w.works,)
        parts = self.allocate_held(*lead)
        self.launch(evidence_fold_kernel, self.heads * self.sets * w.works, "fold", **parts, SINGLE=single)
        if single:
            return parts
        whole = self.allocate_held(self.batch, self.heads)
        before = [None if t is None else t.contiguous() for t in given]
        self.merge_channels(
            evidence_merge_kernel, w, **parts, LOG_IN=before[0], MEAN_IN=before[1], KEY_IN=before[2],
            ENTROPY_IN=before[3], **{f"{n}_OUT": t for n, t in whole.items()},
        )  # fmt: skip
        return whole


class EvidenceForward(Channels):
    def __init__(self, call: Call, recording: Recording | None = None, fit: Fit | None = None) -> None:
        super().__init__(call, recording, fit)
        self.name_channels()

    def attend(self) -> tuple[Tensor, ...]:
        """(out, log_sum, mean_value, mean_key, entropy)"""
        with plan.use_device(self.device):
            held = self.hold()
            return self.read_held(held), *held.values()

    def read_held(self, held: dict[str, Tensor]) -> Tensor:
        """The output, from this state."""
        out = self.allocate_like(self.call.query, self.width)
        w = self.cut("read", self.query_heads, False, self.shifted)
        self.values.update(name_strides("o", out))
        if self.query_heads * w.works:
            self.read_channels(self.query_heads * w.works, held, out)
        return out

    def read_channels(self, count: int, held: dict[str, Tensor], out: Tensor) -> None:
        self.launch(evidence_read_kernel, count, "read", **held, OUT=out)


class EvidenceBackward(Channels, Backward):
    """As `Backward`; held: the final state, where it was kept."""

    def __init__(
        self, call: Call, held: Sequence[Tensor] | None, outer: Outer, wanted: Set[str],
        recording: Recording | None = None, fit: Fit | None = None, made: Set[str] = MADE,
    ) -> None:  # fmt: skip
        grad, *self.grads = outer
        assert grad is not None
        Backward.__init__(self, call, None, grad, None, None, wanted, recording, fit, made)
        self.name_channels()
        self.held, self.wanted = held, wanted

    def run(self) -> dict[str, Tensor]:
        with plan.use_device(self.device):
            held = self.hold() if self.held is None else dict(zip(KERNELS, self.held, strict=True))
            self.values |= held
            self.ask_queries()
            if self.keys:
                self.ask_keys()
            else:
                self.ask_no_keys()
            if self.call.log_sum is not None:
                self.ask_state(held)
        return self.gradients

    def allocate_asked(self, *lead: int) -> dict[str, Tensor]:
        """New dS, dK and dH."""
        at = *lead, self.channels
        named = {"DMEAN": (*at, self.width), "DKEY": (*at, self.dim), "DENTROPY": at}
        return {name: self.allocate(*size) for name, size in named.items()}

    def ask_queries(self) -> None:
        """dq, and what the queries ask of every state."""
        w = self.cut("read_backward", self.query_heads, False, self.shifted)
        count = self.query_heads * w.works
        parts = self.allocate_asked(count)
        dweight = self.allocate_parts(self.dweights, count, self.width)
        if count:
            self.read_backward(w, parts, dweight)
        if self.dweights:
            owner = w.owner
            if owner is None:
                owner = torch.arange(self.batch, device=self.device).repeat_interleave(w.splits)
            mean = self.values["MEAN"][owner].transpose(0, 1).repeat_interleave(self.group, 0)  # [Hq, works, M, E]
            self.add_up("lln_weight", (parts["DMEAN"].view(mean.shape) * mean).sum(-2), w)
            self.add_up("block_weight", dweight, w)
        self.sum_asked(w, parts)

    def sum_asked(self, w: plan.Works, parts: dict[str, Tensor]) -> None:
        """What is asked of every state, of the parts of all works, as the keys' backward reads it."""
        at = self.batch, self.heads, self.channels
        narrow = torch.bfloat16 if self.values["DOT"] is tl.bfloat16 else torch.float32
        self.values |= {name: self.allocate(*at) for name in ("ASK_H", "PULL", "PULL_K", "LOG2", "LOG2_LOW")}
        lows = {"ASK_V": self.values["LOW"], "ASK_K": self.values["LOW"]}
        if not self.signs:
            lows["ASK_X"] = narrow == torch.bfloat16
        for name, low in lows.items():
            width = self.width if name == "ASK_V" else self.dim
            self.values[name] = self.allocate(*at, width, dtype=narrow)
            self.values[f"{name}_LOW"] = self.allocate(*at, width, dtype=narrow) if low else None
        has_state = self.call.log_sum is not None
        self.asked = self.allocate_asked(self.batch, self.heads) if has_state else dict.fromkeys(parts)
        results = {f"{name}_OUT": t for name, t in self.asked.items()}
        grads = self.find_grads({name: self.values[name] for name in KERNELS})
        self.merge_channels(evidence_sum_kernel, w, **parts, **results, **grads, WEIGHTED=self.blocks)

    def read_backward(self, w: plan.Works, parts: dict[str, Tensor], dweight: Tensor | None) -> None:
        """dq, and by splits dS, dK, dH and the gradient of the blocks' weight."""
        count = self.query_heads * w.works
        self.launch(evidence_read_backward_kernel, count, "read_backward", **parts, DWEIGHT=dweight)

    def find_grads(self, held: dict[str, Tensor]) -> dict[str, Any]:
        """Of a returned state; some of them may be missing."""
        if all(g is None for g in self.grads):
            return {"HAS_GRAD": False, **{f"G_{name}": None for name in KERNELS}}
        found: dict[str, Any] = {"HAS_GRAD": True}
        for name, g in zip(KERNELS, self.grads, strict=True):
            found[f"G_{name}"] = torch.zeros_like(held[name]) if g is None else g.contiguous()
        return found

    def ask_keys(self) -> None:
        """dk, dv and what the exponents are made of."""
        w = self.cut("fold_backward", self.heads, True, self.shifted)
        dbeta = self.allocate_parts(self.dbeta, self.heads * w.works, self.dim)
        centred = self.call.log_sum is None and self.grads[0] is None
        self.launch(evidence_fold_backward_kernel, self.heads * w.works, "fold_backward", DBETA=dbeta, CENTRED=centred)
        self.add_up("beta", dbeta, w)

    def add_ways(self, parts: Tensor | None, w: plan.Works) -> None:
        """The gradient of directions."""
        if parts is None:
            return
        way = self.values["WAY"]
        sums = self.sum_works(parts, self.heads, w).unflatten(-1, way.shape[-2:])
        self.gradients["directions"] = sums.sum_to_size(way.shape).contiguous()

    def ask_no_keys(self) -> None:
        if self.dbeta:
            self.gradients["beta"] = torch.zeros_like(self.call.beta)

    def ask_state(self, held: dict[str, Tensor]) -> None:
        """Gradients of the incoming state, by the merge that it went into: the state is one part, and the rest is what
        the keys have. It is small, and torch does it."""
        log, mean, key, entropy = (getattr(self.call, name) for name in HELD)
        final = [held[name].double() for name in KERNELS]
        dmean, dkey, dentropy = (t.double() for t in self.asked.values() if t is not None)
        some = log > -torch.inf
        log_share = torch.where(some, log - final[0], 0.0)
        share = torch.where(some, log_share.exp(), 0.0)
        pull = (final[1] * dmean).sum(-1) + (final[2] * dkey).sum(-1) + final[3] * dentropy
        if self.grads[0] is not None:
            pull = pull - self.grads[0]
        own = (mean * dmean).sum(-1) + (key * dkey).sum(-1) + (entropy - log_share) * dentropy
        grads = share * (own - pull), share[..., None] * dmean, share[..., None] * dkey, share * dentropy
        for name, given, g in zip(HELD, (log, mean, key, entropy), grads, strict=True):
            self.gradients[name] = g.to(given.dtype)
