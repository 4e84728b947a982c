"""Prints as JSON how many variants of each kernel the lengths of one kind of call lead to, without compiling any."""

import itertools
import json
from collections import Counter
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lln.kernels.triton import moments, plan, survey
from lln.kernels.triton.backward import Backward
from lln.kernels.triton.forward import Launch
from lln.kernels.triton.plan import Card

FIRST = (1, 64, 100, 2000, 2048, 70000, 65536, 100_000, 131_072, 200_000)
LATER = (7, 16, 17, 33, 128, 320, 333, 511, 1000, 1024, 4096, 5000, 8191, 16384, 30000, 32768, 90000, 81920, 120_001)


class Absent:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    variants: dict[tuple[str, str], str] = {}  # by kind of call and key: the kernel
    kind = ""

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        variants.setdefault((kind, str(key)), fn.name)
        return True  # it is not to be compiled

    driver.set_active(Absent())
    knobs.runtime.jit_cache_hook = note
    cards: Any = plan
    cards.find_card = lambda device: Card("", 227 * 1024, 228 * 1024, 2**16, 2048, measured=True)
    cards.count_multiprocessors = lambda device: 132

    def run(length: int) -> None:
        nonlocal kind
        for mode, hard in itertools.product(survey.MODES, (False, True)):
            kind = f"{mode} {hard}"
            size = length + 12 * hard  # a hard one is so much shorter
            call = survey.build_call(torch.bfloat16, 64, mode, torch.device("cpu"), length=size, hard=hard)
            log, mean = Launch(call).forward()[1:]
            wanted = {"alpha", "beta"} if hard else {"query"}
            Backward(call, None if call.is_causal else (log, mean), call.query, None, None, wanted).run()
            moments.both_moments(call.query, call.key, 2, call.key_mask, call.key_mask, None, None)

    for length in FIRST:
        run(length)
    early = set(variants)
    for length in LATER:
        run(length)
    late = Counter(name for key, name in variants.items() if key not in early)
    counts = Counter((kind, name) for (kind, _), name in variants.items())
    most = {name: max(n for (_, other), n in counts.items() if other == name) for name in variants.values()}
    print(json.dumps({"triton": triton.__version__, "late": late, "most": most}))


if __name__ == "__main__":
    main()
