"""Runs from before their facts were written down, in folders and in stored results. Nothing else guesses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from lln.lab.paper.jobs import DEIT, configure, find_recipe
from lln.lab.paper.what_differs import describe_data, describe_training
from lln.lab.recipes import NAMES
from lln.lab.recipes.needles import lengthen, set_length
from lln.lab.train.config import TASKS, Attention


def derive_facts(config: dict[str, Any]) -> dict[str, Any]:
    """What `lln.lab.train.run_folder.list_facts` would have stored, from a config.json: the label from the recipe that
    the preset names, the run it starts from out of the name of its folder."""
    task, preset, held = config["task"], config["preset"], config["attention"]
    start = None
    if config["model"]["start"]:
        folder = Path(config["model"]["start"]).parent.name
        seed, length = re.search(r"seed(\d+)$", folder), re.search(r"^needles-(\d+)-", folder)
        start = {
            "folder": folder, "task": "needles" if length else None, "seed": int(seed[1]) if seed else None,
            "length": int(length[1]) if length else None,
        }  # fmt: skip
    attention = dataclasses.replace(Attention(**held), preset=find_recipe(task, preset, None).attention.preset)
    return {
        "task": task, "name": config["data"]["subset"], "preset": preset, "attention": held["name"],
        "label": attention.label, "seed": config["seed"], "length": config["data"]["length"], "start": start,
    }  # fmt: skip


def derive_config(run: dict[str, Any], result: dict[str, Any], changes: dict[str, str]) -> dict[str, Any] | None:
    """The config of a run that a result stored without it: what these changes make of the recipe, if that is what the
    result says of the model and its training. None: it says something else, so the settings are not known."""
    column, preset, start = run["column"], result["scale"], None
    task = "lra" if result.get("table") == "table5" else column if column in TASKS else "glue"
    name = column if task in NAMES else None
    if (task, preset, run["how"]["precision"]) == ("image", "paper", "float16"):
        preset = DEIT
    if run["pretraining"] is not None:
        start = Path(run["pretraining"].replace("seed ", "seed")) / "model"
    config = configure(
        task, preset, run["attention"], run["seed"], changes, name=name, start=start, precision=run["how"]["precision"]
    )
    if task == "needles":
        named = re.search(r"needles-(\d+)(?:-after-(\d+))?-", run["folder"])
        assert named is not None
        length, after = int(named[1]), named[2]
        config = set_length(config, length) if after is None else lengthen(config, length, f"needles-{after}-{start}")
        o, said = config.optimisation, result["settings"][named[1]]
        same = (said["steps"], said["batch"], said["sequences"]) == (o.steps, o.batch, config.data.evaluation)
    else:
        paper = find_recipe(task, "paper", name).to_dict()
        told = describe_training(config.to_dict(), paper) | {"data": describe_data(config.to_dict(), paper)}
        said = result.get("differs", [])
        if "marks" in result:
            marks = result["marks"][{"mlm": "MLM loss", "image": "accuracy"}.get(task, column)]
            said = [text for part in told for text in marks[part]]
        texts = [text for part in told.values() for text in part]
        # A figure says nothing of its float16 runs.
        same = "differs" in result and config.precision == "float16"
        same = same or all(any(text in one for one in said) for text in texts)
    return config.to_dict() | run["how"] if same else None
