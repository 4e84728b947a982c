"""In what runs differ from the paper's, as sentences: its data, its model, its budget."""

from __future__ import annotations

from typing import Any


def describe_data(config: dict[str, Any], paper: dict[str, Any]) -> list[str]:
    if config["data"]["subset"] == "retrieval":  # the recipe's is no more the paper's than any other
        return [
            f"Data: {config['data']['name']} stands in for the published pairs of papers, which are not on the Hub."
        ]
    ours, theirs = (" ".join(filter(None, (c["data"]["name"], c["data"]["subset"]))) for c in (config, paper))
    return [] if ours == theirs else [f"Data: {ours}, where the paper's recipe has {theirs}."]


def describe_training(config: dict[str, Any], paper: dict[str, Any]) -> dict[str, list[str]]:
    """Of the model and of the budget."""

    def model(config: dict[str, Any]) -> str:
        m = config["model"]
        norm = ", pre-norm" if m["pre_norm"] else ""
        places = f", {m['positions']} positions" if "positions" in m else ""
        return f"{m['layers']} layers, {m['width']} wide, {m['heads']} heads{norm}{places}"

    def budget(config: dict[str, Any]) -> str:
        o, what = config["optimisation"], "pixels a side" if config["task"] == "image" else "tokens"
        length = f"{config['data']['length']} {what} in {config['precision']}"
        return f"{o['steps']:,} steps of {o['batch']} examples of {length}"

    found: dict[str, list[str]] = {}
    for name, word, title in (("model", "Model", model), ("budget", "Training", budget)):
        ours, theirs = title(config), title(paper)
        found[name] = [] if ours == theirs else [f"{word}: {ours}; in the paper's recipe {theirs}."]
    return found
