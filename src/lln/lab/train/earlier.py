"""What presets had before they said it: runs that were begun or stored then go on, and are read, as they were."""

import dataclasses

from lln.lab.train.config import BY_WIDTH, Config

EVALUATED = 20_000  # generated examples that a model is judged by; 2,000 before, which could not tell most models apart


def as_before(config: Config) -> Config:
    """The config as the same preset made it then: initialisation by task, fixed pieces of text, few generated examples.

    >>> from lln.lab.recipes import recipe
    >>> now = recipe("mlm", "mini")
    >>> now.data.windows, as_before(now).data.windows
    (True, False)
    """
    data = dataclasses.replace(config.data, windows=False)
    if data.name == "generated" and data.evaluation == EVALUATED:
        data = dataclasses.replace(data, evaluation=0)
    model = config.model
    if model.initialisation == BY_WIDTH:
        model = dataclasses.replace(model, initialisation="")
    return dataclasses.replace(config, data=data, model=model)
