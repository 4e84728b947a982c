"""The command line, and Python in a process of its own, as a user meets them."""

import subprocess
import sys
from collections.abc import Mapping
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


def run_command(
    *arguments: object, columns: int = 200, stdin: str | None = None, environment: Mapping[str, str] | None = None
) -> Answer:
    """`lln` with these arguments. What it raises is raised here: a user would see a traceback."""
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", **(environment or {})}
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def assert_sentence(stderr: str, *parts: str, command: str, alone: bool = True) -> None:
    """A mistake is one line that begins with the command, and by default nothing else is said."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(f"{command}: ")]
    assert len(said) == 1, stderr
    assert lines == said or not alone, stderr
    assert "Traceback" not in stderr
    for part in parts:
        assert part in said[0]


def run_python(code: str, *options: str) -> str:
    """What a new process prints that runs `code` and succeeds."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
