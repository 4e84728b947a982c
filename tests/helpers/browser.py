"""Chromium, for tests of what people look at."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("LLN_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


# Texts of a page with less contrast than WCAG's AA asks for: 4.5, of large letters 3.
FAINT = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const shine = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => layer.length ? over(layer, below) : below, [255, 255, 255]);
  };
  const found = [], walker = document.createTreeWalker(document.querySelector("article") || document.body, 4);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    const seen = element.getClientRects().length && style.visibility == "visible";
    if (!seen || !walker.currentNode.textContent.trim()) continue;
    const below = behind(element), [a, b] = [shine(over(parse(style.color), below)), shine(below)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05), size = parseFloat(style.fontSize);
    if (ratio < (size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5) && !element.closest(".headerlink"))
      found.push(`${ratio.toFixed(2)}: ${walker.currentNode.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""


@contextmanager
def launch() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield made
        made.close()
