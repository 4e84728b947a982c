"""LLNAttention: statistics of q and k, moment matching and the op, as one module on q, k, v."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lln.attention import Backend, Coefficient, CuSeqlens, Mix, lln_attention
from lln.checks import check_key_mask, check_packing, check_tensors, coefficient
from lln.convolution import check_sequence, check_value, convolve
from lln.feature_map import map_features
from lln.kernels.common import compute_dtype, wide_dtype
from lln.moments import (
    LENGTH,
    SIGMA_FLOOR,
    Data,
    Matching,
    both_moments,
    has_kernels,
    kernel,
    match_moments,
    score_factor,
    sigma,
)
from lln.options import (
    Statistics,
    check_convolution,
    check_feature_map,
    check_numbers,
    check_options,
    check_overlap,
)
from lln.overlap import overlapping_attention
from lln.state import LLNState


class LLNAttention(nn.Module):
    """LLN or LLN+Diag attention whose alpha and beta follow the spread of the queries and keys.

    Args:
        num_heads: query heads.
        head_dim: of queries and keys.
        num_key_heads: key and value heads, where fewer (grouped-query attention).
        value_dim: of the values, where not head_dim; only a learnable `mix` and a convolution need to know.
        matching: "paper", "variance" or "entropy", see `lln.match_moments`.
        statistics: where sigma_q and sigma_k come from:
            "sample": each sample (packed: each sequence) and head for itself; nothing is stored, batch mates and
            padding are invisible. Not for causal attention: it would look at later tokens.
            "batch": one number over the whole tensor, in eval too: the paper's released code.
            "running": for each key head a moving average, kept in buffers and frozen in eval: for causal attention.
            "fixed": alpha and beta as given, or those of sigma = 1.
        alpha, beta: with "fixed": numbers, or tensors [heads] or [heads, dim].
        learnable: with "fixed": "head" or "channel" makes alpha and beta parameters that start from the given values.
        block_size: LLN+Diag with blocks of so many tokens; None: LLN alone.
        mix: of the linear part and the blocks: a number; "ratio" learns one number a head; "scales" learns two factors
            (r, p) a head and value channel. All start at the average of the two.
        feature_map: with "fixed": "linear" learns a linear map of the queries of each head and of the keys of each key
            head (see `lln.feature_map`). It starts at the identity.
        convolution: an odd width: each channel of each head's queries, keys and values learns a convolution over that
            many tokens, which is added to it before anything else, statistics included (see `lln.convolution`). The
            window is symmetric, or reaches back alone where attention is causal. It starts at zero. What key_mask and
            query_mask hide, and other packed sequences, are not seen. Refused: a state, and cross attention.
        overlap: with a block_size divisible by 4: in place of blocks, windows of block_size keys around every
            block_size / 2 queries, a quarter of it further on both sides; causal: half of it before them. No state.
        dropout: probability in training.
        scale: of the softmax that is imitated, and of the one in the blocks; default 1 / sqrt(head_dim).
        decoder: the queries belong to a causal decoder (cross attention), so statistics must not look at all of them.
        length: number of keys that "entropy" matching assumes with "running" and "fixed" statistics.
        momentum: weight of a new batch in the "running" averages.
        backend: of the op and, where it can, of the statistics.

    With "running" a training step uses the buffers as they stand. Its own moments, summed over all ranks of a
    torch.distributed run, wait until the next training step, eval() or state_dict() brings them into the buffers: a
    recomputation inside backward (activation checkpointing) must see the same alpha and beta. It does if the module's
    backward comes before its next forward, eval() or state_dict().

    Statistics stay in float32 whatever .half() or .to(dtype) make of the parameters. A state goes with "running" or
    "fixed" statistics, whose beta does not change from call to call.
    """

    pending: Tensor
    running_count: Tensor
    running_variance_q: Tensor
    running_variance_k: Tensor
    mix_logit: nn.Parameter
    lln_scale: nn.Parameter
    block_scale: nn.Parameter
    map_q: nn.Parameter
    map_k: nn.Parameter
    key_offset: nn.Parameter
    conv_q: nn.Parameter
    conv_k: nn.Parameter
    conv_v: nn.Parameter

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_key_heads: int | None = None,
        value_dim: int | None = None,
        matching: Matching = "paper",
        statistics: Statistics = "sample",
        alpha: Coefficient | None = None,
        beta: Coefficient | None = None,
        learnable: Literal["head", "channel"] | None = None,
        block_size: int | None = None,
        mix: float | Literal["ratio", "scales"] = 0.5,
        feature_map: Literal["linear"] | None = None,
        convolution: int | None = None,
        overlap: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        decoder: bool = False,
        length: int = LENGTH,
        momentum: float = 0.1,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_options(num_heads, head_dim, num_key_heads, matching, statistics, alpha, beta, learnable, block_size, mix)
        check_feature_map(feature_map, statistics)
        check_convolution(convolution)
        check_overlap(overlap, block_size)
        check_numbers(dropout, momentum, length, scale, backend)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_key_heads, self.value_dim = num_key_heads or num_heads, value_dim or head_dim
        self.matching, self.statistics = matching, statistics
        self.block_size, self.scale, self.decoder = block_size, scale, decoder
        self.length, self.momentum, self.dropout, self.backend = length, momentum, dropout, backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if matching != "paper":  # refuses a head_dim that the curves do not cover now rather than in forward
            match_moments(1.0, 1.0, head_dim, matching)
        if statistics == "running":
            # (queries, keys) x (count, sum, sum of squares) of the last step; a buffer, so that a CUDA graph finds it.
            wide = wide_dtype(torch.empty(0, device=device).device)
            pending = torch.zeros(2, 3, self.num_key_heads, dtype=wide, device=device)
            self.register_buffer("pending", pending, persistent=False)
            self.register_buffer("running_count", torch.zeros((), dtype=torch.int64, device=device))
            for name in ("running_variance_q", "running_variance_k"):
                self.register_buffer(name, torch.ones(self.num_key_heads, dtype=torch.float32, device=device))
        if statistics == "fixed":
            self._make_coefficients(alpha, beta, learnable, factory)
        self._make_mix(mix, factory)
        self.feature_map = feature_map
        if feature_map is not None:
            self.map_q = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim, **factory))
            self.map_k = nn.Parameter(torch.zeros(self.num_key_heads, head_dim, head_dim, **factory))
            self.key_offset = nn.Parameter(torch.zeros(self.num_key_heads, head_dim, **factory))
        self.convolution, self.overlap = convolution, overlap
        if convolution is not None:
            self.conv_q = nn.Parameter(torch.zeros(num_heads, head_dim, convolution, **factory))
            self.conv_k = nn.Parameter(torch.zeros(self.num_key_heads, head_dim, convolution, **factory))
            self.conv_v = nn.Parameter(torch.zeros(self.num_key_heads, self.value_dim, convolution, **factory))

    def _make_coefficients(
        self, alpha: Coefficient | None, beta: Coefficient | None, learnable: str | None, factory: dict[str, Any]
    ) -> None:
        usual = match_moments(1.0, 1.0, self.head_dim, self.matching, self.scale, length=self.length)
        device = torch.empty(0, device=factory["device"]).device
        self.numbers: dict[str, float] = {}
        for name, given, heads, value in (
            ("alpha", alpha, self.num_heads, usual[0]),
            ("beta", beta, self.num_key_heads, usual[1]),
        ):
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

    def _make_mix(self, mix: float | str, factory: dict[str, Any]) -> None:
        self.mix = mix
        if mix == "ratio":
            self.mix_logit = nn.Parameter(torch.zeros(self.num_heads, **factory))
        elif mix == "scales":
            for name in ("lln_scale", "block_scale"):
                scales = torch.full((self.num_heads, self.value_dim), 0.5, **factory)
                self.register_parameter(name, nn.Parameter(scales))

    def mix_weights(self) -> Mix:
        """The `mix` of the op as it stands now."""
        if self.mix == "ratio":
            return self.mix_logit.sigmoid()
        if self.mix == "scales":
            return self.lln_scale.unsqueeze(0), self.block_scale.unsqueeze(0)
        return float(self.mix)

    def features(self, query: Tensor, key: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
        """The queries and keys that the op is given. where: is_causal, masks and cu_seqlens, as in forward."""
        return self._mapped(*self._convolved(query, key, **where))

    @property
    def moves(self) -> bool:
        """Whether `features` are others than the queries and keys that came."""
        return self.feature_map is not None or self.convolution is not None

    def _mapped(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.feature_map is None:
            return query, key
        return map_features(query, key, self.map_q, self.map_k, self.key_offset)

    def _convolved(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.convolution is None:
            return query, key
        check_sequence(query, key, is_causal, self.decoder, cu_seqlens)
        where: dict[str, Any] = {"is_causal": is_causal, "cu_seqlens": cu_seqlens}
        rows = key_mask if query_mask is None else query_mask
        return convolve(query, self.conv_q, mask=rows, **where), convolve(key, self.conv_k, mask=key_mask, **where)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
        state: LLNState | None = None,
        return_state: bool = False,
        dropout: float | None = None,
    ) -> Tensor | tuple[Tensor, LLNState]:
        """query [B, H, N, D], key [B, key heads, M, D], value [B, key heads, M, E] -> [B, H, N, E]; see lln_attention.

        query_mask [B, N]: rows that count for sigma_q; default key_mask in self attention (N = M).
        dropout: in training in place of the module's own.
        Raises ValueError for statistics that would let a causal output see later tokens."""
        self._check(query, key, value, key_mask, query_mask, cu_seqlens)
        where: dict[str, Any] = {
            "is_causal": is_causal,
            "key_mask": key_mask,
            "query_mask": query_mask,
            "cu_seqlens": cu_seqlens,
        }
        if self.convolution is not None:
            check_value(value, self.value_dim, state is not None or return_state)
            query, key = self._convolved(query, key, **where)
            value = convolve(value, self.conv_v, is_causal=is_causal, mask=key_mask, cu_seqlens=cu_seqlens)
        new = None
        if self.statistics == "running" and self.training and not in_backward():
            self.commit()
            new = self._summed(query, key, query_mask, key_mask, cu_seqlens)
        alpha, beta = self._matched(query, key, **where)
        query, key = self._mapped(query, key)
        p = self.dropout if dropout is None else dropout
        result: Tensor | tuple[Tensor, LLNState] = self.attend(
            query, key, value, alpha, beta, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens,
            dropout_p=p if self.training else 0.0, state=state, return_state=return_state,
        )  # fmt: skip
        if new is not None:
            self.pending.copy_(new)  # only now: a call that failed has not been seen
        return result

    def attend(self, query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, beta: Tensor, **call: Any) -> Any:
        """The op with this module's blocks, on `features` and with `coefficients`. call: further arguments of it."""
        if self.block_size is not None:
            call |= {"block_size": self.block_size, "mix": self.mix_weights(), "scale": self.scale}
        op = overlapping_attention if self.overlap else lln_attention
        return op(query, key, value, alpha, beta, **call, backend=self.backend)

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        cu_seqlens: CuSeqlens | None,
    ) -> None:
        """What the statistics need to be right; the op checks the rest."""
        check_tensors(query, key, value)
        sizes = query.shape[1], key.shape[1], query.shape[3]
        if sizes != (self.num_heads, self.num_key_heads, self.head_dim):
            raise ValueError(
                f"query and key must have {self.num_heads} and {self.num_key_heads} heads of {self.head_dim}; "
                f"got query {list(query.shape)} and key {list(key.shape)}."
            )
        check_packing(cu_seqlens, query, key)
        check_key_mask(key_mask, key)
        check_key_mask(query_mask, query, "query_mask", "query")

    def coefficients(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(alpha, beta) that forward would use now, in a shape that lln_attention takes. Changes nothing."""
        where: dict[str, Any] = {
            "is_causal": is_causal,
            "key_mask": key_mask,
            "query_mask": query_mask,
            "cu_seqlens": cu_seqlens,
        }
        return self._matched(*self._convolved(query, key, **where), **where)

    def _matched(
        self,
        query: Tensor,
        key: Tensor,
        *,
        is_causal: bool,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        cu_seqlens: CuSeqlens | None,
    ) -> tuple[Tensor, Tensor]:
        """`coefficients` of queries and keys that are convolved already."""
        if (is_causal or self.decoder) and self.statistics in ("sample", "batch"):
            raise ValueError(
                f"statistics={self.statistics!r} looks at all tokens, so a causal output would depend on later ones; "
                "use statistics='running' or 'fixed' for causal attention and in decoders."
            )
        if self.statistics == "fixed":
            return self._fixed("alpha", query), self._fixed("beta", query)
        fused = self.matching == "paper" and has_kernels(query, key, self.backend)  # eq. (10) in the same kernel
        factor = score_factor(self.scale, self.head_dim)
        length: int | Tensor = self.length
        if self.statistics == "running":
            variances = self.running_variance_q, self.running_variance_k
            if fused and variances[0].device == query.device:
                alpha, beta = kernel("paper_match")(*variances, self.num_heads, factor)
                return alpha, beta
            sigma_q, sigma_k = (v.to(wide_dtype(v.device)).clamp_min(SIGMA_FLOOR**2).sqrt()[None] for v in variances)
        else:
            data = self._data(query, key, query_mask, key_mask, cu_seqlens)
            if fused and self.statistics == "sample":
                alpha, beta = kernel("paper_coefficients")(*data, factor)
                return alpha, beta
            found = both_moments(*data, self.backend)
            if self.matching == "entropy":
                length = found[1, 0] / self.head_dim
            if self.statistics == "batch":
                length = length.mean() if isinstance(length, Tensor) else length
                found = found.sum((2, 3))
            sigma_q, sigma_k = sigma(*found.unbind(1)).unbind()
        alpha, beta = match_moments(sigma_q, sigma_k, self.head_dim, self.matching, self.scale, length=length)
        assert isinstance(alpha, Tensor)
        assert isinstance(beta, Tensor)
        dtype = compute_dtype(query.dtype)
        alpha, beta = alpha.to(dtype), beta.to(dtype)
        if alpha.ndim == 2:  # [B, key heads]
            if self.num_heads != self.num_key_heads:
                alpha = alpha.repeat_interleave(self.num_heads // self.num_key_heads, 1)
            alpha, beta = alpha.unsqueeze(-1), beta.unsqueeze(-1)
        return alpha, beta

    def _fixed(self, name: str, query: Tensor) -> Tensor:
        dtype = compute_dtype(query.dtype)
        if f"log_{name}" in self._parameters:
            learned: Tensor = getattr(self, f"log_{name}")
            return learned.to(dtype).exp().unsqueeze(0)
        if f"fixed_{name}" in self._buffers:
            given: Tensor = getattr(self, f"fixed_{name}")
            return given.to(dtype)
        return torch.full((1, 1, 1), self.numbers[name], dtype=dtype, device=query.device)

    def _data(
        self,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        cu_seqlens: CuSeqlens | None,
    ) -> Data:
        """What the statistics are of, as `both_moments` takes it."""
        if query_mask is None and query.shape[-2] == key.shape[-2]:
            query_mask = key_mask
        pair = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
        return query.detach(), key.detach(), self.num_key_heads, query_mask, key_mask, pair[0], pair[1]

    def _summed(self, query: Tensor, key: Tensor, *where: Any) -> Tensor:
        """The moments of the whole batch on all ranks, as `pending` holds them."""
        both = both_moments(*self._data(query, key, *where), self.backend).sum(2)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(both)
        return both

    @torch.no_grad()
    def commit(self) -> None:
        """Bring the moments of the last training step into the running averages."""
        if self.statistics != "running":
            return
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

    def train(self, mode: bool = True) -> LLNAttention:
        if not mode:
            self.commit()
        return super().train(mode)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.commit()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        state_dict, prefix = args[0], args[1]
        if self.statistics == "running":
            self.pending.zero_()  # of the weights that are being replaced
            for name in ("running_count", "running_variance_q", "running_variance_k"):
                # A model that never had them (softmax weights, say) leaves them as they are.
                state_dict.setdefault(prefix + name, getattr(self, name))
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> LLNAttention:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.dtype != old.dtype:
                self._buffers[name] = old.to(buffer.device)
        return self

    def extra_repr(self) -> str:
        groups = "" if self.num_key_heads == self.num_heads else f"/{self.num_key_heads}"
        block = "" if self.block_size is None else f", block_size={self.block_size}, mix={self.mix!r}"
        block += ", overlap=True" if self.overlap else ""
        how = f"matching={self.matching!r}, statistics={self.statistics!r}"
        features = "" if self.feature_map is None else f", feature_map={self.feature_map!r}"
        features += "" if self.convolution is None else f", convolution={self.convolution}"
        return f"heads={self.num_heads}{groups}, head_dim={self.head_dim}, {how}{block}{features}"


def in_backward() -> bool:
    """Whether autograd is running backward right now, that is, whether a forward is a recomputation."""
    # A compiled graph recomputes within itself and does not come here again.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
