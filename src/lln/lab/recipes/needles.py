"""Needles in text, at any length: does attention find one token among tens of thousands? No task of the paper, so there
is no preset of that name.

No positions: a needle is found by its key alone. A model that is new to the task learns it in short sequences and goes
on from there (`lengthen`): with one in ten thousand tokens to look at, a new model has nothing to begin with."""

from dataclasses import replace

from lln.lab.train.config import BY_WIDTH, Attention, Config, Data, Model, Optimisation

SHARE = 3  # of the steps that a new model takes, a model that goes on takes one in so many


def make_model(layers: int, width: int, heads: int, inner: int) -> Model:
    return Model(
        layers, width, heads, inner, pre_norm=True, dropout=0.0, attention_dropout=0.0, positions="none",
        initialisation=BY_WIDTH,
    )  # fmt: skip


def tiny() -> Config:
    """In Python's own documentation; seconds on two cores."""
    return Config(
        task="needles", preset="tiny", attention=Attention(options={"block_size": 32}),
        model=make_model(layers=2, width=64, heads=2, inner=128),
        data=Data(
            "embedded/prose", length=128, vocabulary=512, evaluation=512,
            options={"needles_every": 16, "questions_every": 8, "keys": 16},
        ),
        optimisation=Optimisation(steps=300, batch=16, rate=6e-3, warmup=30, schedule="cosine", clip=1.0),
        log_every=10, evaluate_every=100, save_every=100,
    )  # fmt: skip


def mini() -> Config:
    """Half a minute a run on one large GPU: pre-norm, 4 layers, 256 wide, 32k tokens a step."""
    return Config(
        task="needles", preset="mini", attention=Attention(options={"statistics": "batch", "block_size": 64}),
        model=make_model(layers=4, width=256, heads=4, inner=1024),
        data=Data(
            "embedded/prose", length=512, vocabulary=2048, evaluation=2048,
            options={"needles_every": 64, "questions_every": 8, "keys": 512},
        ),
        optimisation=Optimisation(steps=1500, batch=64, rate=2e-3, warmup=150, schedule="cosine", clip=1.0),
        precision="bfloat16", graph=True, log_every=50, evaluate_every=1500, save_every=1500,
    )  # fmt: skip


def set_length(config: Config, length: int) -> Config:
    """The same work with sequences of another length: as many tokens a step, and as many in an evaluation."""
    d, o = config.data, config.optimisation
    batch, rest = divmod(o.batch * d.length, length) if length > 0 else (0, 0)
    if rest or batch == 0:
        raise ValueError(f"lengths must divide the {o.batch * d.length} tokens of a step; got {length}.")
    evaluation = d.evaluation and max(d.evaluation * d.length // length, 1)
    return replace(config, data=replace(d, length=length, evaluation=evaluation), optimisation=replace(o, batch=batch))


def lengthen(config: Config, length: int, start: str) -> Config:
    """Going on from the model in the folder `start`, which learned the task in shorter sequences."""
    found = set_length(config, length)
    steps = max(config.optimisation.steps // SHARE, 1)
    optimisation = replace(found.optimisation, steps=steps, warmup=min(config.optimisation.warmup, steps // 5))
    return replace(found, model=replace(found.model, start=start), optimisation=optimisation)
