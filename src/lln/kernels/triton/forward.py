"""Launches of the forward kernels: what each is given, in which order."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.kernels.triton import plan
from lln.kernels.triton.causal import causal_kernel
from lln.kernels.triton.causal_slow import slow_kernel
from lln.kernels.triton.fold import fold_kernel, merge_kernel, prefix_kernel
from lln.kernels.triton.read import read_kernel
from lln.kernels.triton.tape import Recording

SLOW = {"num_warps": 8, "num_stages": 1}  # launch settings of kernels that rarely have to do anything
SPLITS = 16  # splits a program of the merging kernels takes at once


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What the op takes, in its order."""

    query: Tensor  # [B, Hq, N, D]; see lln.kernels.call for all of these
    key: Tensor
    value: Tensor
    alpha: Tensor
    beta: Tensor
    lln_weight: Tensor | None
    block_weight: Tensor | None
    key_mask: Tensor | None
    cu_query: Tensor | None
    cu_key: Tensor | None
    log_sum: Tensor | None
    mean_value: Tensor | None
    start: Tensor | None
    open_key: Tensor | None
    open_value: Tensor | None
    open_mask: Tensor | None
    seed: Tensor | None
    block_size: int | None
    is_causal: bool
    scale: float
    dropout: float


def like(t: Tensor, dim: int) -> Tensor:
    """A new [B, H, N, dim] tensor with heads and rows in t's order: models pass transposed views and transpose back."""
    batch, heads, length, _ = t.shape
    if t.stride(1) < t.stride(2):
        return t.new_empty(batch, length, heads, dim).transpose(1, 2)
    return t.new_empty(batch, heads, length, dim)


def strides(t: Tensor | None, count: int = 4) -> tuple[int, ...]:
    return (0,) * count if t is None else t.stride()


def steps(t: Tensor | None) -> tuple[int, int, int]:
    """Strides of a factor [B, H, D], 0 where a size of 1 stands for all."""
    if t is None:
        return 0, 0, 0
    a, b, c = t.stride()
    x, y, z = t.shape
    return a if x > 1 else 0, b if y > 1 else 0, c if z > 1 else 0


