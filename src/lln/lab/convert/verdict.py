"""Whether a converted model is still the model it was made from, on passages or pictures that nothing was learned from.

Encoders: Spearman's rank correlation of the similarities of all pairs of passages (cosines of the means of the last
hidden states) with those of the softmax model; of classifiers also how many have the class they had. Models that
predict the next token: their perplexity over the softmax model's. Beside it stands the simplest thing that could have
kept as much: softmax attention inside blocks, alone.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from lln.hf.converting import convert
from lln.hf.watch import find_rows, move_batch, switch_to_eval

KEPT = 0.95  # rank correlation
WORSE = 1.05  # perplexity over the softmax model's
FEWEST = 8  # passages, 28 pairs: fewer say nothing about an order
# What a script can ask for: the exit code of `lln convert` by the verdict.
EXITS = {"kept": 0, "not kept": 3, "not decided": 4}

TABLES = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
# A table names a class, or several (DeiT has two).
CLASSIFIERS = {
    name for table in TABLES for held in table.values() for name in ([held] if isinstance(held, str) else held)
}

Batch = Mapping[str, Any]


def predicts(model: PreTrainedModel) -> bool:
    """Whether it is a causal language model with its head."""
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not model.config.is_encoder_decoder


@torch.no_grad()
def measure_model(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor:
    """What the model makes of the passages: the mean loss of a token [], or the similarities of all pairs [pairs]."""
    losses, tokens, means = 0.0, 0, []
    with switch_to_eval(model):
        for batch in batches:
            given = move_batch(batch, model)
            rows = find_rows(model, given)
            if predicts(model):
                labels = given["input_ids"]
                labels = labels if rows is None else labels.masked_fill(~rows, -100)
                count = int((labels[:, 1:] != -100).sum())
                losses, tokens = losses + count * model(**given, labels=labels).loss.item(), tokens + count
            else:
                hidden = model.base_model(**given).last_hidden_state.double()
                counted = torch.ones_like(hidden[..., 0]) if rows is None else rows.double()
                means.append((hidden * counted.unsqueeze(-1)).sum(1) / counted.sum(1, keepdim=True))
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


def leave_blocks(model: PreTrainedModel, size: dict[str, Any]) -> PreTrainedModel:
    """A copy of the softmax model with blocks of softmax attention alone. size: block_size or tile, overlap
    and layers."""
    how: dict[str, Any] = {"mix": 0.0, "statistics": {"encoder": "sample", "decoder": "fixed"}, **size}
    return convert(copy.deepcopy(model), "lln_diag", **how)


@torch.no_grad()
def classify(model: PreTrainedModel, batches: Sequence[Batch]) -> Tensor | None:
    """The class that the model gives each passage or picture; None where it is no classifier of a whole one, or one
    that does not choose (it estimates a number, or says yes or no of each class)."""
    choosing = getattr(model.config, "problem_type", None) in (None, "single_label_classification")
    if type(model).__name__ not in CLASSIFIERS or not choosing or model.config.num_labels < 2:
        return None
    with switch_to_eval(model):
        return torch.cat([model(**move_batch(batch, model)).logits.argmax(-1).cpu() for batch in batches])


def agree(found: Tensor | None, wanted: Tensor | None) -> float | None:
    """The share that has the wanted class."""
    return None if found is None or wanted is None else float((found == wanted).double().mean())


def can_decide(passages: int, held_out: bool, predicting: bool) -> bool:
    """Whether so many passages, of those that are judged by, are enough for a verdict."""
    return held_out and (passages >= FEWEST or predicting)


def judge(value: float, blocks: float, passages: int, held_out: bool, predicting: bool) -> dict[str, Any]:
    """The verdict as conversion.json has it."""
    better = value < blocks if predicting else value > blocks
    near = value <= WORSE if predicting else value >= KEPT
    verdict = "kept" if near and better else "not kept"
    if not can_decide(passages, held_out, predicting) or not math.isfinite(value):
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
