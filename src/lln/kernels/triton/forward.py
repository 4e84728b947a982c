"""Launches of the forward kernels: what each is given, in which order.

A kernel is given what its arguments are named for: tensors of the call in capitals, their strides as q_b, q_h, q_n,
q_d, sizes and switches. `Launch.values` holds them: those of the call, those of how it is cut, and what a launch adds,
which stays until another launch has its own. One dictionary, since the host has little time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.kernels.call import FIELDS, TENSORS, Call
from lln.kernels.triton import plan
from lln.kernels.triton.causal import causal_rows_kernel
from lln.kernels.triton.fit import Fit, Rehearsal
from lln.kernels.triton.fold import fold_kernel, merge_kernel, prefix_kernel
from lln.kernels.triton.read import read_kernel
from lln.kernels.triton.tape import Recording

FEW = 8  # tiles of keys that one program folds: to merge the states of several takes another launch
TOGETHER = {"causal_queries": ("causal_queries", "causal_keys")}  # kernels that work on the same cut
MERGED = ("fold", "read_backward")  # kernels whose works another puts together
SPLITS = 4, 16  # splits a program of the merging kernels takes at once: few of them or many
SHORT = {"query": "Q", "key": "K", "value": "V", "key_mask": "MASK", "open_key": "OPEN_K", "open_value": "OPEN_V"}
POINTERS = [SHORT.get(name, name.upper()) for name in FIELDS[:TENSORS]]
ROWS = {t: tuple(f"{t}_{axis}" for axis in "bhnd") for t in ("q", "k", "v", "o", "g", "dq", "dk", "dv")}
# alpha, beta, the weights of the two parts, the mask
FACTORS = ["alpha_b", "alpha_h", "alpha_d", "beta_b", "beta_h", "beta_d", "lln_b", "lln_h", "lln_e"]
FACTORS += ["block_b", "block_h", "block_e", "mask_b", "mask_n"]
# What the forward of `causal_rows_kernel` has no use for.
BACKWARD = ("GRAD", "DQ", "REACH", "REACH_D", "LOG_Z", "OWN", "REFERENCE", "DALPHA", "DLLN", "DBLOCK", *ROWS["g"])
NO_BACKWARD = {**dict.fromkeys(BACKWARD), "HAS_DALPHA": False, "HAS_DWEIGHT": False, "BACKWARD": False}
PICK: dict[Any, Callable[[dict[str, Any]], tuple[Any, ...]]] = {}  # a kernel's arguments out of the values


def make_like(t: Tensor, dim: int) -> Tensor:
    """A new [B, H, N, dim] tensor with heads and rows in t's order: models pass transposed views and transpose back."""
    batch, heads, length, _ = t.shape
    if t.stride(1) < t.stride(2):
        return t.new_empty(batch, length, heads, dim).transpose(1, 2)
    return t.new_empty(batch, heads, length, dim)


def name_strides(t: str, x: Tensor) -> Iterable[tuple[str, int]]:
    """By the names of ROWS."""
    return zip(ROWS[t], x.stride(), strict=True)


def read_factor_strides(t: Tensor | None) -> tuple[int, int, int]:
    """Strides of a factor [B, H, D], 0 where a size of 1 stands for all."""
    if t is None:
        return 0, 0, 0
    a, b, c = t.stride()
    x, y, z = t.shape
    return a if x > 1 else 0, b if y > 1 else 0, c if z > 1 else 0


