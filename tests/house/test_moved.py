"""Import paths of the last release work, warn once, and give the modules themselves."""

import importlib

import pytest

from helpers.command import run_python
from lln._moved import MOVED, find_new


@pytest.mark.parametrize("old", sorted(MOVED))
@pytest.mark.filterwarnings("ignore:lln\\.:DeprecationWarning")
def test_an_old_path_gives_the_module_in_its_new_place(old: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])
    spec = importlib.import_module(MOVED[old]).__spec__
    assert spec is not None
    assert spec.name == MOVED[old]


def test_it_warns_once_for_a_room_and_names_the_new_place() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from lln.training.config import Config
    from lln.training.sources import read
    from lln.recipes import recipe
print(*[f"{w.category.__name__}: {w.message}" for w in caught], sep="\\n")
"""
    end = "the old name works in this release and not in the next."
    assert run_python(code, "-W", "error").splitlines() == [
        f"DeprecationWarning: lln.training is now lln.lab.train; {end}",
        f"DeprecationWarning: lln.recipes is now lln.lab.recipes; {end}",
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


def test_what_never_was_is_not_found() -> None:
    assert find_new("lln.hf") is None
    with pytest.raises(ModuleNotFoundError, match=r"lln\.training\.nonsense"):
        importlib.import_module("lln.training.nonsense")
