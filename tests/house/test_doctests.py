"""Every example in a docstring of the package runs, and every public name has one."""

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import lln

SOURCE = Path(lln.__file__).parent
PUBLIC = ("lln", "lln.distributed", "lln.instruments", "lln.hf", "lln.jax", "lln.mindspore", "lln.naive")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def load(name: str) -> object:
    """The module, or a skip where what it needs is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "lln":
            raise
        pytest.skip(f"{name} needs {error.name}")


@pytest.mark.parametrize(
    "name", [module_name(path) for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
)
def test_the_examples_of_a_module_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(name)
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    examples = doctest.DocTestFinder(exclude_empty=True).find(module, name)
    with torch.random.fork_rng(devices=[]):
        for example in examples:
            runner.run(example, out=told.append)
    assert not runner.failures, "".join(told)
    assert runner.tries, f"{name} has >>> in its source and no example in a docstring"


@pytest.mark.parametrize("name", lln.mechanisms())
def test_every_module_that_a_mechanism_is_shows_its_shapes_and_an_example(name: str) -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "head_dim": 8, "max_length": 16}
    described = type(lln.mechanism(name, **sizes)).__doc__ or ""
    assert "    Shape:\n" in described
    assert ">>> " in described


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_an_example(package: str) -> None:
    found: Any = load(package)
    shown = {name: getattr(found, name) for name in found.__all__}
    bare = [
        name
        for name, value in shown.items()
        if (inspect.isroutine(value) or inspect.isclass(value)) and ">>> " not in (value.__doc__ or "")
    ]
    assert bare == []
