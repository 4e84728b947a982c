"""A result of `lln bench`, read back and shown: on the terminal, as Markdown, as charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from lln.files import write_text
from lln.lab.bench.kernel_tables import growth, markdown, rich_table
from lln.lab.core.tables import print_wide


def read(path: Path) -> dict[str, Any]:
    """A stored result; what is none is refused in terms of the option."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise typer.BadParameter(f"cannot read {path}: {reason}.", param_hint="--render") from None
    if not isinstance(result, dict) or not {"rows", "scaling", "checks", "copy_bytes_per_second"} <= result.keys():
        raise typer.BadParameter(
            f"{path} is not a result of lln bench; name a bench.json that it wrote.", param_hint="--render"
        )
    return result


def publish(result: dict[str, Any], out: Path, *, as_json: bool, charts: bool) -> None:
    """Writes bench.md and, where altair is there to draw them, the charts; prints the table, or the result as JSON."""
    write_text(out / "bench.md", markdown(result))
    if charts:
        from lln.lab.bench.kernel_charts import charts_of

        drawn = charts_of(result)
        for name, text in drawn.items():
            write_text(out / f"{name}.svg", text)
        said = f"Table, result and {len(drawn)} charts are in {out}."
    else:
        said = f"Table and result are in {out}; charts need: pip install 'lln-attention[report]'"
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        print_wide(rich_table(result), *growth(result))
    typer.echo(said, err=True)
