"""A run's folder: what is half-written or changed is noticed, and nothing that was whole is lost."""

import json
from pathlib import Path

import pytest

from lln.lab.recipes import NAMES, RECIPES, recipe
from lln.lab.train.config import Config, change
from lln.lab.train.run_folder import Run, find_damage, list_facts, seal


def begin(path: Path) -> Run:
    run = Run(path, CONFIG)
    run.begin()
    return run


CONFIG = {"task": "mlm", "optimisation": {"steps": 3, "betas": (0.9, 0.98)}}


def checkpoint(run: Run, step: int, sealed: bool = True) -> Path:
    folder = run.path / f"checkpoint-{step}"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(step)))
    (folder / "inner" / "state.json").write_text("{}")
    if sealed:
        seal(folder)
    return folder


def test_the_same_config_finds_its_run_again(tmp_path: Path) -> None:
    assert not (Run(tmp_path / "run", CONFIG).path).exists()  # nothing is written before it begins
    begin(tmp_path / "run")
    assert Run(tmp_path / "run", CONFIG).read("result.json") is None
    with pytest.raises(ValueError, match=r"optimisation.steps is 3 there and 4 here"):
        Run(tmp_path / "run", {"task": "mlm", "optimisation": {"steps": 4, "betas": (0.9, 0.98)}})
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optimisation"]["steps"] == 3


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is no run"):
        Run(tmp_path, CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        Run(tmp_path / "thesis.tex", CONFIG)


@pytest.mark.parametrize("harm", ["no manifest", "cut", "changed", "gone", "manifest cut"])
def test_a_broken_checkpoint_gives_way_to_the_last_good_one(tmp_path: Path, harm: str) -> None:
    run = begin(tmp_path / "run")
    checkpoint(run, 9)
    good = checkpoint(run, 10)
    bad = checkpoint(run, 100, sealed=harm != "no manifest")  # the newest by number, not by name
    if harm == "cut":
        (bad / "model.safetensors").write_bytes(b"\0")
    elif harm == "changed":
        (bad / "model.safetensors").write_bytes(bytes(reversed(range(100))))
    elif harm == "gone":
        (bad / "inner" / "state.json").unlink()
    elif harm == "manifest cut":
        (bad / "manifest.json").write_text("{")
    said: list[str] = []
    assert run.find_newest(said.append) == good
    assert len(said) == 1
    assert "checkpoint-100 is not whole" in said[0]
    assert not bad.exists()
    assert find_damage(good) is None


def test_facts_are_stored_as_soon_as_a_run_begins(tmp_path: Path) -> None:
    first = recipe("mlm", "tiny", "elu_diag")
    run = Run(tmp_path / "first", first.to_dict(), list_facts(first))
    run.begin()
    wanted = {
        "task": "mlm", "name": "", "preset": "tiny", "attention": "elu", "label": "elu_diag", "seed": 0, "length": 128,
        "start": None,
    }  # fmt: skip
    assert run.read("facts.json") == wanted
    asked = {"seed": "3", "model.start": str(tmp_path / "first" / "model"), "attention.options.alpha": "2"}
    second = list_facts(change(recipe("glue", "tiny", "lln", "sst2"), asked))
    assert second["start"] == {"folder": "first", "task": "mlm", "seed": 0, "length": 128}
    assert (second["label"], second["seed"], second["name"]) == ("lln:alpha=2", 3, "topics")
    foreign = list_facts(change(recipe("glue"), {"model.start": "roberta/model"}))
    assert foreign["start"] == {"folder": "roberta", "task": None, "seed": None, "length": None}


@pytest.mark.parametrize("preset", ["tiny", "mini", "paper"])
@pytest.mark.parametrize(
    ("asked", "options", "label"),
    [
        ("lln_diag", {}, "lln_diag"),
        ("elu", {"block_size": "7"}, "elu:block_size=7"),
        ("elu_diag", {}, "elu_diag"),
        ("lln", {"statistics": "running", "matching": "entropy"}, "lln:matching=entropy:statistics=running"),
        ("softmax", {"convolution": "5"}, "softmax:convolution=5"),
    ],
)
def test_a_label_shows_what_is_not_the_presets_own(
    asked: str, options: dict[str, str], label: str, preset: str
) -> None:
    config = change(recipe("mlm", preset, asked), {f"attention.options.{k}": v for k, v in options.items()})
    assert config.attention.label == label
    assert "preset" not in config.to_dict()["attention"]


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    (run.path / "checkpoint-draft").mkdir()
    assert run.find_newest(lambda text: None) is None


def test_metrics_after_a_checkpoint_are_taken_back_and_half_lines_dropped(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    for step in (1, 2, 3):
        run.log({"step": step, "loss": float("nan") if step == 2 else 0.5})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [m["step"] for m in run.read_metrics()] == [1, 2, 3]
    run.go_back(2)
    assert run.read_metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": "nan"}]
    run.log({"step": 3, "loss": 0.25})
    assert run.read_metrics()[-1] == {"step": 3, "loss": 0.25}


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    with run.lock(), pytest.raises(ValueError, match="another process"), Run(tmp_path / "run", CONFIG).lock():
        pass
    with run.lock():
        pass


@pytest.mark.parametrize(
    ("task", "preset"), [(task, preset) for task, presets in RECIPES.items() for preset in presets]
)
def test_every_recipe_is_complete_and_plain(task: str, preset: str) -> None:
    for name in NAMES.get(task, [None]):
        config = recipe(task, preset, "softmax", name)
        assert isinstance(config, Config)
        assert config.attention.name == "softmax"
        assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_changes_that_go_together_may_come_in_any_order() -> None:
    for names in (("width", "heads"), ("heads", "width")):
        values = {"width": "35", "heads": "7"}
        made = change(recipe("mlm", "mini"), {f"model.{name}": values[name] for name in names})
        assert (made.model.width, made.model.heads) == (35, 7)
    with pytest.raises(ValueError, match=r"model.width must be a multiple of model.heads; got 35 and 6"):
        change(recipe("mlm", "mini"), {"model.width": "35"})
    assert recipe("mlm", "mini").model.width == 384


def test_options_are_changed_by_name() -> None:
    changes = {"optimisation.rate": "3e-4", "attention.options.matching": "entropy", "compile": "yes"}
    config = change(
        recipe("mlm"), {"record_every": "0"} | changes | {"optimisation.betas": ".9,.95", "model.layers": "3"}
    )
    assert config.optimisation.rate == 3e-4
    assert config.optimisation.betas == (0.9, 0.95)
    assert config.attention.options == {"block_size": 32, "matching": "entropy"}
    assert config.compile
    assert config.model.layers == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("optimisation.rat", "1", "'rat' is none of steps"),
        ("optimisation", "1", "is a group of options"),
        ("seed.deep", "1", "has no options of its own"),
        ("optimisation.steps", "1.5", "must be a whole number; got '1.5'"),
        ("compile", "maybe", "must be yes or no"),
        ("model.heads", "5", "model.width must be a multiple of model.heads"),
        ("save_every", "15", "save_every must be a multiple of log_every"),
        ("precision", "int8", "precision must be"),
        ("compile", "yes", "record_every must be 0 with compile"),
        ("optimisation.betas", "1", "two numbers"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(recipe("mlm"), {name: text})


def test_unknown_recipes_are_refused() -> None:
    for arguments, message in (
        (("audio",), "task must be one of mlm, glue, image, lra"),
        (("mlm", "huge"), "preset must be one of tiny, mini, paper"),
        (("lra", "tiny", "lln", "chess"), "lra has the tasks listops"),
        (("mlm", "tiny", "lln", "sst2"), "mlm is one task"),
    ):
        with pytest.raises(ValueError, match=message):
            recipe(*arguments)