class Launch:
    """The sizes and settings that the kernels of one call share, and the forward ones launched."""

    def __init__(self, call: Call, recording: Recording | None = None, fit: Fit | None = None) -> None:
        self.call, self.recording = call, recording
        self.fit = Fit(plan.value_part(call.query.shape[3], call.query.dtype)) if fit is None else fit
        q, k, v = call.query, call.key, call.value
        self.heads, self.keys, self.dim = k.shape[1], k.shape[2], k.shape[3]
        self.query_heads, self.rows, self.width = q.shape[1], q.shape[2], v.shape[3]
        self.group = self.query_heads // self.heads
        self.batch = q.shape[0] if call.cu_query is None else call.cu_query.shape[0] - 1
        self.device, self.dtype = q.device, q.dtype
        padded, padded_value = plan.pad_dim(self.dim), plan.pad_value_dim(self.width, self.dim)
        self.size = max(padded, padded_value)
        self.tile, self.used = plan.tile_rows(call.block_size, self.size, self.dtype)
        self.small = plan.is_small(q.shape[0], self.query_heads, max(self.rows, self.keys))
        card = plan.find_card(q.device)
        self.measured = card is None or card.measured
        self.blocks, self.shifted = call.block_size is not None, call.start is not None
        half = q.dtype == torch.bfloat16 and q.is_cuda  # the interpreter multiplies no bfloat16 matrices
        mask = (0, 0) if call.key_mask is None else call.key_mask.stride()
        weights = *read_factor_strides(call.lln_weight), *read_factor_strides(call.block_weight)
        factors = *read_factor_strides(call.alpha), *read_factor_strides(call.beta), *weights, *mask
        self.values: dict[str, Any] = dict(zip(POINTERS, call.arguments(), strict=False))
        self.values.update(zip(FACTORS, factors, strict=True))
        for name, t in (("q", q), ("k", k), ("v", v)):
            self.values.update(name_strides(name, t))
        self.values |= {
            "scale": call.scale, "dropout": call.dropout_p, "total": self.rows, "H": self.heads, "G": self.group,
            "D": self.dim, "E": self.width, "BD": padded, "BE": padded_value, "BS": call.block_size or 0,
            "MASKED": call.key_mask is not None, "HAS_OPEN": call.open_key is not None,
            "DROPOUT": call.seed is not None,
            "UNIFORM": all(t is not None and t.shape[-1] == 1 for t in (call.lln_weight, call.block_weight)),
            "WIDE": q.dtype == torch.float32, "DOT": tl.bfloat16 if half else tl.float32,
            "PRECISION": plan.choose_precision(q.dtype),
            "FLAT": call.alpha.shape[-1] == 1 and call.beta.shape[-1] == 1,
        }  # fmt: skip

    def settings(self, kernel: str) -> plan.Settings:
        found = self.fit.settings.get(kernel)
        if found is not None:
            return found
        blocks = self.blocks and kernel != "fold"
        return plan.choose_settings(kernel, blocks, self.dtype, self.size, self.tile, self.small, self.measured)

    def cut(self, kernel: str, heads: int, of_keys: bool, shifted: bool) -> plan.Works:
        """How the kernels that follow are cut, for this one: the keys, or the queries, of so many heads."""
        # 0 in a rehearsal, which asks for them, and in the interpreter.
        programs = max(self.settings(name).programs for name in TOGETHER.get(kernel, (kernel,))) or 4
        n, cu = (self.keys, self.call.cu_key) if of_keys else (self.rows, self.call.cu_query)
        if kernel == "fold" and n <= FEW * self.used:
            programs = 0
        w = plan.cut(self.device, n, self.batch, heads, self.tile, self.used, shifted, cu, programs, kernel in MERGED)
        # EVEN: then every tile is full and every key visible, and the kernels need no masks.
        masked = shifted or cu is not None or self.call.key_mask is not None
        self.values |= {
            "BM": w.rows, "USED": w.used, "tiles": w.tiles, "splits": w.splits, "works": w.works, "OWNER": w.owner,
            "BEGIN": w.begin, "PACKED": w.begin is not None, "N": n, "CU": cu, "SHIFT": shifted,
            "START": self.call.start if shifted else None,
            "EVEN": not (masked or n % w.rows or w.used != w.rows),
        }  # fmt: skip
        return w

    def record_made(self, t: Tensor) -> Tensor:
        return t if self.recording is None else self.recording.make(t)

    def allocate(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.record_made(torch.empty(shape, dtype=dtype, device=self.device))

    def allocate_like(self, t: Tensor, dim: int) -> Tensor:
        return self.record_made(make_like(t, dim))

    def launch(self, kernel: Any, programs: int, settings: str, /, **given: Any) -> None:
        """A kernel with the values so far and those given, and with the settings of that name."""
        pick = PICK.get(kernel.fn)
        if pick is None:
            pick = PICK[kernel.fn] = operator.itemgetter(*kernel.arg_names)
        self.values.update(given)
        args = pick(self.values)
        if isinstance(self.fit, Rehearsal):
            self.fit.launch(settings, kernel, args, self.settings(settings))
            return
        compiled = kernel[(programs,)](*args, **self.settings(settings).options)
        if self.recording is not None:
            self.recording.launch(compiled, (programs,), args)

    def allocate_states(self, *lead: int) -> tuple[Tensor, Tensor]:
        """New (log_sum, mean_value) of [*lead] states."""
        return self.allocate(*lead, self.dim, dtype=torch.float64), self.allocate(*lead, self.dim, self.width)

    def allocate_sums(self, *lead: int) -> tuple[Tensor, Tensor]:
        """New [*lead, D, E] and [*lead, D], in float32."""
        return self.allocate(*lead, self.dim, self.width), self.allocate(*lead, self.dim)

    def fold(self, w: plan.Works, single: bool) -> tuple[Tensor, Tensor]:
        """States of the works, [heads * works, ...]; with `single` of the sequences, [B, heads, ...]."""
        count = self.heads * w.works
        log, mean = self.allocate_states(self.batch, self.heads) if single else self.allocate_states(count)
        self.launch(fold_kernel, count, "fold", LOG=log, MEAN=mean, SINGLE=single)
        return log, mean

    def merge_with(self, kernel: Any, w: plan.Works, **given: Any) -> None:
        """A kernel that merges works: programs of a few channels each, about a thousand in all."""
        channels = max(min(triton.next_power_of_2(self.batch * self.heads * self.dim // 1024), 16), 4)
        at_once = SPLITS[w.begin is not None or w.splits > SPLITS[0]]
        programs = self.batch * self.heads * -(-self.dim // channels)
        self.launch(kernel, programs, "merge", BC=channels, BP=at_once, **given)

    def merge(self, kernel: Any, w: plan.Works, **given: Tensor) -> tuple[Tensor, Tensor]:
        """One state a sequence, of the incoming one and those given, of the works."""
        log, mean = self.allocate_states(self.batch, self.heads)
        before, values = (None if t is None else t.contiguous() for t in (self.call.log_sum, self.call.mean_value))
        self.merge_with(
            kernel, w, **given, LOG_IN=before, MEAN_IN=values, LOG_OUT=log, MEAN_OUT=mean, HAS_STATE=before is not None
        )
        return log, mean

    def fold_sequences(self) -> tuple[Tensor, Tensor]:
        w = self.cut("fold", self.heads, True, False)
        single = w.splits == 1 and self.call.cu_key is None and self.call.log_sum is None
        log, mean = self.fold(w, single)
        return (log, mean) if single else self.merge(merge_kernel, w, LOG=log, MEAN=mean)

    def read(self, log: Tensor, mean: Tensor) -> Tensor:
        out = self.allocate_like(self.call.query, self.width)
        w = self.cut("read", self.query_heads, False, self.shifted)
        self.values.update(name_strides("o", out))
        self.launch(read_kernel, self.query_heads * w.works, "read", LOG=log, MEAN=mean, OUT=out)
        return out

    def fold_prefixes(self, kernel: str = "causal") -> tuple[plan.Works, tuple[Tensor, Tensor]]:
        """(works of a causal call; L and S after the last). Its kernels are given the states before each work, L after
        it in two forms, the open block, marks to set."""
        w = self.cut(kernel, self.query_heads, True, self.shifted)
        return w, self.carry_prefixes(w, *self.fold(w, False))

    def carry_prefixes(self, w: plan.Works, log: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """What `fold_prefixes` gives, from the states of the works."""
        before, mean_before, end = (self.record_made(torch.empty_like(t)) for t in (log, mean, log))
        final = self.merge(
            prefix_kernel, w, LOG=log, MEAN=mean, BEFORE=before, MEAN_BEFORE=mean_before, END=end,
            END32=self.allocate(*log.shape),
        )  # fmt: skip
        self.values |= {
            "LOG": before, "MEAN": mean_before, "MARK": self.allocate(self.query_heads * w.works, dtype=torch.int32)
        }  # fmt: skip
        for name in ("OPEN_K", "OPEN_V", "OPEN_MASK"):
            if self.values[name] is not None:
                self.values[name] = self.values[name].contiguous()
        return final

    def launch_causal_rows(self, settings: str, count: int) -> None:
        """`causal_rows_kernel`, and again for the splits that it marks."""
        self.launch(causal_rows_kernel, count, settings, SLOW=False)
        self.launch(causal_rows_kernel, count, "slow", SLOW=True)

    def attend_causally(self) -> tuple[Tensor, Tensor, Tensor]:
        w, final = self.fold_prefixes()
        return self.read_causally(w), *final

    def read_causally(self, w: plan.Works) -> Tensor:
        """The output, after `carry_prefixes`."""
        out = self.allocate_like(self.call.query, self.width)
        self.values.update(name_strides("o", out), OUT=out, **NO_BACKWARD)
        self.launch_causal_rows("causal", self.query_heads * w.works)
        return out

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        with plan.use_device(self.device):
            if self.call.is_causal and self.rows:
                return self.attend_causally()
            log, mean = self.state()
            return (self.read(log, mean) if self.rows else self.allocate_like(self.call.query, self.width)), log, mean

    def state(self) -> tuple[Tensor, Tensor]:
        """(log_sum, mean_value) of all keys."""
        if self.keys:
            return self.fold_sequences()
        if self.call.log_sum is not None and self.call.mean_value is not None:
            given = self.call.log_sum, self.call.mean_value
            log, mean = (t.clone(memory_format=torch.contiguous_format) for t in given)
            return log, mean
        log = torch.full((self.batch, self.heads, self.dim), -torch.inf, dtype=torch.float64, device=self.device)
        return log, torch.zeros(self.batch, self.heads, self.dim, self.width, device=self.device)
