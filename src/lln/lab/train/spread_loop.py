"""Training with sequences spread over processes: each group of so many holds one batch, every process some columns."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import lln.hf
from lln.distributed import split_evenly
from lln.lab.data.examples import IGNORE
from lln.lab.train.config import Config, need
from lln.lab.train.loop import Loop
from lln.lab.train.objective import Batch, Guesses, compare_tokens, split_labels
from lln.lab.train.shard import ShardedLoop


class SpreadLoop(Loop):
    """The loop of a run with context_parallel: `ranks` processes share each sequence."""

    objective: Guesses

    def __init__(self, *given: Any, ranks: int) -> None:
        self.ranks = ranks
        super().__init__(*given)
        sizes = self.processes // ranks, ranks
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("data", "sequence"))
        self.recording.every = 0  # it would look at the queries and keys of one process
        self.objective.whole = self.config.data.length
        lln.hf.spread(self.model, self.mesh["sequence"])

    def count_readers(self) -> tuple[int, int]:
        return self.processes // self.ranks, self.rank // self.ranks

    def move(self, batch: Batch) -> Batch:
        """The columns of this process."""
        counts = split_evenly(batch["input_ids"].shape[1], self.ranks)
        return super().move({name: t.split(list(counts), 1)[self.rank % self.ranks] for name, t in batch.items()})

    def gather_rows(self, rows: Tensor) -> Tensor:
        group = self.mesh["data"].get_group()
        parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    def measure(self, batch: Batch) -> Tensor:
        given, labels = split_labels(batch)
        losses = compare_tokens(self.run_model(**given)["logits"], labels).sum(1)
        both = torch.stack([losses, (labels != IGNORE).sum(1)])
        distributed.all_reduce(both, group=self.mesh["sequence"].get_group())
        return both[0] / both[1].clamp_min(1)


class SpreadShardedLoop(SpreadLoop, ShardedLoop):
    """With weights spread over all processes, too."""


def check_spread(config: Config, processes: int, ranks: int) -> None:
    """ValueError, in one sentence, for what cannot be spread."""
    need(
        (
            processes % ranks == 0 and processes > 1,
            f"context_parallel: {ranks} processes share a sequence, and torchrun started {processes}; use torchrun "
            f"--nproc-per-node {ranks}, or a multiple of it.",
        ),
        (
            config.attention.name in ("lln", "lln_diag"),
            f"context_parallel spreads lln and lln_diag alone; got attention {config.attention.name!r}.",
        ),
        (config.task == "mlm", f"context_parallel goes with mlm, which judges single tokens; got {config.task}."),
        (not config.compile, "context_parallel needs compile=no: processes talk inside each layer."),
    )
