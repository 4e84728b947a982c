"""How a pretrained model attends to texts, and what LLN attention would make of the same queries and keys."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import lln.hf  # noqa: F401  models that were saved with LLN attention run it
from lln.checks import MATCHINGS
from lln.hf.watch import switch_to_eval
from lln.instruments.concentration import entropy
from lln.instruments.observation import Observation, measure
from lln.instruments.recorder import record
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.errors import Refused, first_line
from lln.lab.core.progress import Progress, ignore
from lln.matching.data import match_data
from lln.nn.attention import LLNAttention

TEXTS = tuple(write_paragraphs("inspect.txt", "texts"))
COMPARED = (*MATCHINGS, "data")  # ways to set LLN's alpha and beta
ROWS = 64  # of queries that data matching looks at
LAYER_MEANS = (
    "temperature", "entropy", "max_entropy", "spectral_gap", "log_variance", "lognormality", "sigma_q", "sigma_k",
)  # fmt: skip
BOTH = ("entropy", "spectral_gap")  # in which softmax and LLN are compared
DIFFERENCES = tuple(f"{name}_difference" for name in BOTH)


class CannotInspect(Refused):
    """A model that cannot be looked into."""


@torch.no_grad()
def inspect(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_length: int = 512,
    batch_size: int = 8,
    progress: Progress = ignore,
) -> dict[str, Any]:
    """Means over the texts for each layer and head, ready for JSON:

        rows     layer, call, label, head, attention; what `record` measures; "softmax" and "lln": entropy and
                 spectral_gap of softmax attention and of LLN with each matching on the same queries and keys, LLN
                 also alpha, beta and its differences from softmax
        layers   the same as means over heads
        tokens   of each text

    None: there is nothing to measure (no eigenvalues of cross attention, no LLN where pairs are masked or biased).

    Raises:
        CannotInspect for a model that does not run on text, or in which nothing can be observed."""
    tokens: list[int] = []

    def encode_all() -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(encode(model, tokenizer, texts, max_length, batch_size)):
            progress(f"texts {number * batch_size + 1} to {min((number + 1) * batch_size, len(texts))}")
            tokens.extend(batch["attention_mask"].sum(1).tolist())
            yield batch

    return inspect_batches(model, encode_all()) | {"tokens": tokens}


@torch.no_grad()
def inspect_batches(model: Any, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`rows` and `layers` of `inspect` for any model that `lln.instruments.record` sees, those of timm and diffusers
    among them; `tokens` of each sample, in the layer that has most. batches: arguments of its forward.

    >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> found = inspect_batches(model, [{"src": torch.randn(1, 6, 16)}])
    >>> [(row["head"], sorted(row["lln"])) for row in found["rows"]]
    [(0, ['data', 'entropy', 'paper', 'variance']), (1, ['data', 'entropy', 'paper', 'variance'])]
    """
    found: dict[tuple[str, int, str], list[dict[str, Tensor]]] = {}
    tokens: list[int] = []
    for batch in batches:
        observed = run(model, batch)
        longest = max((seen for _, seen in observed), key=lambda seen: seen.query.shape[2])
        tokens += [longest.query.shape[2]] * longest.query.shape[0]
        for call, seen in observed:
            key = seen.layer or type(model).__name__, call, seen.attention
            found.setdefault(key, []).append(compare(seen))
    labels = label_layers([(layer, call) for layer, call, _ in found])
    rows = []
    for (layer, call, kind), parts in found.items():
        means = {name: average_texts(torch.cat([part[name] for part in parts])) for name in parts[0]}
        for head in range(len(means["entropy"])):
            label = labels[layer, call]
            place = {"layer": layer, "call": call, "label": label, "head": head, "attention": kind}
            rows.append(place | nest({name: values[head] for name, values in means.items()}))
    return {"rows": rows, "layers": average_layers(rows), "tokens": tokens}


