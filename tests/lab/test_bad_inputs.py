"""Bad input of the command line is refused in a sentence that names it, before anything is written; see the table in
`helpers.bad_inputs`."""

import typing
from pathlib import Path
from typing import Annotated

import pytest

from helpers.bad_inputs import (
    BY_HAND,
    Bad,
    judge,
    lay_out,
    list_bad_inputs,
    list_fields,
    make_options,
    take_stock,
    train,
)
from helpers.command import run_command
from lln.lab.cli.app import app
from lln.lab.recipes import recipe

TABLE = list_bad_inputs()
ROWS = 100  # a test: pytest takes longer for a test than a refusal takes


def refuse(rows: list[Bad], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with how each is refused."""
    found = []
    for number, bad in enumerate(rows):
        place = folder / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        before = lay_out(bad, place)
        try:
            answer = run_command(*bad.arguments, columns=1000)
            wrong = judge(bad, answer.exit_code, answer.output, before, take_stock(place))
        except Exception as error:  # a user would see a traceback
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            found.append(f"lln {' '.join(bad.arguments)}: {wrong}")
    return found


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LLN_DATA_ROOT", raising=False)


def test_what_stands_in_the_table_by_hand_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    assert not refuse(list(BY_HAND), tmp_path / "rows", monkeypatch)


def test_some_of_what_options_say_of_themselves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    assert not refuse(TABLE[: -len(BY_HAND)][::5], tmp_path / "rows", monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, len(TABLE), ROWS))
def test_the_whole_table_is_refused(start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows").mkdir()
    assert not refuse(TABLE[start : start + ROWS], tmp_path / "rows", monkeypatch)


def test_the_table_is_a_long_one() -> None:
    assert len(TABLE) >= 400
    assert {row.arguments[0] for row in make_options()} >= {
        registered.callback.__name__ for registered in app.registered_commands if registered.callback
    } - {"info"}


def test_every_number_of_a_config_declares_its_range() -> None:
    """In one place: where the option is."""
    bare = [name for name, kind, rule in list_fields(recipe("mlm")) if kind in (int, float, tuple) and rule is None]
    assert not bare


def test_every_number_of_a_command_declares_its_range() -> None:
    """Those that do not are finite and looked at by what they are for."""
    bare = []
    for registered in app.registered_commands:
        assert registered.callback is not None
        for name, hint in typing.get_type_hints(registered.callback, include_extras=True).items():
            if typing.get_origin(hint) is not Annotated:
                continue
            kind, info = typing.get_args(hint)
            numbers = {int, float} & {kind, *typing.get_args(kind)}
            if numbers and info.min is None:
                bare.append(f"{registered.callback.__name__} {name}")
    assert bare == ["convert rate", "convert fine_rate"]


def test_a_table_that_is_too_kind_is_found_out(tmp_path: Path) -> None:
    """`judge` fails where it should."""
    bad = train({"model.heads": "0"}, "model.heads")
    assert judge(bad, 2, "model.heads must be a positive int; got 0.", {}, {}) is None
    assert judge(bad, 0, "model.heads", {}, {}) == "exit code 0"
    assert judge(bad, 2, "heads", {}, {}) == "it does not say 'model.heads'"
    assert judge(bad, 2, "Traceback model.heads", {}, {}) == "it says 'Traceback'"
    assert judge(bad, 2, "model.heads", {}, {"out/.lock": b""}) == "it leaves ['out/.lock']"
    assert judge(bad, 2, "model.heads", {"a": b""}, {"a": b"1"}) == "it leaves a changed file"


@pytest.mark.parametrize(("asked", "seed"), [(["--set", "seed=5"], 5), (["--seed", "5"], 5), ([], 0)])
def test_a_seed_takes_effect_however_it_is_given(asked: list[str], seed: int) -> None:
    answer = run_command("train", "image", "--attention", "lln", "--dry-run", *asked)
    assert answer.exit_code == 0, answer.output
    assert f'"seed": {seed},' in answer.stdout


def test_of_an_option_given_twice_the_last_counts_and_says_so() -> None:
    twice = ["--set", "log_every=5", "--set", "log_every=20"]
    answer = run_command("train", "image", "--attention", "lln", "--dry-run", *twice)
    assert '"log_every": 20,' in answer.stdout
    assert "--set log_every=5 gives way to --set log_every=20, which comes later." in answer.stderr


def test_the_home_folder_is_meant_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    answer = run_command("inspect", "~/model", "--file", "~/notes.txt")
    assert f"{tmp_path}/notes.txt is empty" in answer.stderr
    assert not (tmp_path / "~").exists()
