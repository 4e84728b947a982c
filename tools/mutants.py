"""Changes the library in one place, as a slip of the hand would, and sees whether a test notices:

    make mutants                                100 mutants, drawn by seed
    python tools/mutants.py --only 17           one of them again
    python tools/mutants.py --list 20           what the first twenty are

Drawn from all places in `TESTS` where an operator of `mutate` applies: comparisons, sums and products, `and` and `or`,
`not`, numbers, True and False, smallest and largest, statements that are left out. Each runs the tests of its room, in
a copy of the sources, until one fails; a mutant that all of them pass has survived. One that changes nothing that can
be seen is listed with the reason in tools/equivalent_mutants.json. Results are in results/hardening/mutants.json.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import functools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from campaign import Campaign, Tried, finish, make_parser
from lln.files import read_json

ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
NEAREST = 4  # test files that are tried before the rooms they are in
LONGEST = 900  # seconds of the tests of a mutant; one that takes longer goes round in circles, and is noticed
# Which tests look at which sources, by the first prefix that fits: those most likely to notice come first.
TESTS = {
    "kernels/triton": ["triton"],
    "kernels/evidence": ["core/test_evidence.py", "core/test_evidence_mix.py", "core"],
    "kernels/features.py": ["core/test_feature_map.py", "core", "peers"],
    "kernels": ["core/test_against_reference.py", "core/test_gradients.py", "core/test_state.py", "core", "hf"],
    "state.py": ["core/test_state.py", "core/test_refusals.py", "core"],
    "checks.py": ["core/test_errors.py", "core/test_refusals.py", "core"],
    "values.py": ["core/test_refusals.py", "core/test_errors.py", "core"],
    "matching": ["core/test_moments.py", "core/test_nn.py", "core", "lab/test_report_moments.py"],
    "hf/distillation.py": ["hf/test_learner.py", "hf/test_distill.py", "hf"],
    "hf": ["hf"],
    "lab/convert/workplace.py": ["lab/test_workplace.py", "lab/test_convert_command.py"],
    "lab/train/run_folder.py": ["lab/test_training_runs.py", "lab/test_faults.py", "lab/test_training.py"],
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any",
         "clamp_min": "clamp_max", "triu": "tril", "tril": "triu"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str  # below src/lln
    line: int
    operator: str
    before: str
    after: str
    start: int  # characters of the source that are replaced
    end: int
    shown: str  # its whole line, before and after

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator}: {self.before} -> {self.after}"

    @property
    def key(self) -> str:
        """What it is wherever its line has gone."""
        return f"{self.file}: {self.shown}"


def mutate(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(the operator, the node as it is after it)"""
    kinds = (ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Attribute, ast.Call)
    made = copy.deepcopy(node) if isinstance(node, kinds) else node
    if isinstance(made, ast.Compare) and type(made.ops[0]) in COMPARISONS:
        made.ops[0] = COMPARISONS[type(made.ops[0])]()
        yield "comparison", made
    elif isinstance(made, ast.BinOp) and type(made.op) in ARITHMETIC and not is_text(made.left, made.right):
        made.op = ARITHMETIC[type(made.op)]()
        yield "arithmetic", made
    elif isinstance(made, ast.BoolOp):
        made.op = ast.Or() if isinstance(made.op, ast.And) else ast.And()
        yield "and, or", made
    elif isinstance(made, ast.UnaryOp) and isinstance(made.op, (ast.Not, ast.USub)):
        yield "sign" if isinstance(made.op, ast.USub) else "not", made.operand
    elif isinstance(made, ast.Constant) and isinstance(made.value, bool):
        yield "truth", ast.Constant(not made.value)
    elif isinstance(made, ast.Constant) and isinstance(made.value, (int, float)):
        value = made.value
        yield "number", ast.Constant(value + 1 if isinstance(value, int) else 2.0 * value if value else 1.0)
    elif isinstance(made, ast.Attribute) and made.attr in NAMES:
        made.attr = NAMES[made.attr]
        yield "name", made
    elif isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in NAMES:
        made.func.id = NAMES[made.func.id]
        yield "name", made
    elif isinstance(made, (ast.Raise, ast.Expr, ast.AugAssign)) and not is_docstring(made):
        yield "statement", ast.Pass()


