"""The report of a conversion as rows of text, for the screen and the model card."""

from __future__ import annotations

from typing import Any

TITLES = {"matched": "matched", "distilled": "distilled", "fine_tuned": "fine-tuned"}


def stages_of(result: dict[str, Any]) -> str:
    return " → ".join(TITLES[stage] for stage in result["stages"])


def columns(result: dict[str, Any]) -> list[str]:
    found = ["layer", "entropy, softmax", "entropy", "gap, softmax", "gap", "error"]
    return [*found, "mix"] if has_mix(result) else found


def rows(result: dict[str, Any]) -> list[list[str]]:
    found = []
    for layer in result["layers"]:
        stages = [layer[stage] for stage in result["stages"]]
        row = [layer["label"]]
        for what, digits in (("entropy", 2), ("spectral_gap", 3)):
            row += [shown([layer["softmax"][what]], digits), shown([stage[what] for stage in stages], digits)]
        row.append(shown([stage["error"] for stage in stages], 3))
        if has_mix(result):
            row.append(shown([stage["mix"] for stage in stages], 2))
        found.append(row)
    return found


def has_mix(result: dict[str, Any]) -> bool:
    return any(layer[stage]["mix"] is not None for layer in result["layers"] for stage in result["stages"])


def shown(values: list[float | None], digits: int) -> str:
    return " → ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


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
    later = " After fine-tuning both are those of the new weights." if "fine_tuned" in result["stages"] else ""
    lines = [
        f"From {request['model']} by `lln convert`: {request['attention']}, `{request['matching']}` matching, {steps} "
        f"on {result['passages']['learned']} passages of up to {result['passages']['tokens']} tokens.",
        f"Numbers: {stages_of(result)}.",
        "",
        f"| {' | '.join(names)} |",
        "|---" * len(names) + "|",
        *(f"| {' | '.join(row)} |" for row in rows(result)),
        "",
        "Entropy in bits; gap: 1 - abs(second eigenvalue); error: of the outputs, against softmax attention on the "
        f"same queries, keys and values; mix: the weight of LLN beside the blocks. Means over heads.{later}",
        "",
        whole(result),
    ]
    return "\n".join(lines) + "\n"
