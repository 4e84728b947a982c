"""Ctrl-C, at whatever moment of the start, prints no traceback."""

import subprocess
import sys

import pytest

from helpers.command import run_python


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--help"]), ("lln.lab.cli.app", ["--help"]), ("lln.lab.cli.convert", ["info"]), ("rich", ["info"]),
        ("torch", ["info", "--quick"]), ("torch._C", ["info", "--quick"]),
        ("transformers", ["train", "image", "--dry-run"]),
        ("torch", ["report", "--lengths", "16", "--device", "cpu"]), ("lln.files", ["compare"]),
    ],
)  # fmt: skip
def test_ctrl_c_while_a_command_starts_ends_it_without_a_traceback(module: str, arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Press())\n"
        f"sys.argv = ['lln', *{arguments!r}]\n"
        "from lln.__main__ import main\n"
        "main()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in found.stderr, found.stderr
    assert found.returncode == 130, found.stderr
    assert "KeyboardInterrupt" not in found.stderr


def test_little_comes_before_a_command_hears_ctrl_c() -> None:
    """Nobody listens while `lln` itself is imported."""
    code = "import sys; before = {*sys.modules}; import lln; print(*({*sys.modules} - before))"
    brought = run_python(code)
    assert not {"importlib.resources", "tempfile", "shutil", "pathlib", "torch"} & set(brought.split())
