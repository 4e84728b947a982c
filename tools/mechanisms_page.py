"""docs/mechanisms.md, from what the mechanisms say about themselves."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import lln
from lln.peers.registry import COMMON, FEATURES, REGISTRY, Mechanism

HEAD = """# Mechanisms

Made by `make pages` from what the mechanisms declare; a test compares.

| name | is | alpha and beta of LLN |
|---|---|---|
| `lln.lln_attention(query, key, value, alpha, beta)` | LLN and LLN+Diag, a function | are given |
| `lln.LLNAttention(heads, dim)` | the same as a module on query, key, value | follow from query and \
key, or are learned |
| `lln.MultiheadAttention(embed_dim, heads)` | that with projections, in the place of torch's | likewise |
| `lln.attention(name, query, key, value, **options)` | any mechanism without parameters, a function with the \
arguments of `lln_attention` (`is_causal`, `key_mask`, `cu_seqlens`, ...) | follow from query and key, or are given |
| `lln.mechanism(name, num_heads=..., head_dim=..., max_length=..., **options)` | any mechanism as a module | follow \
from query and key, or are learned |
| `lln.mechanisms()` | name -> what the mechanism says about itself; runs nothing | none |

*Kernel* mechanisms take `block_size`, which adds softmax attention inside blocks (ELU+Diag, Performer+Diag, ...).
Mechanisms on q, k, v are functions, or modules where they always learn something. *Mixers* are modules on hidden
states that replace the whole attention block. Cost is the time of one head, forward: N queries, M keys, dims D and E,
and sizes from the options: F features, b tokens of a block, m landmarks, w a window or the width of a convolution, c a
chunk, g global tokens, R rounds, s the dim of FLASH's keys, e the channels of a mixer, and r the rank of a projection,
of BigBird its random blocks. Rows with nothing to attend to are zero, sums are taken in float32, and dropout acts on P,
or on the queries' features where there is no P.
"""
FRAMEWORKS = """## LLN in every framework

From the arguments that each `lln_attention` takes; `+`: in modules alone. Grouped heads and cross attention are in all
of them. [GPUs](gpu.md) says which calls run in PyTorch's Triton kernels, [In JAX and MindSpore](ports.md) what
differs in detail.
"""
SOURCE = Path(lln.__file__).parent
# Where the function is, and what PyTorch has in modules alone.
BACK_ENDS = {
    "PyTorch, `lln`": ("functional.py", {"value_convolution"}),
    "JAX, `lln.jax`": ("jax/attending.py", set[str]()),
    "MindSpore, `lln.mindspore`": ("mindspore/attending_ms.py", set[str]()),
}
ARGUMENTS = {
    "padding": {"key_mask"}, "causal": {"is_causal"}, "packing": {"cu_seqlens", "segment_ids"},
    "LLN+Diag": {"block_size"}, "states": {"state"}, "evidence read": {"read"}, "overlapping blocks": {"overlap"},
    "value convolution": {"value_convolution"}, "dropout": {"dropout_p"},
}  # fmt: skip
KINDS = {"kernel": "Kernel mechanisms", "attention": "Others on q, k, v", "mixer": "Mixers"}
UNLISTED = (*COMMON, "device", "dtype")  # options that all modules have


def make_row(m: Mechanism) -> str:
    marks = ["yes" if feature not in m.refuses else "no" for feature in FEATURES]
    return "| " + " | ".join([f"`{m.name}`", m.title, m.paper, m.learned, m.cost, *marks]) + " |"


def list_options(options: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in options.items() if name not in UNLISTED)


def list_details(m: Mechanism) -> list[str]:
    lines = [f"- **{m.name}**" + (f": {m.note}." if m.note else ".")]
    of_function, of_module = list_options(m.options), list_options(m.module_options)
    if of_function:
        lines.append(f"  Options: {of_function}.")
    if of_module and of_module != of_function:
        lines.append(f"  Options of the module: {of_module}.")
    return lines + [f"  No {FEATURES[feature]}: {reason}." for feature, reason in m.refuses.items()]


def list_arguments(path: Path, function: str) -> set[str]:
    """The names of a function's parameters, without importing its framework."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    raise ValueError(f"{path} has no function {function}.")


def compare_frameworks() -> list[str]:
    lines = [FRAMEWORKS, "| back end | " + " | ".join(ARGUMENTS) + " |", "|---" * (len(ARGUMENTS) + 1) + "|"]
    for name, (place, in_modules) in BACK_ENDS.items():
        taken = list_arguments(SOURCE / place, "lln_attention")
        marks = ["yes" if names & taken else "+" if names & in_modules else "no" for names in ARGUMENTS.values()]
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    return [*lines, ""]


def markdown() -> str:
    lines = [HEAD, *compare_frameworks()]
    columns = ["name", "is called", "paper", "learns", "cost", *FEATURES]
    for kind, title in KINDS.items():
        entries = [m for m in REGISTRY.values() if m.kind == kind]
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += [*map(make_row, entries), ""]
        for m in entries:
            lines += list_details(m)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
