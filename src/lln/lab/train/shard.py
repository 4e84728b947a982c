"""Fully sharded training (FSDP2): weights, gradients and the optimiser's moments are spread over the processes.

By torch's own fully_shard, on GPUs and CPUs alike. Checkpoints hold whole tensors under
the names that one process gives them, so that any number of processes can load the model.
"""

from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from lln.lab.train.config import Config, need
from lln.lab.train.loop import Loop

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class ShardedLoop(Loop):
    """The loop of a run with `fsdp`."""

    def wrap(self) -> Any:
        mesh = init_device_mesh(self.device.type, (self.processes,))
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for module in (*layers, self.model):
            sharded: Any = fully_shard(module, mesh=mesh)
            # gloo, which connects CPUs, takes a mean for a sum before torch 2.9.
            sharded.set_force_sum_reduction_for_comms(self.device.type == "cpu")
        return self.model

    def gather_weights(self) -> dict[str, Any]:
        """Whole tensors, in the first process; the others get nothing, and have to ask too."""
        state = get_model_state_dict(self.model, options=WHOLE)
        return {name: t for name, t in state.items() if name not in self.model.all_tied_weights_keys}

    def gather_moments(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE)

    def load_moments(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=WHOLE)


def check_shards(config: Config, processes: int) -> None:
    """ValueError, in one sentence, for what cannot be sharded."""
    half = config.precision == "float16"
    need(
        (processes > 1, "fsdp needs several processes: torchrun --nproc-per-node 2 -m lln train ... --fsdp."),
        (not config.graph, "fsdp needs graph=no: a graph holds one process."),
        (not half, "fsdp needs no float16: its loss scale is not agreed on by the processes; use bfloat16."),
    )
