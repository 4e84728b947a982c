"""The paper's experiments: `lln.lab.recipes.recipe(task, preset, attention, name)` returns a complete config."""

import dataclasses
from collections.abc import Callable

from lln.lab.recipes import glue, image, lra, mlm, needles
from lln.lab.train.config import Config, choose_attention, need
from lln.rules import suggest

PRESETS = ("tiny", "mini", "paper")
RECIPES: dict[str, dict[str, Callable[..., Config]]] = {
    task.__name__.rpartition(".")[2]: {preset: getattr(task, preset) for preset in PRESETS if hasattr(task, preset)}
    for task in (mlm, glue, image, lra, needles)
}
NAMES: dict[str, list[str]] = {"glue": list(glue.TASKS), "lra": list(lra.TASKS)}  # tasks that come in several


def recipe(task: str, preset: str = "tiny", attention: str = "lln_diag", name: str | None = None) -> Config:
    """Return the complete config of a task (mlm, glue, image, lra, needles), which `lln.lab.train.run.train` can run.

    preset: tiny (minutes on two cores, no download), mini (minutes on one large GPU) or paper (the paper's own).
    attention: a mechanism, with `_diag` for one with blocks. name: which GLUE or LRA task. ValueError names what there
    is.

    >>> config = recipe("lra", "tiny", "lln_diag", name="listops")
    >>> config.data.name, config.data.length, config.attention.options
    ('generated', 64, {'block_size': 16})
    """
    presets, names = RECIPES.get(task, {}), NAMES.get(task, [])
    need(
        (task in RECIPES, f"task must be one of {', '.join(RECIPES)}; got {task!r}.{suggest(task, RECIPES)}"),
        (preset in PRESETS, f"preset must be one of {', '.join(PRESETS)}; got {preset!r}."),
        (preset in presets, f"{task} has the presets {', '.join(presets)}; got {preset!r}."),
        (name is None or names != [], f"{task} is one task and takes no name; got {name!r}."),
        (name in (None, *names), f"{task} has the tasks {', '.join(names)}; got {name!r}.{suggest(name, names)}"),
    )
    config = presets[preset](*([name or names[0]] if names else []))
    return dataclasses.replace(config, attention=choose_attention(attention, config.attention.options))


__all__ = ["NAMES", "PRESETS", "RECIPES", "recipe"]
