"""Whether a converted model is still the model it was made from, on passages that nothing was learned from.

Encoders: Spearman's rank correlation of the similarities of all pairs of passages (cosines of the means of the last
hidden states) with those of the softmax model. Models that predict the next token: their perplexity over the softmax
model's. Beside it stands the simplest thing that could have kept as much: softmax attention inside blocks, alone.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lln.hf.converting import convert
from lln.hf.watch import evaluating, on_device

KEPT = 0.95  # rank correlation
WORSE = 1.05  # perplexity over the softmax model's
FEWEST = 8  # passages, 28 pairs: fewer say nothing about an order
# What a script can ask for: the exit code of `lln convert` by the verdict.
EXITS = {"kept": 0, "not kept": 3, "not decided": 4}

Batch = Mapping[str, Any]


def predicts(model: PreTrainedModel) -> bool:
    """Whether it is a causal language model with its head."""
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not model.config.is_encoder_decoder


@torch.no_grad()
def measure_model(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor:
    """What the model makes of the passages: the mean loss of a token [], or the similarities of all pairs [pairs]."""
    losses, tokens, means = 0.0, 0, []
    with evaluating(model):
        for batch in batches:
            given = on_device(batch, model)
            mask = given["decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"]
            if predicts(model):
                labels = given["input_ids"].masked_fill(mask == 0, -100)
                count = int((labels[:, 1:] != -100).sum())
                losses, tokens = losses + count * model(**given, labels=labels).loss.item(), tokens + count
            else:
                hidden = model.base_model(**given).last_hidden_state.double()
                means.append((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))
    if predicts(model):
        return torch.tensor(losses / max(tokens, 1), dtype=torch.float64)
    unit = torch.nn.functional.normalize(torch.cat(means), dim=-1)
    return (unit @ unit.T)[tuple(torch.triu_indices(len(unit), len(unit), 1))].cpu()


def compare(found: Tensor, wanted: Tensor) -> float:
    """Perplexity over the wanted one, or the rank correlation with the wanted similarities; NaN where it is neither."""
    if not wanted.ndim:
        return math.exp(min(float(found - wanted), 700.0))
    if len(wanted) < 2:
        return math.nan
    ranks = torch.stack([t.argsort().argsort() for t in (found, wanted)]).double()
    return float(ranks.corrcoef()[0, 1])


def measure_blocks(model: PreTrainedModel, batches: Sequence[Batch], size: dict[str, Any]) -> Tensor:
    """The same of blocks alone. model: the softmax model, which stays as it is. size: block_size or tile."""
    blocks = copy.deepcopy(model)
    convert(blocks, "lln_diag", mix=0.0, statistics={"encoder": "sample", "decoder": "fixed"}, **size)
    return measure_model(blocks, batches)


def judge(value: float, blocks: float, passages: int, held_out: bool, predicting: bool) -> dict[str, Any]:
    """The verdict as conversion.json has it."""
    better = value < blocks if predicting else value > blocks
    near = value <= WORSE if predicting else value >= KEPT
    verdict = "kept" if near and better else "not kept"
    if not held_out or (passages < FEWEST and not predicting) or not math.isfinite(value):
        verdict = "not decided"
    measure = "perplexity over the softmax model's" if predicting else "rank correlation of similarities"
    return {
        "verdict": verdict,
        "measure": measure,
        "value": value if math.isfinite(value) else None,
        "blocks_alone": blocks if math.isfinite(blocks) else None,
        "better_than_blocks": better,
        "bar": WORSE if predicting else KEPT,
        "passages": passages,
    }
