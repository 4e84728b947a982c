"""The attention functions that transformers' models call: q, k, v and a mask in, the attended values out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from lln.hf.attach import Attached, ModelAttention, Peer
from lln.hf.cache import TAG, StateLayer
from lln.hf.decoding import find_stepper
from lln.hf.find import find_active, rescale_query
from lln.hf.layers import DROPPED, RUNS
from lln.hf.masks import CAUSAL, lln_mask, split
from lln.hf.mixed import attend_softmax, drop_scores, narrow
from lln.hf.options import IMPLEMENTATIONS, LLN, take_new_names
from lln.kernels.triton.attend import attend_known
from lln.peers.registry import LISTENERS
from lln.ranks import find_ranks, refuse_ranks, share
from lln.state import LLNState

# Arguments that change which pairs attend or how much, by what they are.
REFUSED = {
    "position_bias": "a bias of single query-key pairs",
    "sliding_window": "a window that hides other keys from every query",
    "softcap": "a cap on single query-key scores",
    "s_aux": "attention sinks added to single rows of scores",
    "indices": "a choice of keys for every query",
    "block_indices": "a choice of keys for every query",
}
# Those, and what else makes a call more than attention of its tensors.
SPECIAL = {*REFUSED, "cache", "cu_seq_lens_q", "cu_seq_lens_k"}


Result = tuple[Tensor, Tensor | None]  # [B, N, H, E], and P [B, H, N, M] where it was asked for


def register() -> None:
    """Make IMPLEMENTATIONS names that attn_implementation takes, those too that `lln.register` will add."""
    add_names(IMPLEMENTATIONS)
    LISTENERS.append(lambda: add_names(take_new_names()))


def add_names(names: Iterable[str]) -> None:
    for name in names:
        AttentionInterface.register(name, make_function(name))
        AttentionMaskInterface.register(name, lln_mask)


def make_function(name: str) -> Any:
    def function(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        return attend(name, module, query, key, value, attention_mask, **kwargs)

    function.__name__ = name
    function.is_lln = True  # type: ignore[attr-defined]
    return function


@dataclasses.dataclass
class Request:
    """A call of a module's attention, in the words of lln's own. Not frozen: torch.compile makes and changes it."""

    host: str  # the class of the model's attention module
    attention: ModelAttention | Peer
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, key heads, M, D]
    value: Tensor  # [B, key heads, M, E]
    dropout: float
    wanted: bool  # whether P was asked for
    where: dict[str, Any]  # is_causal, key_mask, query_mask and cu_seqlens, as in `lln.LLNAttention`

    def count_all(self) -> None:
        """Between two sequences every query counts."""
        batch, _, length, _ = self.query.shape
        attention = self.attention
        if isinstance(attention, ModelAttention) and attention.statistics in ("sample", "batch"):
            raise ValueError(
                f"{self.host} attends from {length} queries to {self.key.shape[2]} keys, so statistics="
                f"{attention.statistics!r} cannot know which queries are padding; use lln.hf.convert(model, "
                "statistics='running') or 'fixed'."
            )
        self.where["query_mask"] = torch.ones(batch, length, dtype=torch.bool, device=self.query.device)

    def run(self, layer: StateLayer | None = None) -> Result:
        """layer: of an LLNCache, whose state comes before the keys and which is given the one after them."""
        attention, query, key = self.attention, self.query, self.key
        if self.wanted:
            attention.check_weights(query, key)
        state: dict[str, Any] = {} if layer is None else {"state": layer.state, "return_state": True}
        out = attention(query, key, self.value, **self.where, dropout=self.dropout, **state)
        if layer is not None:
            out, after = out
            if key.shape[2] and not attention.cross:
                layer.record(key.shape[2], functools.partial(self.fold, layer.state))
            if key.shape[2]:
                ranks = find_ranks()
                new = key.shape[2] if ranks is None else sum(ranks.measure(key.shape[2]))
                layer.keep(after, new, attention.cross, key.dtype)
        # After the call, which first brings running statistics up to date.
        weights = attention.weights(query, key, self.where) if self.wanted else None
        return out.transpose(1, 2).contiguous(), weights

    def fold(self, before: LLNState | None, count: int) -> LLNState:
        """The state after the first so many keys of this call."""
        first = (t[:, :, :count] for t in (self.query, self.key, self.value))
        where = {n: t[:, :count] if isinstance(t, Tensor) else t for n, t in self.where.items()}
        after: LLNState = self.attention(*first, **where, dropout=self.dropout, state=before, return_state=True)[1]
        return after


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
) -> Result:
    """As transformers' other functions."""
    if (runs := vars(module).get(RUNS)) is not None:
        if runs not in IMPLEMENTATIONS:
            refuse_ranks(type(module).__name__, f"it runs {runs!r}, which sees one rank's rows alone; use LLN")
            own = {} if is_causal is None else {"is_causal": is_causal}
            own |= kwargs | {"dropout": dropout, "scaling": scaling}
            result: Result = attend_softmax(runs, module, query, key, value, attention_mask, **own)
            return result
        implementation, attention_mask, kwargs = runs, narrow(attention_mask, key), drop_scores(kwargs)
    attention = module._modules.get("lln" if implementation in LLN else "lln_peer")
    if type(attention) is not ModelAttention:
        attention = find_active(attention)
    ranks = find_ranks() or getattr(attention, "ranks", None)
    if ranks is not None:  # see `spreading`
        if not isinstance(attention, ModelAttention):
            raise ValueError(
                f"{type(module).__name__} runs {implementation!r}, which cannot be spread over ranks; use 'lln' or "
                "'lln_diag'."
            )
        p = dropout if module.training else 0.0
        with share(ranks):
            return attend_request(attention, module, query, key, value, attention_mask, p, scaling, is_causal, kwargs)
    p, layer = dropout if module.training else 0.0, getattr(key, TAG, None)
    if isinstance(layer, StateLayer) and query.shape[2] == 1 and p == 0.0 and not torch.is_grad_enabled():
        call = module, attention, layer, query, key, value, attention_mask, scaling
        if (found := attend_step(implementation, *call, kwargs)) is not None:
            return found, None
    plain = layer is None and not torch.compiler.is_compiling() and (attention_mask is None or attention_mask.ndim == 2)
    if plain and is_plain(implementation, module, attention, kwargs):
        hidden = attention_mask if attention_mask is not None and attention_mask.shape[-1] else None
        options = (
            attention.settings, p, scaling, is_causal, getattr(module, "is_causal", None),
            None if attention_mask is None else attention_mask.dtype,
        )  # fmt: skip
        given = (query, key, value, hidden, *attention.sources)
        out = attend_known(
            options, given, attention.backend,
            lambda: attend_request(
                attention, module, query, key, value, attention_mask, p, scaling, is_causal, kwargs
            )[0].transpose(1, 2),
        )  # fmt: skip
        return out.transpose(1, 2), None
    if not isinstance(attention, (ModelAttention, Peer)) or attention.implementation != implementation:
        raise RuntimeError(
            f"{type(module).__name__} was not set up for attn_implementation={implementation!r}; call "
            f"model.set_attn_implementation({implementation!r}), or load the model after `import lln.hf`."
        )
    return attend_request(attention, module, query, key, value, attention_mask, p, scaling, is_causal, kwargs)


