"""Attention maps: P of softmax, LLN, LLN+Diag or kernel attention, held as what it is made of rather than as a matrix.

    from lln.instruments import softmax_map, lln_map, entropy, spectral_gap
    p = softmax_map(q, k, key_mask=mask)          q [batch, heads, length, dim]
    entropy(p), spectral_gap(p)                   two tensors [batch, heads]

Everything is computed in float64 (float32 on Apple's MPS) on the device of the inputs, without gradients. Rows of
padded queries are dropped: they count nowhere. So are rows that see no key, and a sample without any row gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lln.checks import (
    Coefficient,
    Directions,
    Inputs,
    Read,
    check_block_size,
    check_directions,
    check_masks,
    check_pair,
    check_read,
    check_tensor,
    coefficient,
    mix_weights,
)
from lln.functional import attend_checked
from lln.instruments.heads import (
    DenseHeads,
    DiagHeads,
    Heads,
    KernelHeads,
    LLNHeads,
    SoftmaxHeads,
    TileHeads,
    span_elements,
)
from lln.kernels.common import make_finite, wide_dtype
from lln.kernels.evidence import channel_exponents, list_logits
from lln.nn.module_options import check_overlap
from lln.nn.overlap import window
from lln.nn.weights import check_size, multiply_identity
from lln.values import check_number, describe

Place = tuple[Tensor, Tensor, Tensor]  # of heads: sample, head and key head, [G] each


class AttentionMap:
    """The attention matrices P [rows, keys] of a batch of heads, from softmax_map, lln_map, kernel_map or dense_map.

    >>> p = lln_map(torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), 1.0, 1.0)
    >>> p.shape, torch.allclose(p.dense().sum(-1), torch.ones(1, 2, 8, dtype=torch.float64))
    ((1, 2, 8, 8), True)
    """

    kind: type[Heads]  # what some of its heads are
    is_product = False  # whether P = A B^T with thin A and B, where it is not causal

    def __init__(
        self, q: Tensor, k: Tensor, scale: float, is_causal: bool, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """q [B, H, N, D], to be scaled, and k [B, key heads, M, D]: what the rows and the keys of P are made of."""
        self.q, self.k, device = q.detach(), k.detach(), q.device
        (self.batch, self.heads, self.rows, self.width), self.keys = q.shape, k.shape[2]
        self.device, self.is_causal, self.dtype, self.scale = device, is_causal, wide_dtype(device), scale
        if query_mask is None and self.rows == self.keys:
            query_mask = key_mask  # one sequence: what is padding among the keys is padding among the queries

        def mask(given: Tensor | None, length: int) -> Tensor:
            return torch.ones(self.batch, length, dtype=torch.bool, device=device) if given is None else given.detach()

        self.seen = mask(key_mask, self.keys)  # [B, M] keys that may be attended to
        valid = mask(query_mask, self.rows)
        # [B, N] rows that count
        self.live = valid & (self.seen.cumsum(1) > 0 if is_causal else self.seen.any(1, keepdim=True))
        self.padded = not bool(self.live.all() & self.seen.all())
        self.factored = self.is_product and not is_causal
        self.spectrum: Tensor | None = None  # of a factored map, once it is known
        self.one_sequence = self.rows == self.keys and torch.equal(valid, self.seen)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, rows, keys)"""
        return self.batch, self.heads, self.rows, self.keys

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, is_causal={self.is_causal})"

    def pick(self, place: Place, q: Tensor, k: Tensor, *masks: Any) -> Heads:
        """The heads at this place. Of them q [G, N, D] and k [G, M, D] in the dtype of all instruments, 0 for hidden
        tokens, which may hold anything; masks: live rows, seen keys, whether they are causal."""
        return self.kind(q.mul_(self.scale), k, *masks)

    def groups(self) -> Iterator[Heads]:
        """All heads in the order of [batch, heads], as many at a time as fit into a span."""
        size = max(span_elements(self.device) // max((self.rows + self.keys) * self.width, 1), 1)
        for part in torch.arange(self.batch * self.heads, device=self.device).split(size):
            yield self.select_heads(part)

    def select_heads(self, index: Tensor) -> Heads:
        """Heads by their place in [batch * heads], index [G]."""
        sample, head = index // self.heads, index % self.heads
        key_head = head // (self.heads // self.k.shape[1])
        live, seen = self.live[sample], self.seen[sample]
        q, k = self.q[sample, head].to(self.dtype), self.k[sample, key_head].to(self.dtype)  # copies
        if self.padded:
            q.masked_fill_(~live.unsqueeze(-1), 0.0)
            k.masked_fill_(~seen.unsqueeze(-1), 0.0)
        heads = self.pick((sample, head, key_head), q, k, live, seen, self.is_causal)
        heads.index = index
        return heads

    def collect(self, values: list[Tensor]) -> Tensor:
        """What was found for each group, [G, ...] each, as [batch, heads, ...]; NaN for a sample without rows."""
        found = torch.cat(values).unflatten(0, (self.batch, self.heads))
        alive = self.live.any(1).view(self.batch, *(1 for _ in found.shape[1:]))
        return torch.where(alive, found, torch.nan)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Compute P as a matrix, [batch, heads, rows, keys]. Padded rows and hidden keys are 0."""
        return torch.cat([group.make_dense() for group in self.groups()]).view(self.shape)

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor]:
        """(A [batch, heads, rows, F], B [batch, heads, keys, F]) with P = A B^T.

        Raises ValueError for a map that has no such form: softmax, LLN+Diag, dense, and every causal one."""
        if not self.factored:
            raise ValueError(
                f"factors: only bidirectional LLN and kernel maps are products of two matrices; got {self!r}, use "
                "dense() for it."
            )
        pairs = [pair for group in self.groups() if (pair := group.factors()) is not None]
        a, b = (torch.cat(sides).unflatten(0, (self.batch, self.heads)) for sides in zip(*pairs, strict=True))
        return a, b


class SoftmaxMap(AttentionMap):
    """P_ij = softmax_j(scale q_i . k_j), eq. (6)."""

    kind = SoftmaxHeads


class LLNMap(AttentionMap):
    """P_ij of eq. (9), and with blocks r P + p P_blocks."""

    def __init__(
        self, q: Tensor, k: Tensor, alpha: Coefficient | None, beta: Coefficient, block_size: int | None, mix: Any,
        overlap: bool, tiles: Tensor | None, read: str, directions: Tensor | str | None, scale: float, *masks: Any,
    ) -> None:  # fmt: skip
        self.is_product = block_size is None
        super().__init__(q, k, scale, *masks)
        self.block_size, self.tiles, self.read = block_size, tiles, read
        self.directions = directions.detach() if isinstance(directions, Tensor) else directions
        (batch, heads, _, dim), key_heads, where = q.shape, k.shape[1], (self.dtype, self.device)
        width = directions.shape[-2] if isinstance(directions, Tensor) else dim
        one = 1.0 if alpha is None else alpha
        self.alpha = coefficient("alpha", one, (batch, heads, dim), *where).detach().expand(batch, heads, -1)
        self.beta = coefficient("beta", beta, (batch, key_heads, width), *where).detach().expand(batch, key_heads, -1)
        weights = mix_weights(mix, block_size, (batch, heads, 1), *where)
        # (tokens that share their keys, how far these begin before them)
        self.window = window(block_size, self.is_causal) if overlap and block_size else (block_size or 0, 0)
        self.weights = [w.detach().expand(batch, heads, 1) for w in weights if w is not None]

    def pick(self, place: Place, q: Tensor, k: Tensor, *masks: Any) -> Heads:
        sample, head, key_head = place
        alpha, beta = self.alpha[sample, head].unsqueeze(1), self.beta[sample, key_head].unsqueeze(1)
        if self.read == "evidence":
            lln = LLNHeads(*self.read_evidence(q, k, beta, key_head, *masks), *masks)
        else:
            lln = LLNHeads(q * alpha, k * beta, *masks)
        if self.block_size is None:
            return lln
        r, p = (w[sample, head].unsqueeze(-1) for w in self.weights)
        if self.tiles is not None:
            place_of = self.tiles.expand(len(sample), -1)
            return TileHeads(lln, q.mul_(self.scale), k, place_of, place_of, self.block_size, r, p)
        first = (lln.seen.cumsum(1) == 0).sum(1, keepdim=True)  # blocks count from the first valid token
        at = torch.arange(self.rows, device=self.device) - first
        rows, before = self.window
        start = at.div(rows, rounding_mode="floor").mul(rows) - before
        start = start.masked_fill(at < 0, -2 * self.block_size)  # before the first valid token no key is near
        return DiagHeads(lln, q.mul_(self.scale), k, at, start, self.block_size, r, p)

    def read_evidence(
        self, q: Tensor, k: Tensor, beta: Tensor, key_head: Tensor, live: Tensor, seen: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """(a, x) by which the evidence read is a map of LLN attention: softmax_c(a + L) are its weights if a is a
        channel's logit less its L."""
        directions = self.directions
        if isinstance(directions, Tensor):
            directions = directions.to(self.dtype)[key_head][:, None, None]
        shape = (..., None, None, slice(None), slice(None))  # every head of this group is a sample of its own
        hidden = ~seen[:, None, None, :, None] if self.padded else None
        x = channel_exponents(k[shape], beta[shape], directions, hidden)
        logits = list_logits(q[shape], k[shape], x, self.scale, is_causal)
        x, logits = x[:, 0, 0], logits[:, 0, 0]
        sums = x.logcumsumexp(1) if is_causal else x.logsumexp(1, keepdim=True)
        return logits - make_finite(sums), x


class KernelMap(AttentionMap):
    """P_ij = fq_i . fk_j / sum_l fq_i . fk_l, eq. (3) in the features of both sides."""

    kind = KernelHeads
    is_product = True


class DenseMap(AttentionMap):
    """P as it was given: its rows stand for queries, one of them for the keys."""

    def pick(self, place: Place, q: Tensor, k: Tensor, *masks: Any) -> Heads:
        return DenseHeads(q.masked_fill_(~masks[1].unsqueeze(1), 0.0), k, *masks)


def softmax_map(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> AttentionMap:
    """Make the map of softmax attention on these queries and keys, P_ij = softmax_j(scale q_i . k_j), to measure it.

    Args:
        q: [batch, heads, length, dim]; k: [batch, key heads, key length, dim], with fewer heads for grouped queries.
        scale: factor of the scores, default 1 / sqrt(dim).
        is_causal: a row sees its own and earlier keys.
        key_mask: [batch, key length] bool, True = attend.
        query_mask: [batch, length] bool, rows that count; default key_mask where the lengths are equal.

    Raises:
        ValueError or TypeError: the message names the argument.

    Example:
        >>> p = softmax_map(torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), is_causal=True)
        >>> p, p.dense().shape
        (SoftmaxMap(shape=(2, 4, 8, 8), is_causal=True), torch.Size([2, 4, 8, 8]))
    """
    check_parts(q, k, ("q", "k"), key_mask, query_mask, is_causal)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)
    return SoftmaxMap(q, k, scale, is_causal, query_mask, key_mask)


def lln_map(
    q: Tensor,
    k: Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor,
    block_size: int | None = None,
    *,
    mix: Any = 0.5,
    evidence_offset: Coefficient = 0.0,
    overlap: bool = False,
    tiles: Tensor | None = None,
    read: Read = "paper",
    directions: Directions | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> AttentionMap:
    """Make the map of LLN attention, eq. (9), or of LLN+Diag with block_size: the P that `lln.lln_attention` multiplies
    values by.

    Args:
        q, k, is_causal, key_mask, query_mask: as for softmax_map.
        alpha, beta: numbers, or tensors [heads], [batch, heads], [heads, dim] or [batch, heads, dim] (beta: key heads).
        block_size: for LLN+Diag: softmax attention inside consecutive blocks of this many tokens, counted from the
            first valid one. None (default): LLN alone.
        mix: P = mix P_lln + (1 - mix) P_blocks; a pair (r, p) gives r P_lln + p P_blocks. Numbers, or tensors [heads]
            or [batch, heads]. "evidence", with evidence_offset: as in `lln.lln_attention`. That map is a matrix, and a
            ValueError where it would be too large.
        overlap: windows instead of blocks, as in `lln.LLNAttention`.
        tiles: [length], int: the block of each token, where blocks are of at most block_size tokens but not of
            consecutive ones; a token of a negative block shares all of them. Not causal.
        read, directions: "evidence" and the directions of its channels, as in `lln.lln_attention`; alpha is None then.
        scale: factor of the scores in the blocks and in the evidence read, default 1 / sqrt(dim).

    Raises:
        ValueError or TypeError: the message names the argument.

    Example:
        >>> import lln
        >>> q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
        >>> p = lln_map(q, k, 1.5, 1.2, block_size=4)
        >>> torch.allclose(p.dense() @ v, lln.lln_attention(q, k, v, 1.5, 1.2, block_size=4))
        True
    """
    check_parts(q, k, ("q", "k"), key_mask, query_mask, is_causal)
    check_block_size(block_size, is_causal, q.shape[2] != k.shape[2], False)
    check_overlap(overlap, block_size)
    check_tiles(tiles, q, block_size, is_causal or overlap)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)
    check_read(read, alpha, beta, directions)
    if isinstance(mix, str):
        given = {"beta": beta, "block_size": block_size, "mix": mix, "overlap": overlap, "read": read, "scale": scale}
        given |= {"evidence_offset": evidence_offset, "directions": directions, "is_causal": is_causal}
        return dense_map(
            attend_to_units(q, k, key_mask, **given), is_causal=is_causal, key_mask=key_mask, query_mask=query_mask
        )
    options = block_size, mix, overlap, tiles, read, check_directions(directions, k)
    return LLNMap(q, k, alpha, beta, *options, scale, is_causal, query_mask, key_mask)


@torch.no_grad()
def attend_to_units(q: Tensor, k: Tensor, key_mask: Tensor | None, **options: Any) -> Tensor:
    """P [batch, heads, length, key length] of a call of the op, from what it makes of unit vectors as values."""
    check_size(q, k, "mix='evidence'", "take fewer heads or shorter sequences")
    wide = wide_dtype(q.device)
    cast: dict[str, Any] = {name: t.to(wide) if isinstance(t, Tensor) else t for name, t in options.items()}
    query, key = q.detach().to(wide), k.detach().to(wide)

    def attend(units: Tensor) -> Tensor:
        out = attend_checked(Inputs(query, key, units, key_mask, None, None, False), None, backend="eager", **cast)
        assert isinstance(out, Tensor)
        return out

    return multiply_identity(attend, query, key)


def kernel_map(
    fq: Tensor,
    fk: Tensor,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> AttentionMap:
    """Make the map of any linear attention, P_ij = fq_i . fk_j / sum_l fq_i . fk_l, from features of queries and keys.

    Args:
        fq: [batch, heads, length, features]; fk: [batch, key heads, key length, features]. Products must be positive in
            sum, and nowhere negative where an instrument takes logarithms.
        is_causal, key_mask, query_mask: as for softmax_map.

    Raises:
        ValueError or TypeError: the message names the argument; for values that make no weights, when the map is
        measured.

    Example:
        >>> p = kernel_map(torch.rand(1, 2, 8, 3), torch.rand(1, 2, 8, 3))
        >>> a, b = p.factors()
        >>> torch.allclose(a @ b.transpose(2, 3), p.dense())
        True
    """
    check_parts(fq, fk, ("fq", "fk"), key_mask, query_mask, is_causal)
    return KernelMap(fq, fk, 1.0, is_causal, query_mask, key_mask)


def dense_map(
    p: Tensor,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> AttentionMap:
    """Make a map from a given attention matrix: p [rows, keys] or [batch, heads, rows, keys], whose rows sum to 1.

    is_causal promises that p is lower triangular; the masks are as for softmax_map.

    Raises:
        ValueError or TypeError: the message names the argument.

    Example:
        >>> dense_map(torch.eye(3))
        DenseMap(shape=(1, 1, 3, 3), is_causal=False)
    """
    check_tensor("p", p, (2, 4), "be [rows, keys] or [batch, heads, rows, keys]")
    p = p if p.ndim == 4 else p[None, None]
    row = p[:, :, :1].transpose(2, 3)  # [batch, heads, keys, 1], as keys are
    check_masks(p, row, key_mask, query_mask, is_causal, ("rows of p", "keys of p"))
    found = DenseMap(p, row, 1.0, is_causal, query_mask, key_mask)
    check_stochastic(torch.where(found.seen[:, None, None], found.q, 0.0), found.live)
    return found


def check_map(p: Any) -> None:
    """TypeError for what is no map: a matrix, say."""
    if not isinstance(p, AttentionMap):
        raise TypeError(
            "p must be an AttentionMap: of queries and keys as softmax_map, lln_map or kernel_map make it, of a matrix "
            f"as dense_map(p) does; got {describe(p)}."
        )


def check_parts(q: Any, k: Any, names: tuple[str, str], key_mask: Any, query_mask: Any, is_causal: bool) -> None:
    check_pair(q, k, names)
    check_masks(q, k, key_mask, query_mask, is_causal, names)


def check_tiles(tiles: Tensor | None, q: Tensor, block_size: int | None, ordered: bool) -> None:
    if tiles is None:
        return
    if not isinstance(tiles, Tensor) or tiles.is_floating_point() or tuple(tiles.shape) != (q.shape[2],):
        raise ValueError(f"tiles must be an int tensor of shape [{q.shape[2]}], the length; got {describe(tiles)}.")
    if block_size is None or ordered:
        raise ValueError(
            "tiles need block_size, and go neither with is_causal nor with overlap, which count tokens in order."
        )


def check_stochastic(p: Tensor, live: Tensor) -> None:
    """p [B, H, N, M]: no entry of a live row (live [B, N]) is negative and each of these rows sums to 1."""
    rows = torch.where(live[:, None, :, None], p, 0.0)
    off = torch.where(live[:, None], (rows.sum(-1, dtype=torch.float32) - 1).abs(), 0.0)
    # The comparisons are written so that NaN fails them.
    if p.numel() and not bool((rows >= 0).all() & (off <= 0.02).all()):
        raise ValueError(
            "p must be an attention matrix: no entry negative and every row summing to 1 over its visible keys; "
            f"got a smallest entry of {rows.min().item():.3g} and a row that is off 1 by {off.max().item():.3g}."
        )
