"""Needles in text: only the needle tells a value, wherever it stands; and `lln reproduce lengths` from end to end."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.command import Answer, run_command
from helpers.fake_runs import list_jobs, make_asked
from helpers.runs import Stop, stop_at
from lln.lab.core.tables import write_csv
from lln.lab.data.examples import IGNORE, Stream
from lln.lab.data.needles import Needles, Planting, average_by_distance, score_answers
from lln.lab.paper import run_jobs as driver
from lln.lab.paper.experiments import EXPERIMENTS
from lln.lab.paper.needle_lengths import assemble_lengths, parse_lengths, write_lengths
from lln.lab.paper.run_records import find_runs
from lln.lab.recipes import recipe
from lln.lab.recipes.needles import set_length
from lln.lab.train.config import Config, change
from lln.lab.train.graph import Feed
from lln.lab.train.loop import Pace
from lln.lab.train.models import Sizes, build
from lln.lab.train.objective import Guesses
from lln.lab.train.run import train
from lln.lab.train.tasks import load

TEXT = np.arange(10, 90, dtype=np.uint16)  # no token twice, so that a place in the text can be told


class Letters:
    """A tokenizer of 100 tokens, as far as needles know it."""

    vocab_size, start_id, mask_id, pad_id = 100, 0, 4, 1


def needles(length: int = 64, planting: Planting | None = None, *, seed: int = 0, split: str = "train") -> Needles:
    return Needles(
        TEXT, Letters(), length=length, count=50, planting=planting or Planting(8, 4, 16, 4), seed=seed, split=split,  # type: ignore[arg-type]
        identity={"name": "letters"}, notes=[],
    )  # fmt: skip


plantings = st.builds(
    Planting, needles_every=st.integers(4, 40), questions_every=st.integers(4, 40), keys=st.integers(1, 30),
    values=st.integers(2, 9),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(40, 200), plantings, st.integers(0, 5), st.integers(0, 3))
def test_every_question_has_one_needle_and_all_else_is_text(
    length: int, planting: Planting, seed: int, epoch: int
) -> None:
    data = needles(length, planting, seed=seed)
    item = data.item(7, epoch)
    ids, labels = item["input_ids"].numpy(), item["labels"].numpy()
    assert ids.shape == labels.shape == (length,)
    assert ids[0] == Letters.start_id
    is_question = (ids >= 100) & (ids < 100 + planting.keys)
    is_needle = ids >= 100 + planting.keys
    assert is_question.sum() == length // planting.questions_every
    assert is_needle.sum() == min(length // planting.needles_every, planting.keys)
    assert ids.max() < data.vocab_size
    np.testing.assert_array_equal(labels != IGNORE, is_question)
    key, value = np.divmod(ids[is_needle] - 100 - planting.keys, planting.values)
    assert len(set(key)) == len(key)
    by_key = dict(zip(key.tolist(), ids[is_needle].tolist(), strict=True))
    for question, answer in zip(ids[is_question].tolist(), labels[is_question].tolist(), strict=True):
        assert by_key[question - 100] == answer
        assert (ids == answer).sum() == 1
    assert value.max() < planting.values
    # Needles are asked for equally often.
    often = np.bincount(ids[is_question] - 100, minlength=planting.keys)[key]
    assert often.max() - often.min() <= 1
    # Between them the text goes on, round and round.
    text = ~(is_question | is_needle)
    text[0] = False
    places = np.flatnonzero(text)
    start = int(ids[places[0]]) - 10 - places[0]
    np.testing.assert_array_equal(ids[places], 10 + (start + places) % len(TEXT))


def test_sequences_depend_on_seed_split_epoch_and_index_alone() -> None:
    def show(seed: int = 0, split: str = "train", index: int = 3, epoch: int = 0) -> list[int]:
        return needles(seed=seed, split=split).item(index, epoch)["input_ids"].tolist()

    assert show() == show()
    others = [show(seed=1), show(split="validation"), show(index=4), show(epoch=1)]
    assert all(other != show() for other in others)
    data = needles()
    batch = data.make_batch(np.array([5, 3, 3]), np.array([0, 0, 2]))
    assert batch["input_ids"][1].tolist() == show()
    assert batch["input_ids"][2].tolist() == show(epoch=2)
    assert needles().fingerprint == data.fingerprint
    assert len({needles(seed=1).fingerprint, needles(split="test").fingerprint, needles(96).fingerprint}) == 3


def test_neither_key_nor_place_nor_what_stands_beside_tells_the_value() -> None:
    """Over many sequences each value follows each key, and each kind of place, about equally often."""
    data = needles(planting=Planting(16, 16, 4, 2))  # 4 needles of 2 values
    batch = data.make_batch(np.arange(50).repeat(20), np.tile(np.arange(20), 50))
    ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    at = labels != IGNORE
    value = (labels[at] - 104) % 2
    question, place = ids[at] - 100, np.nonzero(at)[1]
    for group in [*(question == k for k in range(4)), place < 32, place >= 32, place % 2 == 0]:
        assert abs(value[group].mean() - 0.5) < 0.06
    first = np.argmax(ids >= 104, 1)  # the first needle of a sequence tells nothing of the others
    of_first = (ids[np.arange(len(ids)), first] - 104) % 2
    same = (labels - 104) % 2 == of_first[:, None]
    others = at & (labels != ids[np.arange(len(ids)), first][:, None])
    assert abs(same[others].mean() - 0.5) < 0.06


@pytest.mark.parametrize("count", [1, 2, 5])
def test_values_are_as_likely_however_few_needles_there_are(count: int) -> None:
    data = needles(planting=Planting(12, 12, count, 4))
    batch = data.make_batch(np.arange(50).repeat(20), np.tile(np.arange(20), 50))
    labels = batch["labels"].numpy()
    value = (labels[labels != IGNORE] - 100 - count) % 4
    assert np.bincount(value, minlength=4) / len(value) == pytest.approx([0.25] * 4, abs=0.04)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("foo=1", "data.options: needles have needles_every, questions_every, keys, values; got 'foo'."),
        ("keys=many", "keys must be a positive int; got 'many'."),
        ("keys=2.5", "keys must be a positive int; got 2.5."),
        ("values=1", "values must be an int of at least 2; got 1."),
    ],
)
@pytest.mark.parametrize("command", [["train", "needles"], ["reproduce", "lengths"]])
def test_odd_options_are_refused_before_anything_runs(
    command: list[str], option: str, sentence: str, tmp_path: Path
) -> None:
    asked = [*command, "--set", f"data.options.{option}", "--dry-run", "--out", str(tmp_path / "x")]
    done = run_command(*asked, columns=300)
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.replace("│", " ").split())


def test_learned_positions_go_with_one_length_and_no_judging_means_the_usual(tmp_path: Path) -> None:
    asked = ["reproduce", "lengths", "--set", "model.positions=learned", "--dry-run", "--out", str(tmp_path / "x")]
    done = run_command(*asked, columns=300)
    assert done.exit_code == 2
    assert "model.positions: a model that goes on" in " ".join(done.output.replace("│", " ").split())
    done = run_command(*asked, "--set", "lengths=128")
    assert done.exit_code == 0, done.output
    config = change(recipe("needles", "tiny", "lln"), {"data.evaluation": "0"})
    assert set_length(config, 512).data.evaluation == 0


def test_places_are_spread_over_the_sequence_and_distances_are_told() -> None:
    data = needles(200, Planting(20, 10, 10, 5))
    found = data.measure_distances()
    assert found.shape == (50, 20)
    for index in range(50):
        item = data.item(index)
        ids, labels = item["input_ids"].tolist(), item["labels"]
        places = torch.nonzero(labels != IGNORE).flatten().tolist()
        expected = [abs(place - ids.index(int(labels[place]))) for place in places]
        assert found[index].tolist() == expected
    # Two places drawn from 1 .. 199 lie 200/3 apart on average.
    assert abs(found.mean() - 200 / 3) < 6
    assert found.max() > 150
    batch = data.make_batch(np.arange(50), np.zeros(50, np.int64))
    held = torch.nonzero(batch["input_ids"] >= 110)[:, 1].float()
    assert abs(held.mean() - 100) < 12
    assert held.min() < 12
    assert held.max() > 188


def test_accuracy_is_told_by_distance() -> None:
    data = needles(400, Planting(20, 10, 10, 5))
    batch = data.make_batch(np.arange(50), np.zeros(50, np.int64))
    labels, distances = batch["labels"], data.measure_distances()
    logits = torch.zeros(50, 400, data.vocab_size)
    at = torch.nonzero(labels != IGNORE)
    near = torch.from_numpy(distances.reshape(-1) <= 64)
    for (row, place), known in zip(at.tolist(), near.tolist(), strict=True):
        logits[row, place, labels[row, place] if known else 5] = 9.0
    found = score_answers(logits, labels).numpy()
    assert found.shape == (50, 40, 2)
    guesses = Guesses(torch.nn.Identity(), data.questions / 400)  # a head that saw the questions alone says the same
    with guesses.narrow(labels):
        (few,) = guesses.pick(guesses, (logits,)) or ()  # type: ignore[arg-type]
    assert few.shape[1] < 60
    np.testing.assert_array_equal(score_answers(few, labels).numpy(), found)
    scores = average_by_distance(found, distances)
    assert scores["to_64_accuracy"] == 1.0
    assert scores["to_256_accuracy"] == scores["to_1024_accuracy"] == 0.0
    assert scores["accuracy"] == pytest.approx(float(near.float().mean()))
    picked = logits[labels != IGNORE].double()
    expected = torch.nn.functional.cross_entropy(picked, labels[labels != IGNORE])
    assert scores["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert set(scores) == {"accuracy", "loss", "to_64_accuracy", "to_256_accuracy", "to_1024_accuracy"}


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ValueError, match="values must be an int of at least 2; got 1"):
        Planting(values=1)
    with pytest.raises(ValueError, match="needles_every must be a positive int; got 0"):
        Planting(needles_every=0)
    with pytest.raises(ValueError, match="room for a needle, a question and the start token; got 20 with 0 needles"):
        needles(20, Planting(64, 8, 4, 2))
    with pytest.raises(ValueError, match="got 8 with 8 needles and 8 questions"):
        needles(8, Planting(1, 1, 8, 2))


def test_batches_on_the_device_are_the_streams_own() -> None:
    stream = Stream(needles(), seed=3, length=40)
    feed = Feed(stream, 4, torch.device("cpu"))
    for step in range(10):
        feed.seek(step)
        found = feed.batch()
        expected = stream.__getitems__(range(4 * step, 4 * step + 4))
        for name in ("input_ids", "labels"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


def test_the_head_sees_every_question() -> None:
    for length, every in ((64, 4), (63, 5), (1000, 7), (8191, 32)):
        data = needles(length, Planting(50, every, 16, 4))
        labels = data.item(0)["labels"][None]
        guesses = Guesses(torch.nn.Identity(), data.questions / length)
        with guesses.narrow(labels) as chosen:
            assert int((chosen != IGNORE).sum()) == data.questions
            assert chosen.shape[1] <= data.questions + 2


# The model


def positions(kind: str, width: int = 16) -> torch.nn.Embedding:
    config = change(
        recipe("needles", "tiny", "softmax"),
        {"model.positions": kind, "model.width": str(width), "model.heads": "2", "data.length": "40"},
    )
    found: torch.nn.Embedding = build(config, Sizes(50, padding=1)).base_model.embeddings.position_embeddings
    return found


def test_positions_are_learned_fixed_waves_or_none() -> None:
    learned, waves, none = positions("learned"), positions("sinusoidal"), positions("none")
    assert learned.weight.requires_grad
    assert not waves.weight.requires_grad
    assert not none.weight.requires_grad
    assert none.weight.abs().max() == 0.0
    table = waves.weight.double() / (16**-0.5 * 2**0.5)
    for place, channel in ((0, 0), (3, 0), (17, 4), (40, 7)):
        angle = place / 10_000 ** (2 * (channel // 2) / 16)
        assert float(table[place, channel]) == pytest.approx(np.cos(angle) if channel % 2 else np.sin(angle), abs=1e-5)
    # A step to the right is the same rotation everywhere: dot products depend on distance alone.
    products = table @ table.T
    torch.testing.assert_close(products[5, 9], products[20, 24], rtol=1e-5, atol=1e-5)


def test_positions_that_cannot_be_are_refused_and_learned_ones_leave_no_trace_in_a_config() -> None:
    with pytest.raises(ValueError, match="positions must be one of learned, sinusoidal, none; got 'rotary'"):
        change(recipe("needles"), {"model.positions": "rotary"})
    with pytest.raises(ValueError, match=r"model\.positions must be learned in models of lra; got 'none'"):
        change(recipe("lra"), {"model.positions": "none"})
    # Runs from before there was a choice are found and gone on with.
    assert "positions" not in recipe("mlm").to_dict()["model"]
    assert recipe("needles").to_dict()["model"]["positions"] == "none"


def test_another_length_is_the_same_work() -> None:
    config = recipe("needles", "mini", "lln_diag")
    for length in (512, 8192, 32768):
        other = set_length(config, length)
        assert other.optimisation.batch * length == 32768
        assert other.data.evaluation * length == config.data.evaluation * config.data.length
        assert other.model == config.model
        assert other.optimisation.steps == config.optimisation.steps
    for wrong in (0, 500, 65536):
        with pytest.raises(ValueError, match=f"lengths must divide the 32768 tokens of a step; got {wrong}"):
            set_length(config, wrong)
    with pytest.raises(ValueError, match="needles has the presets tiny, mini; got 'paper'"):
        recipe("needles", "paper")


EASY = {
    "model.layers": "2", "model.width": "32", "model.heads": "1", "model.inner": "32", "data.length": "32",
    "data.options.keys": "8", "data.options.values": "4", "data.options.needles_every": "8",
    "data.options.questions_every": "4", "data.vocabulary": "300", "data.evaluation": "64", "optimisation.batch": "32",
    "optimisation.steps": "200", "optimisation.rate": "6e-3", "optimisation.warmup": "20", "save_every": "200",
    "evaluate_every": "200",
}  # fmt: skip


def make_easy(attention: str = "softmax", **changes: str) -> Config:
    return change(recipe("needles", "tiny", attention), EASY | {k.replace("__", "."): v for k, v in changes.items()})


def test_softmax_learns_to_find_needles(tmp_path: Path, cache: Path) -> None:
    result = train(make_easy(), tmp_path, cache_dir=cache)
    assert result["guess"]["accuracy"] == 0.25
    assert result["metrics"]["accuracy"] > 0.9
    assert result["metrics"]["accuracy"] == pytest.approx(result["metrics"]["to_64_accuracy"])
    assert result["step_seconds"] > 0


def test_a_stopped_run_and_one_with_a_graph_end_like_a_whole_one(tmp_path: Path, cache: Path) -> None:
    short = {"optimisation__steps": "20", "save_every": "10", "evaluate_every": "10", "data__evaluation": "8"}
    whole = train(make_easy("lln_diag", **short), tmp_path / "whole", cache_dir=cache)

    with pytest.raises(Stop):
        train(make_easy("lln_diag", **short), tmp_path / "stopped", cache_dir=cache, progress=stop_at(14))
    resumed = train(make_easy("lln_diag", **short), tmp_path / "stopped", cache_dir=cache)
    graph = train(make_easy("lln_diag", graph="yes", **short), tmp_path / "graph", cache_dir=cache)
    assert whole["metrics"] == resumed["metrics"] == graph["metrics"]


def test_the_splits_differ_in_text_and_needles(cache: Path) -> None:
    data = load(make_easy(), None, cache)
    (evaluation,) = data.evaluations.values()
    assert isinstance(data.train, Needles)
    assert isinstance(evaluation, Needles)
    assert data.train.key != evaluation.key
    assert not np.array_equal(data.train.tokens[:200], evaluation.tokens[:200])
    assert data.sizes.vocabulary == 300 + 8 + 32


def test_a_pace_leaves_out_what_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 30.0, 32.0, 60.0, 63.0])
    monkeypatch.setattr("lln.lab.train.loop.time.perf_counter", lambda: next(clock))
    pace = Pace()
    pace.look(10)
    pace.look(20)  # 2 s a step: the first stretch, left out
    pace.look(30)  # 0.2 s a step
    pace.pause()
    pace.look(40)
    pace.look(50)  # 0.3 s a step
    assert pace.median() == pytest.approx(0.25)
    assert Pace().median() is None


# lln reproduce lengths

SHORT = [
    *(f"{name}={value}" for name, value in EASY.items()), "optimisation.steps=30", "save_every=30", "log_every=10",
    "data.evaluation=8", "optimisation.batch=8",
]  # fmt: skip


def reproduce(*arguments: str | Path, cache: Path) -> Answer:
    changes = [word for text in SHORT for word in ("--set", text)]
    environment = {"LLN_CACHE": os.fspath(cache), "LLN_DATA_ROOT": ""}
    return run_command("reproduce", "lengths", *arguments, "--device", "cpu", *changes, environment=environment)


def test_lengths_from_the_command_to_the_table_and_nothing_twice(tmp_path: Path, cache: Path) -> None:
    asked_for: list[str | Path]
    asked_for = ["--attentions", "softmax,block_diagonal,lln_diag", "--set", "lengths=32,64", "--out", tmp_path]
    dry = reproduce(*asked_for, "--dry-run", cache=cache)
    assert dry.exit_code == 0, dry.output
    assert "needles-64-after-32-tiny-lln_diag-seed0: new" in dry.stdout
    first = reproduce(*asked_for, cache=cache)
    assert first.exit_code == 0, first.output
    result = json.loads((tmp_path / "lengths.json").read_text())
    assert result["lengths"] == [32, 64]
    assert result["attentions"] == ["softmax", "block_diagonal", "lln_diag"]
    for cell in result["cells"]:
        name = "needles-32" if cell["length"] == 32 else "needles-64-after-32"
        folder = tmp_path / "runs" / f"{name}-tiny-{cell['attention']}-seed0"
        stored = json.loads((folder / "result.json").read_text())
        assert cell["accuracy"]["mean"] == 100 * stored["metrics"]["accuracy"]
        assert cell["loss"]["mean"] == stored["metrics"]["loss"]
        assert cell["step_seconds"] == stored["step_seconds"]
        assert stored["config"]["optimisation"]["batch"] * cell["length"] == 256
    assert len(result["cells"]) == 6
    assert (tmp_path / "lengths.md").read_text() in first.stdout
    said = "- 64 tokens: 10 steps of 4 sequences, judged on 4 others, going on from the model of 32 tokens."
    assert said in first.stdout
    assert "<svg" in (tmp_path / "lengths-accuracy-against-length.svg").read_text()
    rows = list(csv.DictReader((tmp_path / "lengths.csv").read_text().splitlines()))
    assert write_csv(result["rows"]) == (tmp_path / "lengths.csv").read_text()
    assert len(rows) == 6
    again = reproduce(*asked_for, cache=cache)
    assert again.exit_code == 0
    assert "all 6 runs are there (6 finished)" in again.stderr
    drawn = reproduce("--from", tmp_path, *asked_for[:2], "--out", tmp_path / "other", "--no-charts", cache=cache)
    assert drawn.exit_code == 0, drawn.output
    assert json.loads((tmp_path / "other" / "lengths.json").read_text())["cells"] == result["cells"]
    assert not list((tmp_path / "other").glob("*.svg"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lengths=32,x"], "lengths must be numbers of tokens, like 512,2048; got '32,x'"),
        (["--set", "lengths=100"], "lengths must divide the 256 tokens of a step; got 100"),
        (["--scale", "paper"], "needles has the presets tiny, mini; got 'paper'"),
    ],
)
def test_lengths_that_cannot_be_are_refused(arguments: list[str], message: str, tmp_path: Path, cache: Path) -> None:
    found = reproduce(*arguments, "--out", tmp_path, cache=cache)
    assert found.exit_code == 2
    assert message in found.stderr


def test_a_length_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = make_asked(tmp_path, attentions=("softmax", "lln_diag", "block_diagonal"), seeds=2, lengths=(128, 256))
    numbers = {"softmax": 0.9, "lln_diag": 0.6, "block_diagonal": 0.3}

    def train(config: Config, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        if config.attention.name == "softmax" and config.data.length == 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        accuracy = numbers[config.attention.name] + 0.02 * config.seed
        metrics = {"accuracy": accuracy, "loss": 1.0, "to_64_accuracy": accuracy, "to_256_accuracy": 0.25}
        found = {"metrics": metrics, "guess": {"accuracy": 0.25}, "parameters": 1, "notes": ["A note."]}
        about = {"device": "a machine", "commit": "abc"}
        found |= {"step_seconds": 0.004, "seconds": 1.0, "provenance": about}
        (folder / "result.json").write_text(json.dumps(found))

    monkeypatch.setattr(driver, "train", train)
    driver.run_jobs(list_jobs("lengths", what), tmp_path, device="cpu")
    result = assemble_lengths(EXPERIMENTS["lengths"], what, find_runs(tmp_path), {})
    result["provenance"] = {"date": "2026-01-01", "commit": "abc", "command": "lln"}
    text = write_lengths(json.loads(json.dumps(result, allow_nan=False)))
    assert "| softmax | 91.0 ± 1.4 (2) | failed |" in text
    assert "| lln_diag | 61.0 ± 1.4 (2) | 61.0 ± 1.4 (2) |" in text
    assert "| a guess | 25.0 | 25.0 |" in text
    assert "| lln_diag | 4 | 4 |" in text
    assert "softmax-seed0, needles-256-after-128-tiny-softmax-seed1 failed: out of memory" in text
    assert "- 256: lln_diag - block_diagonal = +30.0 (beyond the noise, noise" in text
    assert "- 256: lln_diag - softmax" not in text
    assert [r for r in result["rows"] if r["length"] == 256 and r["series"] == "softmax"] == []
    assert len(result["failed"]) == 2


def test_lengths_are_read_from_text() -> None:
    assert parse_lengths("2048, 512,512") == (512, 2048)
    assert parse_lengths("") == ()


def test_a_model_to_begin_from_must_be_there_and_have_the_same_shape(tmp_path: Path) -> None:
    asked = ["train", "needles", "--set", "optimisation.steps=2", "--set", "data.evaluation=4", "--out"]
    done = run_command(*asked, tmp_path / "a")
    assert done.exit_code == 0, done.output
    start = ["--start", str(tmp_path / "a" / "model")]
    other = ["--set", "data.options.keys=8"]
    done = run_command(*asked, tmp_path / "b", *start, *other)
    assert done.exit_code == 2
    assert "has a vocab_size of 592; got settings (model, data.options) with 552." in done.output
    for more in ([], ["--dry-run"]):
        done = run_command(*asked, tmp_path / "c", "--start", tmp_path / "none", *more)
        assert done.exit_code == 2
        assert "none holds no saved model (no config.json)." in done.output
