"""What the paper publishes (data/published.json), by the names of our mechanisms, and in what runs differ from its own.

Accuracies in % are in Tables 1, 3 and 5 (None: it has none), time and memory of training, on one A100 of 40 GB, in
Tables 2 and 4 (None: out of memory)."""

from typing import Any

from lln.files import read_data
from lln.lab.core.documents import write_paragraphs

Numbers = dict[str, dict[str, float | None]]  # attention -> column -> accuracy
AVERAGE = "average"
TABLES = read_data("published")
COLUMNS1, LENGTHS2, COLUMNS3, TASKS4, COLUMNS5 = (tuple(table["columns"]) for table in TABLES.values())


def name_columns(name: str, values: list[float | None]) -> dict[Any, float | None]:
    return dict(zip(TABLES[name]["columns"], values, strict=True))


ACCURACIES: dict[str, Numbers] = {
    table: {attention: name_columns(table, values) for attention, values in TABLES[table]["rows"].items()}
    for table in ("table1", "table3", "table5")
}
TABLE1, TABLE3, TABLE5 = ACCURACIES.values()
# By attention, unit and column.
PAPER2, PAPER4 = (
    {
        attention: {unit: name_columns(table, values) for unit, values in units.items()}
        for attention, units in TABLES[table]["rows"].items()
    }
    for table in ("table2", "table4")
)


def describe_differences(config: dict[str, Any], paper: dict[str, Any]) -> dict[str, list[str]]:
    """In what a config differs from the paper's recipe, as sentences: in model, budget and data."""
    found: dict[str, list[str]] = {}
    for part, sentence in (
        ("model", "Model: {}; in the paper's recipe {}."),
        ("budget", "Training: {}; in the paper's recipe {}."),
        ("data", "Data: {}, where the paper's recipe has {}."),
    ):
        ours, theirs = (write_paragraphs("recipe.txt", part, **c)[0] for c in (config, paper))
        found[part] = [] if ours == theirs else [sentence.format(ours, theirs)]
    if config["data"]["subset"] == "retrieval":  # the recipe's is no more the paper's than any other
        said = "stands in for the published pairs of papers, which are not on the Hub."
        found["data"] = [f"Data: {config['data']['name']} {said}"]
    return found
