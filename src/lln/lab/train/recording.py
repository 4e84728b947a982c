"""What attention does while a model trains (Figs. 1, 8, 9, 10b): temperature, entropy, spectral gap, alpha and beta of
every layer and head, and the gradient of every layer."""

import math
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lln.instruments import record
from lln.instruments.recorder import Recorder
from lln.lab.train.mixers import MixerBlock

MEANS = ("temperature", "entropy", "spectral_gap", "log_variance", "alpha", "beta")  # also logged as a mean of a layer


class Recording:
    """Records the first step and every so many steps after it; every=0: none."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.model = model
        # A mixer has no queries, keys and map to look at.
        self.every = 0 if any(isinstance(module, MixerBlock) for module in model.modules()) else every
        self.recorder: Recorder | None = None
        self.rows: list[dict[str, Any]] = []
        self.gradients: dict[str, float] = {}

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def open(self, step: int) -> None:
        """Before a step."""
        if self.is_due(step):
            self.recorder = record(self.model)
            self.recorder.__enter__()

    def close(self) -> None:
        """After a forward pass: one is enough."""
        if self.recorder is not None:
            self.recorder.__exit__(None, None, None)
            self.rows, self.recorder = self.recorder.rows(), None

    def read_gradients(self) -> None:
        """When all passes are done, and before the weights change."""
        # Of `...attention.self.lln` the projections belong to the part that transformers made.
        owners = {layer: layer.removesuffix(".lln") for layer in sorted({row["layer"] for row in self.rows})}
        self.gradients = {}
        for layer, name in owners.items():
            gradients = [p.grad.detach() for p in self.model.get_submodule(name).parameters() if p.grad is not None]
            self.gradients[layer] = math.sqrt(sum(float(make_whole(g).double().square().sum()) for g in gradients))

    def take(self) -> dict[str, Any] | None:
        """What was recorded in the last step, once: `heads` and `gradient_norms`; None where nothing was."""
        rows, self.rows = [{k: v for k, v in row.items() if k != "step"} for row in self.rows], []
        return {"heads": rows, "gradient_norms": self.gradients} if rows else None


def make_whole(t: Tensor) -> Tensor:
    """A tensor of which processes hold parts, whole."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def average_layers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`attention/LAYER/NAME` for what was measured."""
    found: dict[str, float] = {}
    for number, layer in enumerate(dict.fromkeys(row["layer"] for row in rows)):
        for name in MEANS:
            values = [row.get(name) for row in rows if row["layer"] == layer]
            if kept := [value for value in values if isinstance(value, float) and math.isfinite(value)]:
                found[f"attention/{number}/{name}"] = sum(kept) / len(kept)
    return found
