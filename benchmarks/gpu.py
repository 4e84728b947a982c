"""Everything the GPU kernels are judged by, in one go: `python benchmarks/gpu.py --out benchmarks/results/NAME`.

Each part is a run of `lln bench` of its own, stored in a folder of its own as it finishes, so that nothing is lost when
the machine goes away; a part that is there already is left alone. `make pages` brings what is stored into the
documentation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lln.lab.core.tables import markdown_table

OURS = "LLN,LLN-sample,LLN+Diag,LLN+Diag-sample"
TORCH = "flash,cudnn"  # the fast ones; `lln bench` has the others too
PARTS = {
    "floors": ["--shapes", "16x12x4096x64,1x12x16384x64,4x16x16384x128", "--only", f"{TORCH},{OURS}"],
    "batch1": ["--lengths", "512,1024,2048,4096,8192,16384,65536", "--only", f"{TORCH},LLN,LLN+Diag",
               "--causal", "no"],
    "tokens16k": ["--lengths", "512,1024,2048,4096,8192,16384", "--tokens", "16384", "--only", f"{TORCH},LLN,LLN+Diag",
                  "--causal", "no"],
    "dropout": ["--lengths", "1024,16384", "--tokens", "16384", "--only", f"{TORCH},LLN,LLN+Diag", "--causal", "no",
                "--dropout", "0.1"],
    "evidence": ["--shapes", "16x12x4096x64", "--causal", "no", "--only",
                 f"{TORCH},LLN,LLN+Diag,evidence,evidence-signed,evidence+Diag,evidence-directions"],
    "evidence-causal": ["--shapes", "16x12x4096x64", "--causal", "yes", "--only",
                        f"{TORCH},LLN,evidence,evidence-signed"],
    "evidence-mix": ["--shapes", "16x12x4096x64,1x12x4096x64", "--causal", "no", "--only",
                     "cudnn,LLN,LLN+Diag,evidence-mix,evidence-mix-eager"],
    "evidence-mix-causal": ["--shapes", "16x12x4096x64,1x12x4096x64", "--causal", "yes", "--only",
                            "cudnn,LLN+Diag,evidence-mix,evidence-mix-eager"],
    "million": ["--lengths", "65536,262144,1048576", "--only", "LLN,LLN+Diag", "--causal", "no"],
    "fla": [
        "--peers", "fla", "--shapes", "16x12x4096x64,1x12x4096x64,1x12x16384x64,1x12x65536x64", "--causal", "yes",
        "--only", "fla-linear,fla-gla,LLN,LLN+Diag,cudnn",
    ],
}  # fmt: skip

COLUMNS = {"cudnn": "softmax (cuDNN)", "fla-linear": "fla, ungated", "LLN": "LLN", "LLN+Diag": "LLN+Diag"}


def times(result: dict[str, Any], length: int) -> dict[str, float]:
    """Milliseconds of forward and backward by attention, of batch 1 at this length."""
    rows = [r for r in result["rows"] if r["batch"] == 1 and r["length"] == length and not r["error"]]
    return {r["attention"]: r["device_ms"]["training"]["median"] for r in rows}


def table(folder: Path) -> str:
    """What is stored in the folder, as Markdown."""
    stored = {name: json.loads((folder / name / "bench.json").read_text()) for name in ("batch1", "million", "fla")}
    rows = []
    cases = [("batch1", n, "") for n in (512, 1024, 4096, 16384, 65536)] + [("million", 1048576, "")]
    cases += [("fla", n, ", causal") for n in (4096, 16384, 65536)]
    for part, length, kind in cases:
        ms = times(stored[part], length)
        shown = [f"{ms[name]:.3g}" if name in ms else "" for name in COLUMNS]
        ratio = f"{ms['cudnn'] / ms['LLN+Diag']:.3g} times" if "cudnn" in ms else ""
        rows.append((f"{length:,}{kind}", *shown, ratio))
    made = stored["batch1"]["provenance"]
    lines = [
        *markdown_table(["tokens", *COLUMNS.values(), "LLN+Diag is faster"], rows, "r"),
        "",
        f"Milliseconds of forward and backward, batch 1, 12 heads of 64, bfloat16, medians of CUDA-graph replays; "
        f"{made['device']}, torch {made['torch']}, Triton {made['triton']}, {made['date'][:10]}, "
        f"commit {made['commit']}. fla is flash-linear-attention, whose attention is causal. An empty cell was not "
        "measured.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, with commas between (default: all)")
    parser.add_argument("--repeats", default="20")
    arguments = parser.parse_args()
    for name in arguments.parts.split(","):
        folder = arguments.out / name
        if name not in PARTS:
            parser.error(f"--parts: {name!r} is none of {', '.join(PARTS)}")
        if (folder / "bench.md").exists():
            print(f"{name}: already in {folder}")
            continue
        if name == "fla" and importlib.util.find_spec("fla") is None:
            print("fla: not installed; pip install flash-linear-attention")
            continue
        command = ["lln", "bench", *PARTS[name], "--repeats", arguments.repeats, "--out", str(folder)]
        print(" ".join(command), flush=True)
        subprocess.run([sys.executable, "-m", *command], check=False)


if __name__ == "__main__":
    main()
