"""Attention of one's own from a file that a command line names: `file.py:function`."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import lln
from lln.lab.core.errors import WrongOption, first_line

FORM = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


def names_file(text: str) -> bool:
    return FORM.fullmatch(text) is not None


def load_attention(text: str, option: str) -> str:
    """The name of the mechanism in `file.py:function` or `file.py:Class`. What the file has not given a name itself, by
    `lln.register`, is registered under its own in lower case. WrongOption for what is not there."""
    form = FORM.fullmatch(text)
    if form is None:
        raise WrongOption(option, f"must be file.py:function, like my_attention.py:attend; got {text!r}.")
    path = Path(form["path"]).expanduser()
    if not path.is_file():
        raise WrongOption(option, f"there is no file {path}.")
    before = dict(lln.mechanisms())
    made = getattr(run_file(path, option), form["name"], None)
    if made is None:
        raise WrongOption(option, f"{path} defines no {form['name']}.")
    registered = [m.name for m in lln.mechanisms().values() if before.get(m.name) is not m]
    if own := [name for name in registered if find_source(name) is made]:
        return own[0]
    name = form["name"].lower().lstrip("_")
    try:
        lln.register(name)(made)
    except (TypeError, ValueError) as error:
        raise WrongOption(option, f"{path}: {error}") from None
    return name


def find_source(name: str) -> Any:
    """The function or class that a mechanism was registered with."""
    entry = lln.mechanisms()[name]
    return getattr(entry.function, "function", None) or getattr(entry.module, "made", None)


def run_file(path: Path, option: str) -> Any:
    """The module in a file. It can be imported by the file's name from then on, which pickles need."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != path.resolve():
        raise WrongOption(option, f"{path} has the name of the module {path.stem}, which is loaded; name it otherwise.")
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise WrongOption(option, f"{path} does not run: {type(error).__name__}: {first_line(error)}") from None
    return module
