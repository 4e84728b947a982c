"""`lln inspect` on the command line."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.shared import Count, Device, JsonForTable, ModelName, Seed, fail, need, need_folder
from lln.lab.core.errors import Refused, read_text
from lln.lab.core.limits import LONGEST
from lln.lab.core.progress import progress_bar


def read_texts(file: Path | None, given: list[str]) -> list[str]:
    """One text a line, or the given ones; none where nothing is said."""
    if file is None:
        for text in given:
            if text == "-" or os.path.isfile(text):  # what --text once took, and what a stranger may try
                raise Refused(f"--text: {text} names a file; give it as --file {text}")
        texts = [text for text in given if text.strip()]
        if given and not texts:
            raise Refused("--text: there is nothing but blanks in it")
        return texts
    if given:
        raise Refused("give --file or --text, and not both")
    try:
        lines = sys.stdin.read() if str(file) == "-" else read_text(file, "--file: ")
        lines.encode()  # stdin may hold bytes that are no text
    except UnicodeError:
        raise Refused("--file: - is not UTF-8 text") from None
    texts = [line.strip() for line in lines.splitlines() if line.strip()]
    if not texts:
        raise Refused(f"--file: {file} is empty; it should hold a text in each line")
    return texts


def inspect(
    model: ModelName,
    file: Path | None = None,
    text: Annotated[list[str] | None, typer.Option("--text", "--texts")] = None,
    images: Annotated[list[Path] | None, typer.Option()] = None,
    out: Path = Path("inspected"),
    max_length: Annotated[int, typer.Option(min=2, max=LONGEST)] = 512,
    batch_size: Count = 8,
    device: Device = "",
    seed: Seed = 0,
    as_json: JsonForTable = False,
) -> None:
    """Show how each head of a pretrained model attends, and what LLN attention would give on the same queries and keys.

    The model is one of transformers, for texts or for pictures (--images), or one of timm, for pictures. It may also
    be a diffusers pipeline: its transformer or UNet is given prompts, and is looked at in a few steps from noise to
    a picture.

    Args:
        file: A file with one text in each line; - reads standard input. [default: a few sentences that come with the
            package]
        text: A text that the model reads. May be given several times.
        images: A folder with picture files in it or below. May be given several times.
        out: Folder for the page, its charts (SVG) and data (JSON).
        max_length: The most tokens that are read of a text. The rest is cut off.
        batch_size: How many texts, pictures or prompts are run together.
        seed: Seed of the random numbers that pipelines and some models draw.

    Examples:
        lln inspect sentence-transformers/all-MiniLM-L6-v2  # then open inspected/index.html
        lln inspect ./my-model --file notes.txt --max-length 256  # a saved folder, and your own lines
        lln inspect gpt2 --text "One sentence." --text "Another." --json
        lln inspect timm/vit_small_patch16_224.dino --images photos  # an image model
    """
    need("report")
    need("hf")
    need_folder(out)

    import torch
    from rich.console import Console

    from lln.lab.core.picture_files import find_pictures
    from lln.lab.core.pretrained import shorten_name
    from lln.lab.core.provenance import provenance
    from lln.lab.inspect.inspect_page import tabulate_layers, write
    from lln.lab.inspect.inspection import CannotInspect
    from lln.lab.inspect.subject import find_subject

    torch.manual_seed(seed)
    try:
        pictures = sorted(find_pictures(images).values()) if images else []
        subject = find_subject(
            model, device, read_texts(file, text or []), pictures, max_length=max_length, batch_size=batch_size,
            seed=seed,
        )  # fmt: skip
        with progress_bar(-(-len(subject.shown) // batch_size), transient=True) as step:
            found = subject.measure(step)
    except CannotInspect as error:
        fail(f"lln inspect: {model} ({type(subject.model).__name__}) cannot be inspected: {error}")
    result = {
        "model": shorten_name(model), "class": type(subject.model).__name__, "called": subject.called,
        "texts": subject.shown, "max_length": max_length, **found,
        "provenance": provenance(seed, torch.device(device)),
    }  # fmt: skip
    page = write(result, out)
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
        return
    Console().print(tabulate_layers(result))
    typer.echo(f"The page is {page}: open it in a browser. Charts and inspect.json are beside it.")
