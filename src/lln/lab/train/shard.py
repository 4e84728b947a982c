"""Fully sharded training (FSDP2): weights, gradients and the optimiser's moments are spread over the processes.

By torch's own fully_shard, on GPUs and CPUs alike; accelerate's FSDP has no CPUs. Checkpoints hold whole tensors under
the names that one process gives them, so that any number of processes can load the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from lln.lab.train.config import Config
from lln.lab.train.loop import RunTrainer

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # the Trainer's own names
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class ShardedTrainer(RunTrainer):
    """The Trainer of a run with `fsdp`."""

    sharded = False

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Once a checkpoint has been loaded, and before anything holds the weights."""
        if not self.sharded:
            mesh = init_device_mesh(self.args.device.type, (self.args.world_size,))
            for module in [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]:
                fully_shard(module, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            self.sharded = True
            # Autocast, and no DistributedDataParallel around it.
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            self.model._is_accelerate_prepared = True
        return super().create_optimizer(model)

    def whole_state(self) -> dict[str, Any]:
        """Whole tensors, in the first process; the others get nothing, and have to ask too."""
        state = get_model_state_dict(self.model, options=WHOLE)
        return {name: t for name, t in state.items() if name not in self.model.all_tied_weights_keys}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        state = self.whole_state()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=WHOLE)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True)
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=WHOLE)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


def check_shards(config: Config, processes: int) -> None:
    """ValueError, in one sentence, for what cannot be sharded."""
    for wrong, what in (
        (processes == 1, "several processes: torchrun --nproc-per-node 2 -m lln train ... --fsdp"),
        (config.graph, "graph=no: a graph holds one process"),
        (config.precision == "float16", "no float16: its loss scale is not agreed on by the processes; use bfloat16"),
    ):
        if wrong:
            raise ValueError(f"fsdp needs {what}.")
