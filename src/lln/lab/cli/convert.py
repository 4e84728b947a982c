"""`lln convert` on the command line."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.shared import Count, CountOrNone, Device, ModelName, Seed, Steps, fail, need, need_folder
from lln.lab.core.limits import LONGEST
from lln.lab.core.progress import Bars


def convert(
    model: ModelName,
    out: Annotated[Path, typer.Argument(show_default=False)],
    calibration: Annotated[list[Path] | None, typer.Option()] = None,
    images: Annotated[list[Path] | None, typer.Option()] = None,
    attention: str = "lln_diag",
    layers: Annotated[str | None, typer.Option()] = None,
    read: str = "evidence",
    directions: CountOrNone = None,
    block_size: CountOrNone = None,
    tile: CountOrNone = None,
    distill: Steps = 400,
    fine_tune: Steps = 0,
    match_only: Annotated[bool, typer.Option("--match-only")] = False,
    matching: str = "data",
    learn: str = "channel",
    mix: Annotated[str | None, typer.Option()] = None,
    overlap: str = "auto",
    feature_map: str = "linear",
    length: Annotated[int | None, typer.Option(min=2, max=LONGEST)] = None,
    image_size: CountOrNone = None,
    batch_size: Count = 4,
    rate: float = 0.01,
    fine_rate: float = 1e-4,
    device: Device = "",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Convert a pretrained softmax model to LLN attention, and say whether that keeps the model.

    Each layer's attention is fitted to softmax's outputs and then distilled. OUT is a checkpoint that transformers
    loads after `import lln.hf`, in the dtype of MODEL. Models of text learn from text files (--calibration), those of
    pictures from folders of them (--images). Passages or pictures that nothing is learned from, one in eight, decide
    whether the model is kept; OUT/conversion.json and the card say so, with how far each layer is from softmax. Exit
    code 0: kept; 3: not kept, and OUT is there all the same; 4: too little text, or too few pictures, to decide.

    Args:
        out: Folder for the converted model.
        calibration: A text file, laid end to end and cut into passages; may be given several times. A verdict takes 24
            passages or more.
        images: A folder with picture files in it or below; may be given several times.
        attention: lln or lln_diag.
        layers: Which layers are converted: full_attention (those without a sliding window), indices such as 0,2,5, or a
            slice such as 4:. The others stay as they are. [default: all]
        read: evidence (for pretrained weights), or paper.
        directions: Channels of the evidence read. [default: four times the head dim]
        block_size: Tokens of a block of lln_diag. [default: 64]
        tile: Of pictures, in its place: patches along the side of a tile. [default: 8]
        distill: Steps that teach each layer softmax's outputs.
        fine_tune: Steps that then train all weights on the whole model.
        match_only: Only match alpha and beta of the paper's read; nothing is fitted or distilled.
        matching: Of the paper's read: data, entropy, variance or paper.
        learn: Of the paper's read, distilled alpha and beta: one a head or one a channel.
        mix: Mix of lln_diag: evidence (each query decides), ratio (one a head), or scales (two a channel; no
            output_attentions). [default: evidence for texts, scales for pictures and the paper's read]
        overlap: Windows that overlap in place of blocks: yes, no, or auto (causal models with mix evidence).
        feature_map: linear: a map of queries and keys, distilled for each head; none: without it.
        length: Tokens of a passage; a model with fewer places is given more. [default: what texts and model have, at
            most 1024]
        image_size: Pixels along a picture's side; a model with fewer places is given more. [default: what the
            image processor makes]
        batch_size: Passages or pictures a step.
        rate: Learning rate of distillation.
        fine_rate: Learning rate of fine-tuning.
        seed: Seed of the order of passages or pictures.
        as_json: Print the report as JSON instead of the table.

    Example: [bold]lln convert ./my-model ./my-lln-model --calibration notes.txt[/bold] is all that most models need;
    [bold]... --calibration a.txt --calibration b.txt --distill 800 --fine-tune 200[/bold] takes more text and time;
    [bold]... --length 8192[/bold] also makes the model take longer texts;
    [bold]lln convert ./my-vit ./my-lln-vit --images photos[/bold] is for an image model. A conversion
    that was stopped: the same command.
    """
    need("hf")
    need_folder(out.parent, "OUT")

    import torch

    from lln.hf.distillation import NotFinite
    from lln.lab.convert.conversion_plan import ConversionPlan
    from lln.lab.convert.layer_report import describe_beside, describe_verdict, describe_whole, list_rows, name_stages
    from lln.lab.convert.passages import Passages, read_texts
    from lln.lab.convert.pictures import Pictures
    from lln.lab.convert.pipeline import convert_checkpoint
    from lln.lab.convert.verdict import EXITS
    from lln.lab.core.picture_files import find_pictures
    from lln.lab.core.provenance import provenance
    from lln.lab.core.tables import print_wide, terminal_table

    choices = {"auto": None, "yes": True, "no": False}
    if overlap not in choices:
        fail(f"lln convert: --overlap must be auto, yes or no; got {overlap!r}.")
    sizes = {"block_size": block_size, "length": length, "tile": tile, "image_size": image_size}
    given = check_given({"input_ids": calibration, "pixel_values": images}, sizes)
    try:
        plan = ConversionPlan(
            attention=attention, layers=layers, read=read, directions=directions, matching=matching,
            match_only=match_only, distill=distill, fine_tune=fine_tune, coefficients=learn, mix=mix,
            overlap=choices[overlap], feature_map=None if feature_map == "none" else feature_map, batch_size=batch_size,
            rate=rate, fine_rate=fine_rate, seed=seed,
            **{name: size for name, size in sizes.items() if size is not None},
        )  # fmt: skip
        material = Pictures(find_pictures(given)) if given is images else Passages(read_texts(given))
        with StageBars() as bars:
            about = provenance(seed, torch.device(device))
            result = convert_checkpoint(model, out, material, plan, device=device, about=about, progress=bars)
    except (ValueError, TypeError) as error:
        fail(f"lln convert: {error}")
    except NotFinite as error:
        fail(f"lln convert: {error}", 1)
    except KeyboardInterrupt:
        fail(f"Stopped. The same command goes on from what is in {out}.partial.", 130)
    except OSError as error:
        fail(f"lln convert: {error.strerror or error}; the same command goes on once that is solved.", 1)
    decided = typer.Exit(EXITS[result["verdict"]["verdict"]])
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
        raise decided
    request, (columns, *rows) = result["request"], list_rows(result)
    title = f"{request['model']} with {request['attention']}: {name_stages(result)}"
    print_wide(terminal_table(columns, rows, title=title), narrowest=120)
    typer.echo(describe_whole(result))
    typer.echo(
        f"The model is in {out}: `import lln.hf` before transformers loads it. The report is conversion.json there."
    )
    for sentence in describe_beside(result):
        typer.echo(sentence)
    typer.echo("\n" + "\n".join(describe_verdict(result)))
    raise decided


