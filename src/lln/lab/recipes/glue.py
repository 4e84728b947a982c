"""Fine-tuning on GLUE (Table 1). `model.start` names the pre-trained model's folder."""

import dataclasses

from lln.lab.recipes import mlm
from lln.lab.train.config import Config, Data, Optimisation

# By name, which is also the subset of nyu-mll/glue: fairseq's updates and warm-up at batch 32.
TASKS = {"sst2": (20_935, 1_256), "mnli": (123_873, 7_432), "qnli": (33_112, 1_986), "qqp": (113_272, 28_318)}


def fine_tune(base: Config, data: Data, optimisation: Optimisation, every: int) -> Config:
    """The preset's pre-trained model, with `every` steps between evaluations."""
    return dataclasses.replace(
        base, task="glue", data=data, optimisation=optimisation, log_every=every // 10, evaluate_every=every,
        save_every=every, record_every=every,
    )  # fmt: skip


def tiny(name: str) -> Config:
    """Passages of Python's documentation: which chapter one comes from (sst2), or two halves of one."""
    data = Data("embedded", "topics" if name == "sst2" else "pairs", length=64, vocabulary=1024)
    optimisation = Optimisation(steps=200, batch=32, rate=1e-3, warmup=20, decay=0.1, clip=1.0)
    return fine_tune(mlm.tiny(), data, optimisation, every=100)


def mini(name: str) -> Config:
    data = Data("nyu-mll/glue", name, length=128, vocabulary=16384)
    optimisation = Optimisation(steps=2000, batch=32, rate=1e-4, warmup=120, decay=0.1)
    return fine_tune(mlm.mini(), data, optimisation, every=500)


def paper(name: str) -> Config:
    steps, warmup = TASKS[name]
    data = Data("nyu-mll/glue", name, length=512, vocabulary=50265)
    optimisation = Optimisation(steps=steps, batch=32, rate=1e-5, warmup=warmup, decay=0.1)
    return fine_tune(mlm.paper(), data, optimisation, every=1000)
