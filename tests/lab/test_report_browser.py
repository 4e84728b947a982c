"""The page in a real browser: nothing is fetched, nothing fails, and the explorer answers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import BROWSER, launch
from helpers.command import run_command

pytest.importorskip("playwright.sync_api")
if BROWSER is None and os.environ.get("LLN_BROWSER") != "required":
    pytest.skip("no Chromium here: apt-get install chromium, or name it in LLN_CHROMIUM", allow_module_level=True)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything but the training run, which has its own test."""
    out = tmp_path_factory.mktemp("report")
    parts = "distribution,explorer,moments,lengths"
    found = run_command("report", "--quick", "--sections", parts, "--lengths", "64,128", "--repeats", "1", "--out", out)
    assert found.exit_code == 0, found.output
    return out / "index.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch() as made:
        yield made


def open_page(browser: Any, path: Path, **how: Any) -> tuple[Any, list[str], list[str]]:
    """(page, what the console complained of, what was asked of a network)"""
    page = browser.new_page(**how)
    errors: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, errors, requests


def numbers(page: Any) -> list[list[str]]:
    rows = page.locator("#explorer-table tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def test_the_page_fetches_nothing_and_complains_of_nothing(browser: Any, page_path: Path) -> None:
    page, errors, requests = open_page(browser, page_path)
    page.locator("#temperature").press("ArrowRight")
    assert errors == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert [url for url in requests if not url.startswith("data:")] == []
    page.close()


def test_the_explorer_answers_to_the_keyboard(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path)
    slider = page.locator("#temperature")
    before, said = numbers(page), page.locator("#explorer-said").inner_text()
    drawn = page.locator("#entropy").inner_html()
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    after = numbers(page)
    assert page.locator("#temperature-value").inner_text() == "0.25"
    assert page.locator("#explorer-said").inner_text() != said
    assert page.locator("#entropy").inner_html() != drawn
    assert [row[0] for row in after] == ["softmax", "LLN", "LLN, paper matching", "ReLU", "quadratic", "ELU"]
    # Colder: softmax and LLN concentrate, the kernel of ReLU does not know.
    assert float(after[0][1]) < float(before[0][1]) - 1
    assert float(after[1][1]) < float(before[1][1]) - 1
    assert abs(float(after[3][1]) - float(before[3][1])) < 0.01
    page.close()


def test_matching_changes_lln_and_nothing_else(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path)
    before = numbers(page)
    page.locator("#matching").select_option("unmatched")
    after = numbers(page)
    assert after[1] != before[1]
    assert after[:1] + after[2:] == before[:1] + before[2:]
    assert "LLN, unmatched" in page.locator("#explorer-legend").inner_text()
    page.locator("#dim").select_option("16")
    assert numbers(page)[0] != after[0]
    page.close()


def test_the_heat_maps_follow_temperature_and_matching(browser: Any, page_path: Path) -> None:
    page, errors, _ = open_page(browser, page_path)

    def shades(name: str) -> list[str]:
        found: list[str] = page.locator(f"[id='map-{name}'] rect").evaluate_all(
            "all => all.map(rect => rect.getAttribute('fill-opacity'))"
        )
        return found

    names = ("softmax", "LLN", "LLN+Diag")
    before = {name: shades(name) for name in names}
    assert all(len(found) == 14 * 14 for found in before.values())
    page.locator("#matching").select_option("unmatched")
    assert shades("softmax") == before["softmax"]
    assert shades("LLN") != before["LLN"]
    assert shades("LLN+Diag") != before["LLN+Diag"]
    page.locator("#temperature").focus()
    page.keyboard.press("End")
    assert shades("softmax") != before["softmax"]
    assert "looks at" in page.locator("[id='map-LLN'] rect title").first.text_content()
    assert errors == []
    page.close()


def test_the_page_says_what_it_is_and_that_a_quick_look_is_provisional(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path)
    assert page.locator("h1").inner_text().startswith("lln-attention")
    assert "pip install" in page.locator("main").inner_text()
    assert "provisional" in page.locator(".doubt").first.inner_text()
    assert page.locator("section[aria-labelledby]").nth(1).get_attribute("aria-labelledby") == "lengths"
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read_in_both_schemes(browser: Any, page_path: Path, scheme: str) -> None:
    page, _, _ = open_page(browser, page_path, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    def luminance(colour: str) -> float:
        parts = [int(x) / 255 for x in colour[4:-1].split(",")[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for selector in ("body", "figcaption", "summary", "footer p"):
        ink = page.locator(selector).first.evaluate("e => getComputedStyle(e).color")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        low, high = sorted((luminance(ink), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector
    page.close()


def test_on_paper_it_is_light_and_every_table_is_there(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path, color_scheme="dark")
    closed = page.locator("details:not([open]) table")
    assert not closed.first.is_visible()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert all(table.is_visible() for table in page.locator("table").all())
    page.close()


def test_without_a_script_the_explorer_says_so_and_leaves_no_empty_frames(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path, java_script_enabled=False)
    assert page.locator(".explorer noscript").is_visible()
    assert not page.locator("#temperature").is_visible()
    assert not page.locator("#histogram").is_visible()
    page.close()


def test_nothing_jumps_while_the_slider_moves(browser: Any, page_path: Path) -> None:
    for width in (1200, 390):
        page, _, _ = open_page(browser, page_path, viewport={"width": width, "height": 800})
        page.locator("#temperature").focus()
        page.keyboard.press("Home")
        heights = set()
        for _ in range(12):
            heights.add(page.locator(".explorer").bounding_box()["height"])
            page.keyboard.press("ArrowRight")
        assert len(heights) == 1
        page.close()


def test_text_in_charts_can_be_read(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path, viewport={"width": 1200, "height": 900})
    for selector in (".charts figure svg", ".explorer figure svg"):
        heights = page.evaluate(
            "selector => [...document.querySelectorAll(selector)].map("
            "svg => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)",
            selector,
        )
        assert len(heights) >= 3
        assert min(heights) >= 9.5, selector
    page.close()


def test_every_file_the_page_links_to_is_beside_it(browser: Any, page_path: Path) -> None:
    page, _, _ = open_page(browser, page_path)
    links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    files = {link for link in links if not link.startswith(("#", "https://arxiv.org"))}
    assert {Path(name).suffix for name in files} == {".svg", ".csv", ".json"}
    assert [name for name in files if not (page_path.parent / name).is_file()] == []
    ids = {link[1:] for link in links if link.startswith("#")}
    assert all(page.locator(f"[id='{name}']").count() == 1 for name in ids)
    page.close()
