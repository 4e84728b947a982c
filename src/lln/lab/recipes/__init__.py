"""The paper's experiments: `lln.lab.recipes.recipe(task, preset, attention, name)` returns a complete config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lln.lab.recipes import glue, image, lra, mlm, needles
from lln.lab.train.config import Attention, Config
from lln.peers import mechanisms

PRESETS = ("tiny", "mini", "paper")
RECIPES: dict[str, dict[str, Callable[..., Config]]] = {
    task.__name__.rpartition(".")[2]: {preset: getattr(task, preset) for preset in PRESETS if hasattr(task, preset)}
    for task in (mlm, glue, image, lra, needles)
}
BLOCK_SIZE = 64  # of kernels with blocks, where a preset says nothing
NAMES: dict[str, list[str]] = {"glue": list(glue.TASKS), "lra": list(lra.TASKS)}  # tasks that come in several


def recipe(task: str, preset: str = "tiny", attention: str = "lln_diag", name: str | None = None) -> Config:
    """The config of a task, ready to run. name: which GLUE or LRA task."""
    if task not in RECIPES:
        raise ValueError(f"task must be one of {', '.join(RECIPES)}; got {task!r}.")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}.")
    if preset not in RECIPES[task]:
        raise ValueError(f"{task} has the presets {', '.join(RECIPES[task])}; got {preset!r}.")
    names = NAMES.get(task)
    if names is None and name is not None:
        raise ValueError(f"{task} is one task and takes no name; got {name!r}.")
    if names is not None and name is not None and name not in names:
        raise ValueError(f"{task} has the tasks {', '.join(names)}; got {name!r}.")
    make = RECIPES[task][preset]
    config = make() if names is None else make(name or names[0])
    return dataclasses.replace(config, attention=chosen(attention, config.attention.options))


def chosen(name: str, preset: dict[str, Any]) -> Attention:
    """An attention with what the options of a preset, which are LLN's and its blocks', mean to it. `elu_diag` and the
    like are kernels with blocks."""
    blocks = {k: v for k, v in preset.items() if k == "block_size"}
    base = name.removesuffix("_diag")
    if name == "lln_diag":
        return Attention(name, preset)
    if name == "lln":
        return Attention(name, {k: v for k, v in preset.items() if k not in blocks})
    if name == "block_diagonal":
        return Attention(name, blocks)
    if base != name and base in mechanisms() and mechanisms()[base].mixes:
        return Attention(base, {"block_size": BLOCK_SIZE} | blocks)
    return Attention(name)


__all__ = ["NAMES", "PRESETS", "RECIPES", "recipe"]
