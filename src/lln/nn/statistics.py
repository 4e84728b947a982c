"""alpha and beta of a module: statistics of q and k, kept where they must be, and moment matching."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from lln.checks import Matching, Read, Statistics, coefficient
from lln.functional import Backend, Coefficient, CuSeqlens
from lln.kernels.common import SIGMA_FLOOR, compute_dtype, constant, wide_dtype
from lln.matching.moments import (
    Data,
    both_moments,
    expand_heads,
    find_kernel,
    has_kernels,
    match_moments,
    match_samples,
    score_factor,
    sigma,
)
from lln.nn.head_split import HeadSplit, check_split, find_kept, label_kept, split_module
from lln.ranks import find_ranks, share

LOCK = threading.RLock()  # one for all: modules are copied and pickled, which no lock can be


class Where(NamedTuple):
    """Which tokens attend to which, as `lln.LLNAttention` is told: see its forward."""

    is_causal: bool = False
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    cu_seqlens: CuSeqlens | None = None


class MomentMatcher(nn.Module):
    """The part of `lln.LLNAttention` that alpha and beta come from; see there for the arguments."""

    pending: Tensor
    running_count: Tensor
    running_variance_q: Tensor
    running_variance_k: Tensor
    updates = 0  # steps whose moments were kept, in whichever thread
    split: HeadSplit | None = None  # where heads lie on several ranks: which of them are here

    def __init__(
        self, num_heads: int, head_dim: int, num_key_heads: int | None, matching: Matching, statistics: Statistics, *,
        alpha: Coefficient | None, beta: Coefficient | None, learnable: str | None, scale: float | None, decoder: bool,
        length: int, momentum: float, backend: Backend, factory: dict[str, Any], read: Read = "paper",
        directed: bool = False,
    ) -> None:  # fmt: skip
        """directed: learned directions of the evidence read hold beta, so that here it is 1."""
        super().__init__()
        self.num_heads, self.head_dim, self.num_key_heads = num_heads, head_dim, num_key_heads or num_heads
        self.matching, self.statistics = matching, statistics
        self.scale, self.decoder, self.backend = scale, decoder, backend
        self.length, self.momentum = length, momentum
        if matching != "paper":  # refuses a head_dim that the curves do not cover now rather than in forward
            match_moments(1.0, 1.0, head_dim, matching)
        if statistics == "running":
            device = factory["device"]
            # (queries, keys) x (count, sum, sum of squares) of the last step; a buffer, so that a CUDA graph finds it.
            wide = wide_dtype(torch.empty(0, device=device).device)
            pending = torch.zeros(2, 3, self.num_key_heads, dtype=wide, device=device)
            self.register_buffer("pending", pending, persistent=False)
            self.register_buffer("running_count", torch.zeros((), dtype=torch.int64, device=device))
            for name in ("running_variance_q", "running_variance_k"):
                self.register_buffer(name, torch.ones(self.num_key_heads, dtype=torch.float32, device=device))
        self.read = read
        if directed:
            beta = 1.0
        if statistics == "fixed":
            self._make_coefficients(alpha, beta, learnable, factory)

    def _make_coefficients(
        self, alpha: Coefficient | None, beta: Coefficient | None, learnable: str | None, factory: dict[str, Any]
    ) -> None:
        usual = match_moments(1.0, 1.0, self.head_dim, self.matching, self.scale, length=self.length)
        device = torch.empty(0, device=factory["device"]).device
        self.numbers: dict[str, float] = {}
        for name, given, heads, value in (
            ("alpha", alpha, self.num_heads, usual[0]),
            ("beta", beta, self.num_key_heads, usual[1]),
        )[self.read == "evidence" :]:  # which has no alpha
            chosen = value if given is None else given
            if isinstance(chosen, Tensor):
                chosen = chosen.detach().to(device)
                if learnable == "head" and chosen.ndim > 1 and chosen.shape[-1] > 1:
                    raise ValueError(f"{name} of shape {list(chosen.shape)} is per channel; use learnable='channel'.")
            values = coefficient(name, chosen, (1, heads, self.head_dim), wide_dtype(device), device)
            if learnable is not None:
                # The logarithm is learned: alpha and beta stay positive whatever the optimiser does.
                values = values.expand(1, heads, self.head_dim if learnable == "channel" else values.shape[-1])
                dtype = factory["dtype"] or torch.get_default_dtype()
                self.register_parameter(f"log_{name}", nn.Parameter(values[0].log().to(dtype)))
            elif isinstance(chosen, Tensor):
                self.register_buffer(f"fixed_{name}", values.clone())
            else:
                self.numbers[name] = float(chosen)

    def match(self, query: Tensor, key: Tensor, where: Where) -> tuple[Tensor | None, Tensor]:
        """(alpha, beta) of queries and keys as they are attended with, but for a feature map; the evidence read has no
        alpha. Changes nothing."""
        alpha, beta = self._find_both(query, key, where)
        return None if self.read == "evidence" else alpha, beta

    def _find_both(self, query: Tensor, key: Tensor, where: Where) -> tuple[Tensor | None, Tensor]:
        if (where.is_causal or self.decoder) and self.statistics in ("sample", "batch"):
            raise ValueError(
                f"statistics={self.statistics!r} looks at all tokens, so a causal output would depend on later ones; "
                "use statistics='running' or 'fixed' for causal attention and in decoders."
            )
        if self.statistics == "fixed":
            return self._read_fixed(query)
        if self.statistics == "sample":
            return match_samples(self._data(query, key, where), self.matching, self.scale, self.backend)
        length: int | Tensor = self.length
        if self.statistics == "running":
            variances = self.running_variance_q, self.running_variance_k
            fused = self.matching == "paper" and has_kernels(query, key, self.backend)
            if fused and variances[0].device == query.device:
                factor = score_factor(self.scale, self.head_dim)
                alpha, beta = find_kernel("paper_match")(*variances, self.num_heads, factor)
                return alpha, beta
            sigma_q, sigma_k = (v.to(wide_dtype(v.device)).clamp_min(SIGMA_FLOOR**2).sqrt()[None] for v in variances)
        else:
            found = both_moments(*self._data(query, key, where), self.backend)
            if self.matching == "entropy":
                length = (found[1, 0] / self.head_dim).mean()
            found = found.sum((2, 3))  # of all samples and heads
            found = found if self.split is None else self.split.add_up(found)
            sigma_q, sigma_k = sigma(*found.unbind(1)).unbind()
        matched = match_moments(sigma_q, sigma_k, self.head_dim, self.matching, self.scale, length=length)
        return expand_heads(matched, query)

    def _read_fixed(self, query: Tensor) -> tuple[Tensor | None, Tensor]:
        dtype, kept = compute_dtype(query.dtype), self.sources
        learned = "log_beta" in self._parameters
        if (
            len(kept) == 2
            and not torch.compiler.is_compiling()
            and not (torch.is_grad_enabled() and kept[0].requires_grad)
        ):
            plain = all(t.is_contiguous() and t.device == query.device for t in kept)
            if plain and has_kernels(query, query, self.backend):
                alpha, beta = find_kernel("settle")(*kept, learned)
                return alpha, beta
        *alphas, beta = (
            getattr(self, f"log_{name}").to(dtype).exp().unsqueeze(0)
            if learned
            else getattr(self, f"fixed_{name}").to(dtype)
            if f"fixed_{name}" in self._buffers
            else constant(self.numbers[name], dtype, query.device)
            for name in ("alpha", "beta")[self.read == "evidence" :]
        )
        return alphas[0] if alphas else None, beta

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The tensors, if any, that alpha and beta come from beside queries and keys."""
        if self.statistics == "running":
            return self.running_variance_q, self.running_variance_k
        if self.statistics != "fixed" or self.numbers:
            return ()
        held, prefix = (self._parameters, "log_") if "log_beta" in self._parameters else (self._buffers, "fixed_")
        found = tuple(held[f"{prefix}{name}"] for name in ("alpha", "beta") if f"{prefix}{name}" in held)
        return found  # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop("settings", None)  # see `LLNAttention.settings`
        super().__setattr__(name, value)

    def _data(self, query: Tensor, key: Tensor, where: Where) -> Data:
        """What the statistics are of, as `both_moments` takes it."""
        _, key_mask, query_mask, cu_seqlens = where
        if key_mask is not None and query_mask is None and query.shape[-2] == key.shape[-2]:
            query_mask = key_mask
        pair = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
        return query.detach(), key.detach(), self.num_key_heads, query_mask, key_mask, pair[0], pair[1]

    def sum_moments(self, query: Tensor, key: Tensor, where: Where) -> Tensor:
        """The moments of the whole batch on all ranks, as `pending` holds them."""
        data = self._data(query, key, where)
        if (ranks := find_ranks()) is not None:
            cut = [ranks.cut_offsets(one, t.shape[2]) for one, t in zip(data[5:], data[:2], strict=True)]
            data = *data[:5], cut[0], cut[1]
        with share(None):  # of the rows here: those of all ranks, also of ranks with other sequences, come just below
            both = both_moments(*data, self.backend).sum(2)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if self.split is not None:  # other ranks may have other heads
                wide = self.split.place(both, 2)
                torch.distributed.all_reduce(wide)
                return self.split.take(wide, 2)
            torch.distributed.all_reduce(both)
        return both

    def start_update(self) -> int:
        """The running averages with all that was seen before this training step. Returns what `end_update` takes."""
        if torch.compiler.is_compiling():  # which happens in one thread
            self.commit()
            return 0
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "statistics='running' does not work in torch.nn.DataParallel, which discards its copies of the module "
                "after each forward pass; use DistributedDataParallel, or other statistics."
            )
        with LOCK:
            self.commit()
            return self.updates

    def end_update(self, moments: Tensor, started: int) -> None:
        """Keep the moments of a training step that did not fail. Those of a step in another thread that ended meanwhile
        are brought into the averages first."""
        if torch.compiler.is_compiling():
            self.pending.copy_(moments)
            return
        with LOCK:
            if self.updates != started:
                self.commit()
            self.pending.copy_(moments)
            self.__dict__["updates"] = self.updates + 1

    def commit(self) -> None:
        """Bring the moments of the last training step into the running averages."""
        if self.statistics != "running":
            return
        if torch.compiler.is_compiling():
            self._commit()
            return
        with LOCK:
            self._commit()

    @torch.no_grad()
    def _commit(self) -> None:
        # Nothing pending, no tokens, or an overflow somewhere: then nothing changes. No value is read on the host.
        good = ((self.pending[:, 0] > 1) & self.pending.isfinite().all(1)).all()
        # The first batch replaces the initial 1.
        weight = torch.where(self.running_count == 0, 1.0, self.momentum) * good
        new = torch.where(good, sigma(*self.pending.unbind(1)).square(), 1.0).to(self.running_variance_q)
        weight = weight.to(new)
        for buffer, value in zip((self.running_variance_q, self.running_variance_k), new, strict=True):
            buffer.lerp_(value, weight)
        self.running_count += good
        self.pending.zero_()

    def check_split(self, size: int) -> None:
        check_split(self, size)

    def split_heads(self, mesh: Any) -> None:
        """Keep the heads of this rank alone, see `lln.distributed.split_heads`."""
        split_module(self, mesh)

    def hold(self, dropout_p: float = 0.0) -> contextlib.AbstractContextManager[None]:
        """Within it what is learned is that of the heads here."""
        return contextlib.nullcontext() if self.split is None else self.split.hold(self, dropout_p)

    def train(self, mode: bool = True) -> Self:
        if not mode:
            self.commit()
        return super().train(mode)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.commit()
        super()._save_to_state_dict(*args, **kwargs)
        if self.split is not None:
            label_kept(self, *args[:2])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        state_dict, prefix = args[0], args[1]
        if self.split is not None:
            find_kept(self, state_dict, prefix)
        if self.statistics == "running":
            self.pending.zero_()  # of the weights that are being replaced
            for name in ("running_count", "running_variance_q", "running_variance_k"):
                # A model that never had them (softmax weights, say) leaves them as they are.
                state_dict.setdefault(prefix + name, getattr(self, name))
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.dtype != old.dtype:
                self._buffers[name] = old.to(buffer.device)
        return self


def check_heads(
    query: Tensor, key: Tensor, heads: int, key_heads: int, head_dim: int, split: HeadSplit | None = None
) -> None:
    if (query.shape[1], key.shape[1], query.shape[3]) != (heads, key_heads, head_dim):
        fewer = split is None and 0 < query.shape[1] < heads and not heads % query.shape[1]
        here = "" if split is None else f", of heads that lie on {split.size} ranks"
        remedy = " (where heads lie on several ranks: lln.distributed.split_heads(model, mesh))" if fewer else ""
        raise ValueError(
            f"query and key must have {heads} and {key_heads} heads of {head_dim}{here}; "
            f"got query {list(query.shape)} and key {list(key.shape)}{remedy}."
        )


def is_in_backward() -> bool:
    """Whether autograd is running backward right now, that is, whether a forward is a recomputation."""
    # A compiled graph recomputes within itself and does not come here again.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
