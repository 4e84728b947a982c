"""Import paths of the last release work in every form, warn once each, and give what is in the new place."""

import importlib

import pytest

from helpers.command import run_python
from lln._moved import MOVED, find_new

ALL_FORMS = """
import importlib, sys, types, warnings
import lln
from lln._moved import FUNCTIONS, MOVED

warnings.simplefilter("ignore")


def run_afresh(statement):  # as in a process that has imported nothing by an old path
    for old in MOVED:
        sys.modules.pop(old, None)
        top = old.split(".")[1]
        if isinstance(vars(lln).get(top), types.ModuleType):
            del vars(lln)[top]
    vars(lln.mechanisms).clear()
    names = {"sys": sys}
    exec(statement, names)
    return names["got"]


def is_new(got, old, new):
    if hasattr(new, "__path__"):  # a room, which keeps its old name, so that its modules are found by theirs
        return got is sys.modules[old] and all(getattr(got, n) is getattr(new, n) for n in getattr(new, "__all__", ()))
    return got is new and new.__spec__.name == MOVED[old]


for old, place in MOVED.items():
    room, _, last = old.rpartition(".")
    new = importlib.import_module(place)
    assert is_new(run_afresh(f"import {old}; got = sys.modules['{old}']"), old, new), old
    for statement in (f"import {old} as got", f"from {room} import {last} as got"):
        got = run_afresh(statement)
        if room == "lln" and last in FUNCTIONS:  # in the last release, too, these forms gave the function
            assert got is getattr(lln.peers, last), (statement, got)
        else:
            assert is_new(got, old, new), (statement, got)
    name = next(n for n in (*getattr(new, "__all__", ()), *vars(new)) if n[0] != "_" or n == "__doc__")
    assert run_afresh(f"from {old} import {name} as got") == getattr(new, name), (old, name)
    print(old)
"""


def test_every_form_of_import_gives_what_is_in_the_new_place() -> None:
    assert run_python(ALL_FORMS).split() == list(MOVED)


def test_it_warns_once_for_a_path_names_the_new_place_and_shows_who_imported() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from lln.training.glue import load_glue
    from lln.training import glue, trainer
    from lln.training.trainer import Loop
    import lln.mechanisms.lln_attention as log_normal
    from lln.recipes import recipe
print(*[f"{w.filename} {w.category.__name__}: {w.message}" for w in caught], sep="\\n")
"""
    new_places = {
        "lln.training": "lln.lab.train",
        "lln.training.glue": "lln.lab.data.labelled",
        "lln.training.trainer": "lln.lab.train.loop",
        "lln.mechanisms": "lln.peers",
        "lln.mechanisms.lln_attention": "lln.peers.log_normal",
        "lln.recipes": "lln.lab.recipes",
    }
    end = "the old name works in this release and not in the next."
    assert run_python(code, "-W", "error").splitlines() == [
        f"<string> DeprecationWarning: {old} is now {new}; {end}" for old, new in new_places.items()
    ]


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    code = """
import warnings
warnings.simplefilter("ignore")
import lln, torch
from lln.attention import lln_attention
from lln.mechanisms.registry import Mechanism
import lln.peers.registry as registry
assert callable(lln.attention) and callable(lln.mechanisms)
assert lln_attention is lln.lln_attention and Mechanism is registry.Mechanism
q = torch.randn(1, 1, 4, 8)
print(tuple(lln.attention("elu", q, q, q).shape))
"""
    assert run_python(code, "-W", "error") == "(1, 1, 4, 8)\n"


@pytest.mark.filterwarnings("ignore:lln\\.training is now:DeprecationWarning")
def test_what_never_was_is_not_found() -> None:
    assert find_new("lln.hf") is None
    with pytest.raises(ModuleNotFoundError, match=r"lln\.training\.nonsense"):
        importlib.import_module("lln.training.nonsense")
