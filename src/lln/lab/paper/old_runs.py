"""Folders of runs from before facts.json was written. Nothing else guesses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from lln.lab.recipes import PRESETS, recipe
from lln.lab.recipes.image import deit_tiny
from lln.lab.train.config import Attention


def derive_facts(config: dict[str, Any]) -> dict[str, Any]:
    """What `lln.lab.train.run_folder.list_facts` would have stored, from a config.json: the label from the recipe that
    the preset names, the run it starts from out of the name of its folder."""
    task, preset, held = config["task"], config["preset"], config["attention"]
    usual = recipe(task, preset if preset in PRESETS else "paper")
    options = deit_tiny().attention.options if preset == "deit-tiny" else usual.attention.preset
    start = None
    if config["model"]["start"]:
        folder = Path(config["model"]["start"]).parent.name
        seed, length = re.search(r"seed(\d+)$", folder), re.search(r"^needles-(\d+)-", folder)
        start = {
            "folder": folder, "task": "needles" if length else None, "seed": int(seed[1]) if seed else None,
            "length": int(length[1]) if length else None,
        }  # fmt: skip
    attention = dataclasses.replace(Attention(**held), preset=options)
    return {
        "task": task, "name": config["data"]["subset"], "preset": preset, "attention": held["name"],
        "label": attention.label, "seed": config["seed"], "length": config["data"]["length"], "start": start,
    }  # fmt: skip