def encode(
    model: Any, tokenizer: Any, texts: Sequence[str], max_length: int, batch_size: int
) -> list[dict[str, Tensor]]:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        batch_size = 1
    limits = [max_length, tokenizer.model_max_length, count_positions(model)]
    batches = []
    for first in range(0, len(texts), batch_size):
        part = list(texts[first : first + batch_size])
        batch = tokenizer(
            part, return_tensors="pt", padding=len(part) > 1, truncation=True, max_length=int(min(limits))
        )
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        if not batch["input_ids"].shape[1]:
            raise CannotInspect("the tokenizer makes no token of the text")
        if getattr(model.config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = batch["input_ids"]
            batch["decoder_attention_mask"] = batch["attention_mask"]
        batches.append({name: tensor.to(model.device) for name, tensor in batch.items()})
    return batches


def count_positions(model: Any) -> float:
    """How many tokens the model has places for."""
    places = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(places, int) or places < 1:
        return math.inf
    # RoBERTa and its kin count positions from behind the padding's.
    first = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
    return places - first - 1 if isinstance(first, int) else places


def run(model: Any, batch: dict[str, Tensor]) -> list[tuple[int, Observation]]:
    """(call, Observation) of every attention layer."""
    try:
        with switch_to_eval(model), record(model, samples=None, keep=True, instruments=()) as rec:
            model(**batch)
    except Exception as error:  # anything may happen in a model that is not made for text
        text = first_line(error)
        raise CannotInspect(
            text.removeprefix("record: ")
            if text.startswith("record: ")
            else f"it does not run on {name_inputs(batch)}: {text}"
        ) from error
    if not rec.observations:
        raise CannotInspect("none of its attention layers was used")
    return [(call, seen) for _, call, seen in rec.observations]


def name_inputs(batch: dict[str, Any]) -> str:
    if "pixel_values" in batch or set(batch) == {"x"}:
        return "pictures alone"
    return "text alone" if "input_ids" in batch else ", ".join(batch)


def compare(seen: Observation) -> dict[str, Tensor]:
    """What was measured, [B, H] each; names like "lln.paper.entropy" for what other attention would give."""
    found = measure(seen)
    nothing = torch.full_like(found["entropy"], torch.nan)
    if seen.attention == "softmax":
        softmax = [found[name] for name in BOTH]
    else:
        p = seen.softmax_map()
        softmax = [entropy(p), seen.gap(p)]
    found |= {f"softmax.{name}": values for name, values in zip(BOTH, softmax, strict=True)}
    seen = seen.undo_map()  # other matchings would not have the feature map
    batch, heads, _, dim = seen.query.shape
    for matching in COMPARED:
        numbers = dict.fromkeys(("alpha", "beta", *BOTH), nothing)
        if seen.bias is None and (matching in ("paper", "data") or 8 <= dim <= 256):  # which the curves cover
            alpha, beta = match(seen, matching)
            p = seen.lln_map(alpha, beta)
            numbers = {
                "alpha": alpha[..., 0].to(nothing).expand(batch, heads),
                "beta": beta[..., 0].to(nothing).repeat_interleave(heads // seen.key.shape[1], 1),
                "entropy": entropy(p),
                "spectral_gap": seen.gap(p),
            }
        numbers |= {f"{name}_difference": numbers[name] - found[f"softmax.{name}"] for name in BOTH}
        found |= {f"lln.{matching}.{name}": values for name, values in numbers.items()}
    return {name: values.cpu() for name, values in found.items()}


def match(seen: Observation, matching: str) -> tuple[Tensor, Tensor]:
    """alpha [B, H, 1] and beta [B, key heads, 1]. The spread is that of each text, as bidirectional LLN has it; causal
    LLN would have an average instead."""
    masks: dict[str, Any] = {"key_mask": seen.key_mask, "query_mask": seen.query_mask}
    if matching == "data":
        pair = match_data(seen.query, seen.key, is_causal=seen.is_causal, scale=seen.scale, rows=ROWS, **masks)
        return pair[0].unsqueeze(-1), pair[1].unsqueeze(-1)
    options: dict[str, Any] = {"num_key_heads": seen.key.shape[1], "matching": matching, "scale": seen.scale}
    module = LLNAttention(seen.query.shape[1], seen.query.shape[3], **options)
    alpha, beta = module.coefficients(seen.query, seen.key, **masks)
    assert alpha is not None
    return alpha, beta


def average_texts(values: Tensor) -> list[float | None]:
    """[texts, H] -> H numbers."""
    return [value if math.isfinite(value) else None for value in values.nanmean(0).tolist()]


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"lln.paper.alpha": 1} -> {"lln": {"paper": {"alpha": 1}}}"""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = result
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def average_layers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each layer, means over its heads. Differences from softmax are means of their sizes."""
    layers: list[dict[str, Any]] = []
    for label in dict.fromkeys(row["label"] for row in rows):
        own = [row for row in rows if row["label"] == label]
        layer = {name: own[0][name] for name in ("layer", "call", "label", "attention")} | {"heads": len(own)}
        layer |= {name: average([row[name] for row in own]) for name in LAYER_MEANS}
        layer["lln"] = {
            matching: {name: average([row["lln"][matching][name] for row in own], abs) for name in DIFFERENCES}
            for matching in COMPARED
        }
        layers.append(layer)
    return layers


def average(values: list[float | None], of: Callable[[float], float] = float) -> float | None:
    there = [of(value) for value in values if value is not None]
    return sum(there) / len(there) if there else None


def label_layers(keys: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """A short name for each layer and call: the parts of its name that others do not share."""
    paths = {name: name.split(".") for name, _ in keys}
    again = {name for name, call in keys if call}
    alike = len(paths) > 1 and len({len(path) for path in paths.values()}) == 1
    labels = {}
    for name, call in keys:
        parts = paths[name]
        if alike:
            parts = [part for i, part in enumerate(parts) if len({path[i] for path in paths.values()}) > 1]
        if name in again:
            parts = [*parts, str(call)] if len(paths) > 1 else [str(call)]
        labels[name, call] = " ".join(parts)
    return labels
