"""Fine-tuning on GLUE (Table 1). `model.start` names the pre-trained model's folder."""

from __future__ import annotations

import dataclasses

from lln.lab.recipes import mlm
from lln.lab.train.config import Config, Data, Optimisation

# By name: (subset of nyu-mll/glue; fairseq's updates and warm-up at batch 32).
TASKS = {
    "sst2": ("sst2", 20_935, 1_256),
    "mnli": ("mnli", 123_873, 7_432),
    "qnli": ("qnli", 33_112, 1_986),
    "qqp": ("qqp", 113_272, 28_318),
}


def fine_tuned(base: Config, preset: str, data: Data, optimisation: Optimisation, every: int) -> Config:
    return dataclasses.replace(
        base, task="glue", preset=preset, data=data, optimisation=optimisation, log_every=max(every // 10, 1),
        evaluate_every=every, save_every=every, record_every=every,
    )  # fmt: skip


def tiny(name: str) -> Config:
    """Passages of Python's documentation: which chapter one comes from (sst2), or two halves of one."""
    optimisation = Optimisation(steps=200, batch=32, rate=1e-3, warmup=20, decay=0.1, clip=1.0)
    return fine_tuned(
        mlm.tiny(),
        "tiny",
        Data("embedded", "topics" if name == "sst2" else "pairs", length=64, vocabulary=1024),
        optimisation,
        100,
    )


def mini(name: str) -> Config:
    data = Data("nyu-mll/glue", TASKS[name][0], length=128, vocabulary=16384)
    optimisation = Optimisation(steps=2000, batch=32, rate=1e-4, warmup=120, decay=0.1)
    return fine_tuned(mlm.mini(), "mini", data, optimisation, 500)


def paper(name: str) -> Config:
    subset, steps, warmup = TASKS[name]
    data = Data("nyu-mll/glue", subset, length=512, vocabulary=50265)
    optimisation = Optimisation(steps=steps, batch=32, rate=1e-5, warmup=warmup, decay=0.1)
    return fine_tuned(mlm.paper(), "paper", data, optimisation, 1000)
