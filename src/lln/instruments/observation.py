"""What one call of an attention layer shows, and what the instruments say about it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.instruments.concentration import entropy, log_moments, temperature
from lln.instruments.fits import normal_fit, pick_entries
from lln.instruments.maps import AttentionMap, dense_map, lln_map, softmax_map
from lln.instruments.spectrum import spectral_gap
from lln.kernels.common import wide_dtype
from lln.matching.moments import moments, sigma

MEASURED = ("sigma_q", "sigma_k", "temperature", "entropy", "spectral_gap", "log_variance", "lognormality")
ENTRIES = 2**16  # of log P that the log-normality of a head is taken from
TOLERANCE = 1e-6  # of |lambda_2| where it takes an iteration


@dataclasses.dataclass(frozen=True)
class Observation:
    """The queries and keys of one call of an attention layer, without gradients, and how it attends.

    Example: what LLN attention would make of the queries and keys of softmax attention.
        >>> q, k = torch.randn(2, 1, 2, 8, 4)
        >>> seen = Observation("layer", "softmax", q, k, scale=0.5)
        >>> one = torch.ones(1, 1, 1)
        >>> seen.map(), seen.lln_map(one, one)
        (SoftmaxMap(shape=(1, 2, 8, 8), is_causal=False), LLNMap(shape=(1, 2, 8, 8), is_causal=False))
    """

    layer: str  # its name in the model
    attention: str  # "softmax", "lln" or "lln_diag"
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, key heads, M, D]
    scale: float  # of the scores
    is_causal: bool = False
    key_mask: Tensor | None = None  # [B, M]
    query_mask: Tensor | None = None  # [B, N] rows that count; None: as the maps have it
    bias: Tensor | None = None  # [B, 1 or H, N, M] added to the scores, -inf: hidden; for masks of single pairs
    cross: bool = False  # to another sequence, so that P has no eigenvalues
    alpha: Tensor | None = None  # [1 or B, 1 or H, 1 or D]
    beta: Tensor | None = None  # [1 or B, 1 or key heads, 1 or D]
    block_size: int | None = None
    mix: Any = 0.5
    plain: tuple[Tensor, Tensor] | None = None  # query and key as the model has them, where LLN attends with others
    overlap: bool = False
    evidence_offset: Any = 0.0  # of mix="evidence"
    read: str = "paper"  # or "evidence", which has no alpha, with its directions: see `lln.lln_attention`
    directions: Any = None
    tiles: Tensor | None = None  # [N] the block of each token, where blocks are not consecutive ones; see `lln_map`

    @property
    def masks(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "key_mask": self.key_mask, "query_mask": self.query_mask}

    def map(self) -> AttentionMap:
        """P of the attention that ran."""
        if self.beta is None:
            return self.softmax_map()
        return self.lln_map(self.alpha, self.beta, self.block_size, mix=self.mix)

    def softmax_map(self) -> AttentionMap:
        """P of softmax attention on the model's queries and keys."""
        if self.bias is None:
            plain = self.undo_map()
            return softmax_map(plain.query, plain.key, scale=self.scale, **self.masks)
        p = self.scores().softmax(-1).nan_to_num(0.0)  # NaN: a row that sees nothing, which does not count
        return dense_map(p, key_mask=self.key_mask, query_mask=self.query_mask)

    def lln_map(
        self, alpha: Tensor | None, beta: Tensor, block_size: int | None = None, mix: Any = 0.5
    ) -> AttentionMap:
        """P of LLN attention on these queries and keys. ValueError where single pairs are masked or biased."""
        if self.bias is not None:
            raise ValueError(f"{self.layer}: masks and biases of single query-key pairs cannot exist in LLN attention.")
        batch, heads, key_heads = len(self.query), self.query.shape[1], self.key.shape[1]
        alpha, beta = None if alpha is None else alpha.expand(batch, heads, -1), beta.expand(batch, key_heads, -1)
        options: dict[str, Any] = {"scale": self.scale}
        if block_size is not None:
            options |= {"mix": mix, "overlap": self.overlap, "tiles": self.tiles}
        if mix == "evidence":
            options["evidence_offset"] = self.evidence_offset
        if alpha is None:
            options |= {"read": self.read, "directions": self.directions}
        return lln_map(self.query, self.key, alpha, beta, block_size, **options, **self.masks)

    def undo_map(self) -> Observation:
        """With the model's own queries and keys."""
        if self.plain is None:
            return self
        return dataclasses.replace(self, query=self.plain[0], key=self.plain[1], plain=None)

    def scores(self) -> Tensor:
        """scale q . k + bias, [B, H, N, M]"""
        assert self.bias is not None
        wide = wide_dtype(self.query.device)
        q, k = self.query.to(wide), self.key.to(wide).repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
        return self.scale * q @ k.transpose(2, 3) + self.bias.to(wide)

    def head(self, index: int) -> Observation:
        """One head alone."""
        key = index // (self.query.shape[1] // self.key.shape[1])
        bias = self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, index : index + 1]
        query, keys = self.query[:, index : index + 1], self.key[:, key : key + 1]
        return dataclasses.replace(self, query=query, key=keys, bias=bias)

    def gap(self, p: AttentionMap) -> Tensor:
        """The spectral gap of a map of these queries and keys, [B, H]. NaN where they are of two sequences, where some
        rows do not count, and where no iteration gets to an eigenvalue: whoever records a training run wants it to go
        on."""
        if not self.cross and p.one_sequence:
            with contextlib.suppress(RuntimeError):
                return spectral_gap(p, tolerance=TOLERANCE)
        return torch.full((p.batch, p.heads), torch.nan, dtype=p.dtype, device=p.device)