def check_given(paths: dict[str, list[Path] | None], sizes: dict[str, int | None]) -> list[Path]:
    """The files or folders that the model is to learn from. paths, sizes: options by what models take, and by name.
    Refused unless they are of one kind of model."""
    from lln.lab.convert.material import TAKEN
    from lln.lab.core.errors import Refused

    ways = [f"{taken.option} {taken.named} for a model of {taken.kind}" for taken in TAKEN.values()]
    found = [kind for kind, given in paths.items() if given]
    if len(found) != 1:
        raise Refused(f"give {' or '.join(ways)}" + (", and not both" if found else ""))
    for kind, taken in TAKEN.items():
        for field in taken.fields:
            if kind != found[0] and sizes[field] is not None:
                instead = ", ".join(f"--{name.replace('_', '-')}" for name in TAKEN[found[0]].fields)
                raise Refused(
                    f"--{field.replace('_', '-')} goes with {taken.option}; with {TAKEN[found[0]].option} there are "
                    f"{instead}"
                )
    return paths[found[0]] or []


class StageBars(Bars):
    """A bar for each stage of a conversion."""

    stage = ""

    def __call__(self, stage: str, done: int, total: int, text: str) -> None:
        if stage != self.stage:
            self.stage, self.update = stage, self.add(stage, total)
        self.update(completed=done, total=total, description=f"{stage} {text}")
