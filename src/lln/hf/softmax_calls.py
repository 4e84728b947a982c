"""A model's softmax attention shown to observers where it runs, and what data matching and statistics take from it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lln.hf.attach import ModelAttention
from lln.hf.find import attention_modules, configs, in_units, is_cross, sizes
from lln.hf.interface import refuse
from lln.matching.data import match_data
from lln.matching.moments import both_moments, sigma

NAME = "lln_measure"  # an attn_implementation: softmax attention that shows itself to `module.lln_seen`
ROWS = 64  # of a sample's queries that data matching looks at; there are many samples


@dataclasses.dataclass(frozen=True)
class SoftmaxCall:
    """One call of softmax attention, without gradients."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, key heads, M, D]
    value: Tensor  # [B, key heads, M, E]
    out: Tensor  # [B, N, H, E]
    scale: float | None  # of q . k; None: 1 / sqrt(D)
    is_causal: bool
    key_mask: Tensor | None  # [B, M]
    query_mask: Tensor | None  # [B, N], rows that are no padding; None: all
    mask: Tensor | None  # [B, 1, N, M], which pairs attended
    learned: ModelAttention | None  # LLN attention that the module has from before

    @property
    def where(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "key_mask": self.key_mask, "query_mask": self.query_mask}


class Observer(Protocol):
    """Who looks at one attention module."""

    def look(self, call: SoftmaxCall) -> None: ...


class Seen:
    """What one attention module showed: moments of queries and keys, and alpha and beta that match softmax on them."""

    def __init__(self, data: bool) -> None:
        self.data = data
        self.moments: Tensor | float = 0.0  # [2, 3, key heads]
        self.log_alpha: Tensor | float = 0.0  # [heads], a sum over samples
        self.log_beta: Tensor | float = 0.0  # [key heads]
        self.samples = 0

    def look(self, call: SoftmaxCall) -> None:
        query, key = call.query, call.key
        if call.learned is not None:  # statistics are of what the module has learned to make of them
            query, key = call.learned.convolved(query, key, **call.where)
        self.moments = self.moments + both_moments(query, key, key.shape[1], call.query_mask, call.key_mask).sum(2)
        if self.data:
            if call.learned is not None and call.learned.has_moved():
                raise ValueError(
                    "matching='data': the model's convolution or feature map has learned something, and data matching "
                    "would set alpha and beta as if it had not; leave out matching and batches."
                )
            alpha, beta = match_data(query, key, **call.where, scale=call.scale, rows=ROWS)
            self.log_alpha = self.log_alpha + alpha.log().sum(0)
            self.log_beta = self.log_beta + beta.log().sum(0)
            self.samples += len(query)

    def give(self, attention: ModelAttention) -> None:
        """Put it where the module keeps it."""
        if isinstance(self.moments, float):
            raise ValueError(
                "batches: an attention module of the model was never reached; give it inputs for all of it."
            )
        if attention.statistics == "running":
            for buffer, spread in zip(
                (attention.running_variance_q, attention.running_variance_k),
                sigma(*self.moments.unbind(1)).square(),
                strict=True,
            ):
                buffer.copy_(spread)
            attention.running_count.fill_(1)
            attention.pending.zero_()
        if self.data and attention.statistics == "fixed":
            alpha, beta = (torch.as_tensor(x / self.samples).exp() for x in (self.log_alpha, self.log_beta))
            attention.set_coefficients(alpha, beta)


def softmax(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """transformers' own softmax attention, and a look at it. ValueError for what LLN could not do."""
    refuse(module, kwargs)
    said = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", False) if said is None else said) and query.shape[2] == key.shape[2]
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError("batches: softmax here does not keep packed sequences apart; give each a row of its own.")
    key_mask = None
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool:
            raise ValueError("batches: attention_mask must be a padding mask [batch, length], not numbers to be added.")
        # Some query sees every key that is not padding, with a causal mask and with packed sequences as without.
        key_mask = attention_mask[:, 0].any(1).expand(len(key), -1)
    result = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    seen, cross = module.lln_seen
    query_mask = key_mask
    if cross or query.shape[2] != key.shape[2]:  # which queries are padding is not said
        query_mask = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    scale = sizes(module)[4]
    query = in_units(query, scale, kwargs.get("scaling")).detach()
    held = getattr(module, "lln", None)
    seen.look(
        SoftmaxCall(
            query, key.detach(), value.detach(), result[0].detach(), scale, is_causal, key_mask, query_mask,
            attention_mask, held if isinstance(held, ModelAttention) else None,
        )
    )  # fmt: skip
    return result


@contextlib.contextmanager
def shown(model: PreTrainedModel, observers: Mapping[str, Observer]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that runs the model, in eval and with softmax attention, on a batch of its arguments, and shows
    each attention module to the observer of its name."""
    AttentionInterface.register(NAME, softmax)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    modules = dict(attention_modules(model))
    parts = configs(model)
    before = [config._attn_implementation for config in parts]
    training = {module: module.training for module in model.modules()}

    @torch.no_grad()
    def run(batch: Mapping[str, Any]) -> None:
        if not isinstance(batch, Mapping):
            raise TypeError(f"batches must be dicts of the model's arguments; got a {type(batch).__name__}.")
        model(**{k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()})

    try:
        for name, module in modules.items():
            module.lln_seen = observers[name], is_cross(module, name)
        for config in parts:
            config._attn_implementation_internal = NAME
        model.eval()
        yield run
    finally:
        for config, name in zip(parts, before, strict=True):
            config._attn_implementation_internal = name
        for module in modules.values():
            del module.lln_seen
        for module, mode in training.items():
            module.training = mode


def measure(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], data: bool) -> dict[str, Seen]:
    """Run the model with softmax attention, and return what each attention module saw, by its name."""
    observers = {name: Seen(data) for name, _ in attention_modules(model)}
    count = 0
    with shown(model, observers) as run:
        for batch in batches:
            run(batch)
            count += 1
    if not count:
        raise ValueError("batches must hold at least one batch; it is empty.")
    return observers
