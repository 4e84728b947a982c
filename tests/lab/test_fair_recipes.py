"""What makes the recipes' comparisons fair: first weights, random windows, large evaluations, and what went before."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import SMALLEST, Stop, assert_goes_on, make_tiny, stop_at
from lln.lab.data.sources import read
from lln.lab.data.text import Masking, load_text
from lln.lab.data.tokenizer import train_tokenizer
from lln.lab.recipes import NAMES, RECIPES, recipe
from lln.lab.train.config import change
from lln.lab.train.earlier import EVALUATED, as_before
from lln.lab.train.models import Sizes, build
from lln.lab.train.run import train
from lln.lab.train.run_folder import CONFIG
from lln.lab.train.tasks import load

SHORT = SMALLEST | {"optimisation.steps": "6", "log_every": "1", "save_every": "2", "evaluate_every": "6",
                    "record_every": "0"}  # fmt: skip
ALL = [
    recipe(task, preset, name=name)
    for task, presets in RECIPES.items() for preset in presets for name in NAMES.get(task, [None])
]  # fmt: skip


def test_every_recipe_says_how_its_weights_begin() -> None:
    """The paper's own where its script is known."""
    rules = {(c.task, c.preset): c.model.initialisation for c in ALL}
    known = {("mlm", "paper"): "architecture", ("glue", "paper"): "architecture", ("image", "paper"): "torch"}
    assert rules == dict.fromkeys(rules, "width") | known


@pytest.mark.parametrize("task", ["mlm", "image", "lra"])
def test_attention_does_not_begin_flat(task: str) -> None:
    """Queries and keys of the first layer have a spread near 1, where weights of .02 leave a fifth of it."""
    config = recipe(task, "tiny", "softmax")
    sizes = Sizes(vocabulary=300, padding=1, labels=2, channels=1)
    torch.manual_seed(0)
    spreads = []
    for rule in ("width", "architecture"):
        given = dataclasses.replace(config, model=dataclasses.replace(config.model, width=64, initialisation=rule))
        model = build(given, sizes).eval()
        query = next(m for n, m in model.named_modules() if n.endswith(("query", "q_proj")))
        normed = torch.nn.functional.layer_norm(torch.randn(500, 64), (64,))
        spreads.append(float(query(normed).detach().std()))
    assert spreads[0] == pytest.approx(1.0, rel=0.1)
    assert spreads[1] < 0.25


def test_a_config_of_today_says_more_and_one_of_before_says_what_it_said() -> None:
    now = recipe("mlm", "tiny").to_dict()
    assert (now["model"]["initialisation"], now["data"]["windows"]) == ("width", True)
    before = as_before(recipe("mlm", "tiny")).to_dict()
    assert "initialisation" not in before["model"]
    assert "windows" not in before["data"]
    same = {"model.initialisation": "architecture", "data.windows": "no"}
    assert change(recipe("mlm", "tiny"), same).to_dict() == before
    for task in ("lra", "needles"):  # whose rule it was
        assert recipe(task, "tiny").to_dict() == as_before(recipe(task, "tiny")).to_dict()
    with pytest.raises(ValueError, match="initialisation must be one of width, architecture, torch; got 'zeros'"):
        change(recipe("mlm"), {"model.initialisation": "zeros"})
    with pytest.raises(ValueError, match="windows goes with mlm"):
        change(recipe("image"), {"data.windows": "yes"})


