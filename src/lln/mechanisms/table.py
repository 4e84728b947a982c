"""The table of docs/mechanisms.md, from what the mechanisms say about themselves:

python -m lln.mechanisms.table > docs/mechanisms.md
"""

from __future__ import annotations

from typing import Any

from lln.mechanisms.registry import COMMON, FEATURES, REGISTRY, Mechanism

HEAD = """# Mechanisms

Made by `python -m lln.mechanisms.table`; a test compares.

    lln.attention(name, query, key, value, *, is_causal, key_mask, cu_seqlens, dropout_p, scale, block_size, mix, **options)
    lln.mechanism(name, num_heads=..., head_dim=..., max_length=..., **options)     # any of them as a module
    lln.mechanisms()                                                                # name -> what it says about itself

*Kernel* mechanisms take `block_size`, which adds softmax attention inside blocks (ELU+Diag, Performer+Diag, ...); they and
the other mechanisms on q, k, v that need no parameters are functions. Those with parameters are modules on q, k, v.
*Mixers* are modules on hidden states that replace the whole attention block. Cost is time of one head, forward: N queries,
M keys, dims D and E, and sizes from the options. Rows with nothing to attend to are zero, sums are taken in float32, and
dropout acts on P, or on the queries' features where there is no P.
"""


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|")


def rows(entries: list[Mechanism]) -> list[str]:
    lines = [
        "| name | | paper | learns | cost | " + " | ".join(FEATURES) + " |",
        "|---" * (5 + len(FEATURES)) + "|",
    ]
    for m in entries:
        marks = ["yes" if feature not in m.refuses else "no" for feature in FEATURES]
        lines.append(
            "| " + " | ".join([f"`{m.name}`", *map(cell, (m.title, m.paper, m.learned, m.cost)), *marks]) + " |"
        )
    return lines


def options(m: Mechanism) -> str:
    own = {**m.options, **{k: v for k, v in m.module_options.items() if k not in COMMON}}
    for hidden in ("device", "dtype"):
        own.pop(hidden, None)
    return ", ".join(f"`{name}={value!r}`" for name, value in own.items())


def details(m: Mechanism) -> list[str]:
    lines = [f"- **{m.name}**" + (f": {m.note}." if m.note else ".")]
    if found := options(m):
        lines.append(f"  Options: {found}.")
    lines += [f"  No {FEATURES[feature]}: {reason}." for feature, reason in m.refuses.items()]
    return lines


def markdown() -> str:
    lines = [HEAD]
    for kind, title in (("kernel", "Kernel mechanisms"), ("attention", "Others on q, k, v"), ("mixer", "Mixers")):
        entries = [m for m in REGISTRY.values() if m.kind == kind]
        lines += [f"## {title}", "", *rows(entries), ""]
        for m in entries:
            lines += details(m)
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
