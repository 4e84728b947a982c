"""`lln convert` on the command line."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.common import DeviceToRun, ModelName, fail, need
from lln.lab.core.progress import Bars

EPILOG = (
    "Example: [bold]lln convert ./my-model ./my-lln-model --calibration notes.txt[/bold] finds alpha and beta on a "
    "text; [bold]lln convert gpt2 gpt2-lln --calibration a.txt --calibration b.txt --distill 400 --feature-map "
    "linear[/bold] also teaches every layer; [bold]... --fine-tune 200[/bold] then the whole model. A conversion that "
    "was stopped: the same command."
)


def convert(
    model: ModelName,
    out: Annotated[Path, typer.Argument(help="Folder for the converted model.", show_default=False)],
    calibration: Annotated[
        list[Path],
        typer.Option(help="A text file, laid end to end and cut into passages; may be given several times."),
    ],
    attention: Annotated[str, typer.Option(help="lln or lln_diag.")] = "lln_diag",
    matching: Annotated[str, typer.Option(help="data, entropy, variance or paper.")] = "data",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block of lln_diag.")] = 64,
    distill: Annotated[int, typer.Option(min=0, help="Steps that teach each layer softmax's outputs.")] = 0,
    fine_tune: Annotated[int, typer.Option(min=0, help="Steps that then train all weights on the whole model.")] = 0,
    learn: Annotated[str, typer.Option(help="Distilled alpha and beta: one a head or one a channel.")] = "channel",
    mix: Annotated[
        str,
        typer.Option(
            help="Distilled mix of lln_diag: ratio (one a head), or scales (two a channel; no output_attentions)."
        ),
    ] = "scales",
    feature_map: Annotated[
        str | None,
        typer.Option(help="linear: a map of queries and keys, distilled for each head.", show_default="none"),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a passage, where the model has so many places.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages a step.")] = 4,
    rate: Annotated[float, typer.Option(help="Learning rate of distillation.")] = 0.03,
    fine_rate: Annotated[float, typer.Option(help="Learning rate of fine-tuning.")] = 1e-4,
    device: DeviceToRun = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of passages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of the table.")] = False,
) -> None:
    """Convert a pretrained softmax model to LLN attention, and report how far each layer is from softmax.

    OUT is a checkpoint that transformers loads after `import lln.hf`, in the dtype of MODEL. The report is measured on
    passages that nothing is learned from, one in eight and four at most; OUT/conversion.json and the card have it.
    """
    need("hf")

    import torch

    from lln.hf.distillation import NotFinite
    from lln.lab.convert.layer_report import describe_whole, list_rows, name_stages
    from lln.lab.convert.passages import read_texts
    from lln.lab.convert.pipeline import ConversionPlan, convert_checkpoint
    from lln.lab.core.errors import Refused
    from lln.lab.core.provenance import provenance
    from lln.lab.core.tables import print_wide, terminal_table

    try:
        plan = ConversionPlan(
            attention=attention, matching=matching, block_size=block_size, distill=distill, fine_tune=fine_tune,
            coefficients=learn, mix=mix, feature_map=feature_map, length=length, batch_size=batch_size, rate=rate,
            fine_rate=fine_rate, seed=seed,
        )  # fmt: skip
        texts = read_texts(calibration)
        with StageBars() as bars:
            about = provenance(seed, torch.device(device))
            result = convert_checkpoint(model, out, texts, plan, device=device, about=about, progress=bars)
    except (Refused, ValueError, TypeError) as error:
        fail(f"lln convert: {error}")
    except NotFinite as error:
        fail(f"lln convert: {error}", 1)
    except KeyboardInterrupt:
        fail(f"Stopped. The same command goes on from what is in {out}.partial.", 130)
    except OSError as error:
        fail(f"lln convert: {error.strerror or error}; the same command goes on once that is solved.", 1)
    if as_json:
        typer.echo(json.dumps(result, indent=1, allow_nan=False))
        return
    request, (columns, *rows) = result["request"], list_rows(result)
    title = f"{request['model']} with {request['attention']}: {name_stages(result)}"
    print_wide(terminal_table(columns, rows, title=title), narrowest=120)
    typer.echo(describe_whole(result))
    typer.echo(
        f"The model is in {out}: `import lln.hf` before transformers loads it. The report is conversion.json there."
    )


class StageBars(Bars):
    """A bar for each stage of a conversion."""

    stage = ""

    def __call__(self, stage: str, done: int, total: int, text: str) -> None:
        if stage != self.stage:
            self.stage, self.update = stage, self.add(stage, total)
        self.update(completed=done, total=total, description=f"{stage} {text}")
