"""What mkdocs is told beside mkdocs.yml: files of the repository that pages link to come along.

A page says `../results/paper/fig2-gap.svg`, which is right in the repository; in the site that file is under
`repository/`. A link to a file that is not there stops the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)\s#]+)\)")


def find_outside(page: str, text: str) -> list[str]:
    """Paths in the repository that a page links to. Pages in folders link to other pages with `../`."""
    return [] if "/" in page else OUTSIDE.findall(text)


def on_files(files: Files, config: Any) -> Files:
    wanted: dict[str, str] = {}
    for page in files.documentation_pages():
        for path in find_outside(page.src_uri, page.content_string):
            wanted.setdefault(path, page.src_uri)
    for path, linking in wanted.items():
        source = ROOT / path
        if not source.is_file():
            raise PluginError(f"{linking} links to ../{path}, and there is no such file.")
        files.append(File.generated(config, f"repository/{path}", content=source.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **given: Any) -> str:
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"](repository/\1)", markdown)
