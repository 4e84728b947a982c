"""`lln convert` on the command line."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lln.lab.cli.common import Count, DeviceToRun, ModelName, Seed, fail, need
from lln.lab.core.progress import Bars


def convert(
    model: ModelName,
    out: Annotated[Path, typer.Argument(show_default=False)],
    calibration: Annotated[list[Path], typer.Option()],
    attention: str = "lln_diag",
    matching: str = "data",
    block_size: Count = 64,
    distill: Annotated[int, typer.Option(min=0)] = 0,
    fine_tune: Annotated[int, typer.Option(min=0)] = 0,
    learn: str = "channel",
    mix: str = "scales",
    feature_map: str | None = None,
    length: Annotated[int, typer.Option(min=2)] = 512,
    batch_size: Count = 4,
    rate: float = 0.03,
    fine_rate: float = 1e-4,
    device: DeviceToRun = "cpu",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Convert a pretrained softmax model to LLN attention, and report how far each layer is from softmax.

    OUT is a checkpoint that transformers loads after `import lln.hf`, in the dtype of MODEL. The report is measured on
    passages that nothing is learned from, one in eight and four at most; OUT/conversion.json and the card have it.

    Args:
        out: Folder for the converted model.
        calibration: A text file, laid end to end and cut into passages; may be given several times.
        attention: lln or lln_diag.
        matching: data, entropy, variance or paper.
        block_size: Tokens of a block of lln_diag.
        distill: Steps that teach each layer softmax's outputs.
        fine_tune: Steps that then train all weights on the whole model.
        learn: Distilled alpha and beta: one a head or one a channel.
        mix: Distilled mix of lln_diag: ratio (one a head), or scales (two a channel; no output_attentions).
        feature_map: linear: a map of queries and keys, distilled for each head. [default: none]
        length: Tokens of a passage, where the model has so many places.
        batch_size: Passages a step.
        rate: Learning rate of distillation.
        fine_rate: Learning rate of fine-tuning.
        seed: Seed of the order of passages.
        as_json: Print the report as JSON instead of the table.

    Example: [bold]lln convert ./my-model ./my-lln-model --calibration notes.txt[/bold] finds alpha and beta on a text;
    [bold]lln convert gpt2 gpt2-lln --calibration a.txt --calibration b.txt --distill 400 --feature-map linear[/bold]
    also teaches every layer; [bold]... --fine-tune 200[/bold] then the whole model. A conversion that was stopped: the
    same command.
    """
    need("hf")

    import torch

    from lln.hf.distillation import NotFinite
    from lln.lab.convert.layer_report import describe_whole, list_rows, name_stages
    from lln.lab.convert.passages import read_texts
    from lln.lab.convert.pipeline import ConversionPlan, convert_checkpoint
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
    except (ValueError, TypeError) as error:
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