def test_a_run_that_was_begun_before_goes_on_as_it_was(tmp_path: Path, cache: Path) -> None:
    """Bit for bit, with a sentence that says so; the same settings asked for otherwise are refused."""
    today = make_tiny(SHORT, "softmax")
    earlier = as_before(today)
    train(earlier, tmp_path / "whole", cache_dir=cache)
    with pytest.raises(Stop):
        train(earlier, tmp_path / "parts", cache_dir=cache, progress=stop_at(5))
    said: list[str] = []
    result = train(today, tmp_path / "parts", cache_dir=cache, say=said.append)
    assert any("was begun with an earlier release and goes on with its settings" in text for text in said)
    assert json.loads((tmp_path / "parts" / CONFIG).read_text()) == earlier.to_dict()
    assert result["metrics"] == json.loads((tmp_path / "whole" / "result.json").read_text())["metrics"]
    with pytest.raises(ValueError, match=r"holds a run with other settings: .*initialisation"):
        train(change(today, {"model.initialisation": "torch"}), tmp_path / "whole", cache_dir=cache)


@pytest.fixture
def texts(cache: Path) -> Any:
    tokenizer = train_tokenizer(read("embedded/prose", "validation"), vocab_size=700, cache_dir=cache)
    given: dict[str, Any] = {"length": 65, "masking": Masking(), "cache_dir": cache}
    return lambda **more: load_text("embedded/prose", "validation", tokenizer, **(given | more))


def test_windows_are_pieces_of_the_text_from_random_places(texts: Any) -> None:
    windows, fixed = texts(windows=True, masking=None), texts(masking=None)
    assert len(windows) == len(fixed)
    tokens = windows.placed.tokens
    starts = []
    for epoch in range(3):
        for index in range(20):
            found = windows.item(index, epoch)["input_ids"].numpy()
            assert found[0] == windows.tokenizer.start_id
            at = tokens.tobytes().find(found[1:].astype(tokens.dtype).tobytes())
            assert at >= 0
            starts.append(at // tokens.itemsize)
    assert len(set(starts)) > 55  # each epoch others
    assert len({start % 64 for start in starts}) > 25  # and on no grid
    assert windows.fingerprint != fixed.fingerprint
    again, other = texts(windows=True, masking=None), texts(windows=True, masking=None, seed=1)
    assert torch.equal(again.item(3, 2)["input_ids"], windows.item(3, 2)["input_ids"])
    assert not torch.equal(other.item(3, 2)["input_ids"], windows.item(3, 2)["input_ids"])


def test_windows_are_for_training_alone(cache: Path) -> None:
    data = load(recipe("mlm", "tiny"), cache_dir=cache)
    assert data.train.windows  # type: ignore[attr-defined]
    assert not any(part.windows for part in data.evaluations.values())  # type: ignore[attr-defined]
    assert data.guess == load(as_before(recipe("mlm", "tiny")), cache_dir=cache).guess


@pytest.mark.parametrize("graph", ["no", "yes"])
def test_a_run_with_windows_goes_on_to_the_bit(graph: str, tmp_path: Path, cache: Path) -> None:
    config = make_tiny(SHORT, "softmax", graph=graph)
    assert config.data.windows
    assert_goes_on(config, tmp_path, cache, stop=5)


def test_what_is_generated_is_judged_by_many_examples() -> None:
    for preset in ("mini", "paper"):
        counts = {name: recipe("lra", preset, name=name).data.evaluation for name in NAMES["lra"]}
        assert counts == dict.fromkeys(counts, 0) | {"listops": EVALUATED, "pathfinder": EVALUATED}
    assert EVALUATED >= 20_000


def test_the_papers_vision_transformer_is_that_of_the_released_script() -> None:
    config = recipe("image", "paper", "softmax")
    assert (config.data.length // config.model.patch) ** 2 + 1 == 1025
    assert config.data.options == {"augment": True}
    assert config.precision == "float16"
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=1))
    torch.manual_seed(0)
    model = build(small, Sizes(labels=2, channels=3))
    assert model.base_model.embeddings.position_embeddings.shape[1] == 1025
    query = next(m for n, m in model.named_modules() if n.endswith(("query", "q_proj")))
    assert float(query.weight.detach().abs().max()) <= 128**-0.5  # torch's own: uniform up to 1 / sqrt(inputs)
    assert float(query.weight.detach().std()) == pytest.approx((3 * 128) ** -0.5, rel=0.05)