def is_text(*nodes: ast.AST) -> bool:
    return any(isinstance(n, (ast.JoinedStr, ast.Constant)) and not is_number(n) for n in nodes)


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def list_places(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, no text of messages, no assertions."""
    skipped: tuple[type, ...] = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, skipped):
                yield node
                yield from list_places(node)


def list_mutants(file: str, source: str) -> list[Mutant]:
    """All of one file, in its order."""
    starts, at = [0], 0
    for line in source.splitlines(keepends=True):
        at += len(line)
        starts.append(at)

    def find(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    found = []
    for node in list_places(ast.parse(source)):
        if not isinstance(node, (ast.expr, ast.stmt)) or node.end_lineno is None or node.end_col_offset is None:
            continue
        start, end = find(node.lineno, node.col_offset), find(node.end_lineno, node.end_col_offset)
        for operator, made in mutate(node):
            after = ast.unparse(ast.fix_missing_locations(made))
            after = f"({after})" if isinstance(made, (ast.BinOp, ast.BoolOp, ast.Compare)) else after
            before = source[start:end]
            if " ".join(before.split()) != after:
                first, last = starts[node.lineno - 1], source.index("\n", end)
                lines = source[first:last], source[first:start] + after + source[end:last]
                shown = " -> ".join(" ".join(line.split()) for line in lines)
                about = " ".join(before.split())
                found.append(Mutant(file, node.lineno, operator, about, after, start, end, shown))
    return found


def choose_tests(file: str) -> list[str] | None:
    return next((tests for prefix, tests in TESTS.items() if file.startswith(prefix)), None)


def find_nearest(file: str, rooms: list[str]) -> list[str]:
    """The test files that by their names, or by what they import, are about a file: they notice soonest."""
    stem = Path(file).stem
    parts = [part for part in stem.split("_") if len(part) > 3]
    named = re.compile(rf"\b{re.escape(Path(file).parent.name)}(\.{stem}\b| import .*\b{stem}\b)")
    found = []
    for path in sorted({p for room in rooms for p in list_test_files(ROOT / "tests" / room)}):
        score = 2 * any(part in path.stem for part in parts) + bool(named.search(path.read_text(encoding="utf-8")))
        found += [(-score, path.relative_to(ROOT / "tests").as_posix())] if score else []
    return [name for _, name in sorted(found)[:NEAREST]]


def list_test_files(place: Path) -> list[Path]:
    return sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


@functools.cache
def draw(seed: int) -> list[Mutant]:
    """All mutants, in an order that follows from the seed."""
    base, found = ROOT / "src" / "lln", []
    for path in sorted(base.rglob("*.py")):
        file = path.relative_to(base).as_posix()
        if choose_tests(file) is not None:
            found += list_mutants(file, path.read_text(encoding="utf-8"))
    random.Random(seed).shuffle(found)
    return found


def apply(mutant: Mutant, sources: Path) -> None:
    """Write a file of a copy of the sources with the mutant in it."""
    text = (ROOT / "src" / "lln" / mutant.file).read_text(encoding="utf-8")
    changed = text[: mutant.start] + mutant.after + text[mutant.end :]
    (sources / "lln" / mutant.file).write_text(changed, encoding="utf-8")


def notice(mutant: Mutant, sources: Path, tests: list[str]) -> str | None:
    """The first test that fails with a mutant, or in which words it is noticed otherwise; None: it survives."""
    apply(mutant, sources)
    environment = os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # which may hide what is read below
    try:
        nearest = find_nearest(mutant.file, tests)
        for group in ([nearest] if nearest else []) + [[one] for one in dict.fromkeys(tests)]:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider",
                       "-p", "no:randomly", *(str(ROOT / "tests" / one) for one in group)]  # fmt: skip
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=LONGEST, check=False
            )
            if done.returncode == 1:
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].split(" - ")[0] if failed else "a test"
            if done.returncode != 0:  # it cannot even be imported
                return f"pytest ends with {done.returncode}"
    except subprocess.TimeoutExpired:
        return f"no end after {LONGEST} s"
    finally:
        shutil.copy(ROOT / "src" / "lln" / mutant.file, sources / "lln" / mutant.file)
    return None


def copy_sources(folder: Path) -> Path:
    """What this process changes: each has a copy of its own."""
    sources = folder / str(os.getpid())
    if not sources.exists():
        shutil.copytree(ROOT / "src" / "lln", sources / "lln", ignore=shutil.ignore_patterns("__pycache__"))
    return sources


def try_one(seed: int, folder: Path, number: int) -> Tried:
    mutant = draw(seed)[number]
    if mutant.key in (read_json(EQUIVALENT, dict) or {}):
        return Tried("equivalent")
    by = notice(mutant, copy_sources(folder), choose_tests(mutant.file) or [])
    print(f"{number}: {mutant}: {by or 'SURVIVES'}", file=sys.stderr, flush=True)
    return Tried("killed") if by else Tried("survived", str(mutant))


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, 100)
    parser.add_argument("--at-once", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--list", type=int, help="tell of so many, and run nothing")
    options: argparse.Namespace = parser.parse_args(arguments)
    mutants, reasons = draw(options.seed), read_json(EQUIVALENT, dict) or {}
    if options.list is not None:
        print("\n".join(f"{number}: {one}" for number, one in enumerate(mutants[: options.list])))
        return
    campaign = Campaign("mutants", options, places=len(mutants))
    for number in [number for number in campaign.faults if mutants[int(number)].key in reasons]:
        del campaign.faults[number]  # why it cannot be noticed was found out later
        campaign.counts["survived"] -= 1
        campaign.counts["equivalent"] = campaign.counts.get("equivalent", 0) + 1
    with tempfile.TemporaryDirectory() as folder:
        campaign.run(
            functools.partial(try_one, options.seed, Path(folder)),
            time.monotonic() + options.seconds,
            at_once=options.at_once,
        )
    finish([campaign])


if __name__ == "__main__":
    main()
