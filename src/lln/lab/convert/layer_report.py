"""How far LLN attention is from the softmax attention of the same model, layer by layer, on the same inputs; and the
report of it as rows of text, for the screen and the model card."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lln.hf.attach import ModelAttention
from lln.hf.layers import find_running
from lln.hf.watch import SoftmaxCall, find_rows, move_batch, show_softmax, switch_to_eval
from lln.instruments.observation import Observation, measure
from lln.instruments.watchers import Look, find_mix, observe_lln
from lln.lab.core.documents import write_markdown, write_paragraphs
from lln.lab.core.progress import ignore
from lln.lab.core.tables import escape_markdown

MEASURED = ("entropy", "spectral_gap")
LARGEST = 2**25  # numbers of a map that must be a matrix
WHOLE = Look(lambda: True, ignore, None)  # looks at all samples
TITLES = {"matched": "matched", "fitted": "fitted", "distilled": "distilled", "fine_tuned": "fine-tuned"}


class Witness:
    """Measures one module's softmax attention and its LLN attention on the same queries, keys and values."""

    def __init__(self, attention: ModelAttention, name: str, known: Mapping[str, Any] | None) -> None:
        self.attention, self.name, self.known = attention, name, known
        self.found: dict[str, dict[str, list[Tensor]]] = {"softmax": {}, "lln": {}}  # [B, H] each
        self.error = self.size = 0.0

    def look(self, call: SoftmaxCall) -> None:
        lln = self.attention
        out = lln(call.query, call.key, call.value, **call.where).transpose(1, 2)
        difference, size = (out - call.out).double().square(), call.out.double().square()
        if (mask := call.where["query_mask"]) is not None:
            rows = mask[:, :, None, None]
            difference, size = difference * rows, size * rows
        self.error += float(difference.sum())
        self.size += float(size.sum())
        (ours,) = observe_lln(WHOLE, self.name, lln, (call.query, call.key, call.value), call.where)
        softmax = Observation(self.name, "softmax", call.query, call.key, ours.scale, **call.where, cross=lln.cross)
        for kind, seen in (("softmax", softmax), ("lln", ours)):
            if kind == "softmax" and self.known is not None:
                continue
            if kind == "lln" and lln.mix == "evidence" and call.query.shape[:3].numel() * call.key.shape[2] > LARGEST:
                continue  # that map is a matrix, see `lln_map`
            found = measure(seen, MEASURED)
            for name in MEASURED:
                self.found[kind].setdefault(name, []).append(found[name].cpu())

    def row(self) -> dict[str, Any]:
        means: dict[str, dict[str, Any]] = {
            kind: {name: mean(torch.cat(found[name])) if name in found else None for name in MEASURED}
            for kind, found in self.found.items()
        }
        if self.known is not None:
            means["softmax"] = dict(self.known)
        error = (self.error / self.size) ** 0.5 if self.size else 0.0
        mix = find_mix(self.attention)  # the weight of LLN beside the blocks, of each head
        none = self.attention.block_size is None or isinstance(mix, str)
        mix = None if none else float(mix.mean() if isinstance(mix, Tensor) else mix)
        return {"layer": self.name, **means, "lln": means["lln"] | {"error": error, "mix": mix}}


def mean(values: Tensor) -> float | None:
    """None where there is nothing to measure (no eigenvalues of cross attention)."""
    found = float(values.nanmean())
    return found if found == found else None


