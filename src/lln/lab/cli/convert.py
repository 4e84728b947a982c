"""`lln convert` on the command line."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.shared import (
    Count,
    CountOrNone,
    DeviceChosenLater,
    ModelName,
    Seed,
    Steps,
    choose_device,
    fail,
    need,
    need_folder,
)
from lln.lab.core.limits import LONGEST
from lln.lab.core.progress import Bars


def convert(
    model: ModelName,
    out: Annotated[Path, typer.Argument(show_default=False, metavar="OUT")],
    calibration: Annotated[list[Path] | None, typer.Option()] = None,
    images: Annotated[list[Path] | None, typer.Option()] = None,
    attention: str = "lln_diag",
    layers: Annotated[str | None, typer.Option()] = None,
    read: str = "evidence",
    directions: CountOrNone = None,
    block_size: CountOrNone = None,
    tile: CountOrNone = None,
    distill: Steps = 360,
    fine_tune: Steps = 0,
    fine_tune_on: str = "auto",
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
    device: DeviceChosenLater = "",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Convert a pretrained softmax model to LLN attention, and say whether the result keeps what the model knew.

    Each layer's attention is fitted to the outputs of softmax attention and then distilled. OUT is a checkpoint that
    transformers loads after `import lln.hf`, in the dtype of MODEL. A text model learns from text files
    (--calibration), an image model from folders of pictures (--images).

    One in eight passages or pictures is kept from learning, and decides whether the model counts as kept. The exit
    code is 0 if it is kept, 3 if it is not (OUT is there all the same), and 4 if there is too little text, or too
    few pictures, to decide. OUT/conversion.json and the model card have the figures, and how far each layer is from
    softmax.

    Args:
        out: Folder for the converted model.
        calibration: A text file. The files are joined and cut into passages; a verdict needs at least 24 of them, of a
            causal language model 8. May be given several times.
        images: A folder with picture files in it or below. May be given several times.
        attention: lln or lln_diag.
        layers: Which layers are converted: full_attention (those without a sliding window), indices such as 0,2,5, or
            a slice such as 4:. The others stay as they are. [default: all]
        read: evidence, which is made for pretrained weights, or paper.
        directions: Number of channels of the evidence read. [default: four times the head dimension]
        block_size: Tokens in a block of lln_diag. [default: 64]
        tile: For pictures, instead of a block size: patches along the side of a tile. [default: 8]
        distill: Number of steps that teach each layer the outputs of softmax attention.
        fine_tune: Number of steps after that which train all weights of the whole model.
        fine_tune_on: What fine-tuning keeps: hidden (the last hidden states), logits (the distribution over the next
            token or the classes), or auto (logits in causal language models).
        match_only: Only match alpha and beta of the paper's read. Nothing is fitted or distilled.
        matching: Matching for the paper's read: data, entropy, variance or paper.
        learn: What is distilled for the paper's read: alpha and beta of each head, or of each channel.
        mix: How lln_diag mixes blocks and linear part: evidence (each query decides; slower on a GPU), ratio
            (one number a head), or scales (two factors a channel; without output_attentions). [default: scales;
            evidence for causal language models with the evidence read]
        overlap: Windows that overlap instead of blocks: yes, no, or auto (in causal models with --mix evidence).
        feature_map: linear gives each head a map of queries and keys, which is distilled; none leaves it out.
        length: Tokens in a passage. A model with fewer positions is given more. [default: what texts and model have,
            at most 1024]
        image_size: Pixels along the side of a picture. A model with fewer positions is given more. [default: what the
            image processor makes]
        batch_size: Passages or pictures in a step.
        rate: Learning rate of distillation.
        fine_rate: Learning rate of fine-tuning.
        seed: Seed of the order of passages or pictures.
        as_json: Print the report as JSON instead of the table.

    Examples:
        lln convert ./my-model ./my-lln-model --calibration notes.txt  # all that most models need
        lln convert ./my-model ./my-lln-model --calibration a.txt --calibration b.txt --distill 800 --fine-tune 200  #
            with more text and time
        lln convert ./my-model ./my-lln-model --calibration notes.txt --length 8192  # the model takes longer texts,
            too
        lln convert ./my-vit ./my-lln-vit --images photos  # an image model
        A conversion that was stopped goes on when the same command is given again.
    """
    need("hf")
    need_folder(out.parent, "OUT")

    from lln.lab.convert.given import check_given, read_texts
    from lln.lab.core.picture_files import find_pictures

    choices = {"auto": None, "yes": True, "no": False}
    if overlap not in choices:
        fail(f"lln convert: --overlap must be auto, yes or no; got {overlap!r}.")
    sizes = {"block_size": block_size, "length": length, "tile": tile, "image_size": image_size}
    kind, given = check_given({"input_ids": calibration, "pixel_values": images}, sizes)
    texts, pictures = ([], find_pictures(given)) if kind == "pixel_values" else (read_texts(given), {})
    device = choose_device(device)

    import torch  # from here on it takes seconds: what can be refused before is

    from lln.hf.distillation import NotFinite
    from lln.lab.convert.conversion_plan import ConversionPlan
    from lln.lab.convert.layer_report import describe_beside, describe_verdict, describe_whole, list_rows, name_stages
    from lln.lab.convert.passages import Passages
    from lln.lab.convert.pictures import Pictures
    from lln.lab.convert.pipeline import convert_checkpoint
    from lln.lab.convert.verdict import EXITS
    from lln.lab.core.provenance import provenance
    from lln.lab.core.tables import print_wide, terminal_table

    try:
        plan = ConversionPlan(
            attention=attention, layers=layers, read=read, directions=directions, matching=matching,
            match_only=match_only, distill=distill, fine_tune=fine_tune, coefficients=learn, mix=mix,
            fine_tune_on=None if fine_tune_on == "auto" else fine_tune_on,
            overlap=choices[overlap], feature_map=None if feature_map == "none" else feature_map, batch_size=batch_size,
            rate=rate, fine_rate=fine_rate, seed=seed,
            **{name: size for name, size in sizes.items() if size is not None},
        )  # fmt: skip
        material = Pictures(pictures) if pictures else Passages(texts)
        with StageBars() as bars:
            about = provenance(seed, torch.device(device))
            result = convert_checkpoint(
                model, out, material, plan, device=device, about=about, progress=bars, say=bars.say
            )
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


class StageBars(Bars):
    """A bar for each stage of a conversion."""

    stage = ""

    def __call__(self, stage: str, done: int, total: int, text: str) -> None:
        if stage != self.stage:
            self.stage, self.update = stage, self.add(stage, total)
        self.update(completed=done, total=total, description=f"{stage} {text}")
