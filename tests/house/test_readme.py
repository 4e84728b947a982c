"""The README takes four screens, and its links lead somewhere. That what it shows runs, and that it says what was
measured, is tested with the documentation."""

import importlib
import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from helpers.browser import BROWSER, launch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SCREEN = (1280, 900)

# The sizes of GitHub's own style sheet, which decide how long a page is; with fonts that are wider than most.
STYLE = """body{margin:0;font:16px/1.5 "DejaVu Sans",sans-serif} article{max-width:1012px;margin:auto;padding:32px;
box-sizing:border-box;overflow-wrap:break-word} h1{font-size:2em;margin:0 0 16px;padding-bottom:.3em;line-height:1.25}
h2{font-size:1.5em;margin:24px 0 16px;padding-bottom:.3em;line-height:1.25} p,ul,table,pre{margin:0 0 16px}
img{max-width:100%} code{font:85% monospace;padding:.2em .4em} pre{padding:16px;overflow:auto;font-size:85%;
line-height:1.45} pre code{padding:0;font-size:100%} table{display:block;width:max-content;max-width:100%;overflow:auto;
border-collapse:collapse} td,th{padding:6px 13px;border:1px solid}"""


def test_recording_costs_little() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "record.json").read_text())
    assert all(row["cost"] < 0.1 for row in result["rows"].values())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        sentence = importlib.import_module("record").sentence(result)
    assert sentence.strip() in (ROOT / "docs" / "benchmarks.md").read_text()


def find_anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(links) > 15
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = ROOT / path if path else ROOT / "README.md"
        assert target.is_file(), link
        assert not anchor or anchor in find_anchors(target.read_text()), link


def test_it_takes_four_screens_and_fits_a_phone(tmp_path: Path) -> None:
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(README)
    page_path = tmp_path / "readme.html"
    style = f"<base href={ROOT.as_uri()}/><style>{STYLE}</style><meta name=viewport content='width=device-width'>"
    page_path.write_text(f"<!doctype html><meta charset=utf-8>{style}<article>{html}</article>")
    if BROWSER is None:
        pytest.skip("no Chromium here")
    with launch() as browser:
        page = browser.new_page(viewport={"width": SCREEN[0], "height": SCREEN[1]})
        page.goto(page_path.as_uri())
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        assert page.evaluate("document.documentElement.scrollHeight") <= 4 * SCREEN[1]
        cut = page.evaluate(
            "[...document.querySelectorAll('pre,table')].filter(e => e.scrollWidth > e.clientWidth).length"
        )
        assert cut == 0
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
