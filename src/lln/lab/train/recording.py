"""What attention does while a model trains (Figs. 1, 8, 9, 10b): temperature, entropy, spectral gap, alpha and beta of
every layer and head, the gradient of every layer, and the loss scale under float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from lln.instruments import record
from lln.instruments.recorder import Recorder
from lln.lab.train.run_folder import Run

MEANS = ("temperature", "entropy", "spectral_gap", "log_variance", "alpha", "beta")  # also logged as a mean of a layer


class Recording(TrainerCallback):
    """Records the first step and every so many steps after it: heads into the run's metrics.jsonl, means of layers also
    through `log`, which is the Trainer's and reaches TensorBoard and the like. Without a run: what other processes need
    it for, and nothing is written."""

    def __init__(
        self, run: Run | None, every: int, log: Callable[[dict[str, float]], None], scale: Callable[[], float | None]
    ) -> None:
        self.run, self.every, self.log, self.scale = run, every, log, scale
        self.recorder: Recorder | None = None
        self.rows: list[dict[str, Any]] = []
        self.gradients: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and model is not None:
            self.recorder = record(model)
            self.recorder.__enter__()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.close()  # one forward pass is enough

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
            self.rows, self.recorder = self.recorder.rows(), None

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if state.global_step % self.every == 0 and model is not None:
            self.close()
            layers = {row["layer"] for row in self.rows}
            self.gradients = {layer: gradient_norm(model.get_submodule(owner(layer))) for layer in sorted(layers)}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        if not self.rows:
            return
        rows, self.rows = [{k: v for k, v in row.items() if k != "step"} for row in self.rows], []
        if self.run is None:
            return
        self.run.log(
            {
                "step": state.global_step, "heads": rows, "gradient_norms": self.gradients, "loss_scale": self.scale(),
            }
        )  # fmt: skip
        due = control.should_log  # logging takes the mark away, and the loss of this step may still be to come
        self.log(layer_means(rows))
        control.should_log = due


def owner(layer: str) -> str:
    """The module that a layer's projections belong to: of `...attention.self.lln` the part that transformers made."""
    return layer.removesuffix(".lln")


def gradient_norm(module: nn.Module) -> float:
    gradients = [p.grad.detach() for p in module.parameters() if p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return math.sqrt(sum(float(g.double().square().sum()) for g in whole))


def layer_means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`attention/LAYER/NAME` for what was measured."""
    found: dict[str, float] = {}
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    for number, layer in enumerate(layers):
        for name in MEANS:
            values = [row[name] for row in rows if row["layer"] == layer and isinstance(row.get(name), float)]
            values = [value for value in values if math.isfinite(value)]
            if values:
                found[f"attention/{number}/{name}"] = sum(values) / len(values)
    return found
