"""Stored tables as Markdown, beside their JSON."""

from __future__ import annotations

import json
from pathlib import Path

from lln.lab.paper import costs
from lln.lab.paper.needle_lengths import write_lengths
from lln.lab.paper.run_tables import write_table

RESULTS = Path(__file__).parents[1] / "results"


def tables() -> dict[Path, str]:
    found = {}
    for path in sorted(RESULTS.glob("**/*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("table") in costs.TABLES:
            found[path.with_suffix(".md")] = costs.write_costs(costs.TABLES[result["table"]], result)
        elif "table" in result:
            found[path.with_suffix(".md")] = write_table(result)
        elif result.get("figure") == "lengths":
            found[path.with_suffix(".md")] = write_lengths(result)
    return found
