"""What a preset trains on can be had: embedded, generated, or on the Hub under this name."""

import pytest

from lln.lab.data import embedded
from lln.lab.data.sources import AAN, KNOWN
from lln.lab.recipes import NAMES, RECIPES, recipe

HUB = {"/".join(name.split("/")[:2]) for name, known in KNOWN.items() if "rows" in known}
PRESETS = [
    (task, preset, name) for task, presets in RECIPES.items() for preset in presets for name in NAMES.get(task, [None])
]


@pytest.mark.parametrize(("task", "preset", "name"), PRESETS)
def test_the_data_of_a_preset_can_be_had(task: str, preset: str, name: str | None) -> None:
    data = recipe(task, preset, name=name).data.name
    here = data in ("embedded", "generated") or data in embedded.SETS
    if preset == "tiny":
        assert here
    elif (task, preset, name) == ("lra", "paper", "retrieval"):
        assert data == AAN  # which is refused with a sentence that says what to provide
    else:
        assert here or data in HUB
