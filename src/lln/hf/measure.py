"""The queries and keys of a model's softmax attention, measured where it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lln.hf.find import attention_modules, configs, in_units, is_cross, sizes
from lln.hf.modules import ModelAttention
from lln.moments import both_moments, match_data, sigma

NAME = "lln_measure"  # an attn_implementation: softmax attention that shows its queries and keys to `module.lln_seen`


class Seen:
    """What one attention module showed: moments of queries and keys, and alpha and beta that match softmax on them."""

    def __init__(self, data: bool, cross: bool) -> None:
        self.data, self.cross = data, cross
        self.moments: Tensor | float = 0.0  # [2, 3, key heads]
        self.log_alpha: Tensor | float = 0.0  # [heads], a sum over samples
        self.log_beta: Tensor | float = 0.0  # [key heads]
        self.samples = 0

    def look(self, query: Tensor, key: Tensor, key_mask: Tensor | None, is_causal: bool, scale: float | None) -> None:
        query, key = query.detach(), key.detach()
        query_mask = key_mask
        if self.cross or query.shape[2] != key.shape[2]:  # which queries are padding is not said
            query_mask = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        self.moments = self.moments + both_moments(query, key, key.shape[1], query_mask, key_mask).sum(2)
        if self.data:
            alpha, beta = match_data(
                query, key, key_mask=key_mask, query_mask=query_mask, is_causal=is_causal, scale=scale
            )
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
    """transformers' own softmax attention, and a look at its queries and keys."""
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
    seen: Seen = module.lln_seen
    scale = sizes(module)[4]
    seen.look(in_units(query, scale, kwargs.get("scaling")), key, key_mask, is_causal, scale)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@torch.no_grad()
def measure(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]], data: bool) -> dict[str, Seen]:
    """Run the model with softmax attention, and return what each attention module saw, by its name."""
    AttentionInterface.register(NAME, softmax)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    modules = dict(attention_modules(model))
    parts = configs(model)
    before = [config._attn_implementation for config in parts]
    training = {module: module.training for module in model.modules()}
    count = 0
    try:
        for name, module in modules.items():
            module.lln_seen = Seen(data, is_cross(module, name))
        for config in parts:
            config._attn_implementation_internal = NAME
        model.eval()
        for batch in batches:
            if not isinstance(batch, Mapping):
                raise TypeError(f"batches must be dicts of the model's arguments; got a {type(batch).__name__}.")
            arguments = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            model(**arguments)
            count += 1
        if not count:
            raise ValueError("batches must hold at least one batch; it is empty.")
        return {name: module.lln_seen for name, module in modules.items()}
    finally:
        for config, name in zip(parts, before, strict=True):
            config._attn_implementation_internal = name
        for module in modules.values():
            del module.lln_seen
        for module, mode in training.items():
            module.training = mode
