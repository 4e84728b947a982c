"""The command line, and Python in a process of its own, as a user meets them."""

import os
import subprocess
import sys
from typing import NamedTuple

from typer.testing import CliRunner

from lln.lab.cli.app import app


class Answer(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_command(*arguments: str | os.PathLike[str], columns: int = 200, **environment: str) -> Answer:
    """`lln` with these arguments. What it raises is raised here: a user would see a traceback."""
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", **environment}
    result = CliRunner().invoke(app, [os.fspath(a) for a in arguments], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def run_python(code: str, *options: str) -> str:
    """What a new process prints that runs `code` and succeeds."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
