"""The plan of the house: which room may import which, and how rooms and files are named. CONTRIBUTING.md is its map."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FRONT_DOORS = {"lln", "lln.__main__", "lln._moved"}  # the package's names, the command, the old import paths
MOST_LINES = 350
# File names that may be there twice, since the folders say what they are: a thing and the same by the other back end, a
# task's data and its recipe, and the command that plans a cluster beside what plans a launch.
TWICE = {"causal.py", "fold.py", "moments.py", "needles.py", "plan.py", "step.py"}


def name_module(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_module(path): path for path in sorted(SRC.rglob("*.py"))}


def find_imports(module: str) -> Iterator[str]:
    """Every module of lln that it imports, wherever in the file: an import inside a function counts."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "lln")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            if base.split(".")[0] == "lln":
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield full if full in MODULES else base


IMPORTS = {module: set(find_imports(module)) for module in MODULES}


def find_room(module: str) -> str:
    """The folder of a module. Files beside lln/__init__.py are rooms of their own."""
    if module.count(".") < 2 or MODULES.get(module, Path()).name == "__init__.py":
        return module
    return module.rpartition(".")[0]


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def test_the_graph_is_seen() -> None:
    """Else the other tests say nothing."""
    assert "lln.kernels.eager" in IMPORTS["lln.functional"]
    assert "lln.instruments.transformers_calls" in IMPORTS["lln.instruments.recorder"]  # inside a function
    assert len(MODULES) > 100


def test_kernels_import_kernels_alone() -> None:
    for module in MODULES:
        if is_in(module, "lln.kernels"):
            assert [name for name in IMPORTS[module] if not is_in(name, "lln.kernels")] == [], module


def test_only_the_laboratory_imports_the_laboratory() -> None:
    for module in set(MODULES) - FRONT_DOORS:
        if not is_in(module, "lln.lab"):
            assert [name for name in IMPORTS[module] if is_in(name, "lln.lab")] == [], module


def test_the_ground_floor_of_the_laboratory_stands_alone() -> None:
    for module in MODULES:
        if is_in(module, "lln.lab.core"):
            rooms = [name for name in IMPORTS[module] if is_in(name, "lln.lab") and not is_in(name, "lln.lab.core")]
            assert rooms == [], module


def test_no_rooms_import_each_other() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module in set(MODULES) - FRONT_DOORS:
        room = find_room(module)
        graph[room] |= {find_room(name) for name in IMPORTS[module] if name != "lln"} - {room}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_modules_import_each_other() -> None:
    pairs = {(module, name) for module in MODULES for name in IMPORTS[module] if module in IMPORTS.get(name, ())}
    assert {pair for pair in pairs if pair[0] < pair[1]} == {("lln.hf.cache", "lln.hf.decoding")}  # for types alone


def find_exports(path: Path) -> set[str]:
    """The functions and classes that a package's __init__.py defines or imports."""
    tree, package = ast.parse(path.read_text()), name_module(path)
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                alias.asname or alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES
            }
    return names - {package}


def test_no_module_has_the_name_of_what_its_package_exports() -> None:
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            inside = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module}
            assert find_exports(path) & inside == set(), module


def test_a_file_name_is_there_once() -> None:
    names = Counter(path.name for path in MODULES.values() if path.name != "__init__.py")
    assert {name: count for name, count in names.items() if count > 1} == dict.fromkeys(TWICE, 2)


def count_code(path: Path) -> int:
    """Lines without blanks, comments and docstrings."""
    text = path.read_text()
    described: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            described |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spoken = {line for t in tokens if t.type not in silent for line in range(t.start[0], t.end[0] + 1)}
    return len(spoken - described)


def test_files_can_be_read_at_once() -> None:
    long = {module: lines for module, path in MODULES.items() if (lines := count_code(path)) > MOST_LINES}
    assert long == {}


def test_the_map_answers_with_files_that_are_there() -> None:
    text = (SRC.parent / "CONTRIBUTING.md").read_text()
    answers = re.findall(r"`(src/lln/[^`]+)`", text[text.index("### Where is it decided?") :])
    assert len(answers) >= 20
    assert [path for path in answers if not (SRC.parent / path).exists()] == []
