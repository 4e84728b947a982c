"""What presets had before they said it: runs that were begun or stored then go on, and are read, as they were."""

import dataclasses

from lln.lab.train.config import BY_WIDTH, OF_TORCH, Config

EVALUATED = 20_000  # generated examples that a model is judged by; 2,000 before, which could not tell most models apart


def as_before(config: Config) -> Config:
    """The config as the same preset made it then: initialisation by task, fixed pieces of text, few generated examples,
    and for the paper's vision transformer patches of 32 pixels, images as they are and float32.

    >>> from lln.lab.recipes import recipe
    >>> now = recipe("mlm", "mini")
    >>> now.data.windows, as_before(now).data.windows
    (True, False)
    """
    data = dataclasses.replace(config.data, windows=False)
    if data.name == "generated" and data.evaluation == EVALUATED:
        data = dataclasses.replace(data, evaluation=0)
    model, precision = config.model, config.precision
    if model.initialisation == BY_WIDTH:
        model = dataclasses.replace(model, initialisation="")
    elif (config.task, config.preset, model.initialisation, model.patch) == ("image", "paper", OF_TORCH, 7):
        model = dataclasses.replace(model, initialisation="", patch=32)
        data = dataclasses.replace(data, options={k: v for k, v in data.options.items() if k != "augment"})
        precision = "float32" if precision == "float16" else precision
    return dataclasses.replace(config, data=data, model=model, precision=precision)
