"""Where the parquet files of a data set are: in a local folder, or on the Hub, which is fetched into one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.lab.core.errors import DataError, first_line, need

# split-00000-of-00002.parquet, as the Hub names the pieces of a split
PIECE = re.compile(r"(?P<split>.+)-\d+-of-(?P<count>\d+)\.parquet")


@dataclass(frozen=True)
class Layout:
    """Which files hold which split, by configuration, as patterns relative to the set's folder."""

    patterns: dict[str, dict[str, list[str]]]
    card: str  # the prose of README.md


def resolve_root(data_root: str | os.PathLike[str] | None) -> Path | None:
    """data_root, or else LLN_DATA_ROOT, or else None: the Hub."""
    chosen = data_root or os.environ.get("LLN_DATA_ROOT")
    if not chosen:
        return None
    root = Path(chosen).expanduser()
    if not root.is_dir():
        raise DataError(f"The data root {root} is not a folder.")
    return root


def find_files(
    name: str, split: str, config: str | None, data_root: str | os.PathLike[str] | None
) -> tuple[Path, list[Path], str]:
    """(folder of the set, parquet files of the split in order, the card's prose). DataError says what is missing."""
    root = resolve_root(data_root)
    folder = _local(root, name) if root is not None else _fetch(name, ["README.md"])
    layout = read_layout(folder) if root is not None or _has_configs(folder) else _guess(config, split, folder)
    patterns = _choose(layout, name, config, split, folder)
    if root is None:
        folder = _fetch(name, patterns, folder.name)
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.suffix == ".parquet"})
    if not files:
        raise DataError(f"{name} has no split {split!r} here: no file {' or '.join(patterns)} in {folder}.")
    _check_pieces(files)
    return folder, files, layout.card


def list_splits(name: str, config: str | None, data_root: str | os.PathLike[str] | None) -> list[str]:
    """The splits that the set has, by its card or, in a local folder without one, by its files."""
    root = resolve_root(data_root)
    layout = read_layout(_local(root, name) if root is not None else _fetch(name, ["README.md"]))
    return sorted(_configuration(layout, name, config)) if layout.patterns else []


def read_layout(folder: Path) -> Layout:
    """From the card's `configs`, as the Hub does; without them from the names of the files."""
    configs, card = _read_card(folder)
    if configs:
        return Layout({c["config_name"]: _card_patterns(c) for c in configs}, card)
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        relative = path.relative_to(folder)
        inner = "" if len(relative.parts) == 1 else relative.parts[0]
        match = PIECE.fullmatch(path.name)
        split = match["split"] if match else path.stem
        config = "default" if inner in ("", "data") else inner
        found.setdefault(config, {}).setdefault(split, []).append(relative.as_posix())
    return Layout(found, card)


def _local(root: Path, name: str) -> Path:
    folder = root / name
    if not folder.is_dir():
        raise DataError(f"{name} is not in the data root: expected the folder {folder}.")
    return folder


def _fetch(name: str, patterns: list[str], revision: str | None = None) -> Path:
    """A snapshot of the set in huggingface_hub's own cache; the folder's name is the commit."""
    hub = need("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = first_line(error)
        raise DataError(
            f"{name} could not be fetched from the Hub ({reason}); without a network, name a folder that holds "
            f"{name} with --data-root or LLN_DATA_ROOT, or use an embedded set."
        ) from None


def _read_card(folder: Path) -> tuple[list[dict[str, Any]], str]:
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    match = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    if not match:
        return [], text.strip()
    yaml = need("yaml")
    try:
        head = yaml.safe_load(match[1]) or {}
    except yaml.YAMLError as error:
        raise DataError(f"The card {path} cannot be read: {first_line(error)}.") from None
    configs = head.get("configs") or [] if isinstance(head, dict) else []
    return [c for c in configs if c.get("data_files")], text[match.end() :].strip()


def _has_configs(folder: Path) -> bool:
    return bool(_read_card(folder)[0])


def _card_patterns(config: dict[str, Any]) -> dict[str, list[str]]:
    files = config["data_files"]
    if isinstance(files, str) or (files and isinstance(files[0], str)):
        files = [{"split": "train", "path": files}]
    paths = {entry["split"]: entry["path"] for entry in files}
    return {split: [path] if isinstance(path, str) else list(path) for split, path in paths.items()}


def _guess(config: str | None, split: str, folder: Path) -> Layout:
    """For a set of the Hub whose card names no files: nothing is fetched yet that could show them."""
    inner = ["data/", ""] if config in (None, "default") else [f"{config}/"]
    return Layout({config or "default": {split: [f"{part}{split}-*.parquet" for part in inner]}}, _read_card(folder)[1])


def _configuration(layout: Layout, name: str, config: str | None) -> dict[str, list[str]]:
    there = sorted(layout.patterns)
    if config is None:
        chosen = "default" if "default" in there else there[0] if len(there) == 1 else None
        if chosen is None:
            raise DataError(f"{name} has several configurations, so one must be named: {', '.join(there) or 'none'}.")
        return layout.patterns[chosen]
    if config not in there:
        raise DataError(f"{name} has no configuration {config!r}; there are: {', '.join(there) or 'none'}.")
    return layout.patterns[config]


def _choose(layout: Layout, name: str, config: str | None, split: str, folder: Path) -> list[str]:
    if not layout.patterns:
        raise DataError(f"{name} has no parquet file in {folder}.")
    splits = _configuration(layout, name, config)
    if split not in splits:
        of = f" of {config}" if config else ""
        raise DataError(f"{name} has no split {split!r}{of}; in {folder} there are: {', '.join(sorted(splits))}.")
    return splits[split]


def _check_pieces(files: list[Path]) -> None:
    """Half a download must not pass for the whole set."""
    pieces = [PIECE.fullmatch(path.name) for path in files]
    counts = {int(match["count"]) for match in pieces if match}
    if all(pieces) and len(counts) == 1 and len(files) != counts.copy().pop():
        raise DataError(
            f"{files[0].parent} holds {len(files)} of {counts.pop()} files of this split: {files[0].name}, ..."
        )
