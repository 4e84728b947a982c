"""What the documentation shows runs, what it quotes is what is stored, and its site is whole and needs no network."""

import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer

from conftest import find_missing
from helpers.browser import BROWSER, FAINT, launch
from helpers.command import run_command
from lln.lab.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def tools() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import pages
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return pages


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name, "python") and name != "docs/walkthrough.md"])
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = set()
    for block in blocks(page, "python"):
        try:
            exec(block.replace("4096", "96").replace("1024", "64"), {})
        except ModuleNotFoundError as error:
            if (name := find_missing(error)) is None:
                raise
            missing.add(name)
    if missing:
        pytest.skip(f"some blocks need {', '.join(sorted(missing))}")


def commands() -> list[str]:
    """Every `lln ...` in shell blocks, in indented ones, and in the code that the text quotes."""
    found = []
    for page in NAMES:
        text = (ROOT / page).read_text()
        lines = "\n".join(blocks(page, "sh")).splitlines()
        lines += [line.strip() for line in text.splitlines() if line.startswith("    lln ")]
        lines += [quoted.replace("\n", " ") for quoted in re.findall(r"(?<!`)`(lln [a-z][^`]*)`(?!`)", text)]
        found += [line for line in lines if "lln" in line.split("#")[0]]
    return sorted(set(found))


def arguments(line: str) -> list[str] | None:
    """What follows `lln`, or None where the line runs something else."""
    words = shlex.split(line, comments=True)
    if words[0] == "lln":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1] == "lln":
        return words[words.index("-m") + 2 :]
    return None


# Names for what a reader puts in their place, or lists of what there is.
OPEN = re.compile(r"\.\.\.|\||\bCOMMAND\b")


def test_commands_are_there_with_their_options() -> None:
    group: Any = typer.main.get_command(app)
    known = {name: {o for p in command.params for o in p.opts} for name, command in group.commands.items()}
    checked = 0
    for line in commands():
        words = arguments(line)
        if words is None or OPEN.search(line) or not words or words[0].startswith("-"):
            continue
        assert words[0] in known, line
        options = {word.split("=")[0] for word in words[1:] if word.startswith("--")} - {"--help"}
        assert options <= known[words[0]], f"{line}: no {options - known[words[0]]}"
        checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    "line", [line for page in NAMES for block in blocks(page, "sh") for line in block.splitlines()]
)
def test_a_shell_block_is_a_command_that_parses(line: str) -> None:
    """Arguments and options as typer reads them; nothing is run."""
    words = arguments(line)
    if words is None:
        first = shlex.split(line, comments=True)[:2]
        assert first[0] in ("pip", "make"), line
        if first[0] == "make":
            assert f"\n{first[1]}:" in (ROOT / "Makefile").read_text(), line
        return
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    with command.make_context(words[0], words[1:]) as context:
        assert set(context.params) == {p.name for p in command.params} - {"help"}


def test_help_and_page_name_the_same_options() -> None:
    page = (DOCS / "cli.md").read_text()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        section = page.split(f"\n## lln {name}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `--")]
        shown = {option for row in rows for option in re.findall(r"`(-[^`]+)`", row.split(" | ")[0])}
        assert shown == {o for p in command.params for o in p.opts if o.startswith("-")} - {"--help", "-h"}, name
    assert run_command("--help").exit_code == 0


def test_pages_that_are_made_are_up_to_date() -> None:
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in tools().pages().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"make pages brings them up to date: {', '.join(stale)}"


def test_where_softmax_is_faster_is_what_was_measured() -> None:
    """docs/limits.md: at 512 tokens, and level at 1,024."""
    result = json.loads((ROOT / "benchmarks/results/2026-11-15-h200/batch1/bench.json").read_text())
    forward = {(r["attention"], r["length"]): r["device_ms"]["forward"]["median"] for r in result["rows"]}
    ratios = {n: forward["LLN", n] / forward["cudnn", n] for n in (512, 1024, 2048)}
    assert ratios[512] > 1.1
    assert 0.95 < ratios[1024] < 1.05
    assert ratios[2048] < 0.9


class Requests(HTMLParser):
    """What a browser would fetch to show a page, and where links in it lead."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.links.append(given.get("href", ""))
        else:
            self.fetched += [given[name] for name in ("src", "href", "data", "srcset", "poster") if name in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(made)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    return made


def test_the_site_is_whole_and_fetches_nothing(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(NAMES) - 2  # the README is not among them, a page for what is not found is
    for page in pages:
        found = Requests()
        found.feed(page.read_text(encoding="utf-8"))
        for url in found.fetched:
            assert not re.match(r"(https?:)?//", url), f"{page.name} fetches {url}"
            if page.name != "404.html" and not url.startswith(("data:", "#")):
                assert (page.parent / url.split("#")[0].split("?")[0]).exists(), f"{page.name} has no {url}"
        # The theme would fetch a program for these.
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8")
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_pages_fit_a_phone_and_complain_of_nothing(site: Path) -> None:
    """Tables and code may scroll inside themselves, the page may not."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    with launch() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        told: list[str] = []
        page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: told.append(request.url) if request.url.startswith("http") else None)
        for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # whose links begin at a server's root
            page.goto(path.as_uri(), wait_until="domcontentloaded")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, f"{path.name} is {wide} pixels wide"
            assert page.evaluate("[...document.querySelectorAll('article img')].every(i => i.alt)"), path.name
            if path.parent == site:  # the pages of the reference are long, and made of the same pieces
                assert page.evaluate(FAINT) == [], path.name
            assert told == [], path.name


def test_tables_fit_a_desktop(site: Path) -> None:
    if BROWSER is None:
        pytest.skip("no Chromium here")
    room = "table.closest('article').clientWidth + 32"  # with the margins, which a table may use
    wide = f"[...document.querySelectorAll('article table')].some(table => table.scrollWidth > {room})"
    with launch() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for name in ("benchmarks", "found", "training", "mechanisms", "paper-table1", "paper-table5"):  # the widest
            page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
            assert not page.evaluate(wide), name


def test_dark_pages_can_be_read(site: Path) -> None:
    """Those with tables, code of every kind, links in code, and notes."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    with launch() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        for name in ("index", "quickstart", "limits", "gpu", "cli", "tutorial-own-attention", "api/own"):
            page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
            assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
            assert page.evaluate(FAINT) == [], name


def test_the_search_finds_what_people_look_for(site: Path) -> None:
    """Words of questions, in the texts that the search looks through."""
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    texts = [f"{one['title']} {one['text']}".lower() for one in found]
    for word in ("classification", "attention_mask", "a100", "cite", "install", "sentence-transformers", "flash"):
        assert any(word in text for text in texts), word


def test_nothing_names_a_place_on_this_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/(tmp|work|home|root)/", page.read_text()), page.name
