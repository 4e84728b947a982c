"""LLNAttention: statistics of q and k, moment matching and the op, as one module on q, k, v."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lln.checks import Inputs, Matching, Read, Statistics, check_inputs, check_key_mask
from lln.functional import Backend, Coefficient, CuSeqlens, Mix, attend_checked, autocast
from lln.kernels.triton.attend import attend_known
from lln.matching.moments import LENGTH, match_moments
from lln.nn.convolution import check_sequence, check_value, convolve, warn_convolution
from lln.nn.feature_map import map_features
from lln.nn.image_grid import Patches
from lln.nn.module_options import check_options
from lln.nn.overlap import overlapping_attention
from lln.nn.statistics import MomentMatcher, Where, check_heads, is_in_backward
from lln.nn.value_convolution import (
    Width,
    add_near,
    check_taps,
    check_tokens,
    find_past,
    keep_last,
    read_width,
    take_near,
)
from lln.ranks import find_ranks
from lln.state import LLNState


class LLNAttention(MomentMatcher):
    """A module on queries, keys and values that runs LLN or LLN+Diag attention and chooses alpha and beta from the
    spread (standard deviation) of the queries and keys.

    Args:
        num_heads: number of query heads.
        head_dim: dimension of queries and keys.
        num_key_heads: number of key and value heads, if there are fewer (grouped-query attention).
        value_dim: dimension of the values, default head_dim; only a learnable `mix` and a convolution use it.
        matching: how alpha and beta follow from the spread: "paper" (default), "entropy" (recommended for new models)
            or "variance", see `lln.match_moments`.
        statistics: which queries and keys the spread sigma_q and sigma_k is measured on:
            "sample" (default): each sample (packed: each sequence) and head separately. Nothing is stored, and other
            samples and padding have no influence. Not for causal attention, because it would look at later tokens.
            "batch": one number over the whole tensor, in eval too, as in the paper's released code.
            "running": a moving average for each key head, kept in buffers and frozen in eval; for causal attention.
            "fixed": nothing is measured; alpha and beta are given, or those of sigma = 1.
        alpha, beta: with "fixed": numbers, or tensors [heads] or [heads, dim].
        learnable: with "fixed": "head" or "channel" makes alpha and beta parameters, one for each head or each channel,
            that start from the given values. Default None.
        block_size: for LLN+Diag, the number of tokens in a block. None (default): LLN alone.
        mix: how the linear part and the blocks are weighed: a number (default 0.5), "ratio" to learn one number for
            each head, or "scales" to learn two factors (r, p) for each head and value channel. The learned ones start
            at the average of the two parts. With the evidence read also "evidence": each query weighs its block against
            all keys outside it (see `lln.lln_attention`), with a learned offset for each head that starts at 0.
        read: "paper" (default), or "evidence" for weights that were trained with softmax (see `lln.lln_attention`). The
            latter has no alpha. Its beta is found as usual, and says how much the keys of a channel differ from others.
        directions: the directions of the evidence read's channels: None (default) for the keys' own coordinates;
            "signed" for these and their negatives; or, with "fixed", a number of channels whose directions are learned
            and contain beta. These start as the signed coordinates at the usual beta; `lln.hf.fit` finds better ones.
        feature_map: with "fixed": "linear" learns a linear map of the queries of each head and of the keys of each key
            head (see `lln.nn.feature_map`). It starts at the identity.
        value_convolution: an odd width: each channel of each value head learns a convolution over that many tokens,
            which is added to the output of attention (see `lln.nn.value_convolution`). It starts at zero. The window is
            symmetric; in causal attention it covers earlier tokens only, and a state holds the last width - 1 values.
            It does not reach hidden tokens (key_mask) or other packed sequences. "3x3": over rows and columns of an
            image's patches, in models that `lln.hf.convert` or `lln.timm.convert` made. Not for cross attention.
        convolution: deprecated, use value_convolution. An odd width: each channel of each head's queries, keys and
            values learns a convolution over that many tokens, which is added to them before anything else, statistics
            included (see `lln.nn.convolution`). Not with a state, nor for cross attention.
        overlap: windows instead of blocks, with a block_size divisible by 4. Each group of block_size / 2 queries sees
            block_size keys: its own, and block_size / 4 more on either side (causal: block_size / 2 before them). It
            has a state only with mix="evidence".
        dropout: probability of dropout in training. Default 0.
        scale: factor of the scores of the softmax that is imitated, and of the one in the blocks; default
            1 / sqrt(head_dim).
        decoder: whether the queries belong to a causal decoder (cross attention), so that statistics must not look at
            all of them.
        length: the number of keys that "entropy" matching assumes with "running" and "fixed" statistics.
        momentum: the weight of a new batch in the "running" averages.
        backend: "eager" (plain PyTorch), "triton" (GPU kernels) or "auto" (default: kernels where they can run), for
            attention and, where possible, for the statistics.

    With "running", a training step uses the buffers as they are. Its own moments, summed over all ranks of a
    torch.distributed run, are added to the buffers at the next training step, eval() or state_dict(). A recomputation
    inside backward (activation checkpointing) therefore uses the same alpha and beta, if the module's backward comes
    before its next forward, eval() or state_dict().

    Statistics stay in float32, also after .half() or .to(dtype). A state needs "running" or "fixed" statistics, whose
    beta does not change from call to call.

    Shape:
        - query: [batch, num_heads, length, head_dim]
        - key: [batch, num_key_heads, key length, head_dim]
        - value: [batch, num_key_heads, key length, value dim]
        - output: [batch, num_heads, length, value dim]

    Examples:
        >>> import lln, torch
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = (torch.randn(2, 4, 50, 16) for _ in range(3))
        >>> attention = lln.LLNAttention(num_heads=4, head_dim=16, block_size=8)
        >>> attention(query, key, value).shape
        torch.Size([2, 4, 50, 16])
        >>> causal = lln.LLNAttention(num_heads=4, head_dim=16, statistics="running").eval()
        >>> out, state = causal(query, key, value, is_causal=True, return_state=True)
        >>> token = torch.randn(2, 4, 1, 16)
        >>> causal(token, token, token, is_causal=True, state=state).shape
        torch.Size([2, 4, 1, 16])
    """

    mix_logit: nn.Parameter
    evidence_offset: nn.Parameter
    channel_directions: nn.Parameter
    lln_scale: nn.Parameter
    block_scale: nn.Parameter
    map_q: nn.Parameter
    map_k: nn.Parameter
    key_offset: nn.Parameter
    conv_q: nn.Parameter
    conv_k: nn.Parameter
    conv_v: nn.Parameter
    value_taps: nn.Parameter

    patches: Patches | None = None  # of the model, where it has any and an option asks for them
    value_convolution: Width | None = None  # modules that an earlier version pickled lack it

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
        mix: float | Literal["ratio", "scales", "evidence"] = 0.5,
        read: Read = "paper",
        directions: int | Literal["signed"] | None = None,
        feature_map: Literal["linear"] | None = None,
        value_convolution: Width | None = None,
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
        check_options(
            num_heads=num_heads, head_dim=head_dim, num_key_heads=num_key_heads, matching=matching,
            statistics=statistics, alpha=alpha, beta=beta, learnable=learnable, block_size=block_size, mix=mix,
            read=read, directions=directions, feature_map=feature_map, value_convolution=value_convolution,
            convolution=convolution, overlap=overlap, dropout=dropout, scale=scale,
            length=length, momentum=momentum, backend=backend,
        )  # fmt: skip
        if convolution is not None:
            warn_convolution()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.read, self.directions = read, directions
        super().__init__(
            num_heads, head_dim, num_key_heads, matching, statistics, alpha=alpha, beta=beta, learnable=learnable,
            scale=scale, decoder=decoder, length=length, momentum=momentum, backend=backend, factory=factory, read=read,
            directed=isinstance(directions, int),
        )  # fmt: skip
        self.value_dim, self.block_size, self.mix, self.overlap = value_dim or head_dim, block_size, mix, overlap
        self.feature_map, self.convolution, self.dropout = feature_map, convolution, dropout
        self.value_convolution = value_convolution
        sides = () if value_convolution is None else read_width(value_convolution)
        key_heads, width = self.num_key_heads, convolution or 0
        scales = (num_heads, self.value_dim)
        # What is learned, as it starts: the average of both parts, the identity, no convolution.
        learned: tuple[tuple[bool, float, dict[str, tuple[int, ...]]], ...] = (
            (mix == "ratio", 0.0, {"mix_logit": (num_heads,)}),
            (mix == "scales", 0.5, {"lln_scale": scales, "block_scale": scales}),
            (mix == "evidence", 0.0, {"evidence_offset": (num_heads,)}),
            (feature_map is not None, 0.0, {
                "map_q": (num_heads, head_dim, head_dim),
                "map_k": (key_heads, head_dim, head_dim),
                "key_offset": (key_heads, head_dim),
            }),
            (convolution is not None, 0.0, {
                "conv_q": (num_heads, head_dim, width),
                "conv_k": (key_heads, head_dim, width),
                "conv_v": (key_heads, self.value_dim, width),
            }),
            (value_convolution is not None, 0.0, {"value_taps": (key_heads, self.value_dim, *sides)}),
        )  # fmt: skip
        for wanted, start, shapes in learned:
            for name, shape in shapes.items() if wanted else ():
                self.register_parameter(name, nn.Parameter(torch.full(shape, start, **factory)))

        if isinstance(directions, int):
            axes = torch.eye(head_dim, **factory) * match_moments(1.0, 1.0, head_dim, matching, scale, length=length)[1]
            # Beyond the signed coordinates, some of them again with half and a quarter of the weight, and so on.
            rounds = -(-directions // (2 * head_dim))
            started = torch.cat([sign * axes / 2**i for i in range(rounds) for sign in (1, -1)])[:directions]
            self.channel_directions = nn.Parameter(started.repeat(key_heads, 1, 1))

    def mix_weights(self) -> Mix:
        """The `mix` of the op as it stands now."""
        if self.mix == "ratio":
            return self.mix_logit.sigmoid()
        if self.mix == "scales":
            return self.lln_scale.unsqueeze(0), self.block_scale.unsqueeze(0)
        return "evidence" if self.mix == "evidence" else float(self.mix)

    @property
    def has_state(self) -> bool:
        """Whether a causal sequence may be cut: overlapping windows reach further back than other states keep rows."""
        return not self.overlap or self.mix == "evidence"

    @property
    def asks_for_patches(self) -> str | None:
        """The option that needs to know how the patches of an image lie."""
        return "value_convolution" if isinstance(self.value_convolution, str) else None

    @property
    def moves(self) -> bool:
        """Whether `features` are others than the queries and keys that came."""
        return self.feature_map is not None or self.convolution is not None

    def has_moved(self) -> bool:
        """Whether they have learned to be others: all of it starts at the identity. Reads values on the host."""
        names = ("map_q", "map_k", "key_offset", "conv_q", "conv_k", "conv_v")
        return any(bool(held.any()) for name in names if (held := self._parameters.get(name)) is not None)

    def features(self, query: Tensor, key: Tensor, **where: Any) -> tuple[Tensor, Tensor]:
        """The queries and keys that the op is given. where: the fields of `Where`."""
        with self.hold():
            return self._map(*self.convolve(query, key, Where(**where)))

    def coefficients(self, query: Tensor, key: Tensor, **where: Any) -> tuple[Any, Tensor]:
        """(alpha, beta) that forward would use now, in a shape that lln_attention takes; the evidence read has no
        alpha. Changes nothing. where: the fields of `Where`."""
        here = Where(**where)
        with self.hold():
            return self.match(*self.convolve(query, key, here), here)

    def convolve(self, query: Tensor, key: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """Queries and keys after the convolution."""
        if self.convolution is None:
            return query, key
        is_causal, key_mask, query_mask, cu_seqlens = where
        check_sequence(query, key, is_causal, self.decoder, cu_seqlens)
        rows = key_mask if query_mask is None else query_mask
        return (
            convolve(query, self.conv_q, is_causal=is_causal, mask=rows, cu_seqlens=cu_seqlens),
            convolve(key, self.conv_k, is_causal=is_causal, mask=key_mask, cu_seqlens=cu_seqlens),
        )

    def _map(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.feature_map is None:
            return query, key
        return map_features(query, key, self.map_q, self.map_k, self.key_offset)

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
        where = Where(is_causal, key_mask, query_mask, cu_seqlens)
        p = 0.0 if not self.training else self.dropout if dropout is None else dropout
        special = state is not None or return_state or find_ranks() is not None
        if torch.compiler.is_compiling() or special or cu_seqlens is not None or (settings := self.settings) is None:
            result: Tensor | tuple[Tensor, LLNState] = self._attend(query, key, value, where, p, state, return_state)
            return result
        given = (query, key, value, key_mask, query_mask, *self.sources)
        attend = functools.partial(self._attend, query, key, value, where, p)
        return attend_known((settings, is_causal, p), given, self.backend, attend)

    @property
    def is_plain(self) -> bool:
        """Whether a call does no more than kernels do: nothing is learned but alpha and beta, nothing is kept."""
        learned = self.convolution is not None or self.feature_map is not None or isinstance(self.mix, str)
        learned = learned or self.value_convolution is not None
        if self.split is not None:  # whose parameters are parts, and which draw numbers of their own
            learned = learned or self.training or "log_beta" in self._parameters
        return not (learned or self.read != "paper" or self.overlap or (self.statistics == "running" and self.training))

    @functools.cached_property
    def settings(self) -> tuple[Any, ...] | None:
        """What a call that `is_plain` depends on beside its tensors. Setting any attribute makes it anew."""
        if not self.is_plain:
            return None
        numbers = tuple(self.numbers.values()) if self.statistics == "fixed" else ()
        return (
            self.num_heads, self.num_key_heads, self.head_dim, self.matching, self.statistics, self.decoder, self.scale,
            self.length, self.block_size, self.mix, self.backend, numbers,
        )  # fmt: skip

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, where: Where, dropout_p: float,
        state: LLNState | None = None, return_state: bool = False,
    ) -> Any:  # fmt: skip
        if self.split is None:
            return self._attend_here(query, key, value, where, dropout_p, state, return_state)
        with self.hold(dropout_p):
            return self._attend_here(query, key, value, where, dropout_p, state, return_state)

    def _attend_here(
        self, query: Tensor, key: Tensor, value: Tensor, where: Where, dropout_p: float, state: LLNState | None,
        return_state: bool,
    ) -> Any:  # fmt: skip
        is_causal, key_mask, query_mask, cu_seqlens = where
        # The tensors, checked once for the statistics and for the op, which checks the rest.
        checked = check_inputs(query, key, value, key_mask=key_mask, cu_seqlens=cu_seqlens)
        check_heads(query, key, self.num_heads, self.num_key_heads, self.head_dim, self.split)
        check_key_mask(query_mask, query, "query_mask", "query")
        if self.convolution is not None:
            check_value(value, self.value_dim, state is not None or return_state)
            query, key = self.convolve(query, key, where)
            value = convolve(value, self.conv_v, is_causal=is_causal, mask=key_mask, cu_seqlens=cu_seqlens)
        given, past = value, None
        if self.value_convolution is not None:
            check_tokens(query, key, is_causal, self.decoder, cu_seqlens)
            check_taps(value, self.value_taps)
            given = autocast(query, key, value)[2]
            state, past = find_past(state, given, self.value_taps, is_causal, return_state)
        new, started = None, 0
        if self.statistics == "running" and self.training and not is_in_backward():
            started = self.start_update()
            new = self.sum_moments(query, key, where)
        alpha, beta = self.match(query, key, where)
        query, key = self._map(query, key)
        inputs = Inputs(*autocast(query, key, value), checked.key_mask, checked.cu_query, checked.cu_key, checked.cross)
        result = self.run_op(
            inputs, alpha, beta, is_causal=is_causal, dropout_p=dropout_p, state=state, return_state=return_state
        )
        if self.value_convolution is not None:
            result = self._add_near(result, given, where, past)
        if new is not None:
            self.end_update(new, started)  # only now: a call that failed has not been seen
        return result

    def _add_near(self, result: Any, value: Tensor, where: Where, past: Tensor | None) -> Any:
        """What the op gave, and what the values' neighbours add to it."""
        is_causal, key_mask, _, cu_seqlens = where
        here: dict[str, Any] = {"key_mask": key_mask, "cu_seqlens": cu_seqlens, "past": past}
        near = take_near(value, self.value_taps, self.patches, is_causal=is_causal, **here)
        if isinstance(result, Tensor):
            return add_near(result, near)
        out, state = result
        return add_near(out, near), state.with_last(keep_last(value, self.value_taps.shape[-1] - 1, **here))

    def run_op(self, inputs: Inputs, alpha: Tensor | None, beta: Tensor, **call: Any) -> Any:
        """The op with this module's blocks, on `features` and with `coefficients`. call: further arguments of it,
        or others in the place of the module's own."""
        call = self.read_options() | call
        if self.block_size is not None:
            call = {"block_size": self.block_size, "mix": self.mix_weights(), "scale": self.scale} | call
        op: Callable[..., Any] = overlapping_attention if self.overlap else attend_checked
        if call.get("mix") == "evidence":
            call = {"overlap": self.overlap, "evidence_offset": self.evidence_offset} | call
            op = attend_checked
        return op(inputs, alpha, beta, **call, backend=self.backend)

    def read_options(self) -> dict[str, Any]:
        """The arguments of the op that say how channels are read; the usual ones are left out."""
        if self.read == "paper":
            return {}
        learned = isinstance(self.directions, int)
        directions = self.channel_directions if learned else self.directions
        return {"read": self.read, "directions": directions, "scale": self.scale}

    def list_tiles(self, query: Tensor) -> Tensor | None:
        """The block of each token, [N], where blocks are not consecutive tokens; negative: it belongs to all."""
        return None

    def extra_repr(self) -> str:
        groups = "" if self.num_key_heads == self.num_heads else f"/{self.num_key_heads}"
        block = "" if self.block_size is None else f", block_size={self.block_size}, mix={self.mix!r}"
        block += ", overlap=True" if self.overlap else ""
        how = f"matching={self.matching!r}, statistics={self.statistics!r}"
        features = "" if self.feature_map is None else f", feature_map={self.feature_map!r}"
        features += "" if self.read == "paper" else f", read={self.read!r}, directions={self.directions!r}"
        features += "" if self.convolution is None else f", convolution={self.convolution}"
        features += "" if self.value_convolution is None else f", value_convolution={self.value_convolution!r}"
        return f"heads={self.num_heads}{groups}, head_dim={self.head_dim}, {how}{block}{features}"