def is_plain(implementation: str, module: Any, attention: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is no more than attention of its tensors, so that one like it need not be looked at again: nothing
    packed, nobody who wants P or has hooks on the attention."""
    if type(attention) is not ModelAttention or attention.implementation != implementation:
        return False
    if attention.cross or attention.settings is None:
        return False
    if not SPECIAL.isdisjoint(kwargs) and any(kwargs.get(name) is not None for name in SPECIAL):
        return False
    if attention._forward_hooks or attention._forward_pre_hooks or attention._backward_hooks:
        return False
    if not torch.compiler.is_compiling() and _has_any_global_hook():
        return False
    return not wants_weights(module, attention, kwargs)


def attend_step(
    implementation: str, module: Any, attention: Any, layer: StateLayer, query: Tensor, key: Tensor, value: Tensor,
    mask: Any, scaling: float | None, kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """[B, 1, H, E] of one token after the state of an LLNCache; None where that takes more than `decoding` does."""
    if not isinstance(mask, Tensor) or mask.dtype != CAUSAL or mask.ndim != 4 or key.shape[2] != 1:
        return None
    if layer.record_past or layer.cross is not False or not is_plain(implementation, module, attention, kwargs):
        return None
    stepper = find_stepper(attention, layer, query, scaling)
    if stepper is None:
        return None
    hidden = mask.view(len(mask), 1).view(torch.bool) if mask.shape[-1] else None
    out = stepper.take(attention, query, key, value, hidden)
    layer.count_step()
    return out.transpose(1, 2)


def attend_request(
    attention: ModelAttention | Peer, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    dropout: float, scaling: float | None, is_causal: bool | None, kwargs: dict[str, Any],
) -> Result:  # fmt: skip
    """`attend` with all that a call may bring with it."""
    refuse(module, kwargs)
    layer, lengths = getattr(key, TAG, None), kwargs.get("cu_seq_lens_q")
    causal, key_mask, offsets = split(attention_mask, key.shape[2], layer is not None)
    if causal is None:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        # A mask that transformers makes follows the config, where a causal model may be told to look both ways.
        causal = causal and (offsets is None or getattr(module.config, "is_causal", None) is not False)
    if causal and isinstance(attention, ModelAttention) and attention.statistics in ("sample", "batch"):
        raise ValueError(
            f"{type(module).__name__} attends causally here, so with statistics={attention.statistics!r} its output "
            "would depend on later tokens; use lln.hf.convert(model, statistics='running', batches=...) or 'fixed'."
        )
    where: dict[str, Any] = {"is_causal": causal, "key_mask": key_mask, "query_mask": None, "cu_seqlens": None}
    call = Request(
        type(module).__name__, attention, rescale_query(query, attention.scale, scaling), key, value, dropout,
        wants_weights(module, attention, kwargs), where,
    )  # fmt: skip
    if layer is not None:
        if offsets is not None or lengths is not None:
            raise ValueError("past_key_values: packed sequences cannot go into a cache; leave one of them out.")
        return attend_with_state(call, layer)
    if lengths is not None:
        keys = kwargs.get("cu_seq_lens_k")
        where["cu_seqlens"] = (lengths, keys) if attention.cross and keys is not None else lengths
    elif offsets is not None:
        refuse_ranks("position_ids that begin anew", "pass cu_seq_lens_q, offsets in the rows of all ranks")
        return attend_packed(call, offsets)
    if causal and key.shape[2] > query.shape[2]:
        refuse_ranks("past_key_values", "keys of earlier tokens have no place there; use LLNCache")
        return attend_after_cached(call)
    if attention.cross or query.shape[2] != key.shape[2]:
        call.count_all()
    return call.run()


def attend_packed(call: Request, offsets: Tensor) -> Result:
    """Sequences that begin at these offsets of all rows, one after another."""
    batch, _, length, _ = call.query.shape
    call.query, call.key, call.value = (  # [B, H, N, D] -> [1, H, B N, D]
        t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (call.query, call.key, call.value)
    )
    call.where["cu_seqlens"] = offsets
    out, weights = call.run()
    if weights is not None:  # [1, H, B N, B N]: rows attend within themselves
        rows = weights.squeeze(0).unflatten(2, (batch, -1)).unflatten(1, (batch, -1))
        weights = rows.diagonal(dim1=1, dim2=3).movedim(-1, 0)
    return out.unflatten(1, (batch, length)).squeeze(0), weights


def attend_with_state(call: Request, layer: StateLayer) -> Result:
    """Keys that came through an LLNCache follow those in its state."""
    attention, new = call.attention, call.key.shape[2]
    if not isinstance(attention, ModelAttention):
        raise ValueError(
            f"past_key_values: LLNCache keeps the state of 'lln' and 'lln_diag', and {call.host} runs "
            f"{attention.implementation!r}; use DynamicCache."
        )
    if not attention.cross and not call.where["is_causal"]:
        raise ValueError(
            f"past_key_values: {call.host} is not causal here, so earlier rows would change; use no cache."
        )
    if layer.cross not in (None, attention.cross) or (attention.cross and not layer.empty and new):
        raise ValueError(
            "past_key_values: attention to an encoder and to the decoder's own tokens need a cache each; use "
            "EncoderDecoderCache(LLNCache(), LLNCache())."
        )
    if not torch.compiler.is_compiling():
        _ = attention.settings  # known before a compiler asks in a step: in Python 3.11 a lock is around it
    if attention.cross:
        call.count_all()
        if not new:  # all of them, and what hides some, are in the state
            call.where["key_mask"] = None
    if call.wanted and not layer.empty:
        raise ValueError(
            "output_attentions: the keys of earlier tokens are gone with LLNCache, and P has a column for each; "
            "use past_key_values=DynamicCache(), or use_cache=False."
        )
    return call.run(layer)


def attend_after_cached(call: Request) -> Result:
    """The keys of a growing cache come before the queries. Rows that nobody asked for stand in their places: exact, in
    time linear in the length, as reading a cache is."""
    if isinstance(call.attention, ModelAttention) and call.attention.convolution is not None:
        raise ValueError(
            "past_key_values: the convolution needs earlier tokens that no cache keeps; pass use_cache=False."
        )
    past, key_mask = call.key.shape[2] - call.query.shape[2], call.where["key_mask"]
    counts = torch.arange(call.key.shape[2], device=call.key.device)[None] >= past
    call.where["query_mask"] = counts.expand(len(call.key), -1) if key_mask is None else counts & key_mask
    call.query = nn.functional.pad(call.query, (0, 0, past, 0))
    out, weights = call.run()
    return out[:, past:], None if weights is None else weights[:, :, past:]


def refuse(module: Any, kwargs: dict[str, Any]) -> None:
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            remedy = "use another attn_implementation for this model"
            if name in DROPPED:
                remedy = "lln.hf.convert(model, layers='full_attention') leaves it out"
            raise ValueError(
                f"{name}: {type(module).__name__} uses {what}, which linear attention cannot have because it never "
                f"forms the pairs; {remedy}."
            )
    if kwargs.get("cache") is not None:
        raise ValueError(
            "cache: continuous batching needs pages of keys and values, which linear attention does not keep; use "
            "model.generate."
        )


@contextlib.contextmanager
def collect_nothing(model: nn.Module) -> Iterator[None]:
    """For calls of this model where nobody asks for output_attentions: torch.compile cannot look at transformers'
    recorder from within a layer, and would break the layer's graph there."""
    found = [module for module in model.modules() if isinstance(module, Attached)]
    for attention in found:
        attention.collects = False
    try:
        yield
    finally:
        for attention in found:
            attention.collects = True


def read_asked(config: Any) -> Any:
    """output_attentions of a config. Not by its name where that can be spared: a config answers for each attribute in
    Python, which takes longer than a launch."""
    if torch.compiler.is_compiling():
        return getattr(config, "output_attentions", False)
    held = object.__getattribute__(config, "__dict__")
    return held["_output_attentions"] if "_output_attentions" in held else getattr(config, "output_attentions", False)


def wants_weights(module: Any, attention: Attached, kwargs: dict[str, Any]) -> bool:
    """Whether somebody asked for output_attentions: in the call, in the config, or (models that do not hand the call's
    argument on) with the recorder that transformers keeps for it."""
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = read_asked(module.config)
    if not asked and attention.collects:
        collected = _active_collector.get() or {}
        asked = "attentions" in collected or "cross_attentions" in collected
    return bool(asked)
