"""LLNAttention: statistics of q and k, moment matching and the op, as one module on q, k, v."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lln.attention import Backend, Coefficient, CuSeqlens, Mix, lln_attention
from lln.checks import check_number, coefficient
from lln.kernels.common import compute_dtype, wide_dtype
from lln.moments import LENGTH, MATCHINGS, Matching, match_moments, moments, sigma
from lln.state import LLNState

Statistics = Literal["sample", "batch", "running", "fixed"]
STATISTICS = ("sample", "batch", "running", "fixed")


class LLNAttention(nn.Module):
    """LLN or LLN+Diag attention whose alpha and beta follow the spread of the queries and keys.

    Args:
        num_heads: query heads.
        head_dim: of queries and keys.
        num_key_heads: key and value heads, where fewer (grouped-query attention).
        value_dim: of the values, where not head_dim; only a learnable `mix` needs to know.
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
        dropout: probability in training.
        scale: of the softmax that is imitated, and of the one in the blocks; default 1 / sqrt(head_dim).
        decoder: the queries belong to a causal decoder (cross attention), so statistics must not look at all of them.
        length: number of keys that "entropy" matching assumes with "running" and "fixed" statistics.
        momentum: weight of a new batch in the "running" averages.
        backend: of the op.

    With "running" a training step uses the buffers as they stand. Its own moments, summed over all ranks of a
    torch.distributed run, wait until the next training step, eval() or state_dict() brings them into the buffers: a
    recomputation inside backward (activation checkpointing) must see the same alpha and beta, and does.
    """

    running_count: Tensor
    running_variance_q: Tensor
    running_variance_k: Tensor
    mix_logit: nn.Parameter
    lln_scale: nn.Parameter
    block_scale: nn.Parameter

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
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_key_heads = num_key_heads or num_heads
        self.matching, self.statistics = matching, statistics
        self.block_size, self.scale, self.decoder = block_size, scale, decoder
        self.length, self.momentum, self.backend = length, check_number("momentum", momentum), backend
        self.dropout = check_number("dropout", dropout)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if matching != "paper":  # refuses a head_dim that the curves do not cover now rather than in forward
            match_moments(1.0, 1.0, head_dim, matching)
        self._pending: tuple[Tensor, Tensor] | None = None
        if statistics == "running":
            self.register_buffer("running_count", torch.zeros((), dtype=torch.int64, device=device))
            for name in ("running_variance_q", "running_variance_k"):
                self.register_buffer(name, torch.ones(self.num_key_heads, device=device))
        if statistics == "fixed":
            self._make_coefficients(alpha, beta, learnable, factory)
        self._make_mix(mix, value_dim or head_dim, factory)

    def _make_coefficients(
        self, alpha: Coefficient | None, beta: Coefficient | None, learnable: str | None, factory: dict[str, Any]
    ) -> None:
        usual = match_moments(1.0, 1.0, self.head_dim, self.matching, self.scale, length=self.length)
        for name, given, heads, value in (
            ("alpha", alpha, self.num_heads, usual[0]),
            ("beta", beta, self.num_key_heads, usual[1]),
        ):
            chosen = value if given is None else given
            device = torch.empty(0, device=factory["device"]).device
            shape = (1, heads, self.head_dim)
            if isinstance(chosen, Tensor):
                chosen = chosen.detach().to(device)
            values = coefficient(name, chosen, shape, torch.get_default_dtype(), device)
            if learnable is not None:
                # The logarithm is learned: alpha and beta stay positive whatever the optimiser does.
                values = values.expand(1, heads, self.head_dim if learnable == "channel" else values.shape[-1])
                log = nn.Parameter(values[0].log().clone().to(factory["dtype"] or values.dtype))
                self.register_parameter(f"log_{name}", log)
            else:
                # Not in the state_dict: what the constructor was given, not what was learned.
                self.register_buffer(f"fixed_{name}", values.clone(), persistent=False)

    def _make_mix(self, mix: float | str, value_dim: int, factory: dict[str, Any]) -> None:
        self.mix = mix
        if mix == "ratio":
            self.mix_logit = nn.Parameter(torch.zeros(self.num_heads, **factory))
        elif mix == "scales":
            for name in ("lln_scale", "block_scale"):
                self.register_parameter(name, nn.Parameter(torch.full((self.num_heads, value_dim), 0.5, **factory)))

    def mix_weights(self) -> Mix:
        """The `mix` of the op as it stands now."""
        if self.mix == "ratio":
            return self.mix_logit.sigmoid()
        if self.mix == "scales":
            scales = self.lln_scale, self.block_scale
            return (scales[0].unsqueeze(0), scales[1].unsqueeze(0))
        return float(self.mix)

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
    ) -> Tensor | tuple[Tensor, LLNState]:
        """query [B, H, N, D], key [B, key heads, M, D], value [B, key heads, M, E] -> [B, H, N, E]; see lln_attention.

        query_mask [B, N]: rows that count for sigma_q; default key_mask in self attention (N = M).
        Raises ValueError for statistics that would let a causal output see later tokens."""
        where: dict[str, Any] = {
            "is_causal": is_causal,
            "key_mask": key_mask,
            "query_mask": query_mask,
            "cu_seqlens": cu_seqlens,
        }
        if self.statistics == "running" and self.training and not in_backward():
            self.commit()
            alpha, beta = self.coefficients(query, key, **where)
            self._pending = self._summed(query, key, query_mask, key_mask, cu_seqlens)
        else:
            alpha, beta = self.coefficients(query, key, **where)
        blocks: dict[str, Any] = {}
        if self.block_size is not None:
            blocks = {"block_size": self.block_size, "mix": self.mix_weights(), "scale": self.scale}
        return lln_attention(
            query, key, value, alpha, beta, **blocks, is_causal=is_causal, key_mask=key_mask, cu_seqlens=cu_seqlens,
            dropout_p=self.dropout if self.training else 0.0, state=state, return_state=return_state,
            backend=self.backend,
        )  # fmt: skip

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
        if (is_causal or self.decoder) and self.statistics in ("sample", "batch"):
            raise ValueError(
                f"statistics={self.statistics!r} looks at all tokens, so a causal output would depend on later ones; "
                "use statistics='running' or 'fixed' for causal attention and in decoders."
            )
        if self.statistics == "fixed":
            return self._fixed("alpha"), self._fixed("beta")
        length: int | Tensor = self.length
        if self.statistics == "running":
            spread = self.running_variance_q, self.running_variance_k
            sigma_q, sigma_k = (v.to(wide_dtype(v.device)).sqrt().unsqueeze(0) for v in spread)
        else:
            found_q, found_k = self._moments(query, key, query_mask, key_mask, cu_seqlens)
            length = found_k[0] / self.head_dim
            if self.statistics == "batch":
                length = length.mean()
                found_q, found_k = (tuple(part.sum() for part in found) for found in (found_q, found_k))
            sigma_q, sigma_k = sigma(*found_q), sigma(*found_k)
        alpha, beta = match_moments(sigma_q, sigma_k, self.head_dim, self.matching, self.scale, length=length)
        assert isinstance(alpha, Tensor)
        assert isinstance(beta, Tensor)
        dtype = compute_dtype(query.dtype)
        if alpha.ndim == 2:  # [B, key heads]
            alpha = alpha.repeat_interleave(self.num_heads // self.num_key_heads, 1)
            alpha, beta = alpha.unsqueeze(-1), beta.unsqueeze(-1)
        return alpha.to(dtype), beta.to(dtype)

    def _fixed(self, name: str) -> Tensor:
        if f"log_{name}" in self._parameters:
            learned: Tensor = getattr(self, f"log_{name}")
            return learned.exp().unsqueeze(0)
        fixed: Tensor = getattr(self, f"fixed_{name}")
        return fixed

    def _moments(
        self,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        cu_seqlens: CuSeqlens | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(count, sum, sum of squares) of queries and of keys, each [B, key heads]."""
        if query_mask is None and query.shape[-2] == key.shape[-2]:
            query_mask = key_mask
        pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        heads = self.num_key_heads
        return moments(query, heads, query_mask, pair[0]), moments(key, heads, key_mask, pair[1])

    def _summed(self, query: Tensor, key: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
        """The moments of the whole batch on all ranks, [3, key heads] for queries and for keys."""
        found = [torch.stack([part.sum(0) for part in parts]) for parts in self._moments(query, key, *where)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            both = torch.stack(found)
            torch.distributed.all_reduce(both)
            found = list(both.unbind())
        return found[0], found[1]

    @torch.no_grad()
    def commit(self) -> None:
        """Bring the moments of the last training step into the running averages."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        for buffer, (count, total, squares) in zip(
            (self.running_variance_q, self.running_variance_k), pending, strict=True
        ):
            new = sigma(count, total, squares).square().to(buffer)
            # The first batch replaces the initial 1; a batch without a single token changes nothing.
            weight = torch.where(self.running_count == 0, 1.0, self.momentum) * (count > 1)
            buffer.lerp_(new, weight.to(buffer))
        self.running_count += 1

    def train(self, mode: bool = True) -> LLNAttention:
        if not mode:
            self.commit()
        return super().train(mode)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.commit()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._pending = None  # of the weights that are being replaced
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        heads = (
            f"{self.num_heads}" if self.num_key_heads == self.num_heads else f"{self.num_heads}/{self.num_key_heads}"
        )
        block = "" if self.block_size is None else f", block_size={self.block_size}, mix={self.mix!r}"
        how = f"matching={self.matching!r}, statistics={self.statistics!r}"
        return f"heads={heads}, head_dim={self.head_dim}, {how}{block}"


def in_backward() -> bool:
    """Whether autograd is running backward right now, that is, whether a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def check_options(
    num_heads: int,
    head_dim: int,
    num_key_heads: int | None,
    matching: str,
    statistics: str,
    alpha: Coefficient | None,
    beta: Coefficient | None,
    learnable: str | None,
    block_size: int | None,
    mix: float | str,
) -> None:
    for name, number in (
        ("num_heads", num_heads),
        ("head_dim", head_dim),
        ("num_key_heads", num_key_heads or num_heads),
    ):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a positive int; got {number!r}.")
    if num_heads % (num_key_heads or num_heads):
        raise ValueError(f"num_heads must be a multiple of num_key_heads; got {num_heads} and {num_key_heads}.")
    for name, option, allowed in (("matching", matching, MATCHINGS), ("statistics", statistics, STATISTICS)):
        if option not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {option!r}.")
    if learnable not in (None, "head", "channel"):
        raise ValueError(f"learnable must be None, 'head' or 'channel'; got {learnable!r}.")
    if statistics != "fixed" and not (alpha is None and beta is None and learnable is None):
        raise ValueError(f"alpha, beta and learnable go with statistics='fixed'; got statistics={statistics!r}.")
    if isinstance(mix, str):
        if mix not in ("ratio", "scales"):
            raise ValueError(f"mix must be a number, 'ratio' or 'scales'; got {mix!r}.")
    elif not 0.0 <= check_number("mix", mix) <= 1.0:
        raise ValueError(f"mix must lie between 0 and 1; got {mix}.")
    if block_size is None and mix != 0.5:
        raise ValueError(f"mix weighs LLN against the blocks and needs block_size; got mix={mix!r}.")
