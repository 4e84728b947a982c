"""Everything the GPU kernels are judged by, in one go: `python benchmarks/gpu.py --out benchmarks/results/NAME`.

Each part is a run of `lln bench` of its own, stored in a folder of its own as it finishes, so that nothing is lost when
the machine goes away; a part that is there already is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

OURS = "LLN,LLN-sample,LLN+Diag,LLN+Diag-sample"
TORCH = "flash,cudnn"  # the fast ones; `lln bench` has the others too
PARTS = {
    "floors": ["--shapes", "16x12x4096x64,1x12x16384x64,4x16x16384x128", "--only", f"{TORCH},{OURS}"],
    "batch1": ["--lengths", "512,1024,2048,4096,8192,16384,65536", "--only", f"{TORCH},LLN,LLN+Diag",
               "--causal", "no"],
    "tokens16k": ["--lengths", "512,1024,2048,4096,8192,16384", "--tokens", "16384", "--only", f"{TORCH},LLN,LLN+Diag",
                  "--causal", "no"],
    "million": ["--lengths", "65536,262144,1048576", "--only", "LLN,LLN+Diag", "--causal", "no"],
    "fla": [
        "--peers", "fla", "--shapes", "16x12x4096x64,1x12x4096x64,1x12x16384x64,1x12x65536x64", "--causal", "yes",
        "--only", "fla-linear,fla-gla,LLN,LLN+Diag,cudnn",
    ],
}  # fmt: skip


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
