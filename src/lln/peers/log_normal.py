"""LLN and LLN+Diag, this library's own, with alpha and beta by moment matching; and the blocks of LLN+Diag alone."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from lln.checks import Inputs, Matching, Statistics
from lln.functional import Coefficient, CuSeqlens, attend_checked
from lln.kernels.call import Call
from lln.kernels.eager import attend_block_part
from lln.nn.attention import LLNAttention
from lln.peers.dispatch import run_each
from lln.peers.registry import DECLARED, register


@functools.wraps(LLNAttention)  # its options
def lln_module(num_heads: int, head_dim: int, max_length: int | None = None, **options: Any) -> nn.Module:
    if max_length is not None:
        options.setdefault("length", max_length)
    return LLNAttention(num_heads, head_dim, **options)


@register("lln_diag", module=functools.partial(lln_module, block_size=DECLARED["lln_diag"]["block_size"]))
@register("lln", module=lln_module)
def lln(
    call: Call, *, alpha: Coefficient | None = None, beta: Coefficient | None = None, matching: Matching = "paper",
    statistics: Statistics | None = None,
) -> Tensor:  # fmt: skip
    given = alpha is not None or beta is not None
    chosen = statistics or ("fixed" if given or call.is_causal else "sample")
    cu_seqlens: CuSeqlens | None = None
    if call.cu_query is not None and call.cu_key is not None:
        cu_seqlens = call.cu_query if call.cu_query is call.cu_key else (call.cu_query, call.cu_key)
    blocks: dict[str, Any] = {}
    if call.block_size is not None:
        blocks = {"block_size": call.block_size, "mix": (call.lln_weight, call.block_weight)}
    # The module knows statistics and matching; it holds nothing here.
    module = LLNAttention(
        call.query.shape[1], call.query.shape[3], num_key_heads=call.key.shape[1], matching=matching,
        statistics=chosen, scale=call.scale,
        alpha=None if isinstance(alpha, Tensor) else alpha, beta=None if isinstance(beta, Tensor) else beta,
    )  # fmt: skip
    matched = module.coefficients(
        call.query, call.key, is_causal=call.is_causal, key_mask=call.key_mask, cu_seqlens=cu_seqlens
    )
    factors = [own if isinstance(own, Tensor) else found for own, found in zip((alpha, beta), matched, strict=True)]
    inputs = Inputs(
        call.query, call.key, call.value, call.key_mask, call.cu_query, call.cu_key, isinstance(cu_seqlens, tuple)
    )
    out = attend_checked(
        inputs, *factors, **blocks, is_causal=call.is_causal, dropout_p=call.dropout_p, scale=call.scale
    )
    assert isinstance(out, Tensor)
    return out


@register("block_diagonal")
def block_diagonal(call: Call) -> Tensor:
    """The Diag of LLN+Diag alone: softmax attention inside consecutive blocks and nothing else."""
    return run_each(attend_block_part, call.change(block_weight=None))
