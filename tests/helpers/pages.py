"""A page read as a browser would, and made-up times to make one from."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br", "link", "input"):
            self.open.append(tag)
        if tag == "a" and dict(attrs).get("href", "").startswith("https://arxiv.org/"):  # type: ignore[union-attr]
            return  # a reader may follow it, and no page loads it
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]

    def find_outside(self, folder: Path) -> list[str]:
        """Links to anything but this page and the files beside it, which a reader may follow and no page loads."""
        found = [link for link in self.links if not link.startswith("#") and link != "data:,"]
        return [link for link in found if not (folder / link).is_file()]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def make_times(times: dict[str, list[float]], lengths: list[int]) -> dict[str, Any]:
    """What the lengths section is made of, from medians in milliseconds of each attention at each length."""

    def timing(ms: float) -> dict[str, Any]:
        return {"median": ms, "low": ms, "high": ms, "repeats": 1}

    return {
        "heads": 12,
        "dim": 64,
        "provenance": {"device": "a CPU", "threads": 2},
        "rows": [
            {"attention": name, "length": n, "forward": timing(ms), "training": timing(ms)}
            | {"forward_bytes": 2**20, "training_bytes": 2**20}
            for name, series in times.items()
            for n, ms in zip(lengths, series, strict=True)
        ],
    }
