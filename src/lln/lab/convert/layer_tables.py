"""The report of a conversion as rows of text, for the screen and the model card."""

from __future__ import annotations

from typing import Any

from lln.lab.core.tables import markdown_table

TITLES = {"matched": "matched", "distilled": "distilled", "fine_tuned": "fine-tuned"}


def name_stages(result: dict[str, Any]) -> str:
    return " → ".join(TITLES[stage] for stage in result["stages"])


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
    errors = ", ".join(f"{TITLES[stage]} {error:.3f}" for stage, error in result["hidden_error"].items())
    held = "kept apart from learning" if result["passages"]["held_out"] else "that were also learned from"
    return (
        f"Relative error of the last hidden states against the softmax model's: {errors}; on "
        f"{result['passages']['reported']} passages {held}."
    )


def write_report(result: dict[str, Any]) -> str:
    """Markdown, for the model card."""
    request, (columns, *rows) = result["request"], list_rows(result)
    steps = f"{request['distill']} steps of distillation and {request['fine_tune']} of fine-tuning"
    later = " After fine-tuning both are those of the new weights." if "fine_tuned" in result["stages"] else ""
    lines = [
        f"From {request['model']} by `lln convert`: {request['attention']}, `{request['matching']}` matching, {steps} "
        f"on {result['passages']['learned']} passages of up to {result['passages']['tokens']} tokens.",
        f"Numbers: {name_stages(result)}.",
        "",
        *markdown_table(columns, rows, "l"),
        "",
        "Entropy in bits; gap: 1 - abs(second eigenvalue); error: of the outputs, against softmax attention on the "
        f"same queries, keys and values; mix: the weight of LLN beside the blocks. Means over heads.{later}",
        "",
        describe_whole(result),
    ]
    return "\n".join(lines) + "\n"