class Launch:
    """The sizes and settings that the kernels of one call share."""

    def __init__(self, a: Arguments, recording: Recording | None = None) -> None:
        self.a, self.recording = a, recording
        q, k, v = a.query, a.key, a.value
        self.heads, self.keys, self.dim = k.shape[1], k.shape[2], k.shape[3]
        self.query_heads, self.rows, self.width = q.shape[1], q.shape[2], v.shape[3]
        self.group = self.query_heads // self.heads
        self.batch = q.shape[0] if a.cu_query is None else a.cu_query.shape[0] - 1
        self.device, self.dtype = q.device, q.dtype
        self.BD, self.BE = plan.padded(self.dim), plan.padded_value(self.width, self.dim)
        self.size = max(self.BD, self.BE)
        self.tile, self.used = plan.tile_rows(a.block_size, self.size, self.dtype)
        self.small = plan.is_small(q.shape[0], self.query_heads, max(self.rows, self.keys))
        self.roomy = plan.shared_memory(q.device) >= plan.ROOMY
        self.blocks = a.block_size is not None
        half = q.dtype == torch.bfloat16 and q.is_cuda  # the interpreter multiplies no bfloat16 matrices
        # float32 and float16 multiply as float32 in three passes of tf32, which keep 21 bits: float16 has too few
        # exponents for weights and states. With torch.set_float32_matmul_precision("high"), float32 in one.
        once = q.dtype == torch.float32 and plan.tf32_allowed()
        precision = "tf32" if once or q.dtype == torch.bfloat16 else "tf32x3"
        self.numeric = {
            "WIDE": q.dtype == torch.float32,
            "DOT": tl.bfloat16 if half else tl.float32,
            "PRECISION": precision,
            "FLAT": a.alpha.shape[-1] == 1 and a.beta.shape[-1] == 1,
        }
        self.sizes = {"D": self.dim, "E": self.width, "BD": self.BD, "BE": self.BE}
        self.masked = {"MASKED": a.key_mask is not None}
        self.mask = strides(a.key_mask, 2)
        self.drop = {"DROPOUT": a.seed is not None}
        self.uniform = {"UNIFORM": all(t is not None and t.shape[-1] == 1 for t in (a.lln_weight, a.block_weight))}

    def settings(self, kernel: str, blocks: bool = False) -> plan.Settings:
        return plan.settings(kernel, blocks, self.dtype, self.size, self.tile, self.small, self.roomy)

    def cut(self, s: plan.Settings, heads: int, of_keys: bool, shifted: bool) -> plan.Works:
        length, cu = (self.keys, self.a.cu_key) if of_keys else (self.rows, self.a.cu_query)
        return plan.cut(self.device, length, self.batch, heads, self.tile, self.used, shifted, cu, s.programs)

    def place(self, w: plan.Works, shifted: bool, of_keys: bool) -> tuple[Any, Any, dict[str, Any]]:
        """(pointers, numbers, flags) of `parts.place`."""
        a = self.a
        cu, n = (a.cu_key, self.keys) if of_keys else (a.cu_query, self.rows)
        pointers = cu, w.owner, w.begin, a.start if shifted else None
        flags = {"BM": w.rows, "USED": w.used, "PACKED": cu is not None, "SHIFT": shifted}
        # Then every tile is full and every key visible, and the kernels need no masks.
        flags["EVEN"] = not (shifted or cu is not None or a.key_mask is not None or n % w.rows or w.used != w.rows)
        return pointers, (n, w.works, w.splits, w.tiles), flags

    def made(self, t: Tensor) -> Tensor:
        return t if self.recording is None else self.recording.make(t)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.made(torch.empty(shape, dtype=dtype, device=self.device))

    def like(self, t: Tensor, dim: int) -> Tensor:
        return self.made(like(t, dim))

    def launch(
        self, kernel: Any, grid: tuple[int], *args: Any, options: dict[str, int] | None = None, **named: Any
    ) -> None:
        compiled = kernel[grid](*args, **named, **(options or {}))
        if self.recording is not None:
            self.recording.launch(kernel, compiled, grid, args, named)

    def fold(self, w: plan.Works, shifted: bool, single: bool) -> tuple[Tensor, Tensor]:
        """States of the works, [heads * works, ...]; with `single` of the sequences, [B, heads, ...]."""
        a, s = self.a, self.settings("fold")
        lead = (self.batch, self.heads) if single else (self.heads * w.works,)
        log = self.empty(*lead, self.dim, dtype=torch.float64)
        mean = self.empty(*lead, self.dim, self.width)
        pointers, numbers, flags = self.place(w, shifted, True)
        self.launch(
            fold_kernel, (self.heads * w.works,),
            a.key, a.value, a.beta, a.key_mask, *pointers, log, mean,
            *a.key.stride(), *a.value.stride(), *steps(a.beta), *self.mask, *numbers, self.heads,
            **self.sizes, **flags, **self.masked, SINGLE=single, **self.numeric, options=s.options,
        )  # fmt: skip
        return log, mean

    def channels(self) -> tuple[tuple[int], dict[str, Any]]:
        """(grid, sizes) of the merging kernels: programs of a few channels each, about a thousand in all."""
        channels = max(min(triton.next_power_of_2(self.batch * self.heads * self.dim // 1024), 16), 4)
        grid = (self.batch * self.heads * -(-self.dim // channels),)
        return grid, {"D": self.dim, "E": self.width, "BE": self.BE, "BC": channels}

    def at_once(self, w: plan.Works) -> int:
        return SPLITS if w.begin is not None else min(triton.next_power_of_2(max(w.splits, 1)), SPLITS)

    def merge(
        self, w: plan.Works, log: Tensor, mean: Tensor, prefixes: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """One state a sequence; and `prefixes`, which are filled: L and S before each work, L after it in two forms."""
        a = self.a
        log_out = self.empty(self.batch, self.heads, self.dim, dtype=torch.float64)
        mean_out = self.empty(self.batch, self.heads, self.dim, self.width)
        given = None if a.log_sum is None else a.log_sum.contiguous()
        values = None if a.mean_value is None else a.mean_value.contiguous()
        grid, sizes = self.channels()
        tensors = (log, mean, w.begin, given, values, log_out, mean_out)
        numbers = (w.works, w.splits, self.heads)
        flags: dict[str, Any] = {**sizes, "PACKED": w.begin is not None, "HAS_STATE": given is not None}
        if not prefixes:
            self.launch(merge_kernel, grid, *tensors, *numbers, **flags, BP=self.at_once(w))
        else:
            self.launch(prefix_kernel, grid, *tensors, *prefixes, *numbers, **flags)
        return log_out, mean_out

    def folded(self) -> tuple[Tensor, Tensor]:
        a = self.a
        w = self.cut(self.settings("fold"), self.heads, True, False)
        single = w.splits == 1 and a.cu_key is None and a.log_sum is None
        log, mean = self.fold(w, False, single)
        return (log, mean) if single else self.merge(w, log, mean)

    def read(self, log: Tensor, mean: Tensor) -> Tensor:
        a, s = self.a, self.settings("read", self.blocks)
        out = self.like(a.query, self.width)
        shifted = a.start is not None
        w = self.cut(s, self.query_heads, False, shifted)
        pointers, numbers, flags = self.place(w, shifted, False)
        self.launch(
            read_kernel, (self.query_heads * w.works,),
            a.query, a.key, a.value, a.alpha, log, mean, a.lln_weight, a.block_weight, a.key_mask,
            *pointers, a.seed, out,
            *a.query.stride(), *a.key.stride(), *a.value.stride(), *out.stride(),
            *steps(a.alpha), *steps(a.lln_weight), *steps(a.block_weight), *self.mask,
            a.scale, a.dropout, *numbers, self.heads,
            G=self.group, **self.sizes, **flags, BS=a.block_size or 0, **self.masked, **self.uniform, **self.drop,
            **self.numeric, options=s.options,
        )  # fmt: skip
        return out

    def causal_works(self) -> plan.Works:
        s = self.settings("causal", self.blocks)
        return self.cut(s, self.query_heads, True, self.a.start is not None)

    def prefixes(self, w: plan.Works) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """((L and S before each work, L after it in two forms), (L and S after the last))"""
        log, mean = self.fold(w, self.a.start is not None, False)
        prefixes = *(self.made(torch.empty_like(t)) for t in (log, mean, log)), self.empty(*log.shape)
        return prefixes, self.merge(w, log, mean, prefixes)

    def causal(self) -> tuple[Tensor, Tensor, Tensor]:
        a, s, w = self.a, self.settings("causal", self.blocks), self.causal_works()
        (log, mean, *end), final = self.prefixes(w)
        out = self.like(a.query, self.width)
        pointers, numbers, flags = self.place(w, a.start is not None, True)
        count = self.query_heads * w.works
        mark = self.empty(count, dtype=torch.int32)
        rest = (
            a.lln_weight, a.block_weight, a.key_mask, *self.opened(), *pointers, a.seed, out, mark,
            *a.query.stride(), *a.key.stride(), *a.value.stride(), *out.stride(),
            *steps(a.alpha), *steps(a.beta), *steps(a.lln_weight), *steps(a.block_weight), *self.mask,
            a.scale, a.dropout, *numbers, self.heads,
        )  # fmt: skip
        given = (a.query, a.key, a.value, a.alpha, a.beta, log, mean)
        common: dict[str, Any] = {"G": self.group, **self.sizes, **flags, "BS": a.block_size or 0, **self.masked}
        common |= {"HAS_OPEN": a.open_key is not None, **self.uniform, **self.drop, **self.numeric}
        self.launch(causal_kernel, (count,), *given, *end, *rest, **common, options=s.options)
        self.launch(slow_kernel, (count,), *given, *rest, **common, options=SLOW)
        return out, *final

    def opened(self) -> tuple[Tensor | None, ...]:
        opened = self.a.open_key, self.a.open_value, self.a.open_mask
        return tuple(None if t is None else t.contiguous() for t in opened)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        with plan.on_device(self.device):
            return self.launch_forward()

    def launch_forward(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.a.is_causal and self.rows:
            return self.causal()
        log, mean = self.state()
        return (self.read(log, mean) if self.rows else self.like(self.a.query, self.width)), log, mean

    def state(self) -> tuple[Tensor, Tensor]:
        """(log_sum, mean_value) of all keys."""
        if self.keys:
            return self.folded()
        if self.a.log_sum is not None and self.a.mean_value is not None:
            log, mean = (t.clone(memory_format=torch.contiguous_format) for t in (self.a.log_sum, self.a.mean_value))
            return log, mean
        log = torch.full((self.batch, self.heads, self.dim), -torch.inf, dtype=torch.float64, device=self.device)
        return log, torch.zeros(self.batch, self.heads, self.dim, self.width, device=self.device)
