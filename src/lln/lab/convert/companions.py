"""What lies in a checkpoint's folder beside the model: pooling, normalisation, prompts, a tokenizer's other files. A
conversion changes nothing of it, so it comes along as it is; other forms of the softmax model stay behind."""

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lln.files import write_text
from lln.lab.core.errors import Refused, first_line
from lln.lab.core.pretrained import PATIENCE

MODULES = "modules.json"  # by which sentence-transformers knows the parts of a model
LONGEST = "max_seq_length"  # in the file of sentence-transformers beside a config.json, sentence_bert_config.json
# Of weights, whatever library they are for. Those of the modules that modules.json names are no softmax model's.
WEIGHTS = {
    ".bin", ".ckpt", ".gguf", ".h5", ".mlmodel", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pt", ".pth",
    ".safetensors", ".tflite", ".xml",
}  # fmt: skip


def read_modules(folder: Path) -> list[dict[str, str]]:
    """The parts that modules.json names; none where there is no such file."""
    path = folder / MODULES
    if not path.is_file():
        return []
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return [{"path": str(one["path"]), "type": str(one["type"])} for one in held]
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path} cannot be read: {first_line(error)}") from error


def find_transformer(folder: Path) -> str:
    """Where in a folder the model is that transformers loads: "" or, as older sentence-transformers saved it,
    0_Transformer."""
    paths = [one["path"] for one in read_modules(folder) if one["type"].endswith("Transformer")]
    return next((path for path in paths if (folder / path / "config.json").is_file()), "")


def fetch_companions(name: str) -> tuple[Path | None, bool]:
    """(the folder with a Hub id's other files, whether it is known to hold all of them): without the Hub's answer it is
    what the local cache has, None where that is nothing."""
    import huggingface_hub
    from huggingface_hub import constants

    known = not constants.HF_HUB_OFFLINE
    if known:
        try:
            huggingface_hub.HfApi().model_info(name, timeout=PATIENCE)
        except Exception:  # of whichever library makes the request
            known = False
    how: dict[str, Any] = {"local_files_only": not known}
    try:
        unwanted = [f"*{suffix}" for suffix in sorted(WEIGHTS)]
        folder = Path(huggingface_hub.snapshot_download(name, ignore_patterns=unwanted, **how))
        if parts := [f"{one['path']}/*" for one in read_modules(folder) if one["path"]]:
            huggingface_hub.snapshot_download(name, allow_patterns=parts, **how)
    except OSError:  # nothing of it is in the cache
        return None, False
    return folder, known


def list_companions(folder: Path) -> Iterator[tuple[Path, bool]]:
    """What lies in a folder beside the model, each with whether it stays behind: weights of the model itself, and
    folders that modules.json does not name, since other forms of the model are in such."""
    inside = find_transformer(folder)
    parts = {folder / one["path"] for one in read_modules(folder)} - {folder, folder / inside}
    for place in sorted({folder, folder / inside}):
        for path in sorted(place.iterdir()):
            whole = Path(path.name.removesuffix(".index.json"))
            if path.is_file():
                yield path.relative_to(folder), whole.suffix in WEIGHTS
            elif path not in (*parts, folder / inside) and not path.name.startswith((".", "__")):
                yield path.relative_to(folder), True
    for part in sorted(parts):
        yield from ((path.relative_to(folder), False) for path in sorted(part.rglob("*")) if path.is_file())


def copy_companions(source: Path, target: Path, made: Collection[Path]) -> dict[str, list[str]]:
    """Copy to `target` what `source` has beside the model. made: files of `target`, relative to it, that are the
    converted model's own and stay. Returns the names of what was copied, and of what was not."""
    found: dict[str, list[str]] = {"kept": [], "left_out": []}
    for path, stays in list_companions(source):
        if path in made:
            continue
        found["left_out" if stays else "kept"].append(path.as_posix())
        if not stays:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, target / path)
    return found


def allow_longer(folder: Path, length: int) -> None:
    """Let sentence-transformers hand the model in a folder texts of so many tokens, where it names fewer."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        held = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(held.get(LONGEST), int) and held[LONGEST] < length:
            write_text(path, json.dumps(held | {LONGEST: length}, indent=2) + "\n")
