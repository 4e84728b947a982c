"""`lln info` on the command line."""

import dataclasses
import json
import platform
from typing import Annotated, Any

import typer

from lln.lab.cli import shared


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
        "missing": {extra: shared.find_missing(extra) for extra in shared.EXTRAS},
    }


def ask_device(name: str) -> dict[str, Any]:
    """Which calls run where on a device, and why."""
    import torch

    from lln.kernels.triton import plan
    from lln.kernels.triton.survey import survey

    device = torch.device(name)
    card = plan.find_card(device)
    return {
        "device": name,
        "card": None if card is None else card.name,
        "shared memory": None if card is None else card.shared,
        "settings": None if card is None else "measured" if card.measured else "from compiled occupancy",
        "kinds": [dataclasses.asdict(answer) for answer in survey(device)],
    }


def show_calls(asked: dict[str, Any]) -> list[Any]:
    """A table of kinds of calls by dtypes and head dims, and under it the reasons."""
    from lln.lab.core.tables import terminal_table

    cells: dict[tuple[str, int], list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for kind in asked["kinds"]:
        narrow = min(kind["parts"], default=kind["dim"])
        by = f", values by {narrow}" if narrow < kind["dim"] else ""
        cells.setdefault((kind["dtype"], kind["dim"]), []).append(f"{kind['runs']}{by}")
        if kind["reason"]:
            reasons.setdefault(kind["reason"], []).append(f"{kind['dtype']} {kind['dim']} {kind['mode']}")
    modes = list(dict.fromkeys(kind["mode"] for kind in asked["kinds"]))
    where = f"{asked['device']} {asked['card'] or ''}".strip()
    if asked["shared memory"]:
        where += f", {asked['shared memory'] / 1024:.0f} KiB of shared memory a program, settings {asked['settings']}"
    if {kind["runs"] for kind in asked["kinds"]} == {"eager"} and len(reasons) == 1:
        (reason,) = reasons
        return [f"On {where} all calls run in plain PyTorch (eager). Not by the Triton back end: {reason}."]
    rows = [(mode, *(row[number] for row in cells.values())) for number, mode in enumerate(modes)]
    table = terminal_table(("call", *(f"{dtype} {dim}" for dtype, dim in cells)), rows, "l")
    said = [f"Calls with backend='auto' on {where}, training:", table]
    for reason, kinds in reasons.items():
        which = "" if len(kinds) == len(asked["kinds"]) else f" ({'; '.join(kinds)})"
        said.append(f"Not by the Triton back end{which}: {reason}.")
    return said


def info(as_json: Annotated[bool, typer.Option("--json")] = False, quick: bool = False) -> None:
    """Show versions, devices, back ends and missing extras, and which calls run in GPU kernels on this machine, and
    why.

    Args:
        as_json: Print it as JSON.
        quick: Leave out which calls run where. On a GPU that compiles the kernels, which takes minutes the first
            time.

    Examples:
        lln info  # before you report a problem
        lln info --json  # to attach it
    """
    found = gather_facts()
    if not quick:  # of GPUs; where there is none, of what there is
        asked = [name for name in found["devices"] if name.startswith("cuda")] or found["devices"][-1:]
        found["calls"] = [ask_device(name.partition(" ")[0]) for name in asked]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return

    from lln.lab.core.tables import print_wide, terminal_table

    rows = [(name, found[name]) for name in ("lln-attention", "python", "torch")]
    ends = ", ".join(found["back ends"])
    rows += [
        ("devices", ", ".join(found["devices"])),
        ("triton", found["triton"] or "not installed"),
        ("back ends", ends if "triton" in ends else f"{ends} (triton needs a CUDA or HIP device and Triton 3.6)"),
    ]
    for extra, names in found["missing"].items():
        remedy = f"missing {', '.join(names)}: pip install 'lln-attention[{extra}]'"
        rows.append((f"extra {extra}", remedy if names else "installed"))
    print_wide(terminal_table((), rows, box=None))
    for calls in found.get("calls", ()):
        print_wide("", *show_calls(calls))
