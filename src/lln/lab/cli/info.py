"""`lln info` on the command line."""

import json
import platform
from typing import Annotated, Any

import typer

from lln.lab.cli import common


def gather_facts() -> dict[str, Any]:
    import torch

    import lln
    from lln.kernels.triton.support import OLDEST_TRITON, TRITON

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    kernels = TRITON is not None and TRITON >= OLDEST_TRITON and torch.cuda.is_available()
    return {
        "lln-attention": lln.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "devices": devices,
        "triton": ".".join(map(str, TRITON)) if TRITON else None,
        "back ends": ["eager", "triton"] if kernels else ["eager"],
        "missing": {extra: common.find_missing(extra) for extra in common.EXTRAS},
    }


def info(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Show versions, devices, back ends, and which extras are missing.

    Args:
        as_json: Print it as JSON.

    Example: [bold]lln info[/bold] before you report a problem; [bold]lln info --json[/bold] to attach it.
    """
    found = gather_facts()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return

    from lln.lab.core.tables import print_wide, terminal_table

    rows = [(name, found[name]) for name in ("lln-attention", "python", "torch")]
    ends = ", ".join(found["back ends"])
    rows += [
        ("devices", ", ".join(found["devices"])),
        ("triton", found["triton"] or "not installed"),
        ("back ends", ends if "triton" in ends else f"{ends} (triton needs a CUDA device and Triton 3.6)"),
    ]
    for extra, names in found["missing"].items():
        remedy = f"missing {', '.join(names)}: pip install 'lln-attention[{extra}]'"
        rows.append((f"extra {extra}", remedy if names else "installed"))
    print_wide(terminal_table((), rows, box=None))
