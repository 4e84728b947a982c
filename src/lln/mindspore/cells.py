"""LLN attention as cells of MindSpore: on queries, keys and values, and in the place of its multi-head attention."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from lln.mindspore.attending_ms import as_tensor, lln_attention
from lln.mindspore.matching_ms import load_points, match_samples
from lln.points import LENGTH, match_numbers
from lln.rules import check_choice


class LLNAttention(nn.Cell):
    """A cell that runs LLN or LLN+Diag attention and chooses alpha and beta from the spread of the queries and keys, as
    `lln.LLNAttention` does in PyTorch.

    Args:
        head_dim: of queries and keys.
        matching: "paper", "variance" or "entropy", see `match_moments`.
        statistics: "sample": each sample and head for itself; "fixed": alpha and beta as given, or those of sigma = 1.
        alpha, beta: with "fixed": numbers.
        block_size: LLN+Diag with blocks of so many tokens; None: LLN alone.
        mix: of the linear part and the blocks: a number, or a pair (r, p).
        is_causal: a query attends its own and earlier positions. Needs statistics="fixed".
        scale: of the softmax that is imitated, and of the one in the blocks; default 1 / sqrt(head_dim).
        length: number of keys that "entropy" matching assumes with "fixed".

    Inputs:
        query [batch, heads, length, head_dim], key and value [batch, key heads, key length, ...], key_mask [batch, key
        length] bool or None, query_mask [batch, length] bool or None: rows that count for sigma_q.

    Examples:
        >>> import mindspore as ms, numpy as np
        >>> from lln.mindspore import LLNAttention
        >>> q, k, v = (ms.Tensor(np.random.randn(2, 4, 50, 16), ms.float32) for _ in range(3))
        >>> LLNAttention(16, matching="entropy", block_size=16)(q, k, v).shape
        (2, 4, 50, 16)
    """

    def __init__(
        self, head_dim: int, *, matching: str = "paper", statistics: str = "sample", alpha: float | None = None,
        beta: float | None = None, block_size: int | None = None, mix: Any = 0.5, is_causal: bool = False,
        scale: float | None = None, length: int = LENGTH,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("statistics", statistics, "sample", "fixed")
        if statistics == "sample" and is_causal:
            raise ValueError(
                "statistics='sample' looks at all tokens, so a causal output would depend on later ones; "
                "use statistics='fixed' for causal attention."
            )
        if statistics != "fixed" and not (alpha is None and beta is None):
            raise ValueError(f"alpha and beta go with statistics='fixed'; got statistics={statistics!r}.")
        self.statistics, self.matching = statistics, matching
        self.block_size, self.is_causal = block_size, is_causal
        usual = match_numbers(1.0, 1.0, head_dim, matching, scale, length)
        alpha, beta = (u if given is None else given for u, given in zip(usual, (alpha, beta), strict=True))
        # Tensors, because in a graph MindSpore keeps Python's numbers in float32; of which a call takes one kind.
        numbers = alpha, beta, *(mix if isinstance(mix, (tuple, list)) else (mix, 1.0 - mix))
        self.narrow, self.wide = (tuple(as_tensor(x, dtype) for x in numbers) for dtype in (ms.float32, ms.float64))
        self.points, self.wide_points = (load_points(matching, head_dim, dtype) for dtype in (ms.float32, ms.float64))
        self.scale = None if scale is None else as_tensor(scale, ms.float32)
        self.wide_scale = None if scale is None else as_tensor(scale, ms.float64)

    def construct(self, query: Any, key: Any, value: Any, key_mask: Any = None, query_mask: Any = None) -> Any:
        dtype, numbers, points, scale = ms.float32, self.narrow, self.points, self.scale
        if query.dtype == ms.float64:
            dtype, numbers, points, scale = ms.float64, self.wide, self.wide_points, self.wide_scale
        alpha, beta = numbers[0], numbers[1]
        if self.statistics == "sample":
            if query_mask is None and key_mask is not None and query.shape[2] == key.shape[2]:
                query_mask = key_mask
            q, k = query.astype(dtype), key.astype(dtype)
            alpha, beta = match_samples(q, k, points, self.matching, scale, key_mask, query_mask)
        return lln_attention(
            query, key, value, alpha, beta, block_size=self.block_size, mix=(numbers[2], numbers[3]),
            is_causal=self.is_causal, key_mask=key_mask, scale=scale,
        )  # fmt: skip


class MultiheadAttention(nn.MultiheadAttention):
    """Replace mindspore.nn.MultiheadAttention by LLN attention, in time and memory linear in the length. Its parameters
    have the same names and shapes, which are also those of torch.nn.MultiheadAttention and lln.MultiheadAttention.

    Args:
        embed_dim, num_heads, dropout, has_bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, dtype: as
            MindSpore has them, but dropout is 0, and add_bias_kv and add_zero_attn are False.
        is_cross: queries and keys are of two sequences, so that the padding of the keys says nothing about the queries.
            Where False it does, if their lengths agree. (A graph cannot tell whether two inputs are one.)
        options: of `LLNAttention`: matching, statistics, block_size, mix, is_causal and so on.

    Inputs:
        As MindSpore has them. key_padding_mask [batch, key length], bool with True = ignore, or float with 0 = attend
        and what is negative = ignore. attn_mask: None, since linear attention forms no pairs that could be masked one
        by one; is_causal=True is an option. need_weights asks for P as well, which costs time and memory of order
        length * key length; False leaves the second output out.

    Examples:
        >>> import mindspore as ms, numpy as np
        >>> from lln.mindspore import MultiheadAttention
        >>> attention = MultiheadAttention(32, 4, batch_first=True, block_size=16)
        >>> x = ms.Tensor(np.random.randn(2, 50, 32), ms.float32)
        >>> attention(x, x, x, need_weights=False)[0].shape
        (2, 50, 32)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, has_bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        dtype: Any = ms.float32, *, is_cross: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        for name, given in (("dropout", dropout), ("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise ValueError(
                    f"{name} is supported only in PyTorch (lln.MultiheadAttention); leave it out, got {name}={given}."
                )
        super().__init__(
            embed_dim, num_heads, has_bias=has_bias, kdim=kdim, vdim=vdim, batch_first=batch_first, dtype=dtype
        )
        self.is_cross = is_cross
        self.attention = LLNAttention(self.head_dim, **options)

    def construct(
        self, query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True,
        attn_mask: Any = None, average_attn_weights: bool = True,
    ) -> Any:  # fmt: skip
        if attn_mask is not None:
            raise ValueError(
                "attn_mask: linear attention forms no pairs that could be masked one by one; use is_causal=True of "
                "this cell, or key_padding_mask."
            )
        alone = query.ndim == 2
        q, k, v = (self.lay(x, alone) for x in (query, key, value))
        weights = self.list_projections()
        q, k, v = self.project(q, weights[0]), self.project(k, weights[1]), self.project(v, weights[2])
        batch, heads, length, dim = q.shape
        key_mask = query_mask = None
        if key_padding_mask is not None:
            is_flag = key_padding_mask.dtype == ms.bool_
            key_mask = (ops.logical_not(key_padding_mask) if is_flag else key_padding_mask >= 0).reshape(batch, -1)
            query_mask = key_mask
            if self.is_cross or length != k.shape[2]:
                query_mask = ops.ones((batch, length), ms.bool_)
        out = self.attention(q, k, v, key_mask, query_mask)
        out = self.out_proj(out.swapaxes(1, 2).reshape(batch, length, heads * dim))
        out = out[0] if alone else out if self.batch_first else out.swapaxes(0, 1)
        if not need_weights:
            return (out,)
        units = ops.eye(k.shape[2], k.shape[2], k.dtype).broadcast_to((batch, heads, k.shape[2], k.shape[2]))
        shares = self.attention(q, k, units, key_mask, query_mask)
        shares = shares.mean(1) if average_attn_weights else shares
        return out, shares[0] if alone else shares

    def lay(self, x: Any, alone: bool) -> Any:
        """[batch, length, features]"""
        return x.expand_dims(0) if alone else x if self.batch_first else x.swapaxes(0, 1)

    def list_projections(self) -> Any:
        """(weight, bias) of the queries, of the keys and of the values."""
        width, bias = self.embed_dim, self.in_proj_bias
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            whole = self.in_proj_weight
            weights = (whole[:width], whole[width : 2 * width], whole[2 * width :])
        if bias is None:
            return ((weights[0], None), (weights[1], None), (weights[2], None))
        biases = (bias[:width], bias[width : 2 * width], bias[2 * width :])
        return ((weights[0], biases[0]), (weights[1], biases[1]), (weights[2], biases[2]))

    def project(self, x: Any, layer: Any) -> Any:
        """[batch, N, features] -> [batch, heads, N, dim]"""
        y = ops.matmul(x, layer[0].swapaxes(0, 1))
        y = y if layer[1] is None else y + layer[1]
        return y.reshape(*y.shape[:2], self.num_heads, self.head_dim).swapaxes(1, 2)
