"""Generated cases against dense references in float64:

    make fuzz                                   every kind, an hour
    python tools/fuzz.py --kinds op --cases 50000 --seconds 7200
    python tools/fuzz.py --kinds op --only 1234  one case again
    python tools/fuzz.py --kinds kernels --cases 20000 --forms 16

On a GPU each new form of a call of the kernels is compiled, which takes seconds, where a case takes milliseconds:
--forms is how many there may be. Sixteen forms, with all their lengths, take fewer than 200 compiled variants.

The kinds: op (output, state and gradients of lln_attention), kernels (the Triton kernels with every gradient; in
Triton's interpreter where there is no GPU), states (cut and merged), modules (padding, saving), plugin (models of
transformers). How a case is drawn is in tests/helpers/fuzzing.py. Results are in results/hardening/fuzz-KIND.json,
those of compiled kernels in fuzz-compiled.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from campaign import Campaign, finish, make_parser
from helpers.fuzzing import CHECKS, run_case

# Of the time, where all are asked for. A case of the op takes a hundredth of one of the kernels.
SHARES = {"op": 0.3, "kernels": 0.4, "states": 0.1, "modules": 0.1, "plugin": 0.1}


@contextlib.contextmanager
def poison_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that reading what nobody wrote shows."""
    switches: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_named(kind: str, seed: int, how: dict[str, Any], number: int) -> tuple[str, Any]:
    return kind, run_case(kind, seed, number, **how)


def count_compiled() -> set[str]:
    """A set to which Triton will add what it compiles from now on."""
    from triton import knobs

    compiled = set[str]()

    def note(*, key: Any, fn: Any, **_: Any) -> None:
        compiled.add(f"{fn.name} {key}")

    hooks: Any = knobs.runtime
    hooks.jit_cache_hook = note
    return compiled


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, 50_000)
    parser.add_argument("--kinds", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--forms", type=int, help="how many forms calls of the kernels may have (default: any)")
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if "plugin" in options.kinds:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
    until, campaigns = time.monotonic(), []
    whole = sum(SHARES[kind] for kind in options.kinds)
    with poison_memory():
        for kind in options.kinds:
            until = max(until, time.monotonic()) + options.seconds * SHARES[kind] / whole
            compiled = kind == "kernels" and torch.cuda.is_available()
            how = {"forms": options.forms} if kind == "kernels" and options.forms is not None else {}
            campaign = Campaign("fuzz-compiled" if compiled else f"fuzz-{kind}", options, kind=kind, **how)
            campaigns.append(campaign)
            variants = count_compiled() if compiled else None
            campaign.run(functools.partial(run_named, kind, options.seed, how), until)
            if variants is not None:
                campaign.facts["variants"] = len(variants)
                if options.only is None:
                    campaign.save()
    finish(campaigns)


if __name__ == "__main__":
    main()
