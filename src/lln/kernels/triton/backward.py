"""Launches of the backward kernels. Nothing of the forward is kept but its arguments and, where it is small, the final
state."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lln.kernels.triton import plan
from lln.kernels.triton.causal_backward import causal_keys_kernel, causal_queries_kernel, suffix_kernel
from lln.kernels.triton.causal_slow_backward import slow_keys_kernel, slow_queries_kernel
from lln.kernels.triton.fold import sum_kernel
from lln.kernels.triton.forward import SLOW, Arguments, Launch, steps
from lln.kernels.triton.read import fold_backward_kernel, read_backward_kernel
from lln.kernels.triton.tape import Recording


@dataclasses.dataclass
class Gradients:
    """Of the differentiable arguments, None where nobody asked (alpha, beta, weights) or there is no such argument."""

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    lln_weight: Tensor | None = None
    block_weight: Tensor | None = None
    log_sum: Tensor | None = None
    mean_value: Tensor | None = None
    open_key: Tensor | None = None
    open_value: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which of the gradients that cost extra are asked for."""

    alpha: bool
    beta: bool
    weights: bool


class Backward(Launch):
    def __init__(
        self, a: Arguments, final: tuple[Tensor, Tensor] | None, grad: Tensor, grad_log: Tensor | None,
        grad_mean: Tensor | None, wanted: Wanted, recording: Recording | None = None,
    ) -> None:  # fmt: skip
        super().__init__(a, recording)
        self.grad, self.wanted, self.folded_before = grad, wanted, final is not None
        self.grad_log, self.grad_mean = grad_log, grad_mean
        self.has_grad = grad_log is not None or grad_mean is not None
        if final is not None:
            self.ends_in(final)
        # Weights that are the same for all channels go into P and A, unless their own gradients need these without.
        self.uniform["UNIFORM"] &= not wanted.weights
        # With blocks: of each row of A its largest logit, the inverse of its sum, and D; L as the logits have it.
        self.of_rows: tuple[Tensor | None, ...] = (None,) * 4
        self.result = Gradients(*(self.like(t, t.shape[3]) for t in (a.query, a.key, a.value)))

    def parts(self, wanted: bool, count: int, size: int) -> Tensor | None:
        return self.empty(count, size) if wanted else None

    def per_sequence(self, parts: Tensor, w: plan.Works, heads: int, like: Tensor) -> Tensor:
        """Sums of parts [heads * works, X] over the works of each sequence, in the shape of the factor `like`."""
        size = parts.shape[-1]
        if w.owner is None:
            sums = parts.view(heads, self.batch, w.splits, size).sum(2).transpose(0, 1)
        else:  # a product, not index_add: that would add in any order
            own = (torch.arange(self.batch, device=self.device).unsqueeze(-1) == w.owner).double()
            with torch.autocast(self.device.type, enabled=False):  # backward may run under it
                sums = torch.einsum("bw,hwx->bhx", own, parts.view(heads, w.works, size).double()).float()
        return sums.sum_to_size(like.shape).contiguous()

    def run(self) -> Gradients:
        with plan.on_device(self.device):
            if self.a.is_causal and self.rows:
                self.causal_backward()
            else:
                if not self.folded_before:
                    self.ends_in(self.state())
                self.bidirectional()
        return self.result

    def ends_in(self, state: tuple[Tensor, Tensor]) -> None:
        self.log, self.mean = state
        if self.has_grad:  # one of them may be missing
            self.grad_log = torch.zeros_like(self.log) if self.grad_log is None else self.grad_log.contiguous()
            self.grad_mean = torch.zeros_like(self.mean) if self.grad_mean is None else self.grad_mean.contiguous()

    # Bidirectional

    def bidirectional(self) -> None:
        dmean, pull = self.queries()
        if self.keys:
            self.fold_backward(dmean, pull)
        elif self.wanted.beta:
            self.result.beta = torch.zeros_like(self.a.beta)
        if self.a.log_sum is not None and self.a.mean_value is not None:
            part = (self.a.log_sum - self.log.clamp_min(torch.finfo(torch.float64).min)).exp().float()
            self.result.mean_value = (part.unsqueeze(-1) * dmean).contiguous()
            self.result.log_sum = (part * ((self.a.mean_value * dmean).sum(-1) - pull)).double().contiguous()

    def queries(self) -> tuple[Tensor, Tensor]:
        """dS and r of every state; dq, unless the blocks have a part in it."""
        a, s = self.a, self.settings("read_backward", self.blocks)
        w = self.cut(s, self.query_heads, False, False)
        count = self.query_heads * w.works
        single = w.splits == 1 and self.group == 1 and a.cu_query is None and not self.has_grad
        single = single and not (self.blocks and self.wanted.weights)
        lead = (self.batch, self.heads) if single else (count,)
        parts, pulls = self.empty(*lead, self.dim, self.width), self.empty(*lead, self.dim)
        dalpha = self.parts(self.wanted.alpha, count, self.dim)
        dq = self.result.query
        if self.blocks:
            total = a.query.shape[0] * self.query_heads * self.rows
            self.of_rows = *(self.empty(total) for _ in range(3)), self.empty(self.batch, self.heads, self.dim)
        if count:
            pointers, numbers, flags = self.place(w, False, False)
            self.launch(
                read_backward_kernel, (count,),
                a.query, self.grad, a.alpha, self.log, self.mean, a.lln_weight, *pointers, a.seed,
                dq, parts, pulls, dalpha, *self.of_rows,
                *a.query.stride(), *self.grad.stride(), *dq.stride(), *steps(a.alpha), *steps(a.lln_weight),
                a.dropout, *numbers, self.heads,
                G=self.group, **self.sizes, **flags, BLOCKS=self.blocks, HAS_DALPHA=self.wanted.alpha, SINGLE=single,
                **self.uniform, **self.drop, **self.numeric, options=s.options,
            )  # fmt: skip
        if dalpha is not None:
            self.result.alpha = self.per_sequence(dalpha, w, self.query_heads, a.alpha)
        if self.blocks and self.wanted.weights:
            owner = w.owner
            if owner is None:
                owner = torch.arange(self.batch, device=self.device).repeat_interleave(w.splits)
            mean = self.mean[owner].transpose(0, 1).repeat_interleave(self.group, 0)  # [Hq, works, D, E]
            sums = (parts.view(mean.shape) * mean).sum(-2)
            self.result.lln_weight = self.per_sequence(sums, w, self.query_heads, self.weight(a.lln_weight))
        return (parts, pulls) if single else self.sum(w, parts, pulls)

    def sum(self, w: plan.Works, parts: Tensor, pulls: Tensor) -> tuple[Tensor, Tensor]:
        dmean = self.empty(self.batch, self.heads, self.dim, self.width)
        pull = self.empty(self.batch, self.heads, self.dim)
        grid, sizes = self.channels()
        self.launch(
            sum_kernel, grid,
            parts, pulls, w.begin, self.a.lln_weight, self.log, self.mean, self.grad_log, self.grad_mean, dmean, pull,
            *steps(self.a.lln_weight), w.works, w.splits, self.heads,
            G=self.group, **sizes, BP=self.at_once(w),
            PACKED=w.begin is not None, WEIGHTED=self.blocks, HAS_GRAD=self.has_grad,
        )  # fmt: skip
        return dmean, pull

    @staticmethod
    def weight(t: Tensor | None) -> Tensor:
        assert t is not None
        return t

    def fold_backward(self, dmean: Tensor, pull: Tensor) -> None:
        a, s = self.a, self.settings("fold_backward", self.blocks)
        shifted = a.start is not None
        w = self.cut(s, self.heads, True, shifted)
        dq, dk, dv = self.result.query, self.result.key, self.result.value
        count = self.heads * w.works
        dbeta = self.parts(self.wanted.beta, count, self.dim)
        dweight = self.parts(self.blocks and self.wanted.weights, self.query_heads * w.works, self.width)
        pointers, numbers, flags = self.place(w, shifted, True)
        wide = self.group > 1 and self.dtype != torch.bfloat16  # matrices of float32
        again = self.blocks and (wide or not self.roomy)
        self.launch(
            fold_backward_kernel, (count,),
            a.query, a.key, a.value, self.grad, a.alpha, a.beta, self.log, self.mean, dmean, pull,
            a.lln_weight, a.block_weight, a.key_mask, *pointers, a.seed, *self.of_rows, dq, dk, dv,
            dbeta, dweight,
            *a.query.stride(), *a.key.stride(), *a.value.stride(), *self.grad.stride(),
            *dq.stride(), *dk.stride(), *dv.stride(),
            *steps(a.alpha), *steps(a.beta), *steps(a.lln_weight), *steps(a.block_weight), *self.mask,
            a.scale, a.dropout, *numbers, self.heads,
            G=self.group, **self.sizes, **flags, BS=a.block_size or 0, **self.masked,
            LOW=self.dtype == torch.bfloat16 and self.size <= 64, AGAIN=again,
            HAS_DBETA=self.wanted.beta, HAS_DWEIGHT=dweight is not None,
            **self.uniform, **self.drop, **self.numeric, options=s.options,
        )  # fmt: skip
        if dbeta is not None:
            self.result.beta = self.per_sequence(dbeta, w, self.heads, a.beta)
        if dweight is not None:
            self.result.block_weight = self.per_sequence(dweight, w, self.query_heads, self.weight(a.block_weight))

    # Causal

    def causal_backward(self) -> None:
        a, w = self.a, self.causal_works()
        (log, mean, *end), state = self.prefixes(w)
        self.ends_in(state)
        count, total = self.query_heads * w.works, a.query.shape[0] * self.rows
        reach, reach_d = self.empty(count, self.dim, self.width), self.empty(count, self.dim)
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        log_z, own = self.empty(self.query_heads * total, dtype=wide), self.empty(self.query_heads * total)
        mark = self.empty(count, dtype=torch.int32)
        reference = self.empty(self.heads * w.works * w.tiles, self.dim)
        width = self.empty(count * w.tiles, dtype=torch.int32)
        dalpha = self.parts(self.wanted.alpha, count, self.dim)
        weights = self.blocks and self.wanted.weights
        dlln, dblock = self.parts(weights, count, self.width), self.parts(weights, count, self.width)
        dq, dk, dv = self.result.query, self.result.key, self.result.value
        pointers, numbers, flags = self.place(w, a.start is not None, True)
        opened = self.opened()
        given = (a.query, a.key, a.value, self.grad, a.alpha, a.beta)
        others = (a.lln_weight, a.block_weight, a.key_mask, *opened, *pointers, a.seed)
        strides = (*a.query.stride(), *a.key.stride(), *a.value.stride(), *self.grad.stride())
        factors = (*steps(a.alpha), *steps(a.beta), *steps(a.lln_weight), *steps(a.block_weight), *self.mask)
        sizes = (*factors, a.scale, a.dropout, *numbers, self.rows, self.heads)
        common: dict[str, Any] = {"G": self.group, **self.sizes, **flags, "BS": a.block_size or 0, **self.masked}
        common |= {"HAS_OPEN": a.open_key is not None, **self.uniform, **self.drop, **self.numeric}

        of_queries = {**common, "HAS_DALPHA": self.wanted.alpha, "HAS_DWEIGHT": weights}
        left = (dq, reach, reach_d, log_z, own, mark)
        right = (dalpha, dlln, dblock, *strides, *dq.stride(), *sizes)
        s = self.settings("causal_queries", self.blocks)
        self.launch(
            causal_queries_kernel, (count,),
            *given, log, mean, *end, *others, *left, *right, **of_queries, options=s.options,
        )  # fmt: skip
        self.launch(
            slow_queries_kernel, (count,),
            *given, log, mean, *others, *left, reference, width, *right, **of_queries, options=SLOW,
        )  # fmt: skip

        suffix = self.suffix(w, log, reach, reach_d)
        dbeta = self.parts(self.wanted.beta, self.heads * w.works, self.dim)
        dopen = [None if t is None else torch.zeros_like(t) for t in opened[:2]]
        of_keys = {**common, "HAS_DBETA": self.wanted.beta}
        right = (*others, dk, dv, dbeta, *dopen, *strides, *dk.stride(), *dv.stride(), *sizes)
        s = self.settings("causal_keys", self.blocks)
        grid = (self.heads * w.works,)
        self.launch(
            causal_keys_kernel, grid, *given, *end, *suffix, log_z, own, mark, *right, **of_keys, options=s.options
        )
        states = (log, self.log, *suffix, log_z, own, mark, reference, width)
        self.launch(slow_keys_kernel, grid, *given, *states, *right, **of_keys, options=SLOW)
        self.result.open_key, self.result.open_value = dopen
        if dalpha is not None:
            self.result.alpha = self.per_sequence(dalpha, w, self.query_heads, a.alpha)
        if dbeta is not None:
            self.result.beta = self.per_sequence(dbeta, w, self.heads, a.beta)
        if dlln is not None and dblock is not None:
            self.result.lln_weight = self.per_sequence(dlln, w, self.query_heads, self.weight(a.lln_weight))
            self.result.block_weight = self.per_sequence(dblock, w, self.query_heads, self.weight(a.block_weight))

    def suffix(self, w: plan.Works, log: Tensor, reach: Tensor, reach_d: Tensor) -> tuple[Tensor, Tensor]:
        """R and r at the end of every work; the gradient of the incoming state."""
        count = self.heads * w.works
        suffix, suffix_d = self.empty(count, self.dim, self.width), self.empty(count, self.dim)
        first = self.empty(self.batch, self.heads, self.dim, self.width)
        first_d = self.empty(self.batch, self.heads, self.dim)
        grid, sizes = self.channels()
        self.launch(
            suffix_kernel, grid,
            reach, reach_d, log, self.log, self.mean, self.grad_log, self.grad_mean, suffix, suffix_d, first, first_d,
            w.begin, w.works, w.splits, self.heads,
            G=self.group, **sizes,
            PACKED=w.begin is not None, HAS_GRAD=self.has_grad,
        )  # fmt: skip
        if self.a.mean_value is not None:
            self.result.mean_value = first
            self.result.log_sum = ((self.a.mean_value * first).sum(-1) - first_d).double().contiguous()
        return suffix, suffix_d