@torch.no_grad()
def compare_layers(
    model: PreTrainedModel, batches: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """A row for each attention layer of a model that runs LLN:

        layer     its name
        softmax   entropy (bits) and spectral_gap of softmax attention there
        lln       the same of LLN attention on the same queries and keys; error: ||LLN - softmax|| / ||softmax|| of the
                  outputs; mix: the weight of LLN beside the blocks, None without blocks and where each query has its
                  own (mix="evidence"); entropy and gap are None of the latter where their map would be too large

    Means over heads and samples; padding does not count. The inputs of all layers are those of the softmax model. What
    softmax has there is taken from earlier rows of the same batches, where they are given: it is half of the time."""
    known = {row["layer"]: row["softmax"] for row in earlier}
    witnesses = {name: Witness(attention, name, known.get(name)) for name, attention in find_running(model).items()}
    with switch_to_eval(model), show_softmax(model, lambda call: witnesses[call.layer].look(call)) as run:
        for batch in batches:
            run(batch)
    return [witness.row() for witness in witnesses.values()]


@torch.no_grad()
def last_hidden(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The model's last hidden states at the tokens that are no padding, [tokens, width] of each batch."""
    found = []
    with switch_to_eval(model):
        for batch in batches:
            given = move_batch(batch, model)
            hidden = model.base_model(**given).last_hidden_state
            rows = find_rows(model, given)
            found.append(hidden.flatten(0, 1) if rows is None else hidden[rows])
    return found


def hidden_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """||found - wanted|| / ||wanted||"""
    parts = [(float((a - b).square().sum()), float(b.square().sum())) for a, b in zip(found, wanted, strict=True)]
    error, size = (sum(column) for column in zip(*parts, strict=True))
    return float((error / size) ** 0.5)


def name_stages(result: dict[str, Any]) -> str:
    return " → ".join(TITLES[stage] for stage in result["stages"])


def name_size(result: dict[str, Any]) -> str:
    """How large a passage or picture is."""
    said = result["passages"]
    return (
        f"of {said['pixels'][0]} x {said['pixels'][1]} pixels"
        if "pixels" in said
        else f"of up to {said['tokens']} tokens"
    )


def list_rows(result: dict[str, Any]) -> list[list[str]]:
    """The columns' names, then a row for each layer: what softmax attention has, and LLN's after each stage."""
    mixes = any(layer[stage]["mix"] is not None for layer in result["layers"] for stage in result["stages"])
    rows = [["layer", "entropy, softmax", "entropy", "gap, softmax", "gap", "error", *["mix"] * mixes]]
    for layer in result["layers"]:
        stages = [layer[stage] for stage in result["stages"]]
        row = [layer["label"]]
        for what, digits in (("entropy", 2), ("spectral_gap", 3), ("error", 3), ("mix", 2))[: 3 + mixes]:
            if what in layer["softmax"]:
                row.append(show_steps([layer["softmax"][what]], digits))
            row.append(show_steps([stage[what] for stage in stages], digits))
        rows.append(row)
    return rows


def show_steps(values: list[float | None], digits: int) -> str:
    return " → ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def describe_whole(result: dict[str, Any]) -> str:
    """One sentence about the model as a whole."""
    (sentence,) = write_paragraphs("conversion.md", "whole", **result, titles=TITLES)
    return sentence


def describe_beside(result: dict[str, Any]) -> list[str]:
    """What came along from the checkpoint's folder, where there is something to say about that."""
    return write_paragraphs("conversion.md", "beside", **result)


def describe_verdict(result: dict[str, Any]) -> list[str]:
    """What it says of the model, and what to do about it."""
    return write_paragraphs("conversion.md", "verdict", **result, size=name_size(result))


def write_report(result: dict[str, Any], licence: str | None = None) -> str:
    """Markdown, for the model card, in which names that somebody chose are text and nothing else. licence: of the model
    that it was made from, where that says so."""
    result = result | {"request": result["request"] | {"model": escape_markdown(result["request"]["model"])}}
    if "files" in result:
        files = result["files"]
        result["files"] = files | {"left_out": [escape_markdown(name) for name in files["left_out"]]}
    licence = licence and escape_markdown(str(licence))
    columns, *rows = list_rows(result)
    facts = {"columns": columns, "rows": rows, "numbers": name_stages(result), "titles": TITLES, "licence": licence}
    facts |= {"size": name_size(result)}
    return write_markdown("conversion.md", **result, **facts)
