"""Run docs/walkthrough.md as one session, and write below each piece of code what it printed.

python tools/walkthrough.py
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from lln.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "walkthrough.md"
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


def run_session(text: str) -> list[tuple[str, str]]:
    """What each piece of code printed when the page was made, and what it prints now."""
    found, names = [], dict[str, Any]()
    for cell in CELL.finditer(text):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(cell[1], names)
        found.append((cell[2] or "", printed.getvalue()))
    return found


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    printed = iter(new for _, new in run_session(text))

    def show(cell: re.Match[str]) -> str:
        said = next(printed)
        return f"```python\n{cell[1]}```\n" + (f"\n```text\n{said}```\n" if said else "")

    write_text(PAGE, CELL.sub(show, text))


if __name__ == "__main__":
    main()
