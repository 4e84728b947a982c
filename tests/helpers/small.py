"""The smallest language model that can be trained, as changes of a recipe."""

SMALLEST = {
    "model.layers": "1", "model.width": "32", "model.heads": "2", "model.inner": "32", "data.length": "32",
    "data.vocabulary": "300", "data.evaluation": "20", "optimisation.batch": "4", "optimisation.warmup": "2",
}  # fmt: skip