@torch.no_grad()
def measure(seen: Observation, wanted: tuple[str, ...] = MEASURED) -> dict[str, Tensor]:
    """The wanted of MEASURED, with the entropy also the largest possible one, and alpha and beta where there are any:
    [B, H] each, float64. NaN where there is nothing to measure, and for numbers that are not finite."""
    with torch.autocast(seen.query.device.type, enabled=False):
        if seen.bias is not None and seen.query.shape[1] > 1:
            # P is dense there: one head at a time holds a single matrix.
            parts = [measure(seen.head(head), wanted) for head in range(seen.query.shape[1])]
            return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        return measure_all(seen, wanted)


def measure_all(seen: Observation, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    heads, p = seen.query.shape[1], seen.map()
    each = heads // seen.key.shape[1]  # query heads of a key head
    nothing = torch.full((p.batch, heads), torch.nan, dtype=p.dtype, device=p.device)
    healthy = are_finite(seen.query, p.live) and are_finite(seen.key, p.seen)
    ways: dict[str, Callable[[], Tensor]] = {
        "sigma_q": lambda: spread(seen.query, p.live),
        "sigma_k": lambda: spread(seen.key, p.seen).repeat_interleave(each, 1),
        "temperature": lambda: measure_temperature(seen, p),
        "entropy": lambda: entropy(p),
        "max_entropy": lambda: largest_entropy(seen, p),
        "spectral_gap": lambda: seen.gap(p),
        "log_variance": lambda: log_moments(p).variance,
        # The Kolmogorov-Smirnov distance of `lognormal_fit`, without its p-value.
        "lognormality": lambda: p.collect([normal_fit(*pick_entries(g, ENTRIES, 0)).distance for g in p.groups()]),
    }
    found = {
        name: way() if healthy or name in ("sigma_q", "sigma_k", "max_entropy") else nothing
        for name, way in ways.items()
        if name.removeprefix("max_") in wanted
    }
    if seen.beta is not None:
        beta = seen.beta.to(p.dtype).mean(-1)
        found["alpha"] = nothing if seen.alpha is None else seen.alpha.to(p.dtype).mean(-1).expand(p.batch, heads)
        found["beta"] = beta.expand(p.batch, seen.key.shape[1]).repeat_interleave(each, 1)
    return found


def are_finite(t: Tensor, valid: Tensor) -> bool:
    """Of t [B, H, N, D] at the valid tokens [B, N]."""
    return bool((t.isfinite().all(-1) | ~valid[:, None]).all())


def spread(t: Tensor, valid: Tensor) -> Tensor:
    return sigma(*moments(t, t.shape[1], valid, None))


def measure_temperature(seen: Observation, p: AttentionMap) -> Tensor:
    if seen.bias is None or seen.alpha is not None:
        return temperature(p)
    # Eq. (5) on all pairs that attend, the bias being part of their scores.
    scores = seen.scores()
    there = (scores > -torch.inf) & p.live[:, None, :, None] & p.seen[:, None, None]
    count = there.sum((2, 3))
    apart = scores.masked_fill(~there, 0.0)
    apart = (apart - (apart.sum((2, 3)) / count)[..., None, None]).mul_(there)
    return (apart.square_().sum((2, 3)) / count).rsqrt()


def largest_entropy(seen: Observation, p: AttentionMap) -> Tensor:
    """Of rows that spread evenly over all the keys they may see, in bits: [B, H]."""
    if seen.bias is not None:
        counts = ((seen.bias > -torch.inf) & p.seen[:, None, None]).sum(-1)  # [B, 1 or H, N]
    else:
        counts = (p.seen.cumsum(1) if p.is_causal else p.seen.sum(1, keepdim=True).expand(-1, p.rows))[:, None]
    bits = torch.where(p.live[:, None], counts.clamp_min(1).to(p.dtype).log2(), 0.0)
    return (bits.sum(-1) / p.live.sum(1, keepdim=True)).expand(-1, p.heads)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys which queries see, as Observation has it."""

    is_causal: bool = False
    key_mask: Tensor | None = None
    bias: Tensor | None = None


def read_mask(mask: Any, rows: int, keys: int, one_sequence: bool, is_causal: bool) -> Pattern:
    """What a mask means: [B, keys] or [1 or B, 1 or heads, 1 or rows, keys], either bool or int with True = attend, or
    a float that is added to the scores, where very low numbers hide. `is_causal`: said beside a mask of keys alone.

    Padded rows of one sequence do not count, whatever the mask says about them."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        came = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"record: attention masks must be tensors of 2 or 4 dimensions to be read; got {came}.")
    additive = mask.is_floating_point()
    shown = mask > torch.finfo(mask.dtype).min / 2 if additive else mask.bool()
    if mask.ndim == 2:
        return Pattern(is_causal, drop_full(shown))
    mask, shown = (t[..., :keys].expand(-1, -1, rows, -1) for t in (mask, shown))
    seen = shown.any(2).any(1)  # [B, keys]
    if additive and bool((torch.where(shown, mask, 0.0) != 0).any()):
        return Pattern(key_mask=drop_full(seen), bias=torch.where(shown, mask, -torch.inf))
    plain = seen[:, None, None]
    own = torch.arange(keys - rows, keys, device=mask.device).unsqueeze(-1)  # the last row is that of the last key
    causal = plain & (torch.arange(keys, device=mask.device) <= own)
    counts = seen[:, None, :, None] if one_sequence and rows == keys else torch.ones_like(plain)
    for is_causal, pattern in ((False, plain), (True, causal)):
        if not bool(((shown != pattern) & counts).any()):
            return Pattern(is_causal, drop_full(seen))
    return Pattern(key_mask=drop_full(seen), bias=make_bias(shown))


def make_bias(mask: Tensor, *, hides: bool = False) -> Tensor:
    """A mask as what is added to the scores. Where it is bool or int, True = attend, or where it hides = ignore."""
    return mask if mask.is_floating_point() else torch.where(mask.bool() ^ hides, 0.0, -torch.inf)


def drop_full(mask: Tensor) -> Tensor | None:
    """None where nothing is hidden: it saves the instruments work."""
    return None if bool(mask.all()) else mask


def observe_softmax(
    layer: str, query: Tensor, key: Tensor, scale: float, pattern: Pattern, *, cross: bool = False
) -> Observation:
    """Queries [B, H, N, D] that attend by softmax(scale q . k), with what `read_mask` found."""
    query, key = query.detach(), key.detach()
    key_mask = None if pattern.key_mask is None else pattern.key_mask.expand(len(query), -1)
    rows, keys = query.shape[2], key.shape[2]
    query_mask = bias = None
    if pattern.bias is not None:
        bias = pattern.bias.expand(len(query), -1, -1, -1)
        sees = (bias > -torch.inf).any(-1).any(1)
        query_mask = sees if cross or rows != keys or key_mask is None else sees & key_mask
    elif cross:
        query_mask = torch.ones(len(query), rows, dtype=torch.bool, device=query.device)
    is_causal = pattern.is_causal and (rows > 1 or keys == 1)
    if is_causal and rows < keys:  # the keys of a cache come first: rows that do not count stand in their places
        query = F.pad(query, (0, 0, keys - rows, 0))
        query_mask = (torch.arange(keys, device=query.device) >= keys - rows).expand(len(query), -1)
    return Observation(
        layer, "softmax", query, key, scale, is_causal, key_mask, query_mask, bias, cross or rows != keys
    )


def default_scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])
