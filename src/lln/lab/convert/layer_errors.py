"""How far LLN attention is from the softmax attention of the same model, layer by layer, on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lln.hf.attached import ModelAttention
from lln.hf.find import attention_modules
from lln.hf.watch import SoftmaxCall, evaluating, on_device, show_softmax
from lln.instruments.observation import Observation, default_scale, measure
from lln.instruments.watchers import find_mix

MEASURED = ("entropy", "spectral_gap")


class Witness:
    """Measures one module's softmax attention and its LLN attention on the same queries, keys and values."""

    def __init__(self, attention: ModelAttention, name: str) -> None:
        self.attention, self.name = attention, name
        self.found: dict[str, list[Tensor]] = {}  # [B, H] each
        self.error = self.size = 0.0

    def look(self, call: SoftmaxCall) -> None:
        lln = self.attention
        out = lln(call.query, call.key, call.value, **call.where).transpose(1, 2)
        difference, size = (out - call.out).double().square(), call.out.double().square()
        if call.query_mask is not None:
            rows = call.query_mask[:, :, None, None]
            difference, size = difference * rows, size * rows
        self.error += float(difference.sum())
        self.size += float(size.sum())
        scale = default_scale(call.query) if call.scale is None else call.scale
        softmax = Observation(self.name, "softmax", call.query, call.key, scale, **call.where, cross=lln.cross)
        alpha, beta = lln.coefficients(call.query, call.key, **call.where)
        mapped = lln.features(call.query, call.key, **call.where)
        ours = Observation(
            self.name, lln.implementation, *mapped, scale, **call.where, cross=lln.cross, alpha=alpha, beta=beta,
            block_size=lln.block_size, mix=find_mix(lln), overlap=lln.overlap,
        )  # fmt: skip
        for kind, seen in (("softmax", softmax), ("lln", ours)):
            for name, values in measure(seen, MEASURED).items():
                if name in MEASURED:
                    self.found.setdefault(f"{kind}.{name}", []).append(values.cpu())

    def row(self) -> dict[str, Any]:
        means = {name: mean(torch.cat(values)) for name, values in self.found.items()}
        return {
            "layer": self.name,
            "softmax": {name: means[f"softmax.{name}"] for name in MEASURED},
            "lln": {name: means[f"lln.{name}"] for name in MEASURED}
            | {"error": (self.error / self.size) ** 0.5 if self.size else 0.0, "mix": learned_mix(self.attention)},
        }


def mean(values: Tensor) -> float | None:
    """None where there is nothing to measure (no eigenvalues of cross attention)."""
    found = float(values.nanmean())
    return found if found == found else None


def learned_mix(attention: ModelAttention) -> float | None:
    """The weight of LLN beside the blocks, a mean over heads; None where there are no blocks."""
    if attention.block_size is None:
        return None
    mix = find_mix(attention)
    return float(mix.mean()) if isinstance(mix, Tensor) else float(mix)


@torch.no_grad()
def compare_layers(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each attention layer of a model that runs LLN:

        layer     its name
        softmax   entropy (bits) and spectral_gap of softmax attention there
        lln       the same of LLN attention on the same queries and keys; error: ||LLN - softmax|| / ||softmax|| of the
                  outputs; mix: the weight of LLN beside the blocks, None without blocks

    Means over heads and samples; padding does not count. The inputs of all layers are those of the softmax model."""
    witnesses = {name: Witness(module.lln, name) for name, module in attention_modules(model)}
    with evaluating(model), show_softmax(model, witnesses) as run:
        for batch in batches:
            run(batch)
    return [witness.row() for witness in witnesses.values()]


@torch.no_grad()
def last_hidden(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The model's last hidden states at the tokens that are no padding, [tokens, width] of each batch."""
    found = []
    with evaluating(model):
        for batch in batches:
            given = on_device(batch, model)
            hidden = model.base_model(**given).last_hidden_state
            rows = given["decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"]
            found.append(hidden[rows.bool()])
    return found


def hidden_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """||found - wanted|| / ||wanted||"""
    parts = [(float((a - b).square().sum()), float(b.square().sum())) for a, b in zip(found, wanted, strict=True)]
    error, size = (sum(column) for column in zip(*parts, strict=True))
    return float((error / size) ** 0.5)
