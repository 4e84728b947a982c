"""The report of a conversion as a table: on the screen and in the model card."""

from __future__ import annotations

from typing import Any

from rich.table import Table

TITLES = {"matched": "matched", "distilled": "distilled", "fine_tuned": "fine-tuned"}


def columns(result: dict[str, Any]) -> list[str]:
    stages = [TITLES[stage] for stage in result["stages"]]
    found = ["layer"]
    for what in ("entropy", "gap"):
        found += [f"{what}, softmax", *(f"{what}, {stage}" for stage in stages)]
    found += [f"error, {stage}" for stage in stages]
    return found + ([f"mix, {stage}" for stage in stages] if has_mix(result) else [])


def rows(result: dict[str, Any]) -> list[list[str]]:
    stages = result["stages"]
    found = []
    for layer in result["layers"]:
        row = [layer["label"]]
        for what, digits in (("entropy", 2), ("spectral_gap", 3)):
            row += [shown(layer[kind][what], digits) for kind in ("softmax", *stages)]
        row += [shown(layer[stage]["error"], 3) for stage in stages]
        row += [shown(layer[stage]["mix"], 2) for stage in stages] if has_mix(result) else []
        found.append(row)
    return found


def has_mix(result: dict[str, Any]) -> bool:
    return any(layer[stage]["mix"] is not None for layer in result["layers"] for stage in result["stages"])


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def whole(result: dict[str, Any]) -> str:
    """One sentence about the model as a whole."""
    errors = ", ".join(f"{TITLES[stage]} {error:.3f}" for stage, error in result["hidden_error"].items())
    held = "kept apart from learning" if result["passages"]["held_out"] else "that were also learned from"
    return (
        f"Relative error of the last hidden states against the softmax model's: {errors}; on "
        f"{result['passages']['reported']} passages {held}."
    )


def markdown(result: dict[str, Any]) -> str:
    request, names = result["request"], columns(result)
    steps = f"{request['distill']} steps of distillation and {request['fine_tune']} of fine-tuning"
    lines = [
        f"From {request['model']} by `lln convert`: {request['attention']}, `{request['matching']}` matching, {steps} "
        f"on {result['passages']['learned']} passages of up to {result['passages']['tokens']} tokens.",
        "",
        f"| {' | '.join(names)} |",
        "|---" * len(names) + "|",
        *(f"| {' | '.join(row)} |" for row in rows(result)),
        "",
        "Entropy in bits; gap: 1 - abs(second eigenvalue); error: of the outputs, against softmax attention on "
        "the same queries, keys and values; mix: the weight of LLN beside the blocks. Means over heads.",
        "",
        whole(result),
    ]
    return "\n".join(lines) + "\n"


def rich_table(result: dict[str, Any]) -> Table:
    request = result["request"]
    table = Table(title=f"{request['model']} with {request['attention']}")
    for name in columns(result):
        first, _, rest = name.partition(", ")
        table.add_column(f"{first}\n{rest}" if rest else first, justify="left" if name == "layer" else "right")
    for row in rows(result):
        table.add_row(*row)
    return table
