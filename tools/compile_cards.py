"""Compiles the GPU kernels for cards that are not there, and stores what they take and which settings they get:

    python tools/compile_cards.py --out results/cards.json [--targets 86,gfx942] [--dtypes bfloat16] [--dims 64]
                                  [--modes LLN/LLN+Diag] [--hard] [--registers]

The tests run kernels in Triton's interpreter, as Python: what its compiler makes of them shows on a GPU, or here. A
file that is there is gone on with: rows that it has for the same sources are not made again.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lln.files import write_json
from lln.kernels.triton import fit, moments, plan, survey
from lln.kernels.triton.fit import DoesNotFit, Needs
from lln.kernels.triton.forward import Launch
from lln.kernels.triton.plan import Card, Settings
from lln.lab.core.provenance import provenance

KIB = 1024
STATISTICS = "statistics"  # of queries and keys: kernels with settings of their own
SOURCES = Path(fit.__file__).parent


def describe(name: str, shared: int, whole: int, threads: int, warp: int = 32, measured: bool = False) -> Card:
    """Shared memory in KiB: of a program, of a multiprocessor."""
    return Card(name, shared * KIB, whole * KIB, 2**16, threads, warp, measured)


# By what Triton calls them.
CARDS = {
    "80": describe("A100", 163, 164, 2048),
    "86": describe("RTX 3090, A10", 99, 100, 1536),
    "89": describe("RTX 4090, L4", 99, 100, 1536),
    "90": describe("H100, H200", 227, 228, 2048, measured=True),
    "100": describe("B200", 227, 228, 2048),
    "120": describe("RTX 5090", 99, 100, 1536),
    "gfx942": describe("MI300", 64, 64, 2048, 64),
}


class Absent:
    """What the compiler asks of a driver."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        hip = self.target.startswith("gfx")
        return GPUTarget("hip", self.target, 64) if hip else GPUTarget("cuda", int(self.target), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(target: str, registers: bool) -> list[dict[str, Any]]:
    """From now on kernels are compiled for this target and not run; what each takes goes into what is returned."""
    found: list[dict[str, Any]] = []
    counted = registers or target.startswith("gfx")
    prepare, rehearse, looked = Launch.__init__, fit.Rehearsal.launch, dict[Settings, Needs]()

    def init_as_on_a_gpu(self: Launch, *given: Any) -> None:
        prepare(self, *given)
        if self.dtype == torch.bfloat16:
            self.values["DOT"] = tl.bfloat16

    def look(kernel: Any, args: Sequence[Any], settings: Settings) -> Needs:
        try:
            compiled = kernel.warmup(*args, grid=(1,), **settings.options)
        except Exception as error:  # a compiler knows many
            raise DoesNotFit(f"does not compile: {' '.join(str(error).split())[-300:]}") from error
        tensor = getattr(compiled.metadata, "tmem_size", None) or 0
        needs = Needs(compiled.metadata.shared, count_registers(compiled.asm, target) if counted else 0, tensor)
        looked[settings] = needs
        return needs

    def launch(self: fit.Rehearsal, name: str, kernel: Any, args: Sequence[Any], settings: Settings) -> None:
        if not self.settings:  # another number of channels: what was found before is not taken
            found.clear()
        looked.clear()
        rehearse(self, name, kernel, args, settings)
        chosen = self.settings[name]
        needs = looked[dataclasses.replace(chosen, programs=settings.programs)]
        found.append(
            {"kernel": kernel.fn.__name__, "settings": name, **dataclasses.asdict(chosen), "again": self.again[name],
             "shared": needs.shared, "registers taken": needs.registers or None}
        )  # fmt: skip

    driver.set_active(Absent(target))
    # The assemblers are slow, and decide nothing of this.
    CUDABackend.make_cubin = lambda self, *args, **options: b""
    HIPBackend.make_hsaco = staticmethod(lambda *args, **options: b"")
    patched: Any = Launch
    patched.__init__ = init_as_on_a_gpu
    rehearsals: Any = fit.Rehearsal
    rehearsals.launch = launch
    cards: Any = plan
    cards.HIP = target.startswith("gfx")
    cards.find_card = lambda device: CARDS[target]
    cards.count_multiprocessors = lambda device: 108
    fits: Any = fit
    fits.compile_and_look = look
    return found


def count_registers(asm: dict[str, Any], target: str) -> int:
    """Of a thread; for NVIDIA's by asking ptxas, which takes a while."""
    if target.startswith("gfx"):
        return int(re.findall(r"\.vgpr_count:\s+(\d+)", asm["amdgcn"])[0])
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(asm["ptx"])
        source.flush()
        arch = sm_arch_from_capability(int(target))
        command = [get_ptxas(int(target)).path, "-v", f"--gpu-name={arch}", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.findall(r"Used (\d+) registers", said)[0])


def compile_call(found: list[dict[str, Any]], dtype: str, dim: int, mode: str, hard: bool) -> dict[str, Any]:
    """What the two passes of a call take."""
    call = survey.build_call(getattr(torch, dtype), dim, mode, torch.device("cpu"), hard=hard)
    wanted = {"query"}
    if hard:
        wanted |= {"directions"} if isinstance(call.directions, torch.Tensor) else {"beta"}
        wanted |= {"alpha"} if call.read == "paper" else set()
        wanted |= {"lln_weight", "block_weight"} if call.block_size else set()
    row: dict[str, Any] = {}
    for name in ("forward", "backward"):
        found.clear()
        begun = time.perf_counter()
        try:
            fitted = survey.fit_pass(name, call, frozenset(wanted))
            narrow = min(fitted.part, dim)
            row[name] = {"runs": "kernels", "value channels at once": narrow, "kernels": list(found)}
        except DoesNotFit as lack:
            row[name] = {"runs": "eager", "reason": str(lack)}
        row[name]["seconds"] = round(time.perf_counter() - begun, 1)
    return row


def compile_statistics(card: Card, dtype: str, dim: int) -> dict[str, Any]:
    """Those of short inputs and of long ones, with a mask."""
    found: list[dict[str, Any]] = []
    run: Any = JITFunction.run
    patched: Any = JITFunction
    module: Any = moments

    def note_compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        shared = run(self, *args, grid=grid, warmup=True, **options).metadata.shared
        found.append({"kernel": self.fn.__name__, "warps": options["num_warps"], "shared": shared})

    patched.run = note_compiled
    module.replayed = lambda key, given, launches, *rest: launches(None)
    begun, reason = time.perf_counter(), ""
    try:
        for length in (500, 100_000):
            q = torch.empty(1, 4, length, dim, dtype=getattr(torch, dtype))
            mask = torch.ones(1, length, dtype=torch.bool)
            moments.both_moments(q, q[:, :2], 2, mask, mask, None, None)
    except Exception as error:  # a compiler knows many
        reason = f"does not compile: {' '.join(str(error).split())[-300:]}"
    finally:
        patched.run = run
    if not reason and (largest := max(held["shared"] for held in found)) > card.shared:
        reason = f"needs {largest / KIB:.0f} KiB of shared memory"
    row: dict[str, Any] = {"runs": "eager", "reason": reason} if reason else {"runs": "kernels", "kernels": found}
    return {"forward": row | {"seconds": round(time.perf_counter() - begun, 1)}}


def name_sources(mode: str) -> str:
    """Of the kernels of a mode."""
    names = ["parts", "fold", "read", "causal", "causal_backward"]
    if mode in survey.EVIDENCE:
        names += ["evidence_fold", "evidence_read", "evidence_keys", "evidence_launch"]
        names += ["evidence_directed", "evidence_directed_keys", "evidence_directed_launch"]
        names += ["evidence_outside", "evidence_join", "evidence_join_launch"] if mode in survey.MIXED else []
        names += ["evidence_chunks", "evidence_causal", "evidence_causal_keys", "evidence_causal_launch"]
    text = b"".join((SOURCES / f"{name}.py").read_bytes() for name in names)
    return hashlib.sha256(text).hexdigest()[:12]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(CARDS))
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--modes", default="/".join((*survey.MODES, *survey.EVIDENCE, STATISTICS)), help="divided by /")
    parser.add_argument("--hard", action="store_true", help="with a mask, dropout, grouped heads and every gradient")
    parser.add_argument("--registers", action="store_true", help="count them, which takes NVIDIA's assembler")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    targets = asked.targets.split(",")
    if len(targets) > 1:  # each in a process of its own: Triton keeps what it compiled by device, not by target
        rest = [arg for name in ("dtypes", "dims", "modes") for arg in (f"--{name}", getattr(asked, name))]
        rest += [f"--{name}" for name in ("hard", "registers") if getattr(asked, name)]
        rest += ["--out", str(asked.out)] if asked.out else []
        return max(
            subprocess.run([sys.executable, __file__, "--targets", t, *rest], check=False).returncode for t in targets
        )
    (target,) = targets
    found = pretend(target, asked.registers)
    held: dict[str, Any] = {"rows": []}
    if asked.out and asked.out.exists():
        held = json.loads(asked.out.read_text())
    card, failed = CARDS[target], False
    kinds = asked.dtypes.split(","), map(int, asked.dims.split(",")), asked.modes.split("/")
    for dtype, dim, mode in itertools.product(*kinds):
        sources = name_sources(mode)
        kind = {"target": target, "card": card.name, "shared": card.shared, "dtype": dtype, "dim": dim, "mode": mode,
                "hard": asked.hard}  # fmt: skip
        if any(row | kind == row and row["sources"] == sources for row in held["rows"]):
            continue
        if mode == STATISTICS:
            made_of = compile_statistics(card, dtype, dim)
        else:
            made_of = compile_call(found, dtype, dim, mode, asked.hard)
        row = kind | made_of | {"sources": sources, "triton": triton.__version__}
        for name, made in made_of.items():
            largest = max((k["shared"] for k in made.get("kernels", ())), default=0)
            failed |= made["runs"] == "eager" and (dtype == "bfloat16" or dim < 128)
            channels = made.get("value channels at once")
            said = (
                made.get("reason") or f"{f'{channels} channels at once, ' if channels else ''}{largest / KIB:.0f} KiB"
            )
            print(
                target, dtype, dim, f"{mode}{', hard' if asked.hard else ''}, {name}:", made["runs"], said, flush=True
            )
        held["rows"] = [old for old in held["rows"] if old | kind != old] + [row]
        if asked.out:
            what = "what Triton's compiler makes of the GPU kernels: bytes of shared memory, and the settings that fit"
            write_json(
                asked.out, {"what": what, "provenance": provenance(0, torch.device("cpu"))} | {"rows": held["rows"]}
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
