"""Write what is made rather than written: pages of the documentation and the README's picture.

    python tools/pages.py

`make pages` does it; `tests/house/test_docs.py` compares.
"""

from __future__ import annotations

from pathlib import Path

import benchmarks_page
import cli_page
import map_page
import mechanisms_page
import models_page
import paper_page
import picture
import quoted
import stored_tables
from lln.files import write_text

DOCS = Path(__file__).parents[1] / "docs"


def pages() -> dict[Path, str]:
    return {
        DOCS / "mechanisms.md": mechanisms_page.markdown(),
        DOCS / "models.md": models_page.markdown(),
        DOCS / "cli.md": cli_page.markdown(),
        DOCS / "benchmarks.md": benchmarks_page.markdown(),
        **benchmarks_page.charts(),
        **paper_page.pages(),
        **quoted.pages(),
        **stored_tables.tables(),
        **picture.pictures(),
        **map_page.pages(),
    }


def main() -> None:
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
