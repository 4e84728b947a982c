"""Chromium, for tests of what people look at."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = os.environ.get("LLN_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def launch() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield made
        made.close()
