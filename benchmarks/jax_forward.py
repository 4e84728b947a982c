"""LLN's forward pass in JAX on a CPU beside jax.nn.dot_product_attention, and what it holds in memory against length.

    python benchmarks/jax_forward.py --out benchmarks/results/jax_forward.json

Both are compiled and take turns within one run, after LLN has been compared with the float64 reference on a shorter
input. Memory is what XLA sets aside for a compiled call beside its inputs. The result also fills in the table in
docs/ports.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from lln.files import put_between, write_json, write_text
from lln.jax import lln_attention
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import markdown_table, show_timing
from lln.lab.core.timing import Work, time_calls
from lln.naive import naive_lln

PAGE = Path(__file__).parent.parent / "docs" / "ports.md"
MARKS = "<!-- benchmarks/jax_forward.py -->\n", "<!-- end -->"
SHAPE = {"batch": 1, "heads": 12, "length": 8192, "dim": 64}
CHECK_LENGTH = 256
LENGTHS = (2048, 4096, 8192, 16384)
ALPHA = BETA = 2.1
SETTLING = "after softmax"


def softmax(q: Any, k: Any, v: Any) -> Any:
    """Which has the heads behind the length."""
    return jax.nn.dot_product_attention(*(jnp.swapaxes(t, 1, 2) for t in (q, k, v))).swapaxes(1, 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "LLN": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA),
    "LLN+Diag": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA, block_size=64),
    "LLN, causal": lambda q, k, v: lln_attention(q, k, v, ALPHA, BETA, is_causal=True),
}


def make(length: int, seed: int) -> list[Any]:
    shape = SHAPE["batch"], SHAPE["heads"], length, SHAPE["dim"]
    return list(jax.random.normal(jax.random.key(seed), (3, *shape)))


def check(seed: int) -> None:
    q, k, v = make(CHECK_LENGTH, seed)
    given = [torch.tensor(np.asarray(t)) for t in (q, k, v)]
    for name, is_causal in (("LLN", False), ("LLN, causal", True)):
        found = np.asarray(jax.jit(FUNCTIONS[name])(q, k, v))
        error = abs(found - naive_lln(given[0], given[1], given[2], ALPHA, BETA, is_causal=is_causal).numpy()).max()
        if not error < 1e-5:
            raise SystemExit(f"{name} is off by {error:.1e}; nothing was timed.")


def finish(compiled: Any, given: list[Any]) -> Any:
    return jax.block_until_ready(compiled(*given))


def hold(compiled: Any) -> int:
    """Bytes beside the inputs."""
    found = compiled.memory_analysis()
    return int(found.temp_size_in_bytes + found.output_size_in_bytes)


def measure(repeats: int, seed: int) -> dict[str, Any]:
    check(seed)
    memory: dict[str, list[int]] = {name: [] for name in FUNCTIONS}
    works: dict[str, Work] = {}
    for length in LENGTHS:
        given = make(length, seed)
        for name, function in FUNCTIONS.items():
            compiled = jax.jit(function).lower(*given).compile()
            memory[name].append(hold(compiled))
            if length == SHAPE["length"]:
                works[name] = functools.partial(finish, compiled, given)
    # The gigabytes that softmax gives back are still cleared away while what comes after it runs, which is not counted.
    works = {"softmax": works["softmax"], SETTLING: works["LLN"], **works}
    times = time_calls(works, repeats=repeats, device=torch.device("cpu"))
    del times[SETTLING]
    made = provenance(seed, torch.device("cpu"))
    made |= {"jax": jax.__version__, "threads": len(os.sched_getaffinity(0))}
    return {
        "what": "forward pass in JAX, float32, ms (median and quartiles), and bytes beside the inputs against length",
        "shape": SHAPE,
        "provenance": made,
        "ms": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "lengths": LENGTHS,
        "bytes": memory,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    ms, shape, made = result["ms"], result["shape"], result["provenance"]
    rows = []
    for name, t in ms.items():
        held = [f"{size / 2**20:,.0f}" for size in result["bytes"][name]]
        rows.append((name, show_timing(t), f"{ms['softmax']['median'] / t['median']:.3g}", *held))
    lengths = [f"MiB at {length:,}" for length in result["lengths"]]
    lines = [
        *markdown_table(["forward, float32", "ms (quartiles)", "times as fast as softmax", *lengths], rows, "l"),
        "",
        f"Batch {shape['batch']}, {shape['heads']} heads of {shape['dim']}, times at {shape['length']:,} tokens; "
        f"softmax is `jax.nn.dot_product_attention`. Measured on {made['device']}, "
        f"{made['threads']} threads, jax {made['jax']}, {made['date'][:10]}, commit {made['commit']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to store the result; also updates docs/ports.md")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = json.loads(json.dumps(measure(args.repeats, args.seed)))
    print(table(result))
    if args.out:
        write_json(args.out, result)
        write_text(PAGE, put_between(PAGE.read_text(), MARKS, table(result)))


if __name__ == "__main__":
    main()
