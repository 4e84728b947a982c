"""What the paper publishes (data/published.json), by the names of our mechanisms, and in what runs differ from its own.

Accuracies in % are in Tables 1, 3 and 5 (None: it has none), time and memory of training, on one A100 of 40 GB, in
Tables 2 and 4 (None: out of memory)."""

from typing import Any

from lln.files import read_data

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


def describe_data(config: dict[str, Any], paper: dict[str, Any]) -> list[str]:
    if config["data"]["subset"] == "retrieval":  # the recipe's is no more the paper's than any other
        return [
            f"Data: {config['data']['name']} stands in for the published pairs of papers, which are not on the Hub."
        ]
    ours, theirs = (" ".join(filter(None, (c["data"]["name"], c["data"]["subset"]))) for c in (config, paper))
    return [] if ours == theirs else [f"Data: {ours}, where the paper's recipe has {theirs}."]


def describe_training(config: dict[str, Any], paper: dict[str, Any]) -> dict[str, list[str]]:
    """Of the model and of the budget."""

    def model(config: dict[str, Any]) -> str:
        m = config["model"]
        norm = ", pre-norm" if m["pre_norm"] else ""
        places = f", {m['positions']} positions" if "positions" in m else ""
        return f"{m['layers']} layers, {m['width']} wide, {m['heads']} heads{norm}{places}"

    def budget(config: dict[str, Any]) -> str:
        o, what = config["optimisation"], "pixels a side" if config["task"] == "image" else "tokens"
        length = f"{config['data']['length']} {what} in {config['precision']}"
        return f"{o['steps']:,} steps of {o['batch']} examples of {length}"

    found: dict[str, list[str]] = {}
    for name, word, title in (("model", "Model", model), ("budget", "Training", budget)):
        ours, theirs = title(config), title(paper)
        found[name] = [] if ours == theirs else [f"{word}: {ours}; in the paper's recipe {theirs}."]
    return found
