"""Launches of the backward kernels. Nothing of the forward is kept but its arguments and, where it is small, the final
state."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from lln.kernels.call import Call
from lln.kernels.triton import plan
from lln.kernels.triton.causal_backward import causal_keys_kernel, suffix_kernel
from lln.kernels.triton.fit import Fit
from lln.kernels.triton.fold import sum_kernel
from lln.kernels.triton.forward import Launch, name_strides
from lln.kernels.triton.read import fold_backward_kernel, read_backward_kernel
from lln.kernels.triton.tape import Recording

MADE = frozenset(("query", "key", "value"))


class Backward(Launch):
    """`gradients` are filled by the names of a call's fields; of factors and weights, those that are `wanted`."""

    def __init__(
        self, call: Call, final: tuple[Tensor, Tensor] | None, grad: Tensor, grad_log: Tensor | None,
        grad_mean: Tensor | None, wanted: Set[str], recording: Recording | None = None,
        fit: Fit | None = None, made: Set[str] = MADE,
    ) -> None:  # fmt: skip
        """made: whose gradients are made here, where a backward is done in two parts."""
        super().__init__(call, recording, fit)
        self.folded_before = final is not None
        self.grad_log, self.grad_mean = grad_log, grad_mean
        self.has_grad = grad_log is not None or grad_mean is not None
        if final is not None:
            self.set_end(final)
        self.dalpha, self.dbeta = "alpha" in wanted, "beta" in wanted
        self.dweights = self.blocks and not wanted.isdisjoint(("lln_weight", "block_weight"))
        rows = {"query": call.query, "key": call.key, "value": call.value}
        self.gradients = {name: self.allocate_like(t, t.shape[3]) for name, t in rows.items() if name in made}
        dq, dk, dv = (self.gradients.get(name) for name in rows)
        self.values |= {
            "GRAD": grad, "DQ": dq, "DK": dk, "DV": dv,
            "HAS_GRAD": self.has_grad, "HAS_DALPHA": self.dalpha, "HAS_DBETA": self.dbeta,
            "HAS_DWEIGHT": self.dweights,
            # Of each row of A, with blocks: its largest logit, the inverse of its sum, and D; L as the logits have it.
            "TOP": None, "INVERSE": None, "OWN": None, "LOG2": None,
        }  # fmt: skip
        for name, t in (("g", grad), ("dq", dq), ("dk", dk), ("dv", dv)):
            self.values.update(name_strides(name, grad if t is None else t))
        # Weights that are the same for all channels go into P and A, unless their own gradients need these without.
        self.values["UNIFORM"] &= not self.dweights

    def allocate_parts(self, wanted: bool, count: int, size: int) -> Tensor | None:
        return self.allocate(count, size) if wanted else None

    def add_up(self, name: str, parts: Tensor | None, w: plan.Works) -> None:
        """The gradient of a factor: sums of parts [heads * works, X] over the works of each sequence, in its shape."""
        if parts is None:
            return
        sums = self.sum_works(parts, self.heads if name == "beta" else self.query_heads, w)
        self.gradients[name] = sums.sum_to_size(getattr(self.call, name).shape).contiguous()

    def sum_works(self, parts: Tensor, heads: int, w: plan.Works) -> Tensor:
        """[B, heads, X] of parts [heads * works, X], by sequences."""
        size = parts.shape[-1]
        if w.owner is None:
            return parts.view(heads, self.batch, w.splits, size).sum(2).transpose(0, 1)
        # A product, not index_add: that would add in any order.
        own = (torch.arange(self.batch, device=self.device).unsqueeze(-1) == w.owner).double()
        with torch.autocast(self.device.type, enabled=False):  # backward may run under it
            return torch.einsum("bw,hwx->bhx", own, parts.view(heads, w.works, size).double()).float()

    def run(self) -> dict[str, Tensor]:
        with plan.use_device(self.device):
            if self.call.is_causal and self.rows:
                self.run_causal()
            else:
                if not self.folded_before:
                    self.set_end(self.state())
                self.run_bidirectional()
        return self.gradients

    def set_end(self, state: tuple[Tensor, Tensor]) -> None:
        self.log, self.mean = state
        if self.has_grad:  # one of them may be missing
            self.grad_log = torch.zeros_like(self.log) if self.grad_log is None else self.grad_log.contiguous()
            self.grad_mean = torch.zeros_like(self.mean) if self.grad_mean is None else self.grad_mean.contiguous()

    # Bidirectional

    def run_bidirectional(self) -> None:
        dmean, pull = self.run_queries()
        if self.keys:
            self.fold_backward(dmean, pull)
        elif self.dbeta:
            self.gradients["beta"] = torch.zeros_like(self.call.beta)
        if self.call.log_sum is not None and self.call.mean_value is not None:
            part = (self.call.log_sum - self.log.clamp_min(torch.finfo(torch.float64).min)).exp().float()
            self.gradients["mean_value"] = (part.unsqueeze(-1) * dmean).contiguous()
            dlog = part * ((self.call.mean_value * dmean).sum(-1) - pull)
            self.gradients["log_sum"] = dlog.double().contiguous()

    def run_queries(self) -> tuple[Tensor, Tensor]:
        """dS and r of every state; dq, unless the blocks have a part in it."""
        w = self.cut("read_backward", self.query_heads, False, False)
        count = self.query_heads * w.works
        single = w.splits == 1 and self.group == 1 and self.call.cu_query is None
        single = single and not self.has_grad and not self.dweights
        parts, pulls = self.allocate_sums(self.batch, self.heads) if single else self.allocate_sums(count)
        dalpha = self.allocate_parts(self.dalpha, count, self.dim)
        if self.blocks:
            total = self.call.query.shape[0] * self.query_heads * self.rows
            self.values |= {name: self.allocate(total) for name in ("TOP", "INVERSE", "OWN")}
            self.values["LOG2"] = self.allocate(self.batch, self.heads, self.dim)
        if count:
            self.launch(
                read_backward_kernel, count, "read_backward", LOG=self.log, MEAN=self.mean, DMEAN=parts, PULL=pulls,
                DALPHA=dalpha, BLOCKS=self.blocks, SINGLE=single,
            )  # fmt: skip
        self.add_up("alpha", dalpha, w)
        if self.dweights:
            owner = w.owner
            if owner is None:
                owner = torch.arange(self.batch, device=self.device).repeat_interleave(w.splits)
            mean = self.mean[owner].transpose(0, 1).repeat_interleave(self.group, 0)  # [Hq, works, D, E]
            self.add_up("lln_weight", (parts.view(mean.shape) * mean).sum(-2), w)
        if single:
            return parts, pulls
        dmean, pull = self.allocate_sums(self.batch, self.heads)
        self.merge_with(
            sum_kernel, w, DMEAN=parts, PULL=pulls, LOG=self.log, MEAN=self.mean, G_LOG=self.grad_log,
            G_MEAN=self.grad_mean, DMEAN_OUT=dmean, PULL_OUT=pull, WEIGHTED=self.blocks,
        )  # fmt: skip
        return dmean, pull

    def fold_backward(self, dmean: Tensor, pull: Tensor) -> None:
        w = self.cut("fold_backward", self.heads, True, self.shifted)
        dbeta = self.allocate_parts(self.dbeta, self.heads * w.works, self.dim)
        dweight = self.allocate_parts(self.dweights, self.query_heads * w.works, self.width)
        wide = self.group > 1 and self.dtype != torch.bfloat16  # matrices of float32
        self.launch(
            fold_backward_kernel, self.heads * w.works, "fold_backward", LOG=self.log, MEAN=self.mean, DMEAN=dmean,
            PULL=pull, DBETA=dbeta, DWEIGHT=dweight, LOW=self.dtype == torch.bfloat16 and self.size <= 64,
            AGAIN=self.fit.again.get("fold_backward", self.blocks and wide),
        )  # fmt: skip
        self.add_up("beta", dbeta, w)
        self.add_up("block_weight", dweight, w)

    # Causal

    def run_causal(self) -> None:
        w = self.ask_causally(*self.fold_prefixes("causal_queries"))
        self.sum_suffix(w)
        self.answer_causally(w)

    def ask_causally(self, w: plan.Works, state: tuple[Tensor, Tensor]) -> plan.Works:
        """dq, and what the queries of every work ask of the states before it."""
        self.set_end(state)
        count, rows = self.query_heads * w.works, self.call.query.shape[0] * self.query_heads * self.rows
        reach, reach_d = self.allocate_sums(count)
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        parts = {"alpha": self.allocate_parts(self.dalpha, count, self.dim)}
        parts |= {
            name: self.allocate_parts(self.dweights, count, self.width) for name in ("lln_weight", "block_weight")
        }
        self.parts = parts
        self.values.update(
            name_strides("o", self.gradients["query"]), OUT=None, REACH=reach, REACH_D=reach_d, OWN=self.allocate(rows),
            LOG_Z=self.allocate(rows, dtype=wide), REFERENCE=self.allocate(self.heads * w.works * w.tiles, self.dim),
            DALPHA=parts["alpha"], DLLN=parts["lln_weight"], DBLOCK=parts["block_weight"], BACKWARD=True,
        )  # fmt: skip
        self.launch_causal_rows("causal_queries", count)
        return w

    def answer_causally(self, w: plan.Works) -> None:
        """dk and dv, from what is asked of the states after every work; and sums over the works."""
        count, parts = self.heads * w.works, self.parts
        parts["beta"] = self.values["DBETA"] = self.allocate_parts(self.dbeta, count, self.dim)
        for name, opened in (("open_key", "OPEN_K"), ("open_value", "OPEN_V")):
            self.values[f"D{opened}"] = None
            if self.values[opened] is not None:
                self.values[f"D{opened}"] = self.gradients[name] = torch.zeros_like(self.values[opened])
        again = self.fit.again.get("causal_keys", False)
        self.launch(causal_keys_kernel, count, "causal_keys", SLOW=False, AGAIN=again)
        self.launch(causal_keys_kernel, count, "slow", SLOW=True, AGAIN=True)
        for name, part in parts.items():
            self.add_up(name, part, w)

    def sum_suffix(self, w: plan.Works) -> None:
        """R and r at the end of every work; the gradient of the incoming state."""
        suffix, suffix_d = self.allocate_sums(self.heads * w.works)
        first, first_d = self.allocate_sums(self.batch, self.heads)
        self.merge_with(
            suffix_kernel, w, LOG_END=self.log, MEAN_END=self.mean, G_LOG=self.grad_log, G_MEAN=self.grad_mean,
            SUFFIX=suffix, SUFFIX_D=suffix_d, REACH_0=first, REACH_D0=first_d,
        )  # fmt: skip
        if self.call.mean_value is not None:
            self.gradients["mean_value"] = first
            self.gradients["log_sum"] = ((self.call.mean_value * first).sum(-1) - first_d).double().contiguous()
