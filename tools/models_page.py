"""docs/models.md, from what `make test-models` found."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "results" / "models.json"
NAMES = ("lln", "lln_diag")
HEAD = """# Which models

Made by `make pages` from `results/models.json`, which `make test-models` writes: a tiny model with random weights of
each architecture of transformers {transformers}, from the defaults of its config, runs with `lln` and with
`lln_diag`. Every call of attention inside it is compared with eq. (8) in float64, with the pairs that the model's own
softmax attention sees; beside that nothing may run softmax. A model that cannot be served must be refused in one
sentence, and a refusal that names a remedy is followed by another try with it.

"""
# What a refusal says, without the names in it; the first that is found in its text.
REASONS = (
    (r"no attention of .* uses transformers' AttentionInterface|of .* does not use transformers'|ignores transformers'",
     "Attention of their own: some attention in them does not ask transformers for its function, so it would go on to "
     "run softmax"),
    (r"has no attention", "No attention: none in any layer, or in those few that a tiny model has"),
    (r"names no layer that attends", "Windows in every layer that attends"),
    (r"sliding_window|chunk", "Windows: layers that attend within a window or chunk, and no others"),
    (r"position_bias|bias of single", "Biases of single query-key pairs"),
    (r"softcap", "A cap on single scores"),
    (r"s_aux|sinks", "Attention sinks"),
    (r"block_indices|chooses other keys", "A choice of keys for every query"),
    (r"see each other in the middle of a causal text", "Images or prompts inside a causal text, whose tokens see each "
     "other"),
    (r"keeps images or their tiles apart", "Images or tiles in one row, kept apart by a mask of single pairs"),
    (r"must be a padding mask|lays another pattern|mask of query-key pairs|single query-key pairs",
     "Masks of single pairs: other keys are hidden from each query"),
    (r"a bias cannot be added", "Masks that are numbers to be added"),
    (r"cannot know which queries are padding", "Attention between two sequences, where statistics are not known"),
    (r"in cross attention", "Blocks in cross attention, where there is no diagonal"),
    (r"how many heads of what size", "Heads whose number or size is not said"),
)  # fmt: skip


def read_outcome(row: dict[str, Any]) -> str:
    """Of an architecture: the worse of both attentions."""
    if "outcome" in row:
        return str(row["outcome"])
    if is_partial(row):
        return "in part"
    found = {row[name]["outcome"] for name in NAMES}
    return next(outcome for outcome in ("failed", "refused", "agrees", "not tried") if outcome in found)


def is_partial(row: dict[str, Any]) -> bool:
    """Whether a name is refused, and `convert` serves the parts that can attend linearly."""
    return "outcome" not in row and [row[name]["outcome"] for name in NAMES] == ["refused", "agrees"]


def sort_reason(text: str) -> str:
    return next((words for pattern, words in REASONS if re.search(pattern, text)), text.split(";")[0])


def list_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def tell_later(rows: dict[str, dict[str, Any]]) -> str:
    """The commits of architectures that were tried again alone."""
    later: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        if "commit" in row:
            later[row["commit"]].append(name)
    return "".join(f"; {list_names(names)} at {commit}" for commit, names in sorted(later.items()))


def markdown() -> str:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = stored["architectures"]
    said, count = stored["provenance"], Counter(read_outcome(row) for row in rows.values())
    agreeing = [row for row in rows.values() if read_outcome(row) == "agrees"]
    worst = max(row[name]["error"] for row in agreeing for name in NAMES)
    calls = sum(row[name]["calls"] for row in agreeing for name in NAMES)
    parts = [name for name, row in rows.items() if read_outcome(row) == "in part"]
    lines = [HEAD.format(transformers=said["transformers"])]
    lines += [f"Of {len(rows)} architectures:", ""]
    lines += [
        f"- **{count['agrees']} agree** with eq. (8) and LLN+Diag in all {calls:,} calls, to {worst:.1g} at worst;",
        f"- **{len(parts)} agree in part**: the name alone is refused in one sentence, and `lln.hf.convert` gives LLN "
        "attention to the parts that can have it, says which keep softmax attention, and those agree;",
        f"- **{count['refused']} are refused** in one sentence;",
        f"- **{count['failed']} fail**: another exception, or softmax that goes on to run;",
        f"- {count['not tried']} could not be made tiny, or called, without knowing more about them.",
        "",
        f"{said['device']}, torch {said['torch']}, {said['date'][:10]}, commit {said['commit']}{tell_later(rows)}.",
        "",
    ]
    if failed := {name: row for name, row in rows.items() if read_outcome(row) == "failed"}:
        lines += ["## What fails", ""]
        for name, row in failed.items():
            reasons = {row[each]["reason"] for each in NAMES if row[each]["outcome"] == "failed"}
            lines.append(f"- `{name}`: {'; '.join(sorted(reasons))}.")
        lines.append("")
    lines += ["## What agrees", ""]
    ways: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        if read_outcome(row) == "agrees":
            ways[" and ".join(row["lln_diag"].get("with", row["lln"].get("with", [])))].append(name)
    for way in sorted(ways):
        lines += [
            f"As they are: {list_names(ways[way])}." if not way else f"{way.capitalize()}: {list_names(ways[way])}."
        ]
        lines.append("")
    lines += [f"In those parts that can, by `lln.hf.convert`: {list_names(parts)}.", ""] if parts else []
    lines += ["## What is refused, and why", ""]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        if read_outcome(row) == "refused":
            reason = next(row[each]["reason"] for each in NAMES if row[each]["outcome"] == "refused")
            groups[sort_reason(reason)].append(name)
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines += [f"**{reason}** ({len(names)}): {list_names(names)}.", ""]
    lines += ["## What was not tried", "", "Of these no tiny model ran even with softmax:", ""]
    lines += [list_names([name for name, row in rows.items() if read_outcome(row) == "not tried"]) + "."]
    return "\n".join(lines).rstrip() + "\n"
