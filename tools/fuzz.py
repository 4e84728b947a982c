"""Generated cases against dense references in float64:

    make fuzz                                   every kind, an hour
    python tools/fuzz.py --kinds op --cases 50000 --seconds 7200
    python tools/fuzz.py --kinds op --only 1234  one case again
    python tools/fuzz.py --kinds kernels --cases 20000 --forms 16 --at-once 12

On a GPU each new form of a call of the kernels is compiled, which takes seconds, where a case takes milliseconds:
--forms is how many there may be. Sixteen forms, with all their lengths, take fewer than 200 compiled variants.

The kinds: op (output, state and gradients of lln_attention), kernels (the Triton kernels with every gradient; in
Triton's interpreter where there is no GPU), states (cut and merged), modules (padding, saving), plugin (models of
transformers). How a case is drawn is in tests/helpers/fuzzing.py. Results are in results/hardening/fuzz-KIND.json,
those of compiled kernels in fuzz-compiled.json.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from campaign import Campaign, Tried, finish, make_parser
from helpers.fuzzing import CHECKS, run_case

# Of the time, where all are asked for. A case of the op takes a hundredth of one of the kernels.
SHARES = {"op": 0.3, "kernels": 0.4, "states": 0.1, "modules": 0.1, "plugin": 0.1}


COMPILED = set[str]()  # by Triton, in this process


def prepare() -> None:
    """torch.empty gives NaN, so that reading what nobody wrote shows, and what Triton compiles is written down."""
    torch.set_num_threads(1)
    switches: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        from triton import knobs

        hooks: Any = knobs.runtime
        hooks.jit_cache_hook = lambda *, key, fn, **_: COMPILED.add(f"{fn.name} {key}")


def run_named(kind: str, seed: int, how: dict[str, Any], number: int) -> Tried:
    known = set(COMPILED)
    fault = run_case(kind, seed, number, **how)
    return Tried(kind, fault, tuple(COMPILED - known))


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, 50_000)
    parser.add_argument("--kinds", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--forms", type=int, help="how many forms calls of the kernels may have (default: any)")
    parser.add_argument("--at-once", type=int, default=1, help="processes (default: 1); what is found is the same")
    options: argparse.Namespace = parser.parse_args(arguments)
    if "plugin" in options.kinds:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    prepare()
    until, campaigns = time.monotonic(), []
    whole = sum(SHARES[kind] for kind in options.kinds)
    for kind in options.kinds:
        until = max(until, time.monotonic()) + options.seconds * SHARES[kind] / whole
        compiled = kind == "kernels" and torch.cuda.is_available()
        how = {"forms": options.forms} if kind == "kernels" and options.forms is not None else {}
        campaign = Campaign("fuzz-compiled" if compiled else f"fuzz-{kind}", options, kind=kind, **how)
        campaigns.append(campaign)
        try_one = functools.partial(run_named, kind, options.seed, how)
        campaign.run(try_one, until, at_once=options.at_once, prepare=prepare)
    finish(campaigns)


if __name__ == "__main__":
    main()
