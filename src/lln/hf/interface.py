"""The attention functions that transformers' models call: q, k, v and a mask in, the attended values out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from lln.hf.attach import ModelAttention
from lln.hf.attach_learned import LearnedPeer
from lln.hf.attach_peers import LLN, Peer
from lln.hf.cache import StateLayer, layer_of
from lln.hf.find import in_units
from lln.hf.masks import lln_mask, split
from lln.hf.options import IMPLEMENTATIONS

Attached = ModelAttention | Peer | LearnedPeer
# Arguments that change which pairs attend or how much, by what they are.
REFUSED = {
    "position_bias": "a bias of single query-key pairs",
    "sliding_window": "a window that hides other keys from every query",
    "softcap": "a cap on single query-key scores",
    "s_aux": "attention sinks added to single rows of scores",
    "indices": "a choice of keys for every query",
    "block_indices": "a choice of keys for every query",
}


def register() -> None:
    """Make IMPLEMENTATIONS names that attn_implementation takes."""
    for name in IMPLEMENTATIONS:
        AttentionInterface.register(name, named(name))
        AttentionMaskInterface.register(name, lln_mask)


def named(name: str) -> Callable[..., Any]:
    def function(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        return attend(name, module, query, key, value, attention_mask, **kwargs)

    function.__name__ = name
    function.is_lln = True  # type: ignore[attr-defined]
    return function


def attend(
    implementation: str,
    module: Any,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, key heads, M, D]
    value: Tensor,  # [B, key heads, M, E]
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """([B, N, H, E], and P [B, H, N, M] where output_attentions asks for it), as transformers' other functions."""
    attention = attached(module, implementation)
    refuse(module, kwargs)
    layer = layer_of(key)
    query = in_units(query, attention.scale, scaling)
    length, keys = query.shape[2], key.shape[2]
    said, key_mask, offsets = split(attention_mask, keys, layer is not None)
    causal = said
    if causal is None:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if causal and isinstance(attention, ModelAttention) and attention.statistics in ("sample", "batch"):
        raise ValueError(
            f"{type(module).__name__} attends causally here, so with statistics={attention.statistics!r} its output "
            "would depend on later tokens; use lln.hf.convert(model, statistics='running', batches=...) or 'fixed'."
        )
    where: dict[str, Any] = {"is_causal": causal, "key_mask": key_mask, "query_mask": None, "cu_seqlens": None}

    if layer is not None:
        if offsets is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("past_key_values: packed sequences cannot go into a cache; leave one of them out.")
        return with_state(layer, attention, query, key, value, where, dropout, module, kwargs)
    if kwargs.get("cu_seq_lens_q") is not None:
        where["cu_seqlens"] = packing(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"), attention.cross)
    elif offsets is not None:
        shape = query.shape
        query, key, value = (one_after_another(t) for t in (query, key, value))
        out, weights = run(attention, query, key, value, where | {"cu_seqlens": offsets}, dropout, module, kwargs)
        out = out.unflatten(1, (shape[0], shape[2])).squeeze(0)
        if weights is not None:  # [1, H, B N, B N]: rows attend within themselves
            rows = weights.squeeze(0).unflatten(2, (shape[0], -1)).unflatten(1, (shape[0], -1))
            weights = rows.diagonal(dim1=1, dim2=3).movedim(-1, 0)
        return out, weights

    if causal and keys > length:
        return after_cached(attention, query, key, value, where, dropout, module, kwargs)
    if attention.cross or length != keys:
        attention.check_lengths(type(module).__name__, length, keys)
        where["query_mask"] = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
    return run(attention, query, key, value, where, dropout, module, kwargs)


def run(
    attention: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: dict[str, Any],
    dropout: float,
    module: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    wanted = wants_weights(module, kwargs)
    if wanted:
        attention.check_weights(query, key)
    out: Tensor = attention(query, key, value, **where, dropout=dropout if module.training else 0.0)
    # After the call, which first brings running statistics up to date.
    weights = attention.weights(query, key, where) if wanted else None
    return out.transpose(1, 2).contiguous(), weights


def with_state(
    layer: StateLayer,
    attention: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: dict[str, Any],
    dropout: float,
    module: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Keys that came through an LLNCache follow those in its state."""
    name = type(module).__name__
    if isinstance(attention, (Peer, LearnedPeer)):
        raise ValueError(
            f"past_key_values: LLNCache keeps the state of 'lln' and 'lln_diag', and {name} runs "
            f"{attention.implementation!r}; use DynamicCache."
        )
    if not attention.cross and not where["is_causal"]:
        raise ValueError(f"past_key_values: {name} is not causal here, so earlier rows would change; use no cache.")
    if layer.cross not in (None, attention.cross) or (attention.cross and not layer.empty and key.shape[2]):
        raise ValueError(
            "past_key_values: attention to an encoder and to the decoder's own tokens need a cache each; use "
            "EncoderDecoderCache(LLNCache(), LLNCache())."
        )
    if attention.cross:
        attention.check_lengths(name, query.shape[2], key.shape[2])
        where["query_mask"] = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        if not key.shape[2]:  # all of them, and what hides some, are in the state
            where["key_mask"] = None
    wanted = wants_weights(module, kwargs)
    if wanted and not layer.empty:
        raise ValueError(
            "output_attentions: the keys of earlier tokens are gone with LLNCache, and P has a column for each; "
            "use past_key_values=DynamicCache(), or use_cache=False."
        )
    if wanted:
        attention.check_weights(query, key)
    out, state = attention(
        query, key, value, **where, dropout=dropout if module.training else 0.0, state=layer.state, return_state=True
    )
    weights = attention.weights(query, key, where) if wanted else None
    if key.shape[2]:
        layer.keep(state, key.shape[2], attention.cross, key.dtype)
    return out.transpose(1, 2).contiguous(), weights


def after_cached(
    attention: Attached,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: dict[str, Any],
    dropout: float,
    module: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The keys of a growing cache come before the queries. Rows that nobody asked for stand in their places: exact, in
    time linear in the length, as reading a cache is."""
    if isinstance(attention, ModelAttention) and attention.convolution is not None:
        raise ValueError(
            "past_key_values: the convolution reaches back to queries that no cache keeps; use use_cache=False."
        )
    past = key.shape[2] - query.shape[2]
    query = nn.functional.pad(query, (0, 0, past, 0))
    counts = torch.arange(key.shape[2], device=key.device)[None] >= past
    key_mask = where["key_mask"]
    where["query_mask"] = counts.expand(len(key), -1) if key_mask is None else counts & key_mask
    out, weights = run(attention, query, key, value, where, dropout, module, kwargs)
    return out[:, past:], None if weights is None else weights[:, :, past:]


def attached(module: Any, implementation: str) -> Attached:
    attention = getattr(module, "lln" if implementation in LLN else "lln_peer", None)
    if not isinstance(attention, Attached) or attention.implementation != implementation:
        raise RuntimeError(
            f"{type(module).__name__} was not set up for attn_implementation={implementation!r}; call "
            f"model.set_attn_implementation({implementation!r}), or load the model after `import lln.hf`."
        )
    return attention


def refuse(module: Any, kwargs: dict[str, Any]) -> None:
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: {type(module).__name__} uses {what}, which linear attention cannot have because it never "
                "forms the pairs; use another attn_implementation for this model."
            )
    if kwargs.get("cache") is not None:
        raise ValueError("cache: continuous batching pages keys and values, which linear attention does not keep.")


def packing(queries: Tensor, keys: Tensor | None, cross: bool) -> Any:
    """cu_seqlens of the op, from what flash attention calls cu_seq_lens_q and cu_seq_lens_k."""
    return (queries, keys) if cross and keys is not None else queries


def one_after_another(t: Tensor) -> Tensor:
    """[B, H, N, D] -> [1, H, B N, D]"""
    return t.transpose(0, 1).flatten(1, 2).unsqueeze(0)


COLLECTED = [True]  # whether transformers' recorder is looked at


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """For calls where nobody asks for output_attentions: torch.compile cannot look at transformers' recorder from
    within a layer, and would break the layer's graph there."""
    COLLECTED[0] = False
    try:
        yield
    finally:
        COLLECTED[0] = True


def wants_weights(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether somebody asked for output_attentions: in the call, in the config, or (models that do not hand the call's
    argument on) with the recorder that transformers keeps for it."""
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(module.config, "output_attentions", False)
    if not asked and COLLECTED[0]:
        collected = _active_collector.get() or {}
        asked = "attentions" in collected or "cross_attentions" in collected
    return bool(asked)
