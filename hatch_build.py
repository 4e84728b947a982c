"""What the package's metadata take from elsewhere: its addresses, and the README with links that lead somewhere without
the repository around it. The addresses stand in pyproject.toml, under [tool.hatch.metadata.hooks.custom]."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAPER = "https://arxiv.org/abs/2311.13541"


def make_absolute(text: str, repository: str) -> str:
    """Links to files of the repository as addresses: pages as they are shown, pictures as they are."""
    text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({repository}/blob/main/\1)", text)
    return re.sub(r'(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{repository}/raw/main/\2"', text)


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_absolute(readme, repository)}
        metadata["urls"] = {
            "Repository": repository,
            "Documentation": self.config["documentation"],
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
            "Paper": PAPER,
        }
