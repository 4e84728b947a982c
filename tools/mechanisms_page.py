"""docs/mechanisms.md, from what the mechanisms say about themselves."""

from __future__ import annotations

from typing import Any

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
| `lln.mechanisms()` | name -> what the mechanism says about itself; runs nothing | |

*Kernel* mechanisms take `block_size`, which adds softmax attention inside blocks (ELU+Diag, Performer+Diag, ...).
Mechanisms on q, k, v are functions, or modules where they always learn something. *Mixers* are modules on hidden
states that replace the whole attention block. Cost is the time of one head, forward: N queries, M keys, dims D and E,
and sizes from the options. Rows with nothing to attend to are zero, sums are taken in float32, and dropout acts on P,
or on the queries' features where there is no P.
"""
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


def markdown() -> str:
    lines = [HEAD]
    columns = ["name", "", "paper", "learns", "cost", *FEATURES]
    for kind, title in KINDS.items():
        entries = [m for m in REGISTRY.values() if m.kind == kind]
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += [*map(make_row, entries), ""]
        for m in entries:
            lines += list_details(m)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
