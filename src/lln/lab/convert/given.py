"""What a user gives a conversion to learn from: files of text or folders of pictures. It is looked at before anything
that takes seconds to load, so nothing of that is imported here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lln.lab.core.errors import Refused, read_text


class Taken(NamedTuple):
    """What a model takes, as a user gives it."""

    kind: str  # in a word
    option: str  # of the command line
    named: str  # what the option names
    fields: tuple[str, ...]  # of a plan: those that are about this alone


# By the first argument of a model's forward.
TAKEN = {
    "input_ids": Taken("text", "--calibration", "FILE", ("block_size", "length")),
    "pixel_values": Taken("pictures", "--images", "FOLDER", ("tile", "image_size")),
}


def check_given(paths: dict[str, list[Path] | None], sizes: dict[str, Any]) -> tuple[str, list[Path]]:
    """Which kind of model learns, by its argument in TAKEN, and the files or folders that it is to learn from. paths,
    sizes: options by what models take, and by name. Refused unless they are of one kind of model."""
    ways = [f"{taken.option} {taken.named} for a model of {taken.kind}" for taken in TAKEN.values()]
    found = [(kind, given) for kind, given in paths.items() if given]
    if not found:
        raise Refused(f"there is nothing that the model could learn from; give {', or '.join(ways)}")
    if len(found) > 1:
        raise Refused(f"give {' or '.join(ways)}, and not both")
    ((mine, given),) = found
    for kind, taken in TAKEN.items():
        for field in taken.fields:
            if kind != mine and sizes[field] is not None:
                instead = ", ".join(f"--{name.replace('_', '-')}" for name in TAKEN[mine].fields)
                raise Refused(
                    f"--{field.replace('_', '-')} goes with {taken.option}; with {TAKEN[mine].option} there are "
                    f"{instead}"
                )
    return mine, given


def read_texts(files: Sequence[Path]) -> list[str]:
    """The files' texts. Refused where one is not there, is no text, or holds nothing."""
    texts = [read_text(file, "--calibration: ") for file in files]
    for file, text in zip(files, texts, strict=True):
        if not text.strip():
            raise Refused(f"--calibration: {file} is empty; it should hold text like that the model is used for")
    return texts
