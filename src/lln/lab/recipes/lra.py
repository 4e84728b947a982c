"""Long Range Arena (Tables 4 and 5): models of 2 layers, 64 wide, in the setting of Skyformer."""

from typing import Any

from lln.lab.data.sources import AAN
from lln.lab.train.config import BY_WIDTH, Attention, Config, Data, Model, Optimisation
from lln.lab.train.earlier import EVALUATED

# By name: (data set; tokens a sequence; batch, rate, warm-up).
TASKS: dict[str, tuple[str, int, int, float, int]] = {
    "listops": ("generated", 2000, 32, 1e-4, 1000),
    "text": ("stanfordnlp/imdb", 4000, 32, 1e-4, 80),
    "retrieval": (AAN, 4000, 16, 2e-4, 800),
    "pathfinder": ("generated", 1024, 128, 2e-4, 312),
    "image": ("uoft-cs/cifar10", 1024, 256, 1e-4, 175),
}
STEPS = 50_000
EASY: dict[str, dict[str, Any]] = {
    "listops": {"min_length": 8, "max_depth": 3},
    "pathfinder": {"difficulty": "easy", "dashes": 2, "distractors": 0},
}  # to learn in minutes


def make_model(dropout: float = 0.1, attention_dropout: float = 0.1) -> Model:
    return Model(
        layers=2, width=64, heads=2, inner=128, dropout=dropout, attention_dropout=attention_dropout,
        initialisation=BY_WIDTH,
    )  # fmt: skip


def count_evaluated(source: str) -> int:
    """Examples that a model is judged by: of what is generated so many that most differences can be told; else all."""
    return EVALUATED if source == "generated" else 0


def tiny(name: str) -> Config:
    """Short sequences that need no download, whatever the task."""
    source, length = {
        "listops": ("generated", 64), "text": ("embedded/topics", 160), "retrieval": ("embedded/pairs", 160),
        "pathfinder": ("generated", 144), "image": ("embedded/digits", 64),
    }[name]  # fmt: skip
    steps, batch = (600, 64) if name == "pathfinder" else (400, 32)
    return Config(
        task="lra", preset="tiny", attention=Attention(options={"block_size": 16}), model=make_model(0.0, 0.0),
        data=Data(source, name, length=length, train=8000, evaluation=500, options=EASY.get(name, {})),
        optimisation=Optimisation(
            steps=steps, batch=batch, rate=1e-3, warmup=40, schedule="cosine", decay=0.0, clip=1.0
        ),
        log_every=10, evaluate_every=100, save_every=100, record_every=100,
    )  # fmt: skip


def mini(name: str) -> Config:
    """Without dropout of P, which not every mechanism can have in a graph. Retrieval is a stand-in that needs no
    download: see `AAN`."""
    source, length, batch, _, _ = TASKS[name]
    source = "embedded/passages" if source == AAN else source
    return Config(
        task="lra", preset="mini", attention=Attention(), model=make_model(attention_dropout=0.0),
        data=Data(source, name, length=min(length, 1024), evaluation=count_evaluated(source)),
        optimisation=Optimisation(
            steps=3000, batch=batch, rate=1e-3, warmup=150, schedule="cosine", decay=0.0, clip=1.0
        ),
        precision="bfloat16", graph=True, log_every=50, evaluate_every=500, save_every=500, record_every=500,
    )  # fmt: skip


def paper(name: str) -> Config:
    source, length, batch, rate, warmup = TASKS[name]
    return Config(
        task="lra", preset="paper", attention=Attention(), model=make_model(),
        data=Data(source, name, length=length, evaluation=count_evaluated(source)),
        optimisation=Optimisation(steps=STEPS, batch=batch, rate=rate, warmup=warmup, decay=0.0),
        log_every=50, evaluate_every=500, save_every=500, record_every=500,
    )  # fmt: skip
